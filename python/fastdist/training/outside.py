"""Refuses parameters that `run` uses and the strategy does not keep equal, and parts outside `run`.

Modules, and tensors that require gradients, are searched for in a function's arguments, closures,
global variables and attributes, and in the functions of the same package that it calls by name.
Outside `run` a BatchNorm would take the statistics of one replica's part of a batch for all of it.
"""

from __future__ import annotations

import functools
import inspect
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from fastdist.errors import FastdistError
from fastdist.replicas.context import state

_MAX_DEPTH = 6  # of the objects and functions that lead to a module
_taken_parts = WeakTensorKeyDictionary()
_norms: weakref.WeakSet[nn.Module] = weakref.WeakSet()
# Of all modules, while parts exist: a hook of the model's own would hinder its export.
_hook: RemovableHandle | None = None


class OutsideParameters:
    """The trainable parameters that functions use and that are not the strategy's own."""

    def __init__(self, is_own: Callable[[torch.Tensor], bool]) -> None:
        self._is_own = weakref.WeakMethod(is_own)
        # The code that was searched, by function, or by the object of a method.
        self._searched: weakref.WeakKeyDictionary[Any, set[Any]] = weakref.WeakKeyDictionary()
        self._watched = WeakTensorKeyDictionary()

    def watch(self, fn: Callable[..., Any], given: Any) -> None:
        """Make a run's backward raise an error at a parameter that is not the strategy's.

        The function is searched the first time, with its pair of args and kwargs.
        """
        inner = _innermost(fn)
        owner = fn.__self__ if isinstance(fn, MethodType) else fn
        try:
            searched = self._searched.setdefault(owner, set())
        except TypeError:  # cannot be a key
            searched = set()
        code = getattr(inner, "__code__", type(inner))  # keeps nothing that the function keeps
        if code in searched:
            return
        searched.add(code)
        is_own = self._is_own()
        assert is_own is not None
        for found in _trained_by(fn, given):
            named: Iterable[tuple[str, torch.Tensor]]
            where = "was made outside the scope"
            if isinstance(found, nn.Module):
                kind = type(found).__name__
                named = ((f"{kind}'s {name}", each) for name, each in found.named_parameters())
            else:
                kind = "parameter" if isinstance(found, nn.Parameter) else "tensor"
                named = [(f"a {kind} of shape {tuple(found.shape)}", found)]
                where = "is of no module that was made in the scope"
            for name, tensor in named:
                if tensor.requires_grad and not is_own(tensor):
                    self._watch_one(name, tensor, where)

    def _watch_one(self, name: str, tensor: torch.Tensor, where: str) -> None:
        if tensor in self._watched:
            return
        self._watched[tensor] = None
        known = self._is_own
        is_parameter = isinstance(tensor, nn.Parameter)

        def refuse(reached: torch.Tensor) -> None:
            is_own = known()
            if state.replica is None or is_own is None or is_own(reached):
                return
            if not is_parameter:
                if state.replica.replica_id_in_sync_group == 0:
                    warnings.warn(
                        f"{name}, made outside of run, gets a gradient that is this replica's own: "
                        "if it is to be trained, make it a torch.nn.Parameter of a module in the "
                        "scope; otherwise average the gradient by the replica context's all_reduce",
                        stacklevel=2,
                    )
                return
            raise ValueError(
                f"{name} {where}, so every replica trains a separate model: make the module and "
                "its optimizer inside `with strategy.scope():`, or pass the module to "
                "strategy.mirror. If it is not to be trained, call requires_grad_(False) on it"
            )

        tensor.register_post_accumulate_grad_hook(refuse)  # type: ignore[no-untyped-call]


def _innermost(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function in wrappers, bound methods and partials."""
    inner: Callable[..., Any] = inspect.unwrap(fn)
    while isinstance(inner, (functools.partial, MethodType)):
        inner = inner.func if isinstance(inner, functools.partial) else inner.__func__
    return inner


def _trained_by(used: Callable[..., Any], given: Any) -> Iterator[nn.Module | torch.Tensor]:
    """Yield modules, and tensors outside of modules that require gradients."""
    package = _package(getattr(_innermost(used), "__module__", None))
    seen: set[int] = set()
    waiting: list[tuple[Any, int]] = [(used, 0), (given, 0)]
    while waiting:
        value, depth = waiting.pop()
        if id(value) in seen or depth > _MAX_DEPTH:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            yield value
        elif isinstance(value, torch.Tensor):
            if value.requires_grad and value.is_leaf:
                yield value
        else:
            waiting += [(part, depth + 1) for part in _parts(value, package)]


def _parts(value: Any, package: str) -> list[Any]:
    """Return the values that lie in a value, or that a function refers to."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, FunctionType):
        cells = [_content(cell) for cell in value.__closure__ or ()]
        if _package(value.__module__) != package:
            return [getattr(value, "__wrapped__", None), *cells]
        names = _names(value.__code__)
        named = [value.__globals__[name] for name in names if name in value.__globals__]
        return [*cells, *named, *(value.__defaults__ or ())]
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)[:1000]
    if isinstance(value, dict):
        return list(value.values())[:1000]
    if isinstance(value, (type, ModuleType, torch.Tensor)) or not hasattr(value, "__dict__"):
        return []
    return list(vars(value).values()) if _package(type(value).__module__) == package else []


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _names(code: CodeType) -> set[str]:
    """Return the global names that code uses, also in the functions that it defines."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]


def watch_parts(parts: Iterable[Any], modules: Iterable[nn.Module]) -> None:
    """Raise an error where a model with one of these modules, a BatchNorm, computes a part.

    That is, outside `run` and in training mode.
    """
    global _hook
    _norms.update(module for module in modules if isinstance(module, _NormBase))
    if _norms:
        _taken_parts.update({part: None for part in parts if isinstance(part, torch.Tensor)})
        _hook = _hook or register_module_forward_pre_hook(_refuse_part)


def _refuse_part(module: nn.Module, args: tuple[Any, ...]) -> None:
    global _hook
    if not len(_taken_parts) and _hook is not None:
        _hook.remove()
        _hook = None
    if state.replica is not None or not module.training or torch.compiler.is_compiling():
        return
    if not any(isinstance(value, torch.Tensor) and value in _taken_parts for value in args):
        return
    is_recomputed = torch._C._current_graph_task_id() != -1  # by a checkpoint, in another thread
    if not is_recomputed and any(m.training and m in _norms for m in module.modules()):
        raise FastdistError(
            f"{type(module).__name__}, in training mode and outside run, got this replica's part "
            "of a batch: its running statistics would be those of the part. Call "
            "strategy.run(model, args=(batch,)), or model.eval() before; torch's "
            "update_bn(loader, model) needs the plain DataLoader, whose batches are whole"
        )
