"""Which server keeps the row of an id, where ids have no limit."""

from __future__ import annotations

import numpy as np

from fastdist.ps.wire.frames import Array


def owner_of(ids: Array, owners: int) -> Array:
    """The number of the owner of each id, from 0: ids of any pattern are spread alike.

    By the finisher of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
    Generators, 2014), of whose high bits each owner has an equal range; as csrc/table/routing.cpp.
    """
    x = ids.view(np.uint64)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    owner: Array = ((x >> np.uint64(32)) * np.uint64(owners) >> np.uint64(32)).astype(np.int64)
    return owner
