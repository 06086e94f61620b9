"""The layout of a job, as the input pipeline of one process sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class InputLayout:
    """The replicas of a job, their devices, and the exchange between workers.

    Strategies make it. A worker is a process with one input pipeline. Replicas are numbered worker
    by worker.
    """

    num_replicas: int  # of the whole job
    local_replicas: tuple[int, ...]  # ids of this worker's replicas, consecutive
    num_workers: int
    worker: int  # id of this process
    devices: tuple[torch.device, ...]  # of the local replicas
    # A collective that gathers equally many ints of every worker. It is called only if the number
    # of steps is unknown or the workers' data may differ, and only from the thread that iterates.
    all_gather_ints: Callable[[Sequence[int]], list[list[int]]]
    # Makes an object with the methods of a `DeviceCopy` for one dataset, in its place; the argument
    # is True if all replicas have the same number of examples in all batches.
    make_copy: Callable[[bool], Any] | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class InputContext:
    """The argument of a dataset function (tf.distribute.InputContext).

    Attributes:
        num_input_pipelines: the number of workers; each calls the function once.
        input_pipeline_id: the id of the calling worker.
        num_replicas_in_sync: replicas of the whole job.

    Examples:
        >>> import fastdist as fd, torch
        >>> def make(context):
        ...     size = context.get_per_replica_batch_size(4)
        ...     own = torch.arange(8)[context.input_pipeline_id :: context.num_input_pipelines]
        ...     return own.split(size)
        >>> strategy = fd.OneDeviceStrategy("cpu")
        >>> list(strategy.distribute_datasets_from_function(make))
        [PerReplica(
          0: tensor([0, 1, 2, 3])), PerReplica(
          0: tensor([4, 5, 6, 7]))]
    """

    num_input_pipelines: int
    input_pipeline_id: int
    num_replicas_in_sync: int

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the number of examples per replica and step.

        Raises:
            ValueError: the replicas do not divide the global batch size.
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise ValueError(
                f"a global batch of {global_batch_size} examples cannot be divided evenly among "
                f"{self.num_replicas_in_sync} replicas"
            )
        return global_batch_size // self.num_replicas_in_sync
