"""Finds the modules made in a strategy's scope by torch's registration hooks.

Names, compares, hashes and broadcasts the tensors of modules, and notes changes of their structure.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.lazy import LazyModuleMixin

from fastdist.collectives.communicator import Communicator
from fastdist.errors import FastdistError
from fastdist.replicas.variables import Variable
from fastdist.training.frameworks import inner_modules
from fastdist.training.patched import watch_calls

T = TypeVar("T", bound=torch.Tensor)


class SparseWeight:
    """Base class of modules whose `weight` has sparse gradients if `sparse` is True."""

    weight: torch.Tensor
    sparse: bool


class ModuleRecorder:
    """A context manager that records the modules that this thread makes or copies inside it.

    Its references are weak: modules that the user replaces and drops are not reported.
    """

    def __init__(self) -> None:
        self._new: dict[int, weakref.ref[nn.Module]] = {}
        self._roots: list[weakref.ref[nn.Module]] = []  # as returned last
        self._seen: dict[int, weakref.ref[nn.Module]] = {}
        self._thread = threading.get_ident()
        self._stack = ExitStack()

    def __enter__(self) -> ModuleRecorder:
        for register in (
            torch_module.register_module_parameter_registration_hook,
            torch_module.register_module_buffer_registration_hook,
            torch_module.register_module_module_registration_hook,
        ):
            self._stack.enter_context(register(self._note))
        # Copies and pickles call it.
        self._stack.enter_context(watch_calls(nn.Module, "__setstate__", self._note))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def note(self, module: nn.Module) -> None:
        """Record a module, whether or not it registers anything."""
        known = self._seen.get(id(module))
        if known is None or known() is not module:
            self._seen.pop(id(module), None)  # the entry of a deleted module with the same id
            self._seen[id(module)] = weakref.ref(module)
            self._new[id(module)] = self._seen[id(module)]

    def _note(self, module: nn.Module, *_: object) -> None:  # returning None keeps the value
        if threading.get_ident() == self._thread:
            self.note(module)

    def has_new(self) -> bool:
        """Return True if a module was made that is in none of those that `roots` returned last."""
        known = [root for ref in self._roots if (root := ref()) is not None] if self._new else []
        inner = {id(m) for root in known for m in inner_modules(root)}
        self._new = {
            key: ref for key, ref in self._new.items() if ref() is not None and key not in inner
        }
        return bool(self._new)

    def roots(self) -> list[nn.Module]:
        """Return the modules without a parent among the recorded ones, in order of creation."""
        if len(self._seen) > 1:
            gc.collect()  # all replicas must see the same modules
        alive = [module for ref in self._seen.values() if (module := ref()) is not None]
        inner = {id(m) for module in alive for m in inner_modules(module) if m is not module}
        roots = [module for module in alive if id(module) not in inner]
        self._new, self._roots = {}, [weakref.ref(root) for root in roots]
        return roots


def named_parameters(roots: Sequence[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    """Return every parameter once, with its name; several roots add a prefix to the names."""
    return _named(roots, nn.Module.named_parameters)


def named_buffers(roots: Sequence[nn.Module]) -> list[tuple[str, torch.Tensor]]:
    """Return every buffer once, named as by `named_parameters`."""
    return _named(roots, nn.Module.named_buffers)


def _named(
    roots: Sequence[nn.Module], names: Callable[..., Iterator[tuple[str, T]]]
) -> list[tuple[str, T]]:
    found: dict[int, tuple[str, T]] = {}
    for i, root in enumerate(roots):
        prefix = f"{type(root).__name__}[{i}]" if len(roots) > 1 else ""
        for name, tensor in names(root, prefix=prefix):
            found.setdefault(id(tensor), (name, tensor))
    return list(found.values())


def sparse_parameters(roots: Sequence[nn.Module]) -> set[int]:
    """Return the ids of the parameters whose gradients are sparse."""
    return {
        id(module.weight)
        for root in roots
        for module in root.modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag, SparseWeight)) and module.sparse
    }


def is_materialized(tensor: torch.Tensor) -> bool:
    """Return False for a parameter or buffer of a lazy module whose shape is still unknown."""
    return not isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer))


def require_same_structure(
    communicator: Communicator, named: Sequence[tuple[str, torch.Tensor]]
) -> None:
    """Check that all ranks have made the same tensors. Every rank must call."""
    _require_same(communicator, [f"{name}: {_describe(tensor)}" for name, tensor in named])


def require_same_settings(communicator: Communicator, roots: Sequence[nn.Module]) -> None:
    """Check that all ranks' modules print the same settings, such as a dropout's p.

    Every rank must call, with the same values in all tensors, which modules may print too.
    """
    _require_same(communicator, [line for root in roots for line in _settings(root)])


def _require_same(communicator: Communicator, own: list[str]) -> None:
    digest = hashlib.sha256("\n".join(own).encode()).hexdigest()
    if len(set(communicator.all_gather_object(digest))) == 1:
        return
    everyone = communicator.all_gather_object(own)
    for i in range(max(map(len, everyone))):
        rows = [lines[i] if i < len(lines) else "nothing more" for lines in everyone]
        if len(set(rows)) > 1:
            raise FastdistError(
                f"the model differs between replicas, seen from rank {communicator.rank}:"
                + "".join(f"\n  rank {rank}: {row}" for rank, row in enumerate(rows)),
                tuple(rank for rank, row in enumerate(rows) if row != rows[0]),
            )


def require_in_sync(
    workers: Communicator | None, replicas: Sequence[Sequence[tuple[str, torch.Tensor]]]
) -> None:
    """Compare hashes of the tensors of all local replicas. Every worker must call."""
    digests = [{name: tensor_digest(tensor) for name, tensor in named} for named in replicas]
    if workers is not None:
        digests = [rows for worker in workers.all_gather_object(digests) for rows in worker]
    for name, digest in digests[0].items():
        differing = tuple(r for r, rows in enumerate(digests) if rows.get(name, digest) != digest)
        if differing:
            raise FastdistError(
                f"replicas are out of sync: {name} differs on replicas {list(differing)} from "
                f"replica 0. Was it changed on one replica only?",
                differing,
            )


def when_initialized(roots: Sequence[nn.Module], then: Callable[[nn.Module], None]) -> None:
    """Call `then(module)` once for each lazy module, in its first forward, with its parameters."""
    for root in roots:
        for module in root.modules():
            if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
                _call_once(module, then)


def _call_once(module: nn.Module, then: Callable[[nn.Module], None]) -> None:
    def initialized(module: nn.Module, inputs: Any) -> None:
        handle.remove()
        then(module)

    # Hooks run in order of registration: the module's own hook, which initializes it, runs first.
    handle = module.register_forward_pre_hook(initialized)


def broadcast_state(
    communicator: Communicator, tensors: Sequence[torch.Tensor], root: int = 0
) -> None:
    """Broadcast the root's values to every rank. Every rank must call."""
    ready = [tensor.detach() for tensor in tensors if is_materialized(tensor)]
    dense = [tensor for tensor in ready if tensor.is_contiguous()]
    if dense:
        communicator.broadcast(dense, root)
    for tensor in ready:
        if not tensor.is_contiguous():
            tensor.copy_(communicator.broadcast(tensor.contiguous(), root))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return a tensor's bytes, on the CPU; none of an uninitialized lazy tensor."""
    if not is_materialized(tensor):
        return memoryview(b"")
    dense = tensor.detach() if tensor.layout is torch.strided else tensor.detach().to_dense()
    data = dense.cpu().resolve_conj().resolve_neg().contiguous()
    # A tensor of one element may have any strides, and flattening keeps them.
    return data.as_strided((data.numel(),), (1,)).view(torch.uint8).numpy().data


