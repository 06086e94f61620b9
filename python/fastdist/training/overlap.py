"""Whether ranks communicate while they compute."""

from __future__ import annotations

import os
from typing import Literal, TypeAlias

import numpy as np

from fastdist.cluster.launch import detect_launch
from fastdist.collectives.communicator import Communicator

Overlap: TypeAlias = bool | Literal["auto"]


def agree_on_overlap(ranks: Communicator, overlap: Overlap) -> bool:
    """Return `overlap`; for "auto", if every machine has more cores than ranks.

    Every rank must call.
    """
    if overlap != "auto":
        return overlap
    launch = detect_launch()
    idle = len(os.sched_getaffinity(0)) - (1 if launch is None else launch.local_world_size)
    return bool(ranks.all_reduce(np.array([idle > 0]), "min")[0])
