"""Base class of cluster resolvers: the cluster, and this process's task in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import final

from fastdist.cluster.spec import ClusterSpec
from fastdist.errors import ClusterConfigError


class ClusterResolver(ABC):
    """The cluster, and this process's task in it; subclass it for your own scheduler.

    A subclass defines the cluster spec, the task type and the task id. Follows
    tf.distribute.cluster_resolver.ClusterResolver.

    Examples:
        >>> import fastdist as fd
        >>> class Pair(fd.cluster.ClusterResolver):
        ...     task_type, task_id = "worker", 1
        ...     def cluster_spec(self):
        ...         return fd.cluster.ClusterSpec({"worker": ["a:2222", "b:2222"]})
        >>> Pair().rank, Pair().world_size
        (1, 2)
    """

    __slots__ = ()

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks of the cluster, the same on all tasks."""

    @property
    @abstractmethod
    def task_type(self) -> str:
        """This process's job: "chief", "worker", "ps" or "evaluator"."""

    @property
    @abstractmethod
    def task_id(self) -> int:
        """This process's index among the tasks of its job."""

    @property
    @final
    def is_chief(self) -> bool:
        """True for the task that saves checkpoints: the chief, or worker 0 without a chief."""
        return (self.task_type, self.task_id) == self.cluster_spec().chief

    @property
    @final
    def rank(self) -> int | None:
        """This task's rank among the training tasks; None for a ps or an evaluator."""
        # The cluster spec need not list the evaluator.
        if self.task_type == "evaluator":
            return None
        return self.cluster_spec().training_rank(self.task_type, self.task_id)

    @property
    @final
    def world_size(self) -> int:
        """The number of training tasks: chief and workers."""
        return self.cluster_spec().num_training_tasks

    @property
    @final
    def coordinator_address(self) -> str:
        """The "host:port" of the task of rank 0, for the rendezvous of all ranks.

        Raises:
            ClusterConfigError: the launcher does not give the address.
        """
        spec = self.cluster_spec()
        job, index = spec.chief
        if spec.job_tasks(job)[index] is None:
            raise ClusterConfigError(
                f"ranks on several machines meet at {job} {index}, whose address is not known in "
                f"{spec}; expected it there, or from MASTER_ADDR and MASTER_PORT"
            )
        return spec.task_address(job, index)


class SimpleClusterResolver(ClusterResolver):
    """A cluster and this process's task in it, given as arguments.

    Follows tf.distribute.cluster_resolver.SimpleClusterResolver.

    Examples:
        >>> import fastdist as fd
        >>> spec = fd.cluster.ClusterSpec({"worker": ["a:2222", "b:2222"]})
        >>> resolver = fd.cluster.SimpleClusterResolver(spec, "worker", 1)
        >>> resolver.rank, resolver.is_chief
        (1, False)
    """

    __slots__ = ("_spec", "_task_id", "_task_type")

    def __init__(self, cluster_spec: ClusterSpec, task_type: str, task_id: int) -> None:
        """Check that the task is in the cluster, or is an evaluator.

        Args:
            cluster_spec: the tasks of the cluster.
            task_type: this process's job.
            task_id: this process's index in its job.

        Raises:
            ClusterConfigError: the cluster has no such task.
        """
        if task_type != "evaluator" or cluster_spec.num_tasks("evaluator"):
            cluster_spec.require_task(task_type, task_id)
        self._spec = cluster_spec
        self._task_type = task_type
        self._task_id = task_id

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._spec}, {self._task_type!r}, {self._task_id})"

    @final
    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks of the cluster."""
        return self._spec

    @property
    @final
    def task_type(self) -> str:
        """This process's job."""
        return self._task_type

    @property
    @final
    def task_id(self) -> int:
        """This process's index among the tasks of its job."""
        return self._task_id


def divide_among_jobs(
    jobs: Mapping[str, int], addresses: Sequence[str | None], rank: int, reason: str
) -> tuple[ClusterSpec, str, int]:
    """Assign the first processes to the first job, the next processes to the second, and so on.

    Returns the cluster, and this process's job and index. The reason is the source of the number of
    processes, such as "WORLD_SIZE='4'".
    """
    if sum(jobs.values()) != len(addresses) or min(jobs.values(), default=0) < 0:
        raise ClusterConfigError(
            f"{dict(jobs)} are {sum(jobs.values())} tasks; expected {len(addresses)}, as {reason}"
        )
    remaining = iter(addresses)
    cluster = {job: [next(remaining) for _ in range(tasks)] for job, tasks in jobs.items()}
    places = [(job, index) for job, tasks in jobs.items() for index in range(tasks)]
    return ClusterSpec(cluster), *places[rank]
