"""What a scheduled function will return."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from fastdist.errors import FastdistError

WaitFor = Callable[[Callable[[], bool], float | None], bool]
"""Waits until something holds about calls, so many seconds at most; whether it does."""


class RemoteTraceback(Exception):
    """Where on a worker an error was raised; the cause of the error that is raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class RemoteValue:
    """What a scheduled function will return (tf.distribute.coordinator.RemoteValue).

    It comes to the coordinator when the function has ended, and stays readable when the worker is
    lost. As an argument of a scheduled function it is its value.
    """

    __slots__ = ("__weakref__", "_blob", "_decoded", "_outcome", "_wait_for")

    def __init__(self, wait_for: WaitFor) -> None:
        self._wait_for = wait_for
        self._outcome: str | None = None  # "returned", "raised", "cancelled"
        self._blob: bytes | None = None
        self._decoded: Any = None

    def __repr__(self) -> str:
        return f"<fastdist.RemoteValue {self._outcome or 'not there yet'}>"

    def is_done(self) -> bool:
        """Whether the function has ended, or will not run."""
        return self._outcome is not None

    def fetch(self, timeout: float | None = None) -> Any:
        """Wait for the function, and return what it returned.

        Args:
            timeout: in seconds; None: as long as it takes.

        Raises:
            TimeoutError: it has not ended in time.
            FastdistError: it was cancelled, since another function raised before it began; or what
                it returned cannot be read here.
            BaseException: what it raised.
        """
        if self._outcome is None and not self._wait_for(self.is_done, timeout):
            raise TimeoutError(f"the function has not ended within {timeout:g} s")
        if self._outcome == "cancelled":
            raise FastdistError(
                "the function was cancelled before it began, since another one raised an error"
            )
        blob = self._blob
        if blob is not None:  # another thread may do the same
            try:
                self._decoded, self._blob = pickle.loads(blob), None
            except Exception as error:
                raise FastdistError(
                    f"the function returned what cannot be read here: {error!r}"
                ) from error
        if self._outcome == "raised":
            raise self._decoded.with_traceback(None)
        return self._decoded

    def __reduce__(self) -> Any:
        return _same, (self.fetch(),)

    def settle(self, outcome: str, content: Any = None) -> None:
        """Note how the function ended; the caller holds the lock.

        Args:
            outcome: "returned", "raised" or "cancelled".
            content: a pickle of the value, or an exception.
        """
        if self._outcome is not None:
            return
        if isinstance(content, bytes):
            self._blob = content
        else:
            self._decoded = content
        self._outcome = outcome


def _same(value: Any) -> Any:
    return value
