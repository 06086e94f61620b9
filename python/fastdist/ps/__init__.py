"""Parameter servers: what keeps variables and tables of rows, and what talks to it."""

from __future__ import annotations

try:
    import zmq  # noqa: F401
except ImportError:
    raise ImportError("fastdist.ps needs pyzmq: pip install 'fastdist[ps]'", name="zmq") from None

from fastdist.ps.client import Client
from fastdist.ps.keys import Keys
from fastdist.ps.partition import FixedShards, MaxSizePartitioner, MinSizePartitioner
from fastdist.ps.pending import Pending
from fastdist.ps.server import Server
from fastdist.ps.specs import DenseSpec, RowsSpec, RuleSpec
from fastdist.ps.ticket import Ticket

__all__ = [
    "Client",
    "DenseSpec",
    "FixedShards",
    "Keys",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "Pending",
    "RowsSpec",
    "RuleSpec",
    "Server",
    "Ticket",
]
