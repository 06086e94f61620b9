"""Collectives on arrays: communicators, rendezvous of ranks, and engines that move bytes."""

import fastdist._core as _core
from fastdist.collectives import hints

_core.set_hints(hints)
