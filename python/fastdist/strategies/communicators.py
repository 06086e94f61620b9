"""The communicators of a strategy's replicas."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fastdist.collectives.communicator import Communicator, Work
from fastdist.collectives.init import in_groups, local_group, replica_group
from fastdist.strategies.options import CommunicationOptions

_FOREVER_S = 1e9


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

    def set_phase(self, phase: int) -> None:
        """Replicas that are in different runs shall learn of it by the first thing they call."""
        for communicator in (*self.context, *self.gradients):
            communicator.engine.set_phase(phase)

    def close(self) -> None:
        """Leave all of them; replicas that still wait for this process get an error."""
        for communicator in (*self.context, *self.gradients):
            communicator.close()


class Ends:
    """Tells replicas that still run, all in this process, which ones have ended.

    A collective that they call without those would wait for nothing; so it fails at once.
    """

    def __init__(self, links: Links) -> None:
        self._links = links
        self._works: dict[int, list[Work]] = {}

    def note(self, replica: int) -> None:
        """A replica has ended."""
        both = (self._links.context[replica], self._links.gradients[replica])
        self._works[replica] = [c.barrier(timeout=_FOREVER_S, async_op=True) for c in both]

    def finish(self) -> None:
        """All have ended, without an error."""
        if self._works:
            for replica in set(range(len(self._links.context))) - set(self._works):
                self.note(replica)
        for work in itertools.chain.from_iterable(self._works.values()):
            work.wait()


def thread_links(replicas: int, options: CommunicationOptions) -> Links:
    """For replicas that are the threads of one process."""
    if replicas == 1:
        return Links()
    context, gradients = (local_group(replicas, timeout=options.timeout_s) for _ in range(2))
    return Links(tuple(context), _for_gradients(gradients, options))


def process_links(world: Communicator, options: CommunicationOptions) -> Links:
    """For one replica in each process of `world`. Every rank must call."""
    if world.world_size == 1:
        return Links()
    workers, context, gradients = (_copy(world, options) for _ in range(3))
    return Links((context,), _for_gradients([gradients], options), workers)


def worker_links(world: Communicator, local: int, options: CommunicationOptions) -> Links:
    """For `local` replicas, threads, in each process of `world`. Every rank must call."""
    if world.world_size == 1:
        return thread_links(local, options)
    if local == 1:
        return process_links(world, options)
    workers = _copy(world, options)
    context = replica_group(world, local, timeout=options.timeout_s)
    gradients = replica_group(world, local, timeout=options.timeout_s)
    return Links(tuple(context), _for_gradients(gradients, options), workers)


def _copy(world: Communicator, options: CommunicationOptions) -> Communicator:
    copy = world.subgroup(range(world.world_size))
    assert copy is not None
    return copy if options.timeout_s is None else Communicator(copy.engine, options.timeout_s)


def _for_gradients(
    flat: Sequence[Communicator], options: CommunicationOptions
) -> tuple[Communicator, ...]:
    if options.implementation != "hierarchical_copy":
        return tuple(flat)
    width = (flat[0].world_size + 1) // 2
    with ThreadPoolExecutor(len(flat)) as pool:  # they wait for each other
        return tuple(pool.map(lambda c: in_groups(c, width, timeout=options.timeout_s), flat))
