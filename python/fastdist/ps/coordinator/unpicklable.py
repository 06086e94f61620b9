"""Finds the part of an object that cannot be pickled, for error messages."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any, TypeVar

from fastdist.ps.coordinator.remote_value import RemoteTraceback

Part = tuple[str, Any]
"""A description for users, and the object."""
T = TypeVar("T")

# Errors of pickling itself; any other error comes from the pickled objects.
_KINDS = (TypeError, AttributeError, RecursionError, pickle.PicklingError)


def pickle_or_explain(dumps: Callable[[Any], T], thing: Any, what: str, parts: Iterable[Part]) -> T:
    """Return `dumps(thing)`; raise a TypeError that names the first part that prevents it."""
    try:
        return dumps(thing)
    except _KINDS as error:
        if isinstance(error.__cause__, RemoteTraceback):  # a remote value's function raised it
            raise
        culprit = next((name for name, part in parts if not _can_pickle(dumps, part)), "it")
        raise TypeError(f"{what} cannot be sent to workers: {culprit}: {error}") from error


def parts_of_arguments(args: Iterable[Any], kwargs: dict[str, Any]) -> Iterator[Part]:
    """Yield the arguments of a call."""
    for name, value in (*enumerate(args), *kwargs.items()):
        yield f"argument {name!r}", value


def parts_of_function(fn: Any) -> Iterator[Part]:
    """Yield the objects that a function refers to."""
    if isinstance(fn, functools.partial):
        yield from parts_of_function(fn.func)
        yield from parts_of_arguments(fn.args, fn.keywords)
    elif isinstance(fn, MethodType):
        yield from _attributes("its object's", fn.__self__)
    elif isinstance(fn, FunctionType):
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            yield f"{name!r}, which it closes over", cell
        for name in fn.__code__.co_names:
            if name in fn.__globals__:
                yield f"the global {name!r}", fn.__globals__[name]
        yield from parts_of_arguments(fn.__defaults__ or (), fn.__kwdefaults__ or {})
    else:
        yield from _attributes("its", fn)


def _attributes(whose: str, thing: Any) -> Iterator[Part]:
    for name, value in list(getattr(thing, "__dict__", {}).items()):
        yield f"{whose} {name!r}", value


def _can_pickle(dumps: Callable[[Any], Any], part: Any) -> bool:
    try:
        dumps(part)
    except Exception:
        return False
    return True
