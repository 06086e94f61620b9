"""The engine for XLA tensors: collectives become part of the program that is being traced.

Each device is a rank. The program is traced once in each process, so that a value of the host (a
number, a numpy array) is equal on all ranks of a process.

Processes compare their calls on the host while they trace: programs that differ would hang on the
devices.

All tensors of one dtype in a list are reduced by one all-reduce.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, final

import numpy as np
import torch

from fastdist.collectives.arguments import to_rank
from fastdist.collectives.arrays import dtype_name
from fastdist.collectives.engines.engine import OPS, Bytes, Calls, Engine
from fastdist.collectives.hints import unknown_op
from fastdist.collectives.types import REDUCE_OPS
from fastdist.errors import UnsupportedError
from fastdist.recorder.signatures import DTYPES
from fastdist.tpu.mesh import Mesh

_XLA_OPS = ("sum", "mean", "min", "max")
# For collectives that XLA tensors do not have: another whose result contains the wanted one.
_INSTEAD = {
    "reduce": "all_reduce",
    "gather": "all_gather",
    "scatter": "broadcast",
    **dict.fromkeys(("all_to_all", "send", "recv"), "all_gather"),
}
_TIMEOUT_S = 600.0  # of processes that wait for each other on the host


@final
class SpmdEngine(Engine):
    """Collectives between the devices of a mesh, for code between `Mesh.enter` and `leave`.

    The program is the same on all devices: `rank` is that of this process's first device, and a
    replica's own number is `ReplicaContext.replica_id_in_sync_group`.

    Args:
        peers: an engine between the mesh's processes, in the order of their devices; calls are
            compared over it before they are traced. None if this process has all devices.
    """

    compiled = None  # NCCL does not connect XLA devices

    def __init__(self, mesh: Mesh, peers: Engine | None = None) -> None:
        self.rank = mesh.local[0]
        self.size = mesh.size
        self._here = len(mesh.local)
        self._mesh = mesh
        self._peers = peers
        self._gather_hosts = None if peers is None else peers.calls(_TIMEOUT_S).all_gather

    def calls(self, timeout_s: float) -> Calls:
        """Return the collectives, which are part of the traced program and never asynchronous."""
        del timeout_s  # XLA decides
        return Calls(
            **{op: functools.partial(self._call, op, getattr(self, f"_{op}", None)) for op in OPS}
        )

    def empty(self, nbytes: int) -> Bytes:
        """Allocate host memory; XLA manages the memory of the devices."""
        return np.empty(nbytes, np.uint8)

    def subset(self, groups: Sequence[Sequence[int]], timeout_s: float) -> Engine | None:
        """Return this engine for the group of all ranks in order."""
        if [list(group) for group in groups] == [list(range(self.size))]:
            return self
        raise UnsupportedError(
            f"the XLA engine does not support groups of ranks, got {list(map(list, groups))} of "
            f"{self.size} ranks"
        )

    def survivors(self, ranks: Sequence[int], timeout_s: float) -> Engine:
        """Raise UnsupportedError: programs are compiled for all devices."""
        del ranks, timeout_s
        raise UnsupportedError("shrink does not work between XLA devices; restart the job")

    def close(self) -> None:
        """Do nothing: the engine holds no resources."""

    def _call(
        self,
        name: str,
        method: Callable[..., Any] | None,
        *arrays: Any,
        timeout: float | None = None,
        async_op: bool = False,
        stream: Any = None,
        bucket_bytes: Any = None,
        within: Any = None,
        **given: Any,
    ) -> Any:
        del timeout, bucket_bytes  # XLA decides
        if method is None:
            raise UnsupportedError(
                f"{name} is not supported for XLA tensors; use {_INSTEAD[name]}, whose result all "
                "ranks get"
            )
        if within == "gather_object":
            del given["root"]
        if stream is not None:
            raise UnsupportedError(f"{name}: stream= is not supported for XLA tensors")
        if async_op:
            raise UnsupportedError(
                f"{name}: async_op=True is not supported for XLA tensors; XLA itself overlaps the "
                "collectives of a program with its computations"
            )
        return method(*arrays, **given)

    # --- the collectives ------------------------------------------------------------------------

    def _all_reduce(self, arrays: Any, op: str, out: Any, compress: str | None) -> Any:
        if compress is not None:
            raise UnsupportedError(
                f"compress={compress!r} is not supported for XLA tensors; convert them, for "
                "example by x.to(torch.bfloat16)"
            )
        sources, targets = _fitting("all_reduce", arrays, out)
        _require_op(op, sources)
        self._agree("all_reduce", sources, op)
        for target, result in zip(targets, self._reduced(sources, op), strict=True):
            _put(target, result)
        return arrays if out is None else out

    def _broadcast(self, arrays: Any, root: int, out: Any = None) -> Any:
        to_rank(root, "root", self.size)
        sources, targets = _fitting("broadcast", arrays, out)
        self._agree("broadcast", sources, root=root)
        for source, target in zip(sources, targets, strict=True):
            row = source if source.dim() else source[None]
            everyone = self._joined(row).reshape(self.size, *source.shape)
            _put(target, everyone[root])
        return arrays if out is None else out

    def _all_gather(self, arrays: Any, out: Any) -> Any:
        sources, targets = _tensors(arrays), _tensors(out)
        self._agree("all_gather", sources)
        for source, target in zip(sources, targets, strict=True):
            _put(target, self._joined(source if source.dim() else source[None]))
        return out

    def _reduce_scatter(self, arrays: Any, op: str, out: Any) -> Any:
        sources, targets = _tensors(arrays), _tensors(out)
        _require_op(op, sources)
        self._agree("reduce_scatter", sources, op)
        for target, result in zip(targets, self._reduced(sources, op), strict=True):
            _put(target, self._part(result))
        return out

    def _barrier(self) -> None:
        self._agree("barrier", [])

    def _agree(
        self, name: str, tensors: Sequence[torch.Tensor], op: str = "sum", root: int = 0
    ) -> None:
        """Compare a call with the calls of other processes."""
        if self._peers is None:
            return
        assert self._peers.compiled is not None
        words = [(prod(t.shape), DTYPES.index(dtype_name(t))) for t in tensors]
        count = sum(word[0] for word in words)
        dtype = dtype_name(tensors[0]) if tensors else "bool"
        several = zlib.crc32(repr(words).encode()) | 1 if len(words) > 1 else 0
        self._peers.compiled.compare(name, dtype, op, root, count, several, _TIMEOUT_S)

    def _reduced(self, tensors: Sequence[torch.Tensor], op: str) -> list[torch.Tensor]:
        results: list[Any] = [None] * len(tensors)
        together: dict[torch.dtype, list[int]] = {}
        for i, tensor in enumerate(tensors):
            if _is_on_host(tensor):
                results[i] = self._reduced_on_host(tensor, op)
            else:
                together.setdefault(tensor.dtype, []).append(i)
        for dtype, places in together.items():
            alike, known = [tensors[i].detach() for i in places], op
            if dtype == torch.bool:
                alike, known = [x.to(torch.int32) for x in alike], "max" if op == "sum" else op
            reduced = self._reduced_alike(alike, known)
            for i, result in zip(places, reduced, strict=True):
                results[i] = result.to(dtype)
        return results

    def _reduced_on_host(self, tensor: torch.Tensor, op: str) -> torch.Tensor:
        if self._peers is None:
            adds = op == "sum" and tensor.dtype != torch.bool
            return tensor * self.size if adds else tensor
        everyone = self._joined(tensor[None])
        if tensor.dtype == torch.bool:
            return everyone.all(0) if op == "min" else everyone.any(0)
        if op in ("min", "max"):
            return everyone.amin(0) if op == "min" else everyone.amax(0)
        return everyone.sum(0, dtype=tensor.dtype) if op == "sum" else everyone.mean(0)

    def _joined(self, tensor: torch.Tensor) -> torch.Tensor:
        """Join the tensors of all ranks along axis 0; a host tensor is equal on its ranks."""
        if not _is_on_host(tensor):
            return self._mesh.enter(self._mesh.leave_joined(tensor))
        own = torch.cat([tensor] * self._here)
        if self._gather_hosts is None:
            return own
        everyone = own.new_empty((self.size * tensor.shape[0], *tensor.shape[1:]))
        self._gather_hosts(own.contiguous(), out=everyone)
        return everyone

    # --- on the devices -------------------------------------------------------------------------

    def _reduced_alike(self, tensors: list[torch.Tensor], op: str) -> Sequence[torch.Tensor]:
        scale = 1.0 / self.size if op == "mean" else 1.0
        known = "sum" if op == "mean" else op
        if len(tensors) == 1:
            return [self._mesh.all_reduce(known, tensors[0], scale)]
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        reduced = self._mesh.all_reduce(known, flat, scale)
        parts = torch.split(reduced, [tensor.numel() for tensor in tensors])
        return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]

    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        if _is_on_host(tensor):
            raise ValueError(
                f"expected a tensor on XLA devices, got a tensor on {tensor.device}, which is "
                "equal on all ranks"
            )
        shape = (self.size, tensor.shape[0] // self.size, *tensor.shape[1:])
        return self._mesh.enter(self._mesh.leave(tensor).reshape(shape), True)


def _tensors(arrays: Any) -> list[torch.Tensor]:
    """Return tensors over the arrays' memory, or over copies of read-only arrays."""
    listed = arrays if isinstance(arrays, (list, tuple)) else [arrays]
    return [
        torch.from_numpy(each if each.flags.writeable else each.copy())
        if isinstance(each, np.ndarray)
        else each
        for each in listed
    ]


def _fitting(name: str, arrays: Any, out: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the tensors of arrays, and of `out`, which may be the arrays themselves."""
    sources = _tensors(arrays)
    targets = sources if out is None else _tensors(out)
    ours, theirs = ([(tuple(t.shape), t.dtype) for t in each] for each in (sources, targets))
    if ours != theirs:
        raise ValueError(f"{name}: out must have the array's shape and dtype, {ours}; got {theirs}")
    return sources, targets


def _require_op(op: str, tensors: Sequence[torch.Tensor]) -> None:
    if op not in REDUCE_OPS:
        raise ValueError(unknown_op(op))
    if op not in _XLA_OPS:
        raise UnsupportedError(f"op must be sum, mean, min or max for XLA tensors, got op={op!r}")
    for tensor in tensors:
        is_exact = not (tensor.is_floating_point() or tensor.is_complex())
        wrong = is_exact if op == "mean" else op in ("min", "max") and tensor.is_complex()
        if wrong:
            hint = '; cast to a floating dtype, or use op="sum"' if op == "mean" else ""
            raise TypeError(f'op="{op}" is not defined for dtype {dtype_name(tensor)}{hint}')


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "xla"


def _put(target: torch.Tensor, result: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(result.reshape(target.shape))
