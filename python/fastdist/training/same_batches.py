"""Warns if all replicas compute on the same batches, and so do the same work.

That happens where a program gives the batches of a plain DataLoader to `run`. A hash of the tensors
that `run` got travels with the first gradients, one number per bit, so that it needs no call of
its own.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from fastdist.replicas.per_replica import leaves, select
from fastdist.training.modules import tensor_digest
from fastdist.training.step_record import hash_bits

_RUNS = 3  # runs that are compared
_SAMPLE = 4096  # elements of a tensor that are hashed


class SameBatches:
    """The batches of one replica's first runs."""

    def __init__(self) -> None:
        self._left = _RUNS
        self._hash: int | None = None
        self._sent: int | None = None
        self._seen: set[int] = set()
        self._is_found = False

    def note(self, given: Any) -> None:
        """Hash the tensors in `given`, the args and kwargs of a run without a divided batch."""
        if self._left:
            tensors = list(_tensors(select(given)))
            if tensors:
                self._hash = zlib.crc32(b"".join(map(_digest, tensors)))

    def take(self) -> torch.Tensor:
        """Return a one and the bits of the run's hash; zeros without a hash.

        Returns:
            A tensor of shape [33], which the caller adds up over replicas.
        """
        self._sent, self._hash = self._hash, None
        return hash_bits(self._sent)

    def compare(self, total: torch.Tensor, one_of_all: float) -> None:
        """Compare with the other replicas. Every replica must call.

        Args:
            total: the sum or mean over replicas of the results of `take`.
            one_of_all: the sum or mean of ones.
        """
        having, *counts = total.tolist()
        if not self._left or not having:
            return
        self._left -= 1
        if having != one_of_all or any(count not in (0.0, one_of_all) for count in counts):
            self._left = 0
            return
        assert self._sent is not None
        self._seen.add(self._sent)
        # Constant arguments are no batches.
        self._is_found = not self._left and len(self._seen) == _RUNS

    def report(self, is_chief: bool) -> None:
        """Warn, once and on one replica, if all replicas got the same batches."""
        if self._is_found and is_chief:
            warnings.warn(
                f"run got the same tensors on all replicas in its first {_RUNS} runs, so every "
                "replica does the same work, unless the function takes its own part of them: "
                "strategy.distribute_dataset(dataset, global_batch_size=…) divides batches among "
                "the replicas, and takes a DataLoader too",
                stacklevel=6,  # the line that calls run
            )
        self._is_found = False


def _tensors(given: Any) -> Iterator[torch.Tensor | np.ndarray[Any, Any]]:
    """Yield the dense arrays of several elements in a structure."""
    for leaf in leaves(given):
        if isinstance(leaf, Mapping):  # such as transformers' BatchEncoding
            yield from _tensors(dict(leaf))
        elif isinstance(leaf, np.ndarray):
            if leaf.size > 1 and leaf.dtype.kind in "biuf":
                yield leaf
        elif isinstance(leaf, torch.Tensor):
            is_plain = leaf.layout is torch.strided and not leaf.is_quantized
            if is_plain and leaf.numel() > 1 and not leaf.is_complex():
                yield leaf


def _digest(array: torch.Tensor | np.ndarray[Any, Any]) -> bytes:
    flat = array.reshape(-1)
    sample = flat[:: -(-len(flat) // _SAMPLE)]
    kind = f"{array.dtype}{tuple(array.shape)}".encode()
    if isinstance(sample, torch.Tensor):
        return kind + tensor_digest(sample)
    return kind + sample.tobytes()
