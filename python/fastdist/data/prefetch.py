"""Reads items ahead in a background thread."""

from __future__ import annotations

import collections
import concurrent.futures
import sys
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

_PATIENCE_S = 5.0
_END: Any = object()


def read_ahead(items: Iterator[T], depth: int) -> Generator[T, None, None]:
    """Yield items, of which a thread reads `depth` ahead; only the thread may use the iterator.

    The consumer gets an exception that the iterator raises after the items before it. Closing
    waits up to 5 s for the thread's current item.
    """
    pool = ThreadPoolExecutor(1, "fastdist-prefetch")
    ahead = collections.deque(pool.submit(next, items, _END) for _ in range(depth))
    try:
        while ahead[0].result() is not _END:
            ahead.append(pool.submit(next, items, _END))
            yield ahead.popleft().result()
    finally:
        if not sys.is_finalizing():  # else the thread has ended
            pool.shutdown(wait=False, cancel_futures=True)
            concurrent.futures.wait([each for each in ahead if not each.cancelled()], _PATIENCE_S)
