"""Reads the launcher of this process and its rank from the environment.

A function for each launcher is asked; the first that recognises its variables answers. The
innermost launcher comes first: `torchrun` inside `srun` is torchrun's job, `mpiexec` inside an
`sbatch` script is mpiexec's. Incomplete or contradictory variables are an error, never a world of
one.
"""

import os
from contextlib import suppress
from dataclasses import dataclass

from fastdist.cluster.environ import (
    Environ,
    count,
    first_set,
    index,
    index_of_size,
    require_rank_of_world_size,
)
from fastdist.cluster.mpi import is_hydra, is_openmpi
from fastdist.cluster.slurm import step_of, task_runs
from fastdist.errors import ClusterConfigError
from fastdist.link.addresses import is_loopback
from fastdist.processes.proc import ancestors, start_ticks

JOB_VARIABLE = "FASTDIST_JOB"
"""The variable that `fastdist run` sets to a random string, the same for all ranks of a job."""

LAUNCHER_VARIABLE = "FASTDIST_LAUNCHER"
"""The variable that `fastdist run` sets to the "ip:port" at which it answers questions, or ""."""

ROSTER_VARIABLE = "FASTDIST_ROSTER"
"""Set by `fastdist run --min` for each rank: JSON of a `RosterPlace`."""

REPLICAS_VARIABLE = "FASTDIST_REPLICAS"
"""Set by a strategy for the processes that it starts: JSON of a `StartedReplica`."""

PROCESS_VARIABLE = "FASTDIST_RANK_PROCESS"
"""Set by a rank for the processes that it starts: its process, and the place that it has."""

_PLACE_VARIABLES = (
    *("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"),
    *(JOB_VARIABLE, "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID"),
)
_RANK_VARIABLES = frozenset(
    (
        JOB_VARIABLE,
        PROCESS_VARIABLE,
        LAUNCHER_VARIABLE,
        REPLICAS_VARIABLE,
        ROSTER_VARIABLE,
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
        *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
        *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        *("SLURM_PROCID", "SLURM_LOCALID"),
    )
)
_RANK_PREFIXES = ("TORCHELASTIC_", "OMPI_COMM_WORLD_")


