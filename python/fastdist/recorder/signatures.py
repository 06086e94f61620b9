"""Decodes the signatures of recorded calls, as csrc/core/signature.h packs them."""

from __future__ import annotations

from dataclasses import dataclass

OPS = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "gather", "scatter", "reduce_scatter"),
    *("all_to_all", "send", "recv", "barrier", "empty", "group", "join", "scan"),
    *("broadcast_object", "all_gather_object", "gather_object", "scatter_object", "split"),
    *("all_gather_splits", "gather_splits", "scatter_splits", "reduce_scatter_splits"),
    "all_to_all_splits",
)
DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float32", "float64"),
    *("complex64", "complex128"),
)
_REDUCE_OPS = ("sum", "mean", "prod", "min", "max", "and", "or", "xor")
REQUESTS = (
    *("CREATE", "READ", "CHANGE", "ASSIGN", "STATS", "SAVE", "RESTORE", "COMMIT"),
    *("DISCARD", "RESET", "END"),
)
"""Requests to parameter servers, as ps/wire/protocol.py numbers them, from 1."""

_FIRST_REQUEST = 65
_REDUCTIONS = ("all_reduce", "reduce_scatter", "reduce", "scan")
_ROOTED = ("reduce", "broadcast", "gather", "scatter")  # and those of objects
_PEERS = {"send": "dst", "recv": "src"}
_WITHOUT_ARRAY = ("barrier", "group", "join", "split", *(op for op in OPS if "object" in op))


@dataclass(frozen=True, slots=True)
class Signature:
    """The kind of a call.

    Attributes:
        packed: all fields but the count, in one word; equal on ranks whose calls agree.
        count: elements of this rank's argument.
    """

    packed: int
    count: int

    @property
    def op(self) -> str:
        """The collective's name, or that of a request to a parameter server."""
        number = self.packed & 0x7F
        if number >= _FIRST_REQUEST:
            return _name(REQUESTS, number - _FIRST_REQUEST)
        return _name(OPS, number).removesuffix("_splits")

    @property
    def is_pairwise(self) -> bool:
        """True for sends and receives, which concern two ranks."""
        return self.op in _PEERS

    @property
    def on_gpu(self) -> bool:
        """True if the arrays are on GPUs."""
        return bool(self.packed >> 7 & 1)

    @property
    def root(self) -> int:
        """The root, the other rank of a send or receive (negative: any rank), or the server."""
        root = self.packed >> 24 & 0xFFFF
        return root - 0x10000 if root >= 0x8000 else root

    def __str__(self) -> str:
        if self.op in REQUESTS:
            return f"{self.op}({self.count:,} bytes, server={self.root})"
        words = []
        if self.op not in _WITHOUT_ARRAY:
            words.append(f"{_name(DTYPES, self.packed >> 8 & 0xFF)} × {self.count:,}")
        if self.op in _REDUCTIONS:
            words.append(f'op="{_name(_REDUCE_OPS, self.packed >> 16 & 0xFF)}"')
        word = "root" if self.op.removesuffix("_object") in _ROOTED else _PEERS.get(self.op)
        if word is not None:
            words.append(f"{word}={self.root if self.root >= 0 else 'any'}")
        return f"{self.op}({', '.join(words)})"


def _name(names: tuple[str, ...], number: int) -> str:
    return names[number] if number < len(names) else f"number {number}"
