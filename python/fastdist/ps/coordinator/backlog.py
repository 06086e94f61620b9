"""The functions that have been scheduled and have not ended."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fastdist.ps.coordinator.remote_value import RemoteValue
from fastdist.ps.coordinator.shipping import Definition

# A function that so many workers did not survive is taken to be why.
MOST_LOSSES = 10


@dataclass(slots=True, eq=False)
class Call:
    """A function that has been scheduled.

    Attributes:
        number: in the order of `schedule`.
        function: what to call.
        arguments: a pickle of args and kwargs.
        needs: what the arguments refer to.
        value: what it will return.
        losses: workers that were lost while they had it.
    """

    number: int
    function: Definition
    arguments: bytes
    needs: tuple[Definition, ...]
    value: RemoteValue
    losses: int = 0


class Backlog:
    """Calls that wait, or run. Safe for several threads.

    Args:
        limit: a further call waits until half of so many are left.
        max_staleness: a call may begin when all but so many of those before it have ended.

    Attributes:
        changed: notified when calls end.
        when_wanted: is called when somebody begins to wait for calls.
    """

    def __init__(self, limit: int, max_staleness: int | None = None) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.when_wanted: Callable[[], None] = lambda: None
        self._limit = limit
        self._max_staleness = max_staleness
        self._put = self._wanted = 0  # calls so far, and those that somebody waits for
        self._waiting: deque[Call] = deque()
        self._unfinished: dict[int, Call] = {}
        self._failed: RemoteValue | None = None
        self._closed: Exception | None = None
        self._resting = 0  # those that want no call to run

    # --- the caller's side ----------------------------------------------------------------------

    def put(self, function: Definition, arguments: bytes, needs: tuple[Definition, ...]) -> Call:
        """Add a call; waits while there are too many.

        Raises:
            BaseException: what a call before has raised.
        """
        with self.changed:
            if len(self._unfinished) >= self._limit:
                self.wait_for(lambda: len(self._unfinished) <= self._limit // 2)
            self.raise_failure()
            if self._closed is not None:
                raise self._closed
            number = self._put
            self._put += 1
            call = Call(number, function, arguments, needs, RemoteValue(self.wait_for))
            self._waiting.append(call)
            self._unfinished[number] = call
            return call

    def join(self) -> None:
        """Wait until all calls have ended.

        Raises:
            BaseException: what the first that failed has raised.
        """
        with self.changed:
            self.wait_for(lambda: not self._unfinished)
            self.raise_failure()

    def is_done(self) -> bool:
        """Whether all calls have ended.

        Raises:
            BaseException: what the first that failed has raised.
        """
        with self.changed:
            self.raise_failure()
            if self._unfinished:
                self._want()
            return not self._unfinished

    def raise_failure(self) -> None:
        """Raise what the first call that failed has raised, unless that was done."""
        with self.changed:
            failed, self._failed = self._failed, None
        if failed is not None:
            failed.fetch()

    @contextlib.contextmanager
    def at_rest(self) -> Iterator[None]:
        """No call runs inside: those that do are waited for, and others begin afterwards."""
        with self.changed:
            self._resting += 1
        try:
            self.wait_for(lambda: len(self._waiting) == len(self._unfinished))
            yield
        finally:
            with self.changed:
                self._resting -= 1
            self.when_wanted()

    @property
    def is_empty(self) -> bool:
        """Whether all calls have ended."""
        return not self._unfinished

    def wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until something holds about calls; whether it does."""
        with self.changed:
            self._want()
            return self.changed.wait_for(condition, timeout)

    def _want(self) -> None:
        """Somebody waits for the calls so far: they are not to wait for others."""
        self._wanted = self._put
        self.when_wanted()

    # --- the dispatcher's side ------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._unfinished)

    @property
    def waiting(self) -> int:
        """Calls that have not begun."""
        return len(self._waiting)

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for the next call."""
        return bool(self._waiting) and self._waiting[0].number < self._wanted

    def take(self) -> Call | None:
        """The next call that may begin now."""
        with self.changed:
            if not self._waiting or self._resting:
                return None
            call = self._waiting[0]
            if self._max_staleness is not None:
                oldest = next(iter(self._unfinished))
                if call.number - oldest > self._max_staleness:
                    return None
            return self._waiting.popleft()

    def finish(self, call: Call, content: object) -> None:
        """A call has returned: a pickle; or raised: an exception."""
        with self.changed:
            if self._unfinished.pop(call.number, None) is None:
                return
            if isinstance(content, bytes):
                call.value.settle("returned", content)
            else:
                call.value.settle("raised", content)
                self._failed = self._failed or call.value
                self._cancel()
            self.changed.notify_all()

    def give_back(self, calls: list[Call]) -> None:
        """Calls were with a worker that is lost, or in a step that was not done."""
        with self.changed:
            for call in sorted(calls, key=lambda call: call.number, reverse=True):
                if self._failed is None:
                    self._waiting.appendleft(call)
                else:
                    self._drop(call)
            self.changed.notify_all()

    def fail(self, error: Exception) -> None:
        """Nothing can go on: all calls end with this error."""
        with self.changed:
            for call in self._unfinished.values():
                call.value.settle("raised", error)
                self._failed = self._failed or call.value
            self._unfinished.clear()
            self._waiting.clear()
            self.changed.notify_all()

    def close(self, error: Exception) -> None:
        """Nothing runs any more: calls that have not ended, and later ones, end with this error."""
        self._closed = self._closed or error
        self.fail(error)

    def _cancel(self) -> None:
        while self._waiting:
            self._drop(self._waiting.popleft())

    def _drop(self, call: Call) -> None:
        self._unfinished.pop(call.number, None)
        call.value.settle("cancelled")
