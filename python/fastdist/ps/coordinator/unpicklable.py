"""Which part of what is sent to workers cannot be pickled."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, MethodType
from typing import Any

from fastdist.ps.coordinator.remote_value import RemoteTraceback

Part = tuple[str, Any]
"""How users know something, and the thing."""

# What pickling raises of its own; anything else is said by what is pickled.
_KINDS = (TypeError, AttributeError, RecursionError, pickle.PicklingError)


def pickled_or_named(
    dumps: Callable[[Any], Any], thing: Any, what: str, parts: Callable[[], Iterable[Part]]
) -> Any:
    """What `dumps` makes of a thing.

    Args:
        dumps: pickles.
        thing: to be pickled.
        what: the thing is.
        parts: it consists of; asked for when it cannot be pickled.

    Raises:
        TypeError: it cannot be pickled; names the first part of which that is true.
        Exception: what `dumps` raises of its own, as a remote value of a function that has failed.
    """
    try:
        return dumps(thing)
    except _KINDS as error:
        if isinstance(error.__cause__, RemoteTraceback):
            raise
        culprit = next((name for name, part in parts() if not _goes(dumps, part)), "it")
        raise TypeError(f"{what} cannot be sent to workers: {culprit}: {error}") from error


def parts_of_arguments(args: Iterable[Any], kwargs: dict[str, Any]) -> Iterator[Part]:
    """The arguments of a call."""
    yield from ((f"argument {place}", value) for place, value in enumerate(args))
    yield from ((f"argument {name!r}", value) for name, value in kwargs.items())


def parts_of_function(fn: Any) -> Iterator[Part]:
    """What a function refers to."""
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


def _goes(dumps: Callable[[Any], Any], part: Any) -> bool:
    try:
        dumps(part)
    except Exception:
        return False
    return True
