"""The communicators of a strategy's replicas."""

from __future__ import annotations

from dataclasses import dataclass

from fastdist.communicator import Communicator
from fastdist.world import local_group, replica_group


@dataclass(frozen=True, slots=True)
class Links:
    """What the replicas of this process talk through; nothing where there is one replica in all.

    Attributes:
        context: for each local replica, a communicator of all replicas: collectives in `run`.
        gradients: the same for gradients, so that their order does not depend on other calls.
        workers: of all processes, for cross-replica context; None where there is one.
    """

    context: tuple[Communicator, ...] = ()
    gradients: tuple[Communicator, ...] = ()
    workers: Communicator | None = None

    def close(self) -> None:
        """Leave all of them; replicas that still wait for this process get an error."""
        for communicator in (*self.context, *self.gradients):
            communicator.close()


def thread_links(replicas: int, timeout_s: float | None) -> Links:
    """For replicas that are the threads of one process."""
    if replicas == 1:
        return Links()
    return Links(
        tuple(local_group(replicas, timeout=timeout_s)),
        tuple(local_group(replicas, timeout=timeout_s)),
    )


def process_links(world: Communicator) -> Links:
    """For one replica in each process of `world`. Every rank must call."""
    if world.world_size == 1:
        return Links()
    ranks = range(world.world_size)
    workers, context, gradients = (world.subgroup(ranks) for _ in range(3))
    assert workers is not None
    assert context is not None
    assert gradients is not None
    return Links((context,), (gradients,), workers)


def worker_links(world: Communicator, local: int, timeout_s: float | None) -> Links:
    """For `local` replicas, threads, in each process of `world`. Every rank must call."""
    if world.world_size == 1:
        return thread_links(local, timeout_s)
    if local == 1:
        return process_links(world)
    workers = world.subgroup(range(world.world_size))
    context = replica_group(world, local, timeout=timeout_s)
    gradients = replica_group(world, local, timeout=timeout_s)
    return Links(tuple(context), tuple(gradients), workers)
