"""Checkpoints: directories of safetensors and JSON, written atomically, for every strategy."""

from __future__ import annotations

from fastdist.checkpoints.checkpoint import Checkpoint
from fastdist.checkpoints.elastic import Elastic
from fastdist.checkpoints.manager import CheckpointManager
from fastdist.checkpoints.preemption import PreemptionCheckpointHandler
from fastdist.checkpoints.watching import checkpoints_iterator

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "Elastic",
    "PreemptionCheckpointHandler",
    "checkpoints_iterator",
]
