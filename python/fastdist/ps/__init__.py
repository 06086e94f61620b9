"""Parameter servers: servers that keep variables and tables of rows, and their clients."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fastdist.ps.client.client import Client
    from fastdist.ps.client.items import Item, Ticket
    from fastdist.ps.client.loading import LoadedCheckpoint, SavedRows, load
    from fastdist.ps.client.partition import FixedShards, MaxSizePartitioner, MinSizePartitioner
    from fastdist.ps.model.row_wise_adagrad import RowWiseAdagrad
    from fastdist.ps.server.server import Server
    from fastdist.ps.wire.specs import DenseSpec, RowsSpec, RuleSpec

__all__ = [
    "Client",
    "DenseSpec",
    "FixedShards",
    "Item",
    "LoadedCheckpoint",
    "MaxSizePartitioner",
    "MinSizePartitioner",
    "RowWiseAdagrad",
    "RowsSpec",
    "RuleSpec",
    "SavedRows",
    "Server",
    "Ticket",
    "load",
]

# Loaded on first use: `fastdist.nn` needs only the model folder, which loads no sockets.
_MODULES = {
    "client.client": ("Client",),
    "client.items": ("Item", "Ticket"),
    "client.loading": ("LoadedCheckpoint", "SavedRows", "load"),
    "client.partition": ("FixedShards", "MaxSizePartitioner", "MinSizePartitioner"),
    "model.row_wise_adagrad": ("RowWiseAdagrad",),
    "server.server": ("Server",),
    "wire.specs": ("DenseSpec", "RowsSpec", "RuleSpec"),
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"fastdist.ps.{module}"), name)
    raise AttributeError(f"module 'fastdist.ps' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
