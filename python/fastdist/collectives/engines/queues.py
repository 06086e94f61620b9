"""Queues of calls, which a thread of their own runs in order."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

from fastdist.collectives.arguments import check_timeout
from fastdist.errors import CollectiveTimeoutError


class PendingCall:
    """A call that is queued or running (implements `Work`)."""

    def __init__(self, task: Callable[[], None], result: Any) -> None:
        self._task: Callable[[], None] | None = task
        self._result = result
        self._error: BaseException | None = None
        self._ended = threading.Event()

    def run(self) -> None:
        """Make the call, and release its arrays before `is_done` and `wait` report its end."""
        task, self._task = self._task, None
        assert task is not None
        try:
            task()
        except BaseException as error:  # raised in `wait`
            self._error = error.with_traceback(None)
        del task
        self._ended.set()

    def is_done(self) -> bool:
        """Return True if the call has ended, successfully or not."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the end of the call and return its result."""
        if timeout is not None:
            check_timeout(timeout, may_be_zero=True)
        if not self._ended.wait(timeout):
            raise CollectiveTimeoutError(
                f"the call has not finished after {timeout} s; it is still running, wait again"
            )
        if self._error is not None:
            raise self._error
        return self._result


class CallQueue:
    """Runs calls one after another; its thread starts with the first call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[PendingCall | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._calls.put, None).atexit = False

    def submit(self, task: Callable[[], None], result: Any) -> PendingCall:
        """Run `task` after all earlier tasks."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run_all, args=(self._calls,), name=self._name, daemon=True
            )
            self._thread.start()
        call = PendingCall(task, result)
        self._calls.put(call)
        return call


def _run_all(calls: queue.SimpleQueue[PendingCall | None]) -> None:
    while (call := calls.get()) is not None:
        call.run()
        del call  # released before the thread waits for the next call
