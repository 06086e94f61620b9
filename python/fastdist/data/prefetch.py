"""Reads items ahead in a background thread."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_JOIN_S = 5.0


class Prefetcher(Generic[T]):
    """Iterates in a background thread, at most `depth` items ahead.

    The consumer gets an exception that the iterator raises, with its traceback, after the items
    before it. The thread ends with the items, on `close`, when the prefetcher is garbage-collected,
    and before the interpreter exits; each of these waits up to 5 s for the thread's current item.

    Args:
        items: an iterator that only the thread uses from now on.
        depth: the number of items to read ahead, at least 1.
    """

    def __init__(self, items: Iterator[T], depth: int) -> None:
        # Items, and at the end True with the exception that ended them, or None.
        self._ready: queue.SimpleQueue[tuple[bool, Any]] = queue.SimpleQueue()
        self._room = threading.Semaphore(depth)
        stop = threading.Event()
        # The thread must hold no reference to self, or the prefetcher would never be collected.
        thread = threading.Thread(
            target=_fill,
            args=(items, self._ready, self._room, stop),
            name="fastdist-prefetch",
            daemon=True,
        )
        # A finalizer also runs at exit, before the interpreter tears down modules and threads.
        self._stop = weakref.finalize(self, _stop, thread, self._room, stop)
        thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        if not self._stop.alive:
            raise StopIteration
        is_end, item = self._ready.get()
        if is_end:
            self.close()
            raise StopIteration if item is None else item
        self._room.release()
        value: T = item
        return value

    def close(self) -> None:
        """End the thread and drop the items it read ahead. Closing twice does nothing."""
        self._stop()


def _fill(
    items: Iterator[Any],
    ready: queue.SimpleQueue[tuple[bool, Any]],
    room: threading.Semaphore,
    stop: threading.Event,
) -> None:
    error: BaseException | None = None
    try:
        while True:
            room.acquire()
            if stop.is_set():
                return
            try:
                ready.put((False, next(items)))
            except StopIteration:
                return
    except BaseException as caught:  # of any kind: the consumer must not wait forever
        error = caught
    finally:
        ready.put((True, error))


def _stop(thread: threading.Thread, room: threading.Semaphore, stop: threading.Event) -> None:
    stop.set()
    room.release()
    # The garbage collector may run in any thread, including the prefetcher's.
    if thread is not threading.current_thread():
        thread.join(_JOIN_S)
