"""Signatures of calls, which all ranks compare before any byte of an array moves."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from fastdist.collectives.arguments import REDUCE_OPS
from fastdist.collectives.arrays import DTYPES
from fastdist.collectives.engines.views import Arrays
from fastdist.errors import CollectiveMismatchError

OPS = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "gather",
    "scatter",
    "reduce_scatter",
    "all_to_all",
    "send",
    "recv",
    "barrier",
)
_COMPARED = (*OPS, "empty")
_ROOTED = {"reduce": "root", "broadcast": "root", "gather": "root", "scatter": "root"}
_PEERS = {"send": "dst", "recv": "src"}
_REDUCING = {"all_reduce", "reduce", "reduce_scatter"}

_COMPRESSIONS = (None, "fp16", "bf16", "fp8")
_WIRES = {"float16": "fp16", "bfloat16": "bf16", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8"}
# sequence, op, dtype, reduce op, compression, on a GPU, root, order, count, list
_RECORD = struct.Struct("<QBBBB?iIQQ")
RECORD_BYTES = _RECORD.size
SITE_BYTES = 256


@dataclass(frozen=True, slots=True)
class Signature:
    """The facts about a call that must be equal on all ranks.

    Attributes:
        op: the collective.
        dtype: dtype of the first array.
        reduce_op: the reduction; "sum" for collectives that do not reduce.
        root: the root, or the other rank of send and recv; 0 for collectives without a root.
        order: axis order of one array, 0 for row-major.
        count: the number of elements of this rank's argument.
        list_hash: 0 for one array; for a list, a hash of every array's count, dtype and order.
        compress: compression of all_reduce.
        on_gpu: True if the arrays are on a GPU.
    """

    op: str
    dtype: str = "bool"
    reduce_op: str = "sum"
    root: int = 0
    order: int = 0
    count: int = 0
    list_hash: int = 0
    compress: str | None = None
    on_gpu: bool = False

    @classmethod
    def of_words(cls, words: tuple[int, int, int]) -> Signature:
        """Decode a signature of the compiled module; see csrc/core/signature.h."""
        packed, count, list_hash = words
        root = packed >> 24 & 0xFFFF
        wire = packed >> 56
        return cls(
            _COMPARED[packed & 0x7F],
            DTYPES[packed >> 8 & 0xFF],
            REDUCE_OPS[packed >> 16 & 0x7],
            root - (root >> 15 << 16),
            packed >> 40 & 0xFFFF,
            count,
            list_hash,
            _WIRES[DTYPES[wire - 1]] if wire else None,
            on_gpu=bool(packed >> 7 & 1),
        )

    @classmethod
    def of(cls, op: str, arrays: Arrays, reduce_op: str = "sum", root: int = 0) -> Signature:
        """Make the signature of a call on these arrays."""
        views = arrays.views
        count = sum(view.count for view in views)
        dtype = views[0].dtype if views else "bool"
        if not arrays.is_list:
            return cls(op, dtype, reduce_op, root, views[0].order, count)
        words = [(view.count, DTYPES.index(view.dtype), view.order) for view in views]
        return cls(op, dtype, reduce_op, root, 0, count, zlib.crc32(repr(words).encode()) | 1)

    def pack(self, sequence: int) -> bytes:
        """Encode as `RECORD_BYTES` bytes."""
        return _RECORD.pack(
            sequence,
            _COMPARED.index(self.op),
            DTYPES.index(self.dtype),
            REDUCE_OPS.index(self.reduce_op),
            _COMPRESSIONS.index(self.compress),
            self.on_gpu,
            self.root,
            self.order,
            self.count,
            self.list_hash,
        )

    @classmethod
    def unpack(cls, record: bytes) -> tuple[int, Signature]:
        """Decode the sequence number and the signature of a record."""
        fields = _RECORD.unpack(record)
        sequence, op, dtype, reduce_op, compress, on_gpu, root, order, count, words = fields
        return sequence, cls(
            _COMPARED[op],
            DTYPES[dtype],
            REDUCE_OPS[reduce_op],
            root,
            order,
            count,
            words,
            _COMPRESSIONS[compress],
            on_gpu,
        )

    def __str__(self) -> str:
        parts = []
        if self.op != "barrier":
            what = f"{self.dtype} × {self.count}"
            what += " in a list" if self.list_hash else ""
            what += ", not in row-major order" if self.order else ""
            parts.append(what + (", on GPUs" if self.on_gpu else ""))
        if self.op in _REDUCING:
            parts.append(f'op="{self.reduce_op}"')
        if self.compress is not None:
            parts.append(f'compress="{self.compress}"')
        name = _ROOTED.get(self.op) or _PEERS.get(self.op)
        if name is not None:
            parts.append(f"{name}={self.root}")
        return f"{self.op}({', '.join(parts)})"


def split_signature(arrays: Arrays, tables: Sequence[Sequence[Sequence[int]]]) -> Signature:
    """Make the signature of an all_to_all with splits, whose tables must be equal on all ranks."""
    table = repr((tables, [view.dtype for view in arrays.views]))
    dtype = arrays.views[0].dtype if arrays.views else "bool"
    return Signature("all_to_all", dtype, list_hash=zlib.crc32(table.encode()) | 1)


def mismatch(rank: int, records: Sequence[bytes], sites: Sequence[str]) -> CollectiveMismatchError:
    """Make the error that shows the call of each rank and its line of source."""
    sequence, _ = Signature.unpack(records[rank])
    signatures = [Signature.unpack(record)[1] for record in records]
    lines = [
        f"\n  rank {r}: {signature}" + (f" at {site}" if site else "")
        for r, (signature, site) in enumerate(zip(signatures, sites, strict=True))
    ]
    others = tuple(r for r, record in enumerate(records) if record != records[rank])
    return CollectiveMismatchError(
        f"ranks called different collectives (call {sequence}, seen from rank {rank} of "
        f"{len(records)}):" + "".join(lines),
        others,
    )


def pack_site(site: str) -> bytes:
    """Encode as `SITE_BYTES` bytes; a long text loses its beginning."""
    return site.encode(errors="replace")[-SITE_BYTES:].ljust(SITE_BYTES, b"\0")


def unpack_site(data: bytes) -> str:
    """Decode the output of `pack_site`."""
    return data.rstrip(b"\0").decode(errors="replace")
