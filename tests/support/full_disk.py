"""A limit on the size of files, which stands for a full disk."""

from __future__ import annotations

import contextlib
import resource
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def full_disk(nbytes: int) -> Iterator[None]:
    """Return a context manager in which this process writes at most `nbytes` to a file."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    caches = sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # Python would keep the first bytes of a module's cache
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        sys.dont_write_bytecode = caches
