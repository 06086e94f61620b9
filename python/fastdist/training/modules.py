"""Modules made in a strategy's scope: found by torch's registration hooks, made alike."""

from __future__ import annotations

import gc
import hashlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from fastdist.collectives.communicator import Communicator
from fastdist.errors import FastdistError

T = TypeVar("T", bound=torch.Tensor)


class SparseWeight:
    """Base of modules with a `weight` whose gradients are sparse where `sparse` says so."""

    weight: torch.Tensor
    sparse: bool


class ModuleRecorder:
    """Notes the modules that this thread makes, or copies, while it is open (a `with` statement).

    It keeps none of them alive: what was replaced by another module before the end does not count.
    """

    def __init__(self) -> None:
        self._seen: dict[int, weakref.ref[nn.Module]] = {}
        self._thread = threading.get_ident()
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> ModuleRecorder:
        self._handles = [
            torch_module.register_module_parameter_registration_hook(self._note),
            torch_module.register_module_buffer_registration_hook(self._note),
            torch_module.register_module_module_registration_hook(self._note),
        ]
        self._set_state = nn.Module.__setstate__

        def noted(module: nn.Module, values: Any) -> None:  # of copies and pickles
            self._set_state(module, values)  # type: ignore[no-untyped-call]
            self._note(module)

        nn.Module.__setstate__ = noted  # type: ignore[method-assign]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        nn.Module.__setstate__ = self._set_state  # type: ignore[method-assign]
        for handle in self._handles:
            handle.remove()

    def note(self, module: nn.Module) -> None:
        """Note a module, whether or not it registers anything."""
        known = self._seen.get(id(module))
        if known is None or known() is not module:
            self._seen.pop(id(module), None)  # of a module that is gone
            self._seen[id(module)] = weakref.ref(module)

    def _note(self, module: nn.Module, *_: object) -> None:  # a hook's None changes nothing
        if threading.get_ident() == self._thread:
            self.note(module)

    def roots(self) -> list[nn.Module]:
        """The modules that are part of no other, in the order in which they were made."""
        found = self._roots()
        if len(found) > 1:
            del found
            gc.collect()  # replicas must agree on what is gone
            found = self._roots()
        return found

    def _roots(self) -> list[nn.Module]:
        alive = [module for ref in self._seen.values() if (module := ref()) is not None]
        inner = {id(child) for module in alive for child in module.modules() if child is not module}
        return [module for module in alive if id(module) not in inner]


def named_parameters(roots: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Every parameter once, with a name that tells the module too where there are several."""
    return list(_once(_named(roots, nn.Module.named_parameters)))


def named_buffers(roots: Sequence[nn.Module]) -> list[tuple[str, torch.Tensor]]:
    """Every buffer once, as `named_parameters`."""
    return list(_once(_named(roots, nn.Module.named_buffers)))


def _named(
    roots: Sequence[nn.Module], names: Callable[..., Iterator[tuple[str, T]]]
) -> Iterator[tuple[str, T]]:
    for i, root in enumerate(roots):
        yield from names(root, prefix=f"{type(root).__name__}[{i}]" if len(roots) > 1 else "")


def _once(named: Iterator[tuple[str, T]]) -> Iterator[tuple[str, T]]:
    seen: set[int] = set()
    for name, tensor in named:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def sparse_parameters(roots: Sequence[nn.Module]) -> set[int]:
    """The ids of parameters whose gradients are sparse."""
    return {
        id(module.weight)
        for root in roots
        for module in root.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag, SparseWeight)) and module.sparse
    }


def is_materialized(tensor: torch.Tensor) -> bool:
    """False for a lazy module's parameter or buffer that has no shape yet."""
    return not isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer))


def require_same_structure(
    communicator: Communicator, named: Sequence[tuple[str, torch.Tensor]]
) -> None:
    """Check that all ranks have made the same tensors. Every rank must call.

    Raises:
        FastdistError: the first tensor that differs, with its name and shape on each rank.
    """
    own = [f"{name}: {_describe(tensor)}" for name, tensor in named]
    digest = hashlib.sha256("\n".join(own).encode()).hexdigest()
    if len(set(communicator.all_gather_object(digest))) == 1:
        return
    everyone = communicator.all_gather_object(own)
    for i in range(max(map(len, everyone))):
        rows = [lines[i] if i < len(lines) else "nothing more" for lines in everyone]
        if len(set(rows)) > 1:
            raise FastdistError(
                f"the model differs between replicas, first at tensor {i}, seen from rank "
                f"{communicator.rank}:"
                + "".join(f"\n  rank {rank}: {row}" for rank, row in enumerate(rows)),
                tuple(rank for rank, row in enumerate(rows) if row != rows[0]),
            )


def broadcast_state(communicator: Communicator, tensors: Sequence[torch.Tensor]) -> None:
    """Give every rank the values of rank 0. Every rank must call."""
    ready = [tensor.detach() for tensor in tensors if is_materialized(tensor)]
    dense = [tensor for tensor in ready if tensor.is_contiguous()]
    if dense:
        communicator.broadcast(dense)
    for tensor in ready:
        if not tensor.is_contiguous():
            tensor.copy_(communicator.broadcast(tensor.contiguous()))


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """A hash of a tensor's bits."""
    if not is_materialized(tensor):
        return b""
    data = tensor.detach().cpu().contiguous()
    # Of one element, strides may be anything, and stay so when it is flattened.
    flat = data.as_strided((data.numel(),), (1,)).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=16).digest()


def _describe(tensor: torch.Tensor) -> str:
    if not is_materialized(tensor):
        return "not initialized yet"
    return f"shape {tuple(tensor.shape)}, {tensor.dtype}".replace("torch.", "")
