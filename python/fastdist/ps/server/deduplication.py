"""Tracks which changes a server has applied, so that a repeated request changes nothing."""

from __future__ import annotations

import enum
import threading
from collections import OrderedDict
from dataclasses import dataclass, field

# Above what a client has in flight, and above the number of clients of a job.
MAX_REQUESTS = 1024
_MAX_CLIENTS = 1 << 16


class Progress(enum.Enum):
    """The progress of a change without a reply."""

    NEW = enum.auto()
    RUNNING = enum.auto()


@dataclass(slots=True)
class _Client:
    floor: int = 0
    progress: dict[int, Progress | bytes] = field(default_factory=dict)


class Deduplicator:
    """The changes that each client may still repeat. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: OrderedDict[bytes, _Client] = OrderedDict()

    def begin(self, client: bytes, number: int, floor: int) -> Progress | bytes:
        """Return the progress of a change; a new change counts as running from now on.

        Args:
            floor: the client will not repeat changes below this number.

        Returns:
            The progress before this call, or for an applied change the body of its reply.
        """
        with self._lock:
            known = self._clients.setdefault(client, _Client())
            self._clients.move_to_end(client)
            while len(self._clients) > _MAX_CLIENTS:
                self._clients.popitem(last=False)
            if floor > known.floor:
                known.floor = floor
                for old in [n for n in known.progress if n < floor]:
                    del known.progress[old]
            if number < known.floor:
                return b""
            progress = known.progress.get(number, Progress.NEW)
            if progress is Progress.NEW:
                if len(known.progress) >= MAX_REQUESTS:
                    raise ValueError(f"too many unanswered changes (limit {MAX_REQUESTS})")
                known.progress[number] = Progress.RUNNING
            return progress

    def end(self, client: bytes, number: int, reply: bytes | None) -> None:
        """Store the reply to a change that was new; None if it failed and may be tried again."""
        with self._lock:
            known = self._clients.get(client)
            if known is None or number not in known.progress:
                return
            if reply is None:
                del known.progress[number]
            else:
                known.progress[number] = reply
