"""Compares the optimizer steps that replicas have taken since gradients were last reduced.

Replicas stay equal only if all of them take the same steps with the same hyperparameters. A hash of
both travels with the gradients, one number per bit, so that every replica sees a difference.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fastdist.collectives.communicator import Communicator
from fastdist.errors import FastdistError

_WIDTH = 1 + 32  # numbers


@dataclass(slots=True)
class _Steps:
    """Steps of one replica: a hash of all, their number, and the last."""

    code: int = 0
    count: int = 0
    name: str = "no optimizer"
    settings: list[tuple[str, Any]] = field(default_factory=list)


class StepRecord:
    """The steps of one replica's optimizers since the last reduction of gradients."""

    def __init__(self) -> None:
        self._taken = _Steps()
        self._sent = _Steps()

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Record a step with the optimizer's present hyperparameters."""
        taken = self._taken
        taken.name, taken.settings = type(optimizer).__name__, _settings(optimizer)
        taken.code = zlib.crc32(f"{taken.name}{taken.settings}".encode(), taken.code)
        taken.count += 1

    def take(self) -> torch.Tensor:
        """Return a one and the bits of the hash, and start a new record.

        Returns:
            A tensor of shape [33], which the caller adds up over replicas.
        """
        self._sent = self._taken
        self.clear()
        return hash_bits(self._sent.code)

    def require_equal(self, total: torch.Tensor, workers: Communicator) -> None:
        """Check that all replicas had the same record. Every replica must call.

        Args:
            total: the sum or mean over replicas of the results of `take`.
            workers: the communicator of all replicas.

        Raises:
            FastdistError: the records differ; the message shows the hyperparameters that differ.
        """
        all_alike, *counts = total.tolist()
        if all(count in (0.0, all_alike) for count in counts):
            return
        records = workers.all_gather_object(self._sent)
        other = next(rank for rank, record in enumerate(records) if record != records[0])
        raise FastdistError(
            "replicas have taken different optimizer steps before this backward: "
            f"{_difference(records, other)}. All replicas need the same hyperparameters; a "
            "scheduler that steps by the loss needs the loss of all replicas, by all_reduce of the "
            "replica context in run, or by strategy.reduce outside",
            (other,),
        )

    def clear(self) -> None:
        """Forget the steps so far. Every replica must call."""
        self._taken = _Steps()


def hash_bits(code: int | None) -> torch.Tensor:
    """Return a one and the 32 bits of a hash; 33 zeros for None."""
    bits = np.unpackbits(np.array([code is not None, code or 0], ">u4").view(np.uint8))
    return torch.from_numpy(bits[-_WIDTH:].astype(np.float32))


def _settings(optimizer: torch.optim.Optimizer) -> list[tuple[str, Any]]:
    return [
        (key, _plain(value))
        for group in optimizer.param_groups
        for key, value in group.items()
        if key != "params"
    ]


def _plain(value: Any) -> Any:
    """Return a value whose repr is equal on all replicas; None for a value on a device."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else None
    return value if isinstance(value, (int, float, str, tuple, list)) else None


def _difference(records: Sequence[_Steps], other: int) -> str:
    first, second = records[0], records[other]
    for (key, value), (_, theirs) in zip(first.settings, second.settings, strict=False):
        if first.name == second.name and value != theirs:
            return f"{first.name} had {key}={value!r} on replica 0, {theirs!r} on replica {other}"
    return (
        f"replica 0 took {first.count}, the last of {first.name}; "
        f"replica {other} took {second.count}, the last of {second.name}"
    )
