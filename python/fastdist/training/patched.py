"""Replaces attributes of objects and classes for a while, to learn what users make and call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

_MISSING = object()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Return a context manager inside which an attribute of an object or class has a value."""
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def watch_calls(
    kind: type, name: str, note: Callable[[Any], object]
) -> AbstractContextManager[None]:
    """Return a context manager inside which calls of a method pass the object to `note` too."""
    original = getattr(kind, name)

    @functools.wraps(original)
    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        note(self)

    return replaced(kind, name, watched)


@contextlib.contextmanager
def watch_made(kinds: Sequence[type], note: Callable[[Any], None]) -> Iterator[None]:
    """Return a context manager that passes every object made of these classes, perhaps repeatedly.

    Subclasses are patched too, since some do not call the `__init__` that they inherit.
    """
    with contextlib.ExitStack() as stack:
        for kind in dict.fromkeys(_with_own_init(kinds)):
            stack.enter_context(watch_calls(kind, "__init__", note))
        yield


def _with_own_init(kinds: Sequence[type]) -> Iterator[type]:
    for kind in kinds:
        if "__init__" in kind.__dict__:
            yield kind
        yield from _with_own_init(kind.__subclasses__())
