"""Comparison of calls between processes that trace, on the host."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from math import prod

import torch

from fastdist.collectives.arrays import DTYPES
from fastdist.collectives.engines.engine import Engine

_TIMEOUT_S = 600.0


class Comparison:
    """Compares calls between processes that trace; `peers` connects them on the host."""

    def __init__(self, peers: Engine) -> None:
        assert peers.compiled is not None
        self._peers = peers.compiled
        self._gather = peers.calls(_TIMEOUT_S).all_gather

    def require_same(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        op: str = "sum",
        root: int = 0,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        """Compare a call on XLA tensors with the calls of all processes. Every process must call.

        Raises:
            CollectiveMismatchError: the calls differ; the message shows each call and its line.
        """
        words = [(prod(t.shape), DTYPES.index(dtype_of(t))) for t in tensors]
        count = sum(word[0] for word in words)
        dtype = dtype_of(tensors[0]) if tensors else "bool"
        several = zlib.crc32(repr(words).encode()) | 1 if len(words) > 1 else 0
        self._peers.compare(name, dtype, op, root, count, several, timeout_s)

    def joined(self, own: torch.Tensor) -> torch.Tensor:
        """Join the tensors of all processes along axis 0; shapes must be equal."""
        everyone = own.new_empty((own.shape[0] * self._peers.size, *own.shape[1:]))
        self._gather(own.contiguous(), out=everyone)
        return everyone


def dtype_of(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")
