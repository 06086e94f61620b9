"""Why ranks left a communicator: a board in the store that all its ranks read when a call fails.

Gloo only says that a connection was closed, or that time has passed. Whoever leaves therefore
writes down why before it closes its connections, and whoever finds one closed reads that first.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from fastdist.errors import CollectiveTimeoutError, FastdistError, PeerFailureError

_KINDS: dict[str, type[FastdistError]] = {
    "failure": PeerFailureError,
    "timeout": CollectiveTimeoutError,
}


class StoreLostError(Exception):
    """The process that has the store has ended."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Why a communicator was lost.

    Attributes:
        is_timeout: a rank did not come in time; else one died, left or failed.
        ranks: whom it is about.
        text: for people.
    """

    is_timeout: bool
    ranks: tuple[int, ...]
    text: str

    @classmethod
    def of(cls, error: FastdistError) -> Cause:
        """The cause in an error."""
        is_timeout = isinstance(error, CollectiveTimeoutError)
        return cls(is_timeout, error.ranks, str(error).split(";")[0])

    def error(self) -> FastdistError:
        """The error that a rank raises for it."""
        return _KINDS["timeout" if self.is_timeout else "failure"](self.text, self.ranks)

    def pack(self) -> bytes:
        """As JSON."""
        return json.dumps([self.is_timeout, self.ranks, self.text]).encode()

    @classmethod
    def unpack(cls, data: bytes) -> Cause:
        """What `pack` packed."""
        is_timeout, ranks, text = json.loads(data)
        return cls(bool(is_timeout), tuple(int(rank) for rank in ranks), str(text))


class Departures:
    """The board of one communicator.

    Args:
        store: torch's, with the communicator's prefix.
        rank: this rank.
        size: of the communicator.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._is_lost = False

    def close(self) -> None:
        """Say that this rank has closed the communicator."""
        self._set("closed", b"1")

    def notice(self, what: str) -> None:
        """Say that this rank is in a call that fails, before it knows why."""
        self._set("noticed", what.encode())

    def post(self, cause: Cause) -> None:
        """Say why this rank leaves."""
        self._set("cause", cause.pack())

    def closed(self) -> list[int]:
        """The ranks that have closed the communicator."""
        return sorted(self._all("closed"))

    def noticed(self) -> dict[int, str]:
        """What ranks in failing calls noticed."""
        return {rank: data.decode() for rank, data in self._all("noticed").items()}

    def causes(self) -> dict[int, Cause]:
        """Why other ranks left."""
        return {rank: Cause.unpack(data) for rank, data in self._all("cause").items()}

    def _set(self, what: str, data: bytes) -> None:
        if self._is_lost:
            return
        try:
            self._store.set(f"{what}/{self._rank}", data)
        except RuntimeError:  # the store's process has ended
            self._is_lost = True

    def _all(self, what: str) -> dict[int, bytes]:
        if self._is_lost:  # each try would fill the screen with torch's warnings
            raise StoreLostError
        keys = {rank: f"{what}/{rank}" for rank in range(self._size) if rank != self._rank}
        try:
            return {
                rank: bytes(self._store.get(key))
                for rank, key in keys.items()
                if self._store.check([key])
            }
        except RuntimeError:
            self._is_lost = True
            raise StoreLostError from None
