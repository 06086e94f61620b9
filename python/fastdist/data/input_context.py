"""What the input of one process knows about the job that it feeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from fastdist.data.devices import BatchCopy


@dataclasses.dataclass(frozen=True, slots=True)
class InputLayout:
    """Where the replicas are and how the workers agree; strategies make it.

    A worker is a process with one input pipeline. Replicas are numbered worker by worker.

    Attributes:
        num_replicas: replicas of the whole job.
        local_replicas: ids of this worker's replicas, consecutive.
        num_workers: processes of the job.
        worker: id of this process.
        devices: of the local replicas, in their order.
        all_gather_ints: gives the ints of every worker, in the order of their ids. A collective:
            called by all workers, each with as many ints. Called only where the number of steps
            cannot be known or the workers' data may differ, always from the thread that iterates,
            and never when there is one worker.
        make_copy: makes what brings batches to the replicas, for one dataset; it is told whether
            all replicas have as many examples in all batches. None: copies to the devices.

    Raises:
        ValueError: the numbers contradict each other.
    """

    num_replicas: int
    local_replicas: tuple[int, ...]
    num_workers: int
    worker: int
    devices: tuple[torch.device, ...]
    all_gather_ints: Callable[[Sequence[int]], list[list[int]]]
    make_copy: Callable[[bool], BatchCopy] | None = None

    def __post_init__(self) -> None:
        first = self.local_replicas[0] if self.local_replicas else -1
        stop = first + len(self.local_replicas)
        if first < 0 or self.local_replicas != tuple(range(first, stop)):
            raise ValueError(f"local_replicas must be consecutive ids, got {self.local_replicas}")
        if stop > self.num_replicas:
            raise ValueError(f"replica {stop - 1} is not one of {self.num_replicas} replicas")
        if not 0 <= self.worker < self.num_workers:
            raise ValueError(f"worker {self.worker} is not one of {self.num_workers} workers")
        if len(self.devices) != len(self.local_replicas):
            raise ValueError(
                f"expected one device for each local replica, got {len(self.devices)} devices for "
                f"{len(self.local_replicas)} replicas"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class InputContext:
    """What a dataset function is told (tf.distribute.InputContext).

    Attributes:
        num_input_pipelines: workers, each of which calls the function once.
        input_pipeline_id: the worker that calls.
        num_replicas_in_sync: replicas of the whole job.
    """

    num_input_pipelines: int
    input_pipeline_id: int
    num_replicas_in_sync: int

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Examples per replica and step.

        Raises:
            ValueError: the replicas do not divide the global batch size.
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise ValueError(
                f"a global batch of {global_batch_size} examples cannot be divided evenly among "
                f"{self.num_replicas_in_sync} replicas"
            )
        return global_batch_size // self.num_replicas_in_sync
