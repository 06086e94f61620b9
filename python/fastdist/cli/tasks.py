"""Makes the tasks of a job and their environments: equal ranks, or the roles of a cluster spec."""

import json
import os
import secrets
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fastdist._config import FOLDER_VARIABLE, SECRET_VARIABLE, SECRET_VARIABLES, VARIABLE_PREFIX
from fastdist.cli.command import UsageError
from fastdist.cluster.address import join_address, reserve_port
from fastdist.cluster.launch import LAUNCHER_VARIABLE, ROSTER_VARIABLE, rank_variables, without_rank
from fastdist.cluster.roster import RosterPlace
from fastdist.cluster.tf_config import VARIABLE as TF_CONFIG
from fastdist.cluster.tf_config import served_tasks, tf_configs
from fastdist.processes.job import Ending, Task

_RANK_VARIABLES = (*rank_variables(0, 1, 0, 1, ""), LAUNCHER_VARIABLE)
_MASTER_VARIABLES = ("MASTER_ADDR", "MASTER_PORT")
_HOST = "127.0.0.1"
_SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")  # asks for no password
_IN_A_MINUTE, _SOON = "ServerAliveInterval=15", "ServerAliveInterval=1"  # at the third it gives up


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines of a job of ranks, which start equally many."""

    count: int
    own: int  # number of this machine, from 0
    host: str  # of machine 0, where rank 0 listens; in an elastic job, this machine's
    port: int
    launcher: str  # "ip:port" at which this launcher answers questions about its ranks, or ""


def rank_tasks(ranks: int, user: Mapping[str, str], machines: Machines | None = None) -> list[Task]:
    """Return this machine's tasks of a job of ranks, with torchrun's variables."""
    own = _RANK_VARIABLES if machines is None else (*_RANK_VARIABLES, *_MASTER_VARIABLES)
    _refuse(user, own, "fastdist run sets it itself, for each rank")
    if machines is None:
        holder, port = reserve_port()
        holder.close()  # for scripts that start a store there
        machines = Machines(1, 0, _HOST, port, launcher="")
    # With the variables of an outer torchrun, torch would look for the store of that torchrun.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    environment.pop(ROSTER_VARIABLE, None)
    environment |= {"MASTER_ADDR": machines.host, "MASTER_PORT": str(machines.port), **user}
    _set_defaults(environment, ranks)
    world = machines.count * ranks
    environment[LAUNCHER_VARIABLE] = machines.launcher
    job = secrets.token_hex(16)
    width = len(str(world - 1))
    return [
        Task(
            f"rank {rank}",
            f"{rank:{width}}",
            environment | rank_variables(rank, world, local, ranks, job),
        )
        for local, rank in enumerate(range(machines.own * ranks, (machines.own + 1) * ranks))
    ]


def elastic_tasks(
    most: int,
    roster: str,
    user: Mapping[str, str],
    machines: Machines | None = None,
    *,
    threads: int | None = None,
) -> list[Task]:
    """Return this machine's tasks of an elastic job, whose ranks get their numbers from a roster.

    Args:
        roster: the name of the socket at which they talk to the roster.
        threads: threads of each rank; None: its share of this machine's cores.
    """
    _refuse(user, (*_RANK_VARIABLES, ROSTER_VARIABLE), "ranks of an elastic job change")
    environment = without_rank(os.environ)
    of, prefix, machine = "", "", 0
    if machines is not None:
        environment |= {"MASTER_ADDR": machines.host, LAUNCHER_VARIABLE: machines.launcher}
        machine = machines.own
        of, prefix = f" of machine {machine}", f"{machine}."
    environment |= user
    if threads is not None:  # not this machine's own setting: all machines need one
        environment["OMP_NUM_THREADS"] = user.get("OMP_NUM_THREADS", str(threads))
    _set_defaults(environment, most)
    width = len(str(most - 1))
    return [
        Task(
            f"process {slot}{of}",
            f"{prefix}{slot:{width}}",
            environment | RosterPlace(roster, slot, machine).environment(),
            Ending.RESTARTED,
        )
        for slot in range(most)
    ]


def host_tasks(
    hosts: Sequence[str],
    places: Sequence[Sequence[object]],
    arguments: Sequence[str],
    rdzv: tuple[str, int],
    user: Mapping[str, str],
    *,
    is_elastic: bool,
) -> list[Task]:
    """Return a task for each machine of a job, which starts its ranks by ssh.

    Variables go over the standard input: every user of a machine can see command lines.

    Args:
        places: the arguments of `fastdist run` that say which machine it is.
        arguments: its other arguments.
        rdzv: host of rank 0 or of the roster for the other machines, and its port.
    """
    carried = {k: v for k, v in os.environ.items() if k.startswith(VARIABLE_PREFIX)}
    carried |= new_secret(carried)
    stdin = json.dumps([carried, dict(user)]).encode() + b"\n"
    path = [f"PYTHONPATH={os.environ['PYTHONPATH']}"] if "PYTHONPATH" in os.environ else []
    tasks = []
    for host, own in zip(hosts, places, strict=True):
        place = [*map(str, own), "--rdzv", join_address(*rdzv), "--ends-with-stdin"]
        run = ["env", *path, sys.executable, "-m", "fastdist", "run", *place, *arguments]
        remote = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(run)}"
        probes = _SOON if is_elastic else _IN_A_MINUTE
        command = ["ssh", "-T", *_SSH_OPTIONS, "-o", probes, host, remote]
        task = Task(f"machine {host}", host, dict(os.environ), command=command, stdin=stdin)
        if is_elastic:
            # ssh fails with 255; a launcher whose program fails has restarted it itself.
            final = range(1, 128)
            task = replace(task, ending=Ending.RESTARTED, restart_delay_s=5.0, final_codes=final)
        tasks.append(task)
    return tasks


def new_secret(environment: Mapping[str, str]) -> dict[str, str]:
    """Return a variable with a secret for one job, unless the user has one."""
    if environment.keys() & set(SECRET_VARIABLES):
        return {}
    return {SECRET_VARIABLE: secrets.token_hex(32)}


def take_variables() -> dict[str, str]:
    """Read from stdin what `host_tasks` sends: set variables, and return those of the user."""
    line = bytearray()
    while not line.endswith(b"\n"):  # one by one: the rest of stdin is the supervisor's
        byte = os.read(0, 1)
        if not byte:
            raise UsageError("the launcher of this job has ended")
        line += byte
    carried, user = json.loads(line)
    os.environ.update(carried)
    return dict(user)


def role_tasks(
    workers: int,
    servers: int,
    has_evaluator: bool,
    ports: Sequence[int],
    folder: str,
    user: Mapping[str, str],
) -> list[Task]:
    """Return a chief, workers, parameter servers and perhaps an evaluator, with TF_CONFIG.

    The folder is that of the job's sockets; "" for TCP.
    """
    _refuse(user, (TF_CONFIG,), "fastdist run sets it itself, for each task")
    _refuse(user, _RANK_VARIABLES, "tasks of a job with parameter servers are not ranks")
    environment = {**without_rank(os.environ), FOLDER_VARIABLE: folder, **user}
    environment |= new_secret(environment)
    _set_defaults(environment, workers + servers)
    places = served_tasks(workers, servers) + [("evaluator", 0)] * has_evaluator
    configs = tf_configs(places, [f"{_HOST}:{port}" for port in ports])
    tasks = []
    for (job, index), config in zip(places, configs, strict=True):
        name = f"{job} {index}" if job in ("worker", "ps") else job
        ending = Ending.ENDS_JOB if job == "chief" else Ending.RESTARTED
        tasks.append(Task(name, name, environment | {TF_CONFIG: config}, ending))
    return tasks


def _refuse(user: Mapping[str, str], variables: Sequence[str], why: str) -> None:
    for variable in variables:
        if variable in user:
            raise UsageError(f"--env {variable}: {why}")


def _set_defaults(environment: dict[str, str], processes: int) -> None:
    environment.setdefault("PYTHONUNBUFFERED", "1")
    threads = max(1, len(os.sched_getaffinity(0)) // processes)
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    environment.setdefault("PYTHONHASHSEED", "0")  # sets of strings have one order on all ranks
