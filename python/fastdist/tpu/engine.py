"""The engines for XLA tensors: collectives that become part of the program that is being traced.

`SpmdEngine`: one program for all devices, each of which is a rank; for code between `XlaMesh.enter`
and `leave`. It is traced once in each process, and what the host knows (a number, a numpy array) is
the same on all of its ranks. `ProcessEngine`: torch_xla's mode of one process for each device, by
the functions of `torch_xla.core.xla_model`.

Processes compare what they call, on the host and while they trace, where they can reach each other:
programs that differ would hang, or worse, on the devices.

Lists are reduced as one: all tensors of one dtype in one all-reduce.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import numpy as np
import torch

from fastdist.collectives.arguments import to_rank
from fastdist.collectives.engines.checked import source_line
from fastdist.collectives.engines.engine import Bytes, Calls, Engine
from fastdist.collectives.engines.signature import OPS, REDUCE_OPS
from fastdist.errors import UnsupportedError
from fastdist.tpu.comparison import Comparison, dtype_of, signature_of
from fastdist.tpu.mesh import XlaMesh, load_torch_xla

_XLA_OPS = ("sum", "mean", "min", "max")


class XlaEngine(Engine):
    """What both modes share: arguments are checked, lists are fused. Subclasses move the data.

    Args:
        rank: of this process's first device.
        size: how many ranks there are.
        here: how many of them are this process's.
        peers: all processes on the host, in the order of their ranks; with it, what they call is
            compared before it is traced.
    """

    def __init__(self, rank: int, size: int, here: int, peers: Engine | None) -> None:
        self.rank = rank
        self.size = size
        self._here = here
        self._comparison = None if peers is None else Comparison(peers)

    def calls(self) -> Calls:
        """The collectives; their work is part of the traced program, and so never asynchronous."""
        return {op: functools.partial(self._call, op, getattr(self, f"_{op}")) for op in OPS}

    def trusted_calls(self) -> Calls:
        """The same."""
        return self.calls()

    def empty(self, nbytes: int) -> Bytes:
        """Memory of the host: that of the devices is XLA's own affair."""
        return np.empty(nbytes, np.uint8)

    def subset(self, groups: Sequence[Sequence[int]], timeout_s: float) -> Engine | None:
        """Not there.

        Raises:
            UnsupportedError: always, but for a group of all ranks in order.
        """
        if [list(group) for group in groups] == [list(range(self.size))]:
            return self
        raise UnsupportedError(
            f"XLA engines have no groups, got {list(map(list, groups))} of {self.size} ranks"
        )

    def survivors(self, ranks: Sequence[int], timeout_s: float) -> Engine:
        """Not here: the program is compiled for all devices."""
        del ranks, timeout_s
        raise UnsupportedError("shrink does not work between XLA devices; start the job again")

    def set_phase(self, phase: int) -> None:
        """Nothing to do: what is traced has an order already."""

    def close(self) -> None:
        """Nothing to let go of."""

    def _call(self, name: str, method: Callable[..., Any], *args: Any) -> Any:
        *own, _, async_op = args
        if async_op:
            raise UnsupportedError(
                f"{name}: async_op=True has no meaning for XLA tensors; XLA runs the collectives "
                "of a traced program beside its computations by itself"
            )
        return method(*own)

    # --- what is called -------------------------------------------------------------------------

    def _all_reduce(self, arrays: Any, op: str, out: Any, compress: str | None) -> Any:
        if compress is not None:
            raise UnsupportedError(
                f"compress={compress!r} is not there for XLA tensors; convert them, as in "
                "x.to(torch.bfloat16)"
            )
        sources = _tensors(arrays)
        targets = sources if out is None else _tensors(out)
        _require_fit("all_reduce", sources, targets)
        _require_op(op, sources)
        self._agree("all_reduce", sources, op)
        for target, result in zip(targets, self._reduced(sources, op), strict=True):
            _put(target, result)
        return arrays if out is None else out

    def _reduce(self, arrays: Any, op: str, root: int, out: Any) -> Any:
        to_rank(root, "root", self.size)
        return self._all_reduce(arrays, op, out, None)  # others' result is one more copy

    def _broadcast(self, arrays: Any, root: int, out: Any) -> Any:
        to_rank(root, "root", self.size)
        sources = _tensors(arrays)
        targets = sources if out is None else _tensors(out)
        _require_fit("broadcast", sources, targets)
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

    def _gather(self, arrays: Any, root: int, out: Any) -> Any:
        to_rank(root, "root", self.size)
        return None if out is None else self._all_gather(arrays, out)

    def _scatter(self, arrays: Any, root: int, out: Any) -> Any:
        to_rank(root, "root", self.size)
        sources, targets = _tensors(arrays), _tensors(out)
        self._agree("scatter", sources, root=root)
        for source, target in zip(sources, targets, strict=True):
            given = self._joined(source).reshape(self.size, *source.shape)[root]
            _put(target, self._part(given))
        return out

    def _reduce_scatter(self, arrays: Any, op: str, out: Any) -> Any:
        sources, targets = _tensors(arrays), _tensors(out)
        _require_op(op, sources)
        self._agree("reduce_scatter", sources, op)
        for target, result in zip(targets, self._reduced(sources, op), strict=True):
            _put(target, self._part(result))
        return out

    def _all_to_all(self, arrays: Any, out: Any, counts: Sequence[int]) -> Any:
        if len(counts):
            raise UnsupportedError("all_to_all: XLA has equal parts alone; leave splits out")
        sources, targets = _tensors(arrays), _tensors(out)
        self._agree("all_to_all", sources)
        for source, target in zip(sources, targets, strict=True):
            _put(target, self._exchanged(source))
        return out

    def _send(self, *_: object) -> Any:
        raise UnsupportedError("send is not there for XLA tensors; use all_to_all or scatter")

    def _recv(self, *_: object) -> Any:
        raise UnsupportedError("recv is not there for XLA tensors; use all_to_all or scatter")

    def _barrier(self) -> None:
        self._agree("barrier", [])

    def _agree(
        self, name: str, tensors: Sequence[torch.Tensor], op: str = "sum", root: int = 0
    ) -> None:
        """Compare a call with other processes'."""
        if self._comparison is not None:
            self._comparison.require_same(signature_of(name, tensors, op, root), source_line())

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
        if self._comparison is None:
            self._require_alone()
            adds = op == "sum" and tensor.dtype != torch.bool
            return tensor * self.size if adds else tensor
        everyone = self._joined(tensor[None])
        if tensor.dtype == torch.bool:
            return everyone.all(0) if op == "min" else everyone.any(0)
        if op in ("min", "max"):
            return everyone.amin(0) if op == "min" else everyone.amax(0)
        return everyone.sum(0, dtype=tensor.dtype) if op == "sum" else everyone.mean(0)

    def _joined(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor, along axis 0; what is on the host is the same for its ranks."""
        if not _is_on_host(tensor):
            return self._gathered(tensor)
        own = torch.cat([tensor] * self._here)
        if self._comparison is not None:
            return self._comparison.joined(own)
        self._require_alone()
        return own

    def _require_alone(self) -> None:
        if self._here != self.size:
            raise UnsupportedError(
                "arrays on the host go to other processes by ProcessEngine(peers), which has none"
            )

    # --- what subclasses do ---------------------------------------------------------------------

    @abstractmethod
    def _reduced_alike(self, tensors: list[torch.Tensor], op: str) -> Sequence[torch.Tensor]:
        """Tensors of one dtype, reduced over all ranks by one operation."""

    @abstractmethod
    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's XLA tensor, along axis 0."""

    @abstractmethod
    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part, along axis 0, of a tensor that all ranks have."""

    @abstractmethod
    def _exchanged(self, tensor: torch.Tensor) -> torch.Tensor:
        """Part i of the result is this rank's part of rank i's tensor, along axis 0."""


class SpmdEngine(XlaEngine):
    """The devices of a mesh, inside `XlaMesh.enter` and `leave`.

    Its rank is that of the process's first device, whichever runs: the program is one. Which one
    runs, in the program, is `ReplicaContext.replica_id_in_sync_group`.

    Args:
        mesh: the devices.
        peers: the mesh's processes; None where there is one.
    """

    def __init__(self, mesh: XlaMesh, peers: Engine | None = None) -> None:
        super().__init__(mesh.local[0], mesh.size, len(mesh.local), peers)
        self._mesh = mesh

    def _reduced_alike(self, tensors: list[torch.Tensor], op: str) -> Sequence[torch.Tensor]:
        scale = 1.0 / self.size if op == "mean" else 1.0
        known = "sum" if op == "mean" else op
        if len(tensors) == 1:
            return [self._mesh.all_reduce(known, tensors[0], scale)]
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        reduced = self._mesh.all_reduce(known, flat, scale)
        parts = torch.split(reduced, [tensor.numel() for tensor in tensors])
        return [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)]

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._mesh.enter(self._mesh.leave_joined(tensor))

    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        _require_xla(tensor)
        return self._mesh.enter_part(self._mesh.leave(tensor))

    def _exchanged(self, tensor: torch.Tensor) -> torch.Tensor:
        _require_xla(tensor)
        n = self.size
        rows = tensor.shape[0] // n
        table = self._mesh.leave_joined(tensor).reshape(n, n, rows, *tensor.shape[1:])
        turned = table.transpose(0, 1).reshape(n * n * rows, *tensor.shape[1:])
        return self._mesh.enter_part(turned)


class ProcessEngine(XlaEngine):
    """torch_xla's mode of one process for each device (`torch_xla.launch`).

    Args:
        peers: of the same processes on the host, in the same order. None: XLA itself fails, or
            hangs, where they call different things; and arrays on the host go nowhere.
    """

    def __init__(self, peers: Engine | None = None) -> None:
        runtime: Any = load_torch_xla().runtime
        super().__init__(runtime.global_ordinal(), runtime.world_size(), 1, peers)
        if peers is not None and (peers.rank, peers.size) != (self.rank, self.size):
            raise ValueError(
                f"peers is rank {peers.rank} of {peers.size}, this process is {self.rank} of "
                f"{self.size}"
            )
        self._model: Any = import_module("torch_xla.core.xla_model")

    def _reduced_alike(self, tensors: list[torch.Tensor], op: str) -> Sequence[torch.Tensor]:
        copies = [tensor.clone() for tensor in tensors]  # reduced in place, all of them in one
        scale = 1.0 / self.size if op == "mean" else 1.0
        self._model.all_reduce("sum" if op == "mean" else op, copies, scale=scale)
        return copies

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        gathered: torch.Tensor = self._model.all_gather(tensor, dim=0)
        return gathered

    def _part(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.tensor_split(self.size)[self.rank]

    def _exchanged(self, tensor: torch.Tensor) -> torch.Tensor:
        _require_xla(tensor)
        exchanged: torch.Tensor = self._model.all_to_all(tensor, 0, 0, self.size)
        return exchanged


def _tensors(arrays: Any) -> list[torch.Tensor]:
    listed = arrays if isinstance(arrays, (list, tuple)) else [arrays]
    return [_tensor_of(array) if isinstance(array, np.ndarray) else array for array in listed]


def _tensor_of(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """Over the array's memory, where it may be written."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _require_fit(
    name: str, sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]
) -> None:
    ours = [(tuple(t.shape), t.dtype) for t in sources]
    theirs = [(tuple(t.shape), t.dtype) for t in targets]
    if ours != theirs:
        raise ValueError(f"{name}: out must be as the array, {ours}; got {theirs}")


def _require_op(op: str, tensors: Sequence[torch.Tensor]) -> None:
    if op not in REDUCE_OPS:
        raise ValueError(f"op must be sum, mean, prod, min, max, and, or or xor, got {op!r}")
    if op not in _XLA_OPS:
        raise UnsupportedError(f"XLA tensors are reduced by sum, mean, min and max, got op={op!r}")
    for tensor in tensors:
        is_exact = not (tensor.is_floating_point() or tensor.is_complex())
        wrong = is_exact if op == "mean" else op in ("min", "max") and tensor.is_complex()
        if wrong:
            hint = '; cast to a floating dtype, or use op="sum"' if op == "mean" else ""
            raise TypeError(f'op="{op}" is not defined for dtype {dtype_of(tensor)}{hint}')


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "xla"


def _require_xla(tensor: torch.Tensor) -> None:
    if _is_on_host(tensor):
        raise ValueError(
            f"expected a tensor on XLA devices, got one on {tensor.device}, which all ranks share"
        )


def _put(target: torch.Tensor, result: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(result.reshape(target.shape))
