#!/bin/sh
# A job of two machines with four ranks each: sbatch examples/cluster/slurm.sh train.py --epochs 10
# Each task of srun is a rank. If the job is requeued, it starts again from its last checkpoint.
#SBATCH --job-name=fastdist
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --requeue

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))
OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
export MASTER_ADDR MASTER_PORT OMP_NUM_THREADS

exec srun --kill-on-bad-exit=1 python "$@"