def tensor_digest(tensor: torch.Tensor) -> bytes:
    """Return a hash of a tensor's bits; empty for an uninitialized lazy tensor."""
    if not is_materialized(tensor):
        return b""
    return hashlib.blake2b(bytes_of(tensor), digest_size=16).digest()


def value_stamp(tensor: torch.Tensor) -> object:
    """Return a stamp that changes with the tensor's values and with `requires_grad`."""
    address = tensor.data_ptr() if is_materialized(tensor) else None
    return tensor._version, address, tensor.requires_grad


def _describe(tensor: torch.Tensor) -> str:
    if not is_materialized(tensor):
        return "not initialized yet"
    is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
    frozen = ", frozen" if is_frozen else ""
    return f"shape {tuple(tensor.shape)}, {tensor.dtype}{frozen}".replace("torch.", "")


def _settings(root: nn.Module) -> Iterator[str]:
    """Yield the class and settings of each module, without addresses and numbers of devices."""
    for name, module in root.named_modules():
        settings = ""
        with contextlib.suppress(Exception):  # of a user's extra_repr
            if isinstance(module, Variable):  # which prints each replica's own value
                continue
            settings = re.sub(r"0x[0-9a-f]+|\b(cpu|cuda|xla):\d+", "", module.extra_repr())
        yield f"{name or 'the module'}: {type(module).__name__}({settings})"


def structure_of(roots: Sequence[nn.Module]) -> list[object]:
    """Return a list that changes when a module or parameter is replaced, added or removed.

    Buffers do not count: forward may replace them, as caches, at different times on each replica.
    """
    found: list[object] = []
    for module in modules_of(roots):
        found += (id(module), type(module))
        for parameter in module._parameters.values():
            if parameter is not None:
                # Compare the types first: isinstance is slow for parameters.
                is_whole = type(parameter) is nn.Parameter or is_materialized(parameter)
                shape = parameter.shape if is_whole else None
                found += (id(parameter), type(parameter), parameter.dtype, shape)
    return found


def modules_of(roots: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Yield every module once; four times as fast as `named_modules`, for every `run`."""
    seen: set[nn.Module] = set()
    pending = list(reversed(roots))
    while pending:
        module = pending.pop()
        if module not in seen:
            seen.add(module)
            yield module
            pending += [m for m in reversed(module._modules.values()) if m is not None]
