"""The tasks of a Slurm job step."""

import itertools
import os
import re
from collections.abc import Mapping

from fastdist.cluster.environ import Environ, count, first_set, index_of_size, master_address
from fastdist.cluster.resolver import SimpleClusterResolver, divide_among_jobs
from fastdist.cluster.spec import MOST_TASKS
from fastdist.errors import ClusterConfigError

# Slurm numbers a job's steps from 0; ids from here on are special: the batch script, an interactive
# shell.
_FIRST_SPECIAL_STEP = 0xFFFFFFF0


class SlurmClusterResolver(SimpleClusterResolver):
    """Assigns jobs, hosts and ports to the tasks of an srun step.

    A task's host is the name of its node. The first task of a node has port port_base, the next
    task port_base + 1, and so on. Two steps that share a node need different values of port_base.

    Follows tf.distribute.cluster_resolver.SlurmClusterResolver. Differences: jobs take their tasks
    in the order given, not sorted by name; the strategy assigns the GPUs.

    Examples:
        >>> import fastdist as fd
        >>> environ = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2"}
        >>> environ |= {"SLURM_STEP_NODELIST": "node[1-2]"}
        >>> environ |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1"}
        >>> environ |= {"SLURM_NODEID": "1", "SLURM_LOCALID": "0"}
        >>> resolver = fd.cluster.SlurmClusterResolver({"worker": 2}, environ=environ)
        >>> resolver.cluster_spec().job_tasks("worker"), resolver.task_id
        (('node1:8888', 'node2:8888'), 1)
    """

    __slots__ = ()

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        *,
        port_base: int = 8888,
        environ: Environ = os.environ,
    ) -> None:
        """Read the step's variables from an environment.

        Args:
            jobs: number of tasks of each job, such as {"worker": 4, "ps": 2}: the first four by
                SLURM_PROCID are workers. If None, all tasks are workers, and MASTER_ADDR with
                MASTER_PORT, if both are set, are the address of worker 0.
            port_base: the port of each node's first task.

        Raises:
            ClusterConfigError: srun did not start this process; a variable is missing, malformed or
                contradicts another; the number of tasks of jobs differs from that of the step.
        """
        if step_of(environ) is None:
            raise ClusterConfigError(
                "SLURM_PROCID and SLURM_STEP_ID do not name a task of a step; "
                "expected a process that srun started"
            )
        size_variable = first_set(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
        rank, size = index_of_size(environ, "SLURM_PROCID", size_variable)
        addresses = _addresses(environ, rank, size, port_base)
        if jobs is None:
            jobs = {"worker": size}
            addresses[0] = master_address(environ) or addresses[0]
        reason = f"{size_variable}={environ[size_variable]!r}"
        super().__init__(*divide_among_jobs(jobs, addresses, rank, reason))

    @staticmethod
    def is_available(environ: Environ = os.environ) -> bool:
        """Return True if srun started this process."""
        return step_of(environ) is not None


def step_of(environ: Environ) -> int | None:
    """Return the number of this process's step; None if srun did not start this process."""
    if "SLURM_PROCID" not in environ or "SLURM_STEP_ID" not in environ:
        return None
    step = count(environ, "SLURM_STEP_ID")
    return step if step < _FIRST_SPECIAL_STEP else None


def task_runs(environ: Environ) -> tuple[str, list[tuple[int, int]]]:
    """Return what says the tasks of each node ("NAME='VALUE'"), and its pairs (tasks, nodes)."""
    variable = first_set(environ, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    text = environ.get(variable, "")
    try:
        return f"{variable}={text!r}", parse_tasks_per_node(text)
    except ValueError as error:
        raise ClusterConfigError(f"{variable}: {error}") from None


def _addresses(environ: Environ, rank: int, size: int, port_base: int) -> list[str]:
    """Return the address of each task of the step, by rank."""
    hosts = _hosts(environ)
    said, runs = task_runs(environ)
    nodes, tasks = sum(run[1] for run in runs), sum(run[0] * run[1] for run in runs)
    if nodes != len(hosts) or tasks != size or size > MOST_TASKS:
        raise ClusterConfigError(
            f"{said} is {tasks} tasks on {nodes} nodes; expected {size} tasks on the {len(hosts)} "
            "nodes that Slurm lists"
        )
    tasks_on = [each for each, repeated in runs for _ in range(repeated)]
    distribution = environ.get("SLURM_DISTRIBUTION", "block")
    places = [(node, number) for node, most in enumerate(tasks_on) for number in range(most)]
    if distribution.startswith("cyclic"):
        places.sort(key=lambda place: place[::-1])  # by their numbers, then by node
    own = (count(environ, "SLURM_NODEID"), count(environ, "SLURM_LOCALID"))
    if places[rank] != own:
        raise ClusterConfigError(
            f"task {rank} is number {own[1]} on node {own[0]}; expected number {places[rank][1]} "
            f"on node {places[rank][0]}, as {said} and "
            f"SLURM_DISTRIBUTION={distribution!r}: start with srun --distribution=block or cyclic"
        )
    return [f"{hosts[node]}:{port_base + number}" for node, number in places]


def _hosts(environ: Environ) -> list[str]:
    variable = first_set(environ, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    try:
        return expand_hostlist(environ.get(variable, ""))
    except ValueError as error:
        raise ClusterConfigError(f"{variable}: {error}") from None


# More nodes than any cluster has; a wrong digit must not fill the memory.
_MOST_HOSTS = 1 << 20
# One or more hosts: text and lists in brackets. A comma in brackets does not end the item.
_ITEM = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_LIST = re.compile(rf"{_ITEM.pattern}(?:,{_ITEM.pattern})*")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_RUN = re.compile(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?")


def expand_hostlist(text: str) -> list[str]:
    """Expand a list such as "rack[1-2]n[08-10]" into its hosts, in order.

    Leading zeros are kept. With several brackets, the last varies fastest, as in the output of
    `scontrol show hostnames`.
    """
    if _LIST.fullmatch(text) is None:
        raise _malformed(text)
    hosts: list[str] = []
    for item in _ITEM.findall(text):
        choices = [_expand_part(part, text) for part in _PART.finditer(item)]
        product = itertools.product(*choices)
        hosts += itertools.islice(map("".join, product), _MOST_HOSTS + 1 - len(hosts))
        if len(hosts) > _MOST_HOSTS:
            raise _too_long(text)
    return hosts


def parse_tasks_per_node(text: str) -> list[tuple[int, int]]:
    """Parse a list such as "2(x3),1" into pairs of tasks per node and number of nodes."""
    runs = []
    for entry in text.split(","):
        match = _RUN.fullmatch(entry.strip())
        if match is None:
            raise ValueError(f"malformed list {text!r}; expected tasks per node, as '4(x2),3'")
        runs.append((int(match[1]), int(match[2] or 1)))
    return runs


def _expand_part(part: re.Match[str], text: str) -> list[str]:
    if part[2] is not None:
        return [part[2]]
    numbers: list[str] = []
    for entry in part[1].split(","):
        match = _RANGE.fullmatch(entry)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise _malformed(text)
        first, last = int(match[1]), int(match[2] or match[1])
        if len(numbers) + last - first >= _MOST_HOSTS:
            raise _too_long(text)
        width = len(match[1])
        numbers += [f"{number:0{width}}" for number in range(first, last + 1)]
    return numbers


def _malformed(text: str) -> ValueError:
    return ValueError(f"malformed host list {text!r}; expected hosts, as 'node[01-03,07],gpu5'")


def _too_long(text: str) -> ValueError:
    return ValueError(f"host list {text!r}; expected at most {_MOST_HOSTS} hosts")
