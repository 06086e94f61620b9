"""The tasks of a cluster and their addresses."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastdist.cluster.address import canonical_address
from fastdist.errors import ClusterConfigError

_JOBS = ("chief", "worker", "ps", "evaluator")
_ONE_OF_JOBS = ", ".join(_JOBS)
# More than any cluster has; a wrong digit must not fill the memory.
MOST_TASKS = 1 << 20


@dataclass(frozen=True, slots=True, init=False, repr=False)
class ClusterSpec:
    """The tasks of a cluster and their addresses.

    The jobs are "chief" (at most one task), "worker", "ps" (parameter servers) and "evaluator".
    Chief and workers train together and are ranked in this order; the evaluator never takes part
    in training. Without a chief, worker 0 is the chief.

    Follows tf.train.ClusterSpec. Addresses may be unknown, since launchers publish the number of
    ranks but not their addresses.

    Examples:
        >>> import fastdist as fd
        >>> spec = fd.cluster.ClusterSpec({"worker": ["a:2222", "b:2222"]})
        >>> spec.num_tasks("worker"), spec.task_address("worker", 1)
        (2, 'b:2222')
    """

    _jobs: tuple[tuple[str, tuple[str | None, ...]], ...]

    def __init__(self, cluster: Mapping[str, Sequence[str | None]]) -> None:
        """Check a cluster and keep it.

        Args:
            cluster: the addresses of the tasks of each job, "host:port" or "[IPv6]:port", in order;
                None for an unknown address. A job without tasks is the same as an absent job.

        Raises:
            ClusterConfigError: an unknown job, a malformed address, two tasks with one address,
                two chiefs, neither chief nor worker. The message shows the spec.
        """
        try:
            object.__setattr__(self, "_jobs", _checked(cluster))
        except ValueError as error:
            raise ClusterConfigError(f"{error}, in the cluster spec {cluster!r}") from None

    @classmethod
    def of_ranks(cls, world_size: int, coordinator_address: str | None = None) -> ClusterSpec:
        """Return a spec of workers, of which at most the first has a known address.

        Args:
            world_size: number of workers, at least 1.
            coordinator_address: "host:port" of worker 0.
        """
        if world_size > MOST_TASKS:
            raise ClusterConfigError(f"{world_size} ranks; expected at most {MOST_TASKS}")
        return cls({"worker": [coordinator_address] + [None] * (world_size - 1)})

    def __repr__(self) -> str:
        text = re.sub(r"(?:, None){8,}]", _repeated, str(self.as_dict()))
        return f"ClusterSpec({text})"

    @property
    def jobs(self) -> tuple[str, ...]:
        """The jobs that have tasks, in the order chief, worker, ps, evaluator."""
        return tuple(job for job, _ in self._jobs)

    def job_tasks(self, job: str) -> tuple[str | None, ...]:
        """Return the addresses of a job's tasks, None for an unknown address; empty without tasks.

        Raises:
            ClusterConfigError: clusters have no job of this name.
        """
        if job not in _JOBS:
            raise ClusterConfigError(f"unknown job {job!r}; expected {_ONE_OF_JOBS}, in {self}")
        return dict(self._jobs).get(job, ())

    def num_tasks(self, job: str) -> int:
        """Return the number of tasks of a job, including tasks with an unknown address."""
        return len(self.job_tasks(job))

    def task_address(self, job: str, index: int) -> str:
        """Return the address of a task.

        Raises:
            ClusterConfigError: the cluster has no such task, or its address is unknown.
        """
        self.require_task(job, index)
        address = self.job_tasks(job)[index]
        if address is None:
            raise ClusterConfigError(f"the address of {job} {index} is not known in {self}")
        return address

    def as_dict(self) -> dict[str, list[str | None]]:
        """Return the addresses of each job's tasks, for JSON or to make an equal spec."""
        return {job: list(tasks) for job, tasks in self._jobs}

    @property
    def num_training_tasks(self) -> int:
        """The number of training tasks: chief and workers."""
        return self.num_tasks("chief") + self.num_tasks("worker")

    def training_rank(self, job: str, index: int) -> int | None:
        """Return a task's rank among the training tasks, chief first; None for other jobs.

        Raises:
            ClusterConfigError: the cluster has no such task.
        """
        self.require_task(job, index)
        if job == "chief":
            return index
        return self.num_tasks("chief") + index if job == "worker" else None

    @property
    def chief(self) -> tuple[str, int]:
        """Job and index of the task of rank 0: the chief, or worker 0 without a chief."""
        return ("chief", 0) if self.num_tasks("chief") else ("worker", 0)

    def require_task(self, job: str, index: int) -> None:
        """Check that the cluster has a task.

        Raises:
            ClusterConfigError: the cluster has no such task.
        """
        tasks = self.num_tasks(job)
        if not tasks:
            raise ClusterConfigError(f"job {job!r} has no tasks in {self}")
        if not 0 <= index < tasks:
            raise ClusterConfigError(
                f"there is no {job} {index}; expected an index from 0 to {tasks - 1}, in {self}"
            )

    def require_parameter_servers(self) -> None:
        """Check that the cluster has the tasks that training with parameter servers needs.

        Raises:
            ClusterConfigError: the cluster has no parameter server, no worker or no chief.
        """
        for job in ("ps", "worker", "chief"):
            if not self.num_tasks(job):
                raise ClusterConfigError(
                    f"no {job} task; training with parameter servers needs at least one, in {self}"
                )


