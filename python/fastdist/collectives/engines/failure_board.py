"""A board in a store, where the ranks of a communicator post why they leave it.

Gloo reports only that a connection was closed or that time has passed. A rank that leaves therefore
posts the reason before it closes its connections, and a rank whose call fails reads the board
before it raises.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, TypeVar

from fastdist.collectives.engines.c10d import stay_out_at_exit
from fastdist.errors import CollectiveTimeoutError, FastdistError, PeerFailureError

T = TypeVar("T")
# A question's answer: a function that returns it, or raises StoreLostError.
Answer: TypeAlias = "queue.SimpleQueue[Callable[[], T]]"
_ANSWER_S = 5.0
_SILENT_S = 30.0
_EXIT_S = 1.0


class StoreLostError(Exception):
    """The process that holds the store has ended, or cannot be reached."""


@dataclass(frozen=True, slots=True)
class Cause:
    """The reason why a communicator was lost.

    Attributes:
        is_timeout: True if a rank did not arrive in time; False if a rank died, left or failed.
        ranks: the ranks at fault.
        text: the message for the user.
    """

    is_timeout: bool
    ranks: tuple[int, ...]
    text: str

    @classmethod
    def from_error(cls, error: FastdistError) -> Cause:
        """Take the cause from an error."""
        is_timeout = isinstance(error, CollectiveTimeoutError)
        return cls(is_timeout, error.ranks, str(error).split(";")[0])

    def to_error(self) -> FastdistError:
        """Return the error to raise for this cause."""
        kind = CollectiveTimeoutError if self.is_timeout else PeerFailureError
        return kind(self.text, self.ranks)

    def pack(self) -> bytes:
        """Encode as JSON."""
        return json.dumps([self.is_timeout, self.ranks, self.text]).encode()

    @classmethod
    def unpack(cls, data: bytes) -> Cause:
        """Decode the output of `pack`."""
        is_timeout, ranks, text = json.loads(data)
        return cls(bool(is_timeout), tuple(int(rank) for rank in ranks), str(text))


def died(rank: int) -> Cause:
    """Return the cause for a rank whose process has died."""
    return Cause(False, (rank,), f"rank {rank} has died or left")


def _raise_lost() -> NoReturn:
    raise StoreLostError


class FailureBoard:
    """The board of one communicator.

    Args:
        store: torch's store, with a prefix that only this communicator uses.
        rank: this rank.
        size: the number of ranks of the communicator.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._lost_until = 0.0  # no answer came; do not ask until then

    def post_closed(self) -> None:
        """Post that this rank has closed the communicator."""
        self._set("closed", b"1")

    def post_notice(self, what: str) -> None:
        """Post that a call of this rank fails, before this rank knows why."""
        self._set("noticed", what.encode())

    def post_cause(self, cause: Cause) -> None:
        """Post why this rank leaves."""
        self._set("cause", cause.pack(), mark="has_cause")

    def closed_ranks(self) -> list[int]:
        """Return the other ranks that have closed the communicator."""
        return sorted(self._all("closed"))

    def notices(self) -> dict[int, str]:
        """Return the notices of other ranks, by rank."""
        return {rank: data.decode() for rank, data in self._all("noticed").items()}

    def causes(self) -> dict[int, Cause]:
        """Return why other ranks left, by rank."""
        return _causes(self._all("cause", mark="has_cause"))

    def begin_causes(self) -> Answer[dict[int, Cause]]:
        """Begin to read the causes; the answer comes later, or never."""
        return _begin(lambda: _causes(self._read("cause", mark="has_cause")))

    def _set(self, what: str, data: bytes, mark: str = "") -> None:
        if self._is_lost():
            return

        def write() -> None:
            self._store.set(f"{what}/{self._rank}", data)
            if mark:
                self._store.set(mark, b"1")

        with contextlib.suppress(StoreLostError):
            self._ask(write)

    def _all(self, what: str, mark: str = "") -> dict[int, bytes]:
        if self._is_lost():  # each further attempt would print torch's warnings
            raise StoreLostError
        return self._ask(lambda: self._read(what, mark))

    def _read(self, what: str, mark: str = "") -> dict[int, bytes]:
        if mark and not self._store.check([mark]):
            return {}  # one question, since ranks ask again and again while they wait
        keys = {rank: f"{what}/{rank}" for rank in range(self._size) if rank != self._rank}
        return {
            rank: bytes(self._store.get(key))
            for rank, key in keys.items()
            if self._store.check([key])
        }

    def _is_lost(self) -> bool:
        return time.monotonic() < self._lost_until

    def _ask(self, question: Callable[[], T]) -> T:
        """Use the store in another thread: without a network, an answer never comes."""
        try:
            return _begin(question).get(timeout=_ANSWER_S)()
        except queue.Empty:  # the process that holds the store may be stopped for a while
            self._lost_until = time.monotonic() + _SILENT_S
        except StoreLostError:
            self._lost_until = math.inf
        raise StoreLostError


def _begin(question: Callable[[], T]) -> Answer[T]:
    answer: Answer[T] = queue.SimpleQueue()

    def ask() -> None:
        stay_out_at_exit()
        try:
            value = question()
            answer.put(lambda: value)
        except RuntimeError:  # the store's process has ended
            answer.put(_raise_lost)
        _asking.discard(threading.current_thread())

    thread = threading.Thread(target=ask, daemon=True, name="fastdist failure board")
    _asking.add(thread)
    try:
        thread.start()
    except RuntimeError:  # the interpreter ends: no more threads
        _asking.discard(thread)
        answer.put(_raise_lost)
    return answer


_asking: set[threading.Thread] = set()


@atexit.register
def _await_answers() -> None:
    """Let questions end: torch aborts the process if one returns while the interpreter ends."""
    deadline = time.monotonic() + _EXIT_S
    for thread in list(_asking):
        thread.join(max(0.0, deadline - time.monotonic()))


def _causes(found: dict[int, bytes]) -> dict[int, Cause]:
    return {rank: Cause.unpack(data) for rank, data in found.items()}
