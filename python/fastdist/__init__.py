"""tf.distribute for PyTorch, on the fastest collectives that Python has."""

from __future__ import annotations

from fastdist import errors
from fastdist._version import __version__
from fastdist.communicator import Communicator, Work
from fastdist.default import (
    all_gather,
    all_gather_object,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    broadcast_object,
    gather,
    recv,
    reduce,
    reduce_scatter,
    scatter,
    send,
)
from fastdist.world import default_communicator, init, local_group

__all__ = [
    "Communicator",
    "Work",
    "__version__",
    "all_gather",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "broadcast_object",
    "default_communicator",
    "errors",
    "gather",
    "init",
    "local_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "scatter",
    "send",
]
