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


def _others(world_size: int) -> float:
    return (world_size - 1) / world_size


@dataclass(frozen=True, slots=True)
class Collective:
    """One row of the table above.

    Attributes:
        name: The method of `Communicator`; `send_recv` is a send to the next rank and a receive
            from the previous rank.
        bus_factor: Function from the world size to busbw / algbw, as in nccl-tests.
        floor_buffers: Function from the world size to the floor traffic in units of N.
        reduces: True if the collective takes a reduce op.
        blocks: True if the larger buffer consists of one block per rank.
        in_place: True if the result replaces the input.
    """

    name: str
    bus_factor: Callable[[int], float]
    floor_buffers: Callable[[int], int]
    reduces: bool = False
    blocks: bool = False
    in_place: bool = False


_TABLE = (
    Collective(
        "all_reduce", lambda n: 2 * _others(n), lambda n: 2 * n, reduces=True, in_place=True
    ),
    Collective("reduce", lambda n: 1.0, lambda n: n + 1, reduces=True, in_place=True),
    Collective("broadcast", lambda n: 1.0, lambda n: n, in_place=True),
    Collective("all_gather", _others, lambda n: n + 1, blocks=True),
    Collective("gather", _others, lambda n: 2, blocks=True),
    Collective("scatter", _others, lambda n: 2, blocks=True),
    Collective("reduce_scatter", _others, lambda n: n + 1, reduces=True, blocks=True),
    Collective("all_to_all", _others, lambda n: 2 * n, blocks=True),
    Collective("send_recv", lambda n: 1.0, lambda n: 2 * n),
    Collective("barrier", lambda n: 1.0, lambda n: 0),
)
COLLECTIVES = {collective.name: collective for collective in _TABLE}

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
