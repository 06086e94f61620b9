"""Datasets for replicas: cut into global batches, shared out, read ahead, resumed."""

from __future__ import annotations

from fastdist.data.distribute import distribute_dataset, distribute_datasets_from_function
from fastdist.data.distributed import DistributedDataset
from fastdist.data.input_context import InputContext, InputLayout
from fastdist.data.sharding import AutoShardPolicy
from fastdist.data.streams import Files

__all__ = [
    "AutoShardPolicy",
    "DistributedDataset",
    "Files",
    "InputContext",
    "InputLayout",
    "distribute_dataset",
    "distribute_datasets_from_function",
]
