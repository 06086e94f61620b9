"""Buffers, bus factor and minimum memory traffic of each collective.

N is the "bytes" column and n the world size. As in nccl-tests, N is the size of the larger of a
rank's two buffers; if that buffer consists of n blocks, "count" is the elements of one block.

Floor traffic: every byte that a rank passes is read once, and every byte that a rank gets is
written once, all in one memory system. The floor is the time of this traffic at the speed of n
ranks that copy at the same time, where a copy counts the bytes read and the bytes written. The
floor does not apply to buffers in the caches, which are faster than memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

ROOT = 0


@dataclass(frozen=True, slots=True)
class Collective:
    """The properties of a collective; functions are of the world size.

    `passes` and `gets` name the buffers of a rank, as in `buffer_elements`.
    """

    bus_factor: Callable[[int], float]  # busbw / algbw, as in nccl-tests
    floor_buffers: Callable[[int], int]  # floor traffic in units of N
    passes: str = "count"
    gets: str = ""  # the result replaces what is passed
    reduces: bool = False  # takes a reduce op

    @property
    def blocks(self) -> bool:
        """True if the larger buffer consists of one block per rank."""
        return "blocks" in self.passes + self.gets


def _one(world_size: int) -> float:
    return 1.0


def _others(world_size: int) -> float:
    return (world_size - 1) / world_size


# By method of `Communicator`; `send_recv` sends to the next rank and receives from the previous.
COLLECTIVES = {
    "all_reduce": Collective(lambda n: 2 * _others(n), lambda n: 2 * n, reduces=True),
    "reduce": Collective(_one, lambda n: n + 1, reduces=True),
    "broadcast": Collective(_one, lambda n: n),
    "all_gather": Collective(_others, lambda n: n + 1, "count", "blocks"),
    "gather": Collective(_others, lambda n: 2, "count", "blocks on the root"),
    "scatter": Collective(_others, lambda n: 2, "blocks on the root", "count"),
    "reduce_scatter": Collective(_others, lambda n: n + 1, "blocks", "count", reduces=True),
    "all_to_all": Collective(_others, lambda n: 2 * n, "blocks", "blocks"),
    "send_recv": Collective(_one, lambda n: 2 * n, "count", "count"),
    "barrier": Collective(_one, lambda n: 0, passes=""),
}


def buffer_elements(name: str, count: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the elements that a rank passes and gets; 0 means no such buffer."""
    blocks = count * world_size
    at_root = blocks if rank == ROOT else 0
    elements = {"": 0, "count": count, "blocks": blocks, "blocks on the root": at_root}
    collective = COLLECTIVES[name]
    return elements[collective.passes], elements[collective.gets]