def _repeated(unknown: re.Match[str]) -> str:
    return f"] + [None] * {unknown[0].count('None')}"


def _checked(
    cluster: Mapping[str, Sequence[str | None]],
) -> tuple[tuple[str, tuple[str | None, ...]], ...]:
    if not isinstance(cluster, Mapping):
        raise ValueError(f"expected a dict from job to addresses, got {type(cluster).__name__}")
    for job in cluster:
        if job not in _JOBS:
            raise ValueError(f"unknown job {job!r}; expected {_ONE_OF_JOBS}")
    jobs = {job: _addresses(job, cluster[job]) for job in _JOBS if job in cluster}
    _check_addresses_differ(jobs)
    if not any(jobs.values()):
        raise ValueError("no tasks")
    if len(jobs.get("chief", ())) > 1:
        raise ValueError(f"{len(jobs['chief'])} chiefs; expected at most one")
    if not jobs.get("chief") and not jobs.get("worker"):
        raise ValueError("no worker and no chief; expected at least one task that trains")
    return tuple((job, addresses) for job, addresses in jobs.items() if addresses)


def _addresses(job: str, tasks: object) -> tuple[str | None, ...]:
    """Return a job's addresses in order; raise ValueError for values of other types."""
    if not isinstance(tasks, Sequence) or isinstance(tasks, str | bytes):
        raise ValueError(
            f"tasks of job {job!r}: {tasks!r}; expected a list of addresses, None for unknown ones"
        )
    if len(tasks) > MOST_TASKS:
        raise ValueError(f"{len(tasks)} tasks of job {job!r}; expected at most {MOST_TASKS}")
    for address in tasks:
        if address is not None and not isinstance(address, str):
            raise ValueError(f"address {address!r} of job {job!r}; expected 'host:port'")
    return tuple(tasks)


def _check_addresses_differ(jobs: Mapping[str, tuple[str | None, ...]]) -> None:
    tasks: dict[tuple[str, int], str] = {}
    for job, addresses in jobs.items():
        for index, address in enumerate(addresses):
            if address is None:
                continue
            task = f"{job} {index}"
            try:
                canonical = canonical_address(address)
            except ValueError as error:
                raise ValueError(f"{task}: {error}") from None
            other = tasks.setdefault(canonical, task)
            if other != task:
                raise ValueError(f"{other} and {task} have the same address {address!r}")