@dataclass(frozen=True, slots=True)
class Launch:
    """A rank and its job, as set by the launcher.

    Attributes:
        launcher: "fastdist run", "fastdist.launch", "torchrun", "environment" (RANK and WORLD_SIZE
            set by hand), "openmpi", "hydra" (MPICH, Intel MPI), "srun" or "init" (arguments of
            `fastdist.init`).
        rank: this rank, from 0 to world_size - 1.
        world_size: number of ranks in the job, on all machines.
        local_rank: this rank among those of this machine, from 0 to local_world_size - 1.
        local_world_size: number of ranks on this machine.
        job_key: a string that all ranks of this job on this machine share, and that differs from
            other jobs running at the same time. Any length, any characters.

    Examples:
        >>> import fastdist as fd
        >>> fd.cluster.Launch("torchrun", 1, 4, 1, 4, job_key="example").world_size
        4
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    job_key: str

    def __post_init__(self) -> None:
        if self.local_world_size > self.world_size:
            raise ClusterConfigError(
                f"{self.launcher}: local world size {self.local_world_size}; "
                f"expected at most the world size, {self.world_size}"
            )


def detect_launch(environ: Environ = os.environ) -> Launch | None:
    """Return this rank and its job, by the launcher's variables; None for a world of one.

    Raises:
        ClusterConfigError: a launcher's variables are incomplete, malformed or contradictory.

    Examples:
        >>> import fastdist as fd
        >>> fd.cluster.detect_launch({}) is None
        True
    """
    if environ is os.environ and _Noted.launch is not None:
        return _Noted.launch
    for detect in (_fastdist_run, _torchrun, _by_hand, _openmpi, _hydra, _srun):
        launch = detect(environ)
        if launch is not None:
            return launch
    require_rank_of_world_size(environ)
    return None


def claim_place() -> None:
    """Let the processes that this one starts know that the place in its environment is taken."""
    if _claim()[1] != (place := _place()):
        _set_claim(place)


def require_own_place() -> None:
    """Check that this process is a rank itself, and no process that a rank has started."""
    (pid, claimed), place = _claim(), _place()
    with suppress(OSError):  # no /proc
        if claimed == place and pid != os.getpid() and pid in ancestors("self"):
            raise ClusterConfigError(
                f"this process was started by rank {place.lstrip('/').split('/')[0]} of the job, "
                f"process {pid}, and is no rank itself. Put what ranks alone do under if __name__ "
                f'== "__main__": so that worker processes leave it out; start other programs '
                "without RANK, as by env -u RANK -u FASTDIST_JOB. If that process does nothing but "
                f"start its rank, unset {PROCESS_VARIABLE} there"
            )
    _set_claim(place)


def _place() -> str:
    """Return what distinguishes the rank of the environment; "" without a rank."""
    values = [os.environ.get(name, "") for name in _PLACE_VARIABLES]
    return "/".join(values) if any(values[:4]) else ""


def _set_claim(place: str) -> None:
    if place:
        os.environ[PROCESS_VARIABLE] = f"{os.getpid()} {place}"


def _claim() -> tuple[int, str]:
    """Return the process that has claimed a place, and the place; zero and "" if none has."""
    pid, _, place = os.environ.get(PROCESS_VARIABLE, "").partition(" ")
    return (int(pid) if pid.isdecimal() else 0), place


class _Noted:
    launch: Launch | None = None


def note_launch(launch: Launch | None) -> None:
    """Make `detect_launch` return this; what the environment says if None."""
    _Noted.launch = launch


def without_rank(environ: Environ) -> dict[str, str]:
    """Return the environment without the variables that make a process a rank."""
    return {
        name: value
        for name, value in environ.items()
        if name not in _RANK_VARIABLES and not name.startswith(_RANK_PREFIXES)
    }


def rank_variables(
    rank: int, world_size: int, local_rank: int, local_world_size: int, job: str
) -> dict[str, str]:
    """Return the variables of a rank, as `fastdist run` sets them; `job`: the same on all ranks."""
    return {
        JOB_VARIABLE: job,
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(local_world_size),
    }


def _fastdist_run(environ: Environ) -> Launch | None:
    job = environ.get(JOB_VARIABLE)
    if job is None:
        return None
    if not job:
        raise ClusterConfigError(f"{JOB_VARIABLE}=''; expected the string that fastdist run sets")
    return _torch_launch(environ, "fastdist run", job)


def _torchrun(environ: Environ) -> Launch | None:
    run = environ.get("TORCHELASTIC_RUN_ID")
    if run is None:
        return None
    # The restart count distinguishes a restarted job from the previous one, whose processes may
    # still run; the group rank distinguishes two agents on one machine, whose local ranks both
    # start from 0.
    own = ("WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RESTART_COUNT")
    job = "/".join([run, _master(environ), *(environ.get(variable, "0") for variable in own)])
    return _torch_launch(environ, "torchrun", job)


def _by_hand(environ: Environ) -> Launch | None:
    if "RANK" not in environ:
        return None
    if not _on_one_machine(environ) and not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= environ.keys():
        # Scripts under mpiexec or srun often set RANK for torch from the launcher's variables; the
        # launcher's variables then give the local rank.
        place = index_of_size(environ, "RANK", "WORLD_SIZE")
        for detect in (_openmpi, _hydra, _srun):
            launch = detect(environ)
            if launch is not None and (launch.rank, launch.world_size) == place:
                return launch
    if "LOCAL_RANK" not in environ:  # which what is left in an image or shell lacks
        _require_ranks_for_all(environ)
    return _torch_launch(environ, "environment", _master(environ))


def _require_ranks_for_all(environ: Environ) -> None:
    """Check that a launcher has not started more processes than RANK and WORLD_SIZE have ranks."""
    rank, world_size = index_of_size(environ, "RANK", "WORLD_SIZE")
    for detect in (_openmpi, _hydra, _srun):
        launch = detect(environ)
        if launch is not None and launch.world_size > world_size:
            raise ClusterConfigError(
                f"two launchers disagree: RANK={rank} and WORLD_SIZE={world_size} are set, and "
                f"{launch.launcher} has started this process as rank {launch.rank} of "
                f"{launch.world_size}; unset RANK and WORLD_SIZE, which an image or shell may have "
                "left"
            )


def _openmpi(environ: Environ) -> Launch | None:
    if not is_openmpi(environ):
        return None
    job = environ.get("PMIX_NAMESPACE") or _launcher_process("OMPI_COMM_WORLD_RANK")
    return Launch(
        "openmpi",
        *index_of_size(environ, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        *index_of_size(environ, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        f"openmpi/{job}",
    )


def _hydra(environ: Environ) -> Launch | None:
    if not is_hydra(environ):
        return None
    return Launch(
        "hydra",
        *index_of_size(environ, "PMI_RANK", "PMI_SIZE"),
        *index_of_size(environ, "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        f"hydra/{_launcher_process('PMI_RANK')}",
    )


def _srun(environ: Environ) -> Launch | None:
    step = step_of(environ)
    if step is None:
        return None
    job = environ.get("SLURM_JOB_ID") or environ.get("SLURM_JOBID")
    if not job:
        raise ClusterConfigError("SLURM_JOB_ID is not set; expected the number of the Slurm job")
    node = count(environ, "SLURM_NODEID")
    tasks = first_set(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    reason, local_world_size = _slurm_tasks_on(environ, node)
    return Launch(
        "srun",
        *index_of_size(environ, "SLURM_PROCID", tasks),
        index(environ, "SLURM_LOCALID", local_world_size, reason),
        local_world_size,
        f"srun/{job}.{step}/{node}/{environ.get('SLURM_RESTART_COUNT', '0')}",
    )


def _torch_launch(environ: Environ, launcher: str, job: str) -> Launch:
    """Read torchrun's variables; LOCAL_* may be absent if all ranks share a machine."""
    rank, world_size = index_of_size(environ, "RANK", "WORLD_SIZE")
    local_rank, local_world_size = rank, world_size
    if not _on_one_machine(environ) or "LOCAL_WORLD_SIZE" in environ:
        local_rank, local_world_size = index_of_size(environ, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    elif "LOCAL_RANK" in environ and count(environ, "LOCAL_RANK") != rank:
        raise ClusterConfigError(
            f"LOCAL_RANK={environ['LOCAL_RANK']!r} with RANK={rank} but no LOCAL_WORLD_SIZE; "
            "expected LOCAL_WORLD_SIZE, the number of ranks on this machine"
        )
    return Launch(launcher, rank, world_size, local_rank, local_world_size, f"{launcher}/{job}")


def _master(environ: Environ) -> str:
    return f"{environ.get('MASTER_ADDR', 'localhost')}:{environ.get('MASTER_PORT', '29500')}"


def _on_one_machine(environ: Environ) -> bool:
    return is_loopback(environ.get("MASTER_ADDR") or "localhost")


def _slurm_tasks_on(environ: Environ, node: int) -> tuple[str, int]:
    """Return what says the tasks of each node, and the number of tasks on this node."""
    said, runs = task_runs(environ)
    nodes = 0
    for tasks, repeated in runs:
        nodes += repeated
        if node < nodes:
            return said, tasks
    raise ClusterConfigError(f"{said}, for {nodes} nodes; expected more, as SLURM_NODEID={node}")


def _launcher_process(variable: str) -> str:
    """Identify a launcher that sets no job id by its process id and start time.

    The launcher is the nearest ancestor without the variable that every rank has; a shell between
    the launcher and the rank inherits the variable. A process whose environment is not readable
    belongs to another user and is not a rank.
    """
    try:
        for pid in ancestors("self"):
            if not _has_variable(pid, variable):
                return f"{pid}/{start_ticks(pid)}"
    except OSError as error:
        where = error.filename or "the ancestors of this process in /proc"
        raise ClusterConfigError(f"cannot read {where}: {error.strerror}") from error
    raise ClusterConfigError(
        f"{variable} is set; expected the launcher that set it among this process's ancestors"
    )


def _has_variable(pid: int, variable: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return f"\0{variable}=".encode() in b"\0" + file.read()
    except OSError:
        return False
