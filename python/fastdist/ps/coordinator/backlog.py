"""The scheduled functions that have not ended."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fastdist.ps.coordinator.remote_value import RemoteValue
from fastdist.ps.coordinator.shipping import Definition

# A function that has lost this many workers is given up.
MAX_LOST_WORKERS = 10


@dataclass(slots=True, eq=False)
class Call:
    """A scheduled function."""

    number: int  # in the order of `schedule`
    function: Definition
    arguments: bytes  # a pickle of args and kwargs
    needs: tuple[Definition, ...]  # the definitions that the arguments refer to
    value: RemoteValue
    lost_workers: int = 0  # while they ran it


class Backlog:
    """Calls that are waiting or running. Thread-safe.

    At `limit` unfinished calls, `put` waits until half of them are left. A call may begin once all
    but `max_staleness` of the calls before it have ended.
    """

    def __init__(self, limit: int, max_staleness: int | None = None) -> None:
        self.changed = threading.Condition(threading.RLock())  # notified when calls end
        self.on_wait: Callable[[], None] = lambda: None  # called when a thread begins to wait
        self.waiting: deque[Call] = deque()  # that have not begun
        self._limit = limit
        self._max_staleness = max_staleness
        self._put = self._awaited = 0  # number of calls so far, and of awaited calls
        self._unfinished: dict[int, Call] = {}
        self._failed: RemoteValue | None = None
        self._closed: Exception | None = None
        self._pauses = 0  # number of `paused` contexts

    # --- the caller's side ----------------------------------------------------------------------

    def put(
        self, function: Definition, arguments: bytes, needs: tuple[Definition, ...]
    ) -> RemoteValue:
        """Add a call; wait while there are too many. Raises what an earlier call raised."""
        with self.changed:
            if len(self._unfinished) >= self._limit:
                self.wait_for(lambda: len(self._unfinished) <= self._limit // 2)
            self.raise_failure()
            if self._closed is not None:
                raise self._closed
            value = RemoteValue(self.wait_for)
            call = Call(self._put, function, arguments, needs, value)
            self._put += 1
            self.waiting.append(call)
            self._unfinished[call.number] = call
            return value

    def join(self) -> None:
        """Wait until all calls have ended. Raises what the first call that failed raised."""
        with self.changed:
            self.wait_for(lambda: not self._unfinished)
            self.raise_failure()

    def is_done(self) -> bool:
        """Return True if all calls have ended. Raises what the first call that failed raised."""
        with self.changed:
            self.raise_failure()
            if self._unfinished:
                self._note_waiting()
            return not self._unfinished

    def raise_failure(self) -> None:
        """Raise the error of the first call that failed, once."""
        with self.changed:
            failed, self._failed = self._failed, None
        if failed is not None:
            failed.fetch()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Wait for running calls; start no others while the context is open."""
        with self.changed:
            self._pauses += 1
        try:
            self.wait_for(lambda: len(self.waiting) == len(self._unfinished))
            yield
        finally:
            with self.changed:
                self._pauses -= 1
            self.on_wait()

    def wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until a condition on calls holds; return False on timeout."""
        with self.changed:
            self._note_waiting()
            return self.changed.wait_for(condition, timeout)

    def _note_waiting(self) -> None:
        """Record that a thread waits for all calls so far: they must not wait for further calls."""
        self._awaited = self._put
        self.on_wait()

    # --- the dispatcher's side ------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._unfinished)

    @property
    def is_awaited(self) -> bool:
        """True if a thread waits for the next call."""
        return bool(self.waiting) and self.waiting[0].number < self._awaited

    def take(self) -> Call | None:
        """Remove and return the next call that may begin now."""
        with self.changed:
            if not self.waiting or self._pauses:
                return None
            call = self.waiting[0]
            if self._max_staleness is not None:
                oldest = next(iter(self._unfinished))
                if call.number - oldest > self._max_staleness:
                    return None
            return self.waiting.popleft()

    def finish(self, call: Call, content: bytes | Exception) -> None:
        """Record the end of a call; `content` is its pickled result, or the exception it raised."""
        with self.changed:
            if self._unfinished.pop(call.number, None) is None:
                return
            call.value.settle(content)
            if not isinstance(content, bytes):
                self._failed = self._failed or call.value
                while self.waiting:
                    self._drop(self.waiting.popleft())
            self.changed.notify_all()

    def give_back(self, calls: list[Call]) -> None:
        """Return calls of a lost worker or an aborted step, to run again."""
        with self.changed:
            for call in sorted(calls, key=lambda call: call.number, reverse=True):
                if self._failed is None:
                    self.waiting.appendleft(call)
                else:
                    self._drop(call)
            self.changed.notify_all()

    def fail(self, error: Exception) -> None:
        """End all calls with an error."""
        with self.changed:
            for call in self._unfinished.values():
                call.value.settle(error)
                self._failed = self._failed or call.value
            self._unfinished.clear()
            self.waiting.clear()
            self.changed.notify_all()

    def close(self, error: Exception) -> None:
        """End all calls, and any later ones, with an error."""
        self._closed = self._closed or error
        self.fail(error)

    def _drop(self, call: Call) -> None:
        self._unfinished.pop(call.number, None)
        call.value.settle(None)
