"""The future result of a scheduled function."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from fastdist.errors import FastdistError


class RemoteTraceback(Exception):
    """The traceback of an error on a worker; the cause of the error that is raised here."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class RemoteValue:
    """The future result of a scheduled function (tf.distribute.coordinator.RemoteValue).

    The result is sent to the coordinator when the function has ended, and stays readable if the
    worker is lost. A scheduled function receives the result itself.
    """

    __slots__ = ("__weakref__", "_blob", "_decoded", "_outcome", "_wait_for")

    def __init__(self, wait_for: Callable[[Callable[[], bool], float | None], bool]) -> None:
        self._wait_for = wait_for  # of the backlog
        self._outcome: str | None = None  # "returned", "raised", "cancelled"
        self._blob: bytes | None = None
        self._decoded: Any = None

    def __repr__(self) -> str:
        return f"<fastdist.RemoteValue {self._outcome or 'pending'}>"

    def is_done(self) -> bool:
        """Return True if the function has ended, or was cancelled."""
        return self._outcome is not None

    def fetch(self, timeout: float | None = None) -> Any:
        """Wait for the function, and return its result.

        Args:
            timeout: seconds to wait; None waits without limit.

        Raises:
            TimeoutError: the function has not ended in time.
            FastdistError: the function was cancelled because another one raised before it began, or
                its result cannot be unpickled here.
            BaseException: the function raised it.
        """
        if self._outcome is None and not self._wait_for(self.is_done, timeout):
            raise TimeoutError(f"the function has not ended within {timeout:g} s")
        if self._outcome == "cancelled":
            raise FastdistError(
                "the function was cancelled before it began, because another one raised an error"
            )
        blob = self._blob
        if blob is not None:  # another thread may unpickle it concurrently
            try:
                self._decoded, self._blob = pickle.loads(blob), None
            except Exception as error:
                raise FastdistError(
                    f"the function's result cannot be unpickled here: {error!r}"
                ) from error
        if self._outcome == "raised":
            raise self._decoded.with_traceback(None)
        return self._decoded

    def __reduce__(self) -> Any:
        return identity, (self.fetch(),)

    def settle(self, content: bytes | Exception | None) -> None:
        """Record a pickled result, the exception that was raised, or None for a cancelled call."""
        if isinstance(content, bytes):
            self._blob, self._outcome = content, "returned"
        else:
            self._decoded = content
            self._outcome = "cancelled" if content is None else "raised"


def identity(value: Any) -> Any:
    """Return the argument; for pickles, which name the functions that they call."""
    return value
