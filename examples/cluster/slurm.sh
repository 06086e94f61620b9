#!/bin/sh
# A job of two machines with four ranks each: sbatch examples/cluster/slurm.sh train.py --epochs 10
# Each task of srun is a rank. A job that has saved a checkpoint because it was told to end
# (fd.PreemptionCheckpointHandler) exits with 75, and is put into the queue again.
#SBATCH --job-name=fastdist
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --requeue
##SBATCH --signal=USR1@120   for such jobs: tells them two minutes before the time limit

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))
OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}
export MASTER_ADDR MASTER_PORT OMP_NUM_THREADS

srun --kill-on-bad-exit=1 python "$@"
code=$?
if [ "$code" = 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
