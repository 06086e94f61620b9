"""Checkpoints: directories of safetensors and JSON, written atomically, for every strategy."""

from __future__ import annotations

from fastdist.checkpoints.checkpoint import Checkpoint
from fastdist.checkpoints.elastic import Elastic
from fastdist.checkpoints.manager import CheckpointManager, checkpoints_iterator
from fastdist.checkpoints.preemption import PreemptionCheckpointHandler

__all__ = [
    "Checkpoint",
    "CheckpointManager",
    "Elastic",
    "PreemptionCheckpointHandler",
    "checkpoints_iterator",
]
