"""Reports objects of given classes as they are made."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def watch_made(kinds: Sequence[type], note: Callable[[Any], None]) -> Iterator[None]:
    """Return a context manager that passes every object made of these classes to `note`.

    An object may be passed several times. Subclasses are patched too, since some do not call the
    `__init__` that they inherit.
    """

    def watched(original: Any) -> Any:
        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            note(self)

        return __init__

    originals = {kind: kind.__dict__["__init__"] for kind in _with_own_init(kinds)}
    for kind, original in originals.items():
        kind.__init__ = watched(original)  # type: ignore[misc]
    try:
        yield
    finally:
        for kind, original in originals.items():
            kind.__init__ = original  # type: ignore[misc]


def _with_own_init(kinds: Sequence[type]) -> Iterator[type]:
    for kind in kinds:
        if "__init__" in kind.__dict__:
            yield kind
        yield from _with_own_init(kind.__subclasses__())
