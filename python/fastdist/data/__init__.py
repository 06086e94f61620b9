"""Datasets for replicas: cut into global batches, shared out, read ahead, resumed."""

from __future__ import annotations

from fastdist.data.distributed import DistributedDataset
from fastdist.data.input_context import InputContext
from fastdist.data.sharding import AutoShardPolicy
from fastdist.data.streams import Files

__all__ = ["AutoShardPolicy", "DistributedDataset", "Files", "InputContext"]
