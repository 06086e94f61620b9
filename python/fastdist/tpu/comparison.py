"""Comparison of calls between processes that trace, on the host."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from math import prod

import numpy as np
import torch

from fastdist.collectives.arrays import DTYPES
from fastdist.collectives.engines.engine import Engine
from fastdist.collectives.engines.signature import (
    RECORD_BYTES,
    Signature,
    mismatch,
    pack_site,
    unpack_site,
)


class Comparison:
    """Compares calls between processes that trace; `peers` connects them on the host."""

    def __init__(self, peers: Engine) -> None:
        self._peers = peers
        self._gather = peers.calls()["all_gather"]
        self._sequence = 0

    def require_same(self, signature: Signature, site: str, timeout_s: float = 600.0) -> None:
        """Compare a call with the calls of all processes. Every process must call.

        Raises:
            CollectiveMismatchError: the calls differ; the message shows each call and its line.
        """
        self._sequence += 1
        record = signature.pack(self._sequence)
        records = self._everyone(record, RECORD_BYTES, timeout_s)
        if records.count(records[0]) != len(records):
            packed = pack_site(site)
            sites = self._everyone(packed, len(packed), timeout_s)
            raise mismatch(self._peers.rank, records, [unpack_site(text) for text in sites])

    def joined(self, own: torch.Tensor, timeout_s: float = 600.0) -> torch.Tensor:
        """Join the tensors of all processes along axis 0; shapes must be equal."""
        everyone = own.new_empty((own.shape[0] * self._peers.size, *own.shape[1:]))
        self._gather(own.contiguous(), everyone, timeout_s, False)
        return everyone

    def _everyone(self, own: bytes, length: int, timeout_s: float) -> list[bytes]:
        rows = np.empty(length * self._peers.size, np.uint8)
        self._gather(np.frombuffer(own, np.uint8), rows, timeout_s, False)
        return [row.tobytes() for row in rows.reshape(self._peers.size, length)]


def signature_of(name: str, tensors: Sequence[torch.Tensor], op: str, root: int) -> Signature:
    """Make the signature of a call on XLA tensors, without their memory."""
    words = [(prod(t.shape), DTYPES.index(dtype_of(t))) for t in tensors]
    count = sum(word[0] for word in words)
    dtype = dtype_of(tensors[0]) if tensors else "bool"
    several = zlib.crc32(repr(words).encode()) | 1 if len(words) > 1 else 0
    return Signature(name, dtype, op, root, 0, count, several)


def dtype_of(tensor: torch.Tensor) -> str:
    """Return the name of a tensor's dtype."""
    return str(tensor.dtype).removeprefix("torch.")
