"""Classes whose objects resolve to the twin of the replica that the running thread belongs to."""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn

from fastdist.replicas.context import state
from fastdist.training.metrics import is_state

TWINS = "_fastdist_twins"
_classes: dict[type, type] = {}


def route(thing: Any, twins: list[Any]) -> None:
    """From now on, replicas that have twins use them in place of the object."""
    thing.__dict__[TWINS] = twins
    object.__setattr__(thing, "__class__", _routed_class(type(thing)))


def _routed_class(kind: type) -> type:
    if kind in _classes.values():
        return kind
    if kind not in _classes:
        _classes[kind] = _make_routed_class(kind)
    return _classes[kind]


def _own_twin(thing: Any) -> Any:
    """The twin that the running thread must use; None where that is the object itself."""
    replica = state.replica
    if replica is None or replica.twin is None:
        return None
    twin = object.__getattribute__(thing, "__dict__")[TWINS][replica.twin]
    return None if twin is thing else twin


def _make_routed_class(plain: Any) -> type:
    class Routed(plain):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            replica = state.replica
            if name == "__class__":
                return plain  # for pickle, copy, and what derives classes from it
            if replica is None or replica.twin is None:
                return super().__getattribute__(name)
            twin = _own_twin(self)
            return super().__getattribute__(name) if twin is None else getattr(twin, name)

        def __setattr__(self, name: str, value: Any) -> None:
            twin = _own_twin(self)
            if twin is not None:
                setattr(twin, name, value)
                return
            if name == "__class__":  # a lazy module that has become another
                value = _routed_class(value)
            super().__setattr__(name, value)
            if state.replica is None and isinstance(self, nn.Module):
                _set_on_twins(self, name, value)

        def __delattr__(self, name: str) -> None:
            twin = _own_twin(self)
            if twin is None:
                super().__delattr__(name)
            else:
                delattr(twin, name)

        def __reduce_ex__(self, protocol: Any) -> Any:
            """As an object of the plain class: copies and pickles know no strategy."""
            stripped = bare_copy(self)
            object.__setattr__(stripped, "__class__", plain)
            stripped.__dict__.pop(TWINS, None)
            return stripped.__reduce_ex__(protocol)

    Routed.__name__ = plain.__name__
    Routed.__qualname__ = plain.__qualname__
    Routed.__module__ = plain.__module__
    Routed.__doc__ = plain.__doc__
    return Routed


def _set_on_twins(module: nn.Module, name: str, value: Any) -> None:
    """Plain attributes (`training`, a rate) set outside `run` hold for all replicas."""
    registered = (module._parameters, module._buffers, module._modules)
    if name == "__class__" or any(name in names for names in registered):
        return
    if is_state(module, name):
        return
    for twin in module.__dict__.get(TWINS, ()):
        with contextlib.suppress(AttributeError):  # a property without a setter
            if twin is not module:
                setattr(twin, name, value)


def bare_copy(thing: Any) -> Any:
    """Another object with the same attributes."""
    twin = object.__new__(type(thing))
    twin.__dict__.update(thing.__dict__)
    return twin
