"""What a resolver answers: which cluster this process belongs to, and as which of its tasks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import final

from fastdist.cluster.spec import ClusterSpec
from fastdist.errors import ClusterConfigError


class ClusterResolver(ABC):
    """Finds out the cluster and this process's place in it; subclass it for your own scheduler.

    A subclass says the cluster, the task type and the task id; the rest follows from them. Follows
    tf.distribute.cluster_resolver.ClusterResolver.
    """

    __slots__ = ()

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """The tasks of the cluster; the same on all of them."""

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
        """Whether this task saves checkpoints and the like: the chief, or worker 0 without one."""
        return (self.task_type, self.task_id) == self.cluster_spec().chief

    @property
    @final
    def rank(self) -> int | None:
        """This task's rank among those that train together; None for a ps or an evaluator."""
        # The evaluator need not be in the cluster that it evaluates.
        if self.task_type == "evaluator":
            return None
        return self.cluster_spec().training_rank(self.task_type, self.task_id)

    @property
    @final
    def world_size(self) -> int:
        """How many tasks train together: chief and workers."""
        return self.cluster_spec().num_training_tasks

    @property
    @final
    def coordinator_address(self) -> str:
        """The "host:port" of the task of rank 0, where the ranks meet.

        Raises:
            ClusterConfigError: the launcher does not say it.
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
    """Takes the cluster and this process's place in it as given.

    Follows tf.distribute.cluster_resolver.SimpleClusterResolver.
    """

    __slots__ = ("_spec", "_task_id", "_task_type")

    def __init__(self, cluster_spec: ClusterSpec, task_type: str, task_id: int) -> None:
        """Checks that the task is one of the cluster's, or an evaluator beside it.

        Args:
            cluster_spec: the tasks of the cluster.
            task_type: this process's job.
            task_id: this process's index in its job.

        Raises:
            ClusterConfigError: there is no such task in the cluster.
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
        """The tasks of the cluster."""
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
