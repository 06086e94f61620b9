"""Finds the part of an object that cannot be pickled, for error messages."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any

from fastdist.ps.coordinator.remote_value import RemoteTraceback

Part = tuple[str, Any]
"""A description for users, and the object."""

# Errors of pickling itself; any other error comes from the pickled objects.
_KINDS = (TypeError, AttributeError, RecursionError, pickle.PicklingError)


def pickle_or_explain(
    dumps: Callable[[Any], Any], thing: Any, what: str, parts: Callable[[], Iterable[Part]]
) -> Any:
    """Return `dumps(thing)`; raise an error that names the part that cannot be pickled.

    Args:
        dumps: pickles an object.
        thing: the object.
        what: a description of the object.
        parts: yields its parts; called if it cannot be pickled.

    Raises:
        TypeError: the object cannot be pickled; the message names the first part that prevents it.
        Exception: `dumps` raised it, for example for a remote value of a failed function.
    """
    try:
        return dumps(thing)
    except _KINDS as error:
        if isinstance(error.__cause__, RemoteTraceback):
            raise
        culprit = next((name for name, part in parts() if not _can_pickle(dumps, part)), "it")
        raise TypeError(f"{what} cannot be sent to workers: {culprit}: {error}") from error


def parts_of_arguments(args: Iterable[Any], kwargs: dict[str, Any]) -> Iterator[Part]:
    """Yield the arguments of a call."""
    yield from ((f"argument {place}", value) for place, value in enumerate(args))
    yield from ((f"argument {name!r}", value) for name, value in kwargs.items())


def parts_of_function(fn: Any) -> Iterator[Part]:
    """Yield the objects that a function refers to."""
    if isinstance(fn, functools.partial):
        yield from parts_of_function(fn.func)
        yield from parts_of_arguments(fn.args, fn.keywords)
    elif isinstance(fn, MethodType):
        yield from ((f"its object's {name!r}", value) for name, value in _attributes(fn.__self__))
    elif isinstance(fn, FunctionType):
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            yield f"{name!r}, which it closes over", cell
        for name in fn.__code__.co_names:
            if name in fn.__globals__:
                yield f"the global {name!r}", fn.__globals__[name]
        yield from parts_of_arguments(fn.__defaults__ or (), fn.__kwdefaults__ or {})
    else:
        yield from ((f"its {name!r}", value) for name, value in _attributes(fn))


def _attributes(thing: Any) -> list[Part]:
    return list(getattr(thing, "__dict__", {}).items())


def _can_pickle(dumps: Callable[[Any], Any], part: Any) -> bool:
    try:
        dumps(part)
    except Exception:
        return False
    return True
