"""Tests of finding the launcher, with recorded environments and the launchers installed here."""

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from fastdist.cluster import Launch, detect_launch
from fastdist.errors import ClusterConfigError

TORCH = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TORCHRUN = {
    **TORCH,
    "GROUP_RANK": "1",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_RUN_ID": "run",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-vm-3493@1",
    "PMIX_RANK": "3",
}
HYDRA = {
    "MPI_LOCALNRANKS": "2",
    "MPI_LOCALRANKID": "1",
    "PMI_FD": "9",
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_TASKS_PER_NODE": "8(x2)",
}
BATCH = {"SLURM_JOB_ID": "77", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4", "SLURM_PROCID": "0"}
SHOW_LAUNCH = """
import dataclasses, fastdist.cluster, sys
place = dataclasses.astuple(fastdist.cluster.detect_launch())
sys.stdout.write(f"{place}\\n")  # in one piece: launchers mix what ranks write in several
"""


def detect(environ: Mapping[str, str]) -> Launch:
    launch = detect_launch(environ)
    assert launch is not None
    return launch


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({**TORCH, "FASTDIST_JOB": "ab"}, "fastdist run"),
        ({**TORCHRUN, "FASTDIST_JOB": "ab"}, "fastdist run"),
        (TORCHRUN, "torchrun"),
        ({**TORCHRUN, **SRUN}, "torchrun"),
        (TORCH, "environment"),
        ({**TORCH, "MASTER_ADDR": "node0", **SRUN}, "environment"),
        (OPEN_MPI, "openmpi"),
        ({**OPEN_MPI, **BATCH}, "openmpi"),
        (HYDRA, "hydra"),
        ({**HYDRA, **BATCH}, "hydra"),
        (SRUN, "srun"),
        ({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4"}, "srun"),
        ({**SRUN, "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "n"}, "srun"),
        ({**HYDRA, "RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "node0"}, "hydra"),
        ({**SRUN, "WORLD_SIZE": "4"}, "srun"),
    ],
)
def test_launcher_is_recognised(environ: dict[str, str], launcher: str) -> None:
    launch = detect(environ)
    assert launch.launcher == launcher
    assert (launch.rank, launch.world_size) == (3, 4)
    assert (launch.local_rank, launch.local_world_size) == (1, 2)


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"WORLD_SIZE": "1"},
        {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"},
        BATCH,
        {**SRUN, "SLURM_STEP_ID": "4294967291"},  # the batch script
        {**SRUN, "SLURM_STEP_ID": "4294967290"},  # an interactive shell
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
    ],
)
def test_started_alone(environ: dict[str, str]) -> None:
    assert detect_launch(environ) is None


@pytest.mark.parametrize("address", [None, "localhost", "127.0.0.1", "::1", ""])
@pytest.mark.parametrize("local_rank", [None, "1"])
def test_rank_and_world_size_alone_mean_one_machine(
    address: str | None, local_rank: str | None
) -> None:
    optional = {"MASTER_ADDR": address, "LOCAL_RANK": local_rank}
    environ = {"RANK": "1", "WORLD_SIZE": "3"} | {
        k: v for k, v in optional.items() if v is not None
    }
    launch = detect(environ)
    assert (launch.local_rank, launch.local_world_size) == (1, 3)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**TORCH, "RANK": "4"}, "RANK='4'; expected an integer from 0 to 3, as WORLD_SIZE='4'"),
        ({**TORCH, "WORLD_SIZE": "0"}, "WORLD_SIZE='0'; expected an integer of at least 1"),
        ({**TORCH, "RANK": "-1"}, "RANK='-1'; expected an integer of at least 0"),
        ({**TORCH, "RANK": "one"}, "RANK='one'; expected an integer"),
        ({**TORCH, "RANK": ""}, "RANK=''; expected an integer"),
        ({**TORCH, "RANK": "1_0"}, "RANK='1_0'; expected an integer"),
        ({**TORCH, "RANK": "9" * 5000}, "expected an integer"),
        ({**TORCH, "RANK": "\u0663"}, "expected an integer"),
        ({**TORCH, "LOCAL_RANK": "2"}, "LOCAL_RANK='2'; expected an integer from 0 to 1"),
        ({**TORCH, "LOCAL_WORLD_SIZE": "5"}, "local world size 5; expected at most the world size"),
        *(
            ({**launcher, "RANK": "0", "WORLD_SIZE": "1"}, "two launchers disagree: RANK=0 and WOR")
            for launcher in (HYDRA, OPEN_MPI, SRUN)
        ),
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE='2' is set but RANK is not"),
        ({"WORLD_SIZE": "x"}, "WORLD_SIZE='x' is set but RANK is not"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node0"}, "LOCAL_RANK is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "no LOCAL_WORLD_SIZE"),
        ({**HYDRA, "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n"}, "two launchers disagree"),
        ({"FASTDIST_JOB": "ab"}, "RANK is not set"),
        ({**TORCH, "FASTDIST_JOB": ""}, "FASTDIST_JOB=''"),
        ({"TORCHELASTIC_RUN_ID": "run"}, "RANK is not set"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not set"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, "OMPI_COMM_WORLD_LOCAL_RANK='1'"),
        ({**HYDRA, "PMI_SIZE": "3"}, "PMI_RANK='3'; expected an integer from 0 to 2"),
        ({**SRUN, "SLURM_NODEID": "2"}, "'2(x2)', for 2 nodes; expected more, as SLURM_NODEID=2"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(y2)"}, "expected tasks per node"),
        (
            {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2,1"},
            "SLURM_LOCALID='1'; expected an integer from",
        ),
        ({**SRUN, "SLURM_JOB_ID": ""}, "SLURM_JOB_ID is not set"),
        ({**SRUN, "SLURM_STEP_ID": "x"}, "SLURM_STEP_ID='x'"),
    ],
)
def test_bad_variables_are_named(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ClusterConfigError) as caught:
        detect_launch(environ)
    assert message in str(caught.value)


def test_one_rank_among_the_tasks_of_another_launcher() -> None:
    """A job of one worker in a cluster of Ray whose daemons srun has started."""
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert detect(SRUN | ranks).world_size == 1


@pytest.mark.parametrize(
    ("tasks", "node", "local_world_size"),
    [("4(x2),3", 0, 4), ("4(x2),3", 1, 4), ("4(x2),3", 2, 3), ("2", 0, 2), ("2,4,2(x3)", 4, 2)],
)
def test_slurm_tasks_per_node(tasks: str, node: int, local_world_size: int) -> None:
    environ = {**SRUN, "SLURM_STEP_NUM_TASKS": "32", "SLURM_NODEID": str(node)}
    environ["SLURM_STEP_TASKS_PER_NODE"] = tasks
    assert detect(environ).local_world_size == local_world_size


def test_slurm_variables_of_the_allocation_stand_in_for_the_step() -> None:
    environ = {k: v for k, v in SRUN.items() if not k.startswith("SLURM_STEP_")}
    launch = detect({**environ, "SLURM_STEP_ID": "0", "SLURM_TASKS_PER_NODE": "1,3"})
    assert (launch.world_size, launch.local_world_size) == (4, 3)


@pytest.mark.parametrize(
    ("environ", "change"),
    [
        ({**TORCH, "FASTDIST_JOB": "ab"}, {"FASTDIST_JOB": "cd"}),
        (TORCHRUN, {"TORCHELASTIC_RUN_ID": "other"}),
        (TORCHRUN, {"TORCHELASTIC_RESTART_COUNT": "1"}),
        (TORCHRUN, {"MASTER_PORT": "29401"}),
        (TORCHRUN, {"GROUP_RANK": "0"}),
        (TORCH, {"MASTER_PORT": "29401"}),
        (OPEN_MPI, {"PMIX_NAMESPACE": "prterun-vm-3493@2"}),
        (SRUN, {"SLURM_JOB_ID": "78"}),
        (SRUN, {"SLURM_STEP_ID": "1"}),
        (SRUN, {"SLURM_RESTART_COUNT": "1"}),
    ],
)
def test_job_key_differs_between_jobs_only(environ: dict[str, str], change: dict[str, str]) -> None:
    ranks = {"RANK": "2", "LOCAL_RANK": "0", "OMPI_COMM_WORLD_RANK": "2", "SLURM_PROCID": "2"}
    peer = environ | {k: v for k, v in ranks.items() if k in environ}
    assert detect(peer).job_key == detect(environ).job_key
    assert detect(environ | change).job_key != detect(environ).job_key


def run_launcher(*words: str, **variables: str) -> list[Launch]:
    """Runs a command whose processes each print their Launch."""
    environ = {k: v for k, v in os.environ.items() if k != "FASTDIST_JOB"} | variables
    shown = subprocess.run(
        words, env=environ, capture_output=True, text=True, timeout=60, check=True
    )
    return sorted(
        (Launch(*ast.literal_eval(line)) for line in shown.stdout.splitlines()),
        key=lambda launch: launch.rank,
    )


@pytest.mark.slow
def test_hydra_job_key_names_the_launcher_through_shells() -> None:
    def rank(number: int) -> str:
        place = f"PMI_RANK={number} PMI_SIZE=2 MPI_LOCALRANKID={number} MPI_LOCALNRANKS=2"
        return f'{place} sh -c \'"$PYTHON" -c "$SHOW"; true\''

    job = f"{rank(0)}; {rank(1)}"
    variables = {"PYTHON": sys.executable, "SHOW": SHOW_LAUNCH}
    jobs = [run_launcher("sh", "-c", job, **variables) for _ in range(2)]
    for launches in jobs:
        assert [launch.local_rank for launch in launches] == [0, 1]
        assert launches[0].job_key == launches[1].job_key
    assert jobs[0][0].job_key != jobs[1][0].job_key


TOOL = """
import multiprocessing, subprocess, sys, numpy, fastdist as fd
from fastdist.cluster.launch import without_rank
if {spawns} or __name__ == "__main__":
    comm = fd.init()
def work():
    print("worked", flush=True)
if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=work)
        process.start()
        process.join()
    print(comm.rank, comm.all_reduce(numpy.ones(1))[0], flush=True)
"""
INIT = "import fastdist as fd; comm = fd.init(); print('a world of', comm.world_size, flush=True)"
STARTS = f"""
import os, subprocess, sys, numpy, fastdist as fd
from fastdist.cluster.launch import without_rank
rank = int(os.environ["RANK"])
def tool(environ):
    command = [sys.executable, "-c", {INIT!r}]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=20)
def refused():
    assert "was started by rank 0 of the job, process " + str(os.getpid()) in tool(None).stderr
if rank == 0:
    refused()
    assert tool(without_rank(os.environ)).stdout == "a world of 1\\n"
    pid = os.fork()
    if not pid:
        try: fd.init()
        except fd.errors.ClusterConfigError: os._exit(7)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
comm = fd.init()
if rank == 0: refused()
print(comm.all_reduce(numpy.full(1, rank + 1.0))[0], flush=True)
comm.close()
if sys.argv[1:]: os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def run_two(program: Path, *words: str) -> str:
    command = [sys.executable, "-m", "fastdist", "run", "-n", "2", str(program), *words]
    environ = os.environ | {"FASTDIST_RENDEZVOUS_TIMEOUT_S": "20"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_program_that_a_rank_starts_does_not_take_its_place(tmp_path: Path) -> None:
    """But what a rank becomes by exec, and a program without the rank's variables, are right."""
    program = tmp_path / "program.py"
    program.write_text(STARTS)
    assert sorted(run_two(program).split("\n")) == ["", "[0] 3.0", "[1] 3.0"]
    again = run_two(program, "-c", "import numpy, " + INIT[7:])
    assert sorted(again.split("\n")[2:]) == ["", "[0] a world of 2", "[1] a world of 2"]


@pytest.mark.slow
@pytest.mark.parametrize("guards", [False, True])
def test_worker_processes_that_import_the_program(tmp_path: Path, guards: bool) -> None:
    program = tmp_path / "program.py"
    program.write_text(TOOL.format(spawns=not guards))
    lines = run_two(program).splitlines()
    assert {line[4:] for line in lines} == {"worked", "0 2.0", "1 2.0"}
    assert len(lines) == (8 if guards else 4)  # a fork imports nothing again


def check_job_of_two(launches: list[Launch], launcher: str) -> None:
    assert [launch.rank for launch in launches] == [0, 1]
    for launch in launches:
        assert launch.launcher == launcher
        assert (launch.world_size, launch.local_world_size) == (2, 2)
        assert launch.local_rank == launch.rank
        assert launch.job_key == launches[0].job_key


def test_mpiexec() -> None:
    mpiexec = shutil.which("mpiexec")
    if mpiexec is None:
        pytest.skip("no mpiexec in PATH")
    version = subprocess.run([mpiexec, "--version"], capture_output=True, text=True).stdout
    is_open_mpi = "Open MPI" in version or "OpenRTE" in version
    options = ["--oversubscribe", "--allow-run-as-root"] if is_open_mpi else []
    rank = [sys.executable, "-c", SHOW_LAUNCH]
    jobs = [run_launcher(mpiexec, *options, "-n", "2", *rank) for _ in range(2)]
    for launches in jobs:
        check_job_of_two(launches, "openmpi" if is_open_mpi else "hydra")
    assert jobs[0][0].job_key != jobs[1][0].job_key


def test_srun() -> None:
    srun = shutil.which("srun")
    if srun is None:
        pytest.skip("no srun in PATH")
    launches = run_launcher(srun, "-n", "2", sys.executable, "-c", SHOW_LAUNCH)
    check_job_of_two(launches, "srun")


@pytest.mark.slow
def test_torchrun() -> None:
    pytest.importorskip("torch")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    rank = ["--no-python", sys.executable, "-c", SHOW_LAUNCH]
    launches = run_launcher(*torchrun, "--nproc-per-node", "2", *rank)
    check_job_of_two(launches, "torchrun")
