"""Buffers, bus factor and minimum memory traffic of each collective.

N is the "bytes" column and n the world size. As in nccl-tests, N is the size of the larger of a
rank's two buffers; if that buffer consists of n blocks, "count" is the elements of one block.

====================  ==================  ==================  ==============  ===================
collective            a rank passes       a rank gets         bus factor      floor traffic, bytes
====================  ==================  ==================  ==============  ===================
all_reduce            N (in place)        N                   2(n-1)/n        2nN
reduce                N (in place)        N on the root       1               (n+1)N
broadcast             N on the root       N (in place)        1               nN
all_gather            N/n                 N                   (n-1)/n         (n+1)N
gather                N/n                 N on the root       (n-1)/n         2N
scatter               N on the root       N/n                 (n-1)/n         2N
reduce_scatter        N                   N/n                 (n-1)/n         (n+1)N
all_to_all            N                   N                   (n-1)/n         2nN
send_recv (ring)      N to the next       N from the previous 1               2nN
barrier               nothing             nothing             -               -
====================  ==================  ==================  ==============  ===================

Floor traffic: every byte that a rank passes is read once, and every byte that a rank gets is
written once, all in one memory system. The floor is the time of this traffic at the speed of n
ranks that copy at the same time, where a copy counts the bytes read and the bytes written. The
floor does not apply to buffers in the caches, which are faster than memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Collective:
    """One row of the table above; functions are of the world size."""

    bus_factor: Callable[[int], float]  # busbw / algbw, as in nccl-tests
    floor_buffers: Callable[[int], int]  # floor traffic in units of N
    reduces: bool = False  # takes a reduce op
    blocks: bool = False  # the larger buffer consists of one block per rank
    in_place: bool = False  # the result replaces the input


def _one(world_size: int) -> float:
    return 1.0


def _others(world_size: int) -> float:
    return (world_size - 1) / world_size


# By method of `Communicator`; `send_recv` sends to the next rank and receives from the previous.
COLLECTIVES = {
    "all_reduce": Collective(
        lambda n: 2 * _others(n), lambda n: 2 * n, reduces=True, in_place=True
    ),
    "reduce": Collective(_one, lambda n: n + 1, reduces=True, in_place=True),
    "broadcast": Collective(_one, lambda n: n, in_place=True),
    "all_gather": Collective(_others, lambda n: n + 1, blocks=True),
    "gather": Collective(_others, lambda n: 2, blocks=True),
    "scatter": Collective(_others, lambda n: 2, blocks=True),
    "reduce_scatter": Collective(_others, lambda n: n + 1, reduces=True, blocks=True),
    "all_to_all": Collective(_others, lambda n: 2 * n, blocks=True),
    "send_recv": Collective(_one, lambda n: 2 * n),
    "barrier": Collective(_one, lambda n: 0),
}

ROOT = 0


def buffer_elements(name: str, count: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the elements that a rank passes and gets; 0 means no such buffer."""
    every = count * world_size
    at_root = rank == ROOT
    passes, gets = {
        "all_gather": (count, every),
        "gather": (count, every if at_root else 0),
        "scatter": (every if at_root else 0, count),
        "reduce_scatter": (every, count),
        "all_to_all": (every, every),
        "send_recv": (count, count),
        "barrier": (0, 0),
    }.get(name, (count, 0))
    return passes, gets
