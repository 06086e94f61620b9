"""tf.distribute for PyTorch, on the fastest collectives that Python has."""

from __future__ import annotations

from typing import Any

from fastdist import errors
from fastdist._version import __version__
from fastdist.communicator import Communicator, Work
from fastdist.world import default_communicator, init, local_group

_COLLECTIVES = (
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "gather",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
)

__all__ = [
    "Communicator",
    "Work",
    "__version__",
    "default_communicator",
    "errors",
    "init",
    "local_group",
    *_COLLECTIVES,
]


def __getattr__(name: str) -> Any:
    """`fastdist.all_reduce(x)` and its siblings: methods of the default communicator."""
    if name in _COLLECTIVES:
        return getattr(default_communicator(), name)
    raise AttributeError(f"module 'fastdist' has no attribute {name!r}")
