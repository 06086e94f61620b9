"""Tracks which changes a server has applied, so that a repeated request changes nothing."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

# Above what a client has in flight, and above the number of clients of a job.
MAX_REQUESTS = 1024
_MAX_CLIENTS = 1 << 16


@dataclass(slots=True)
class _Client:
    floor: int = 0
    # By the numbers of changes: bodies of replies, None while a change is running.
    replies: dict[int, bytes | None] = field(default_factory=dict)


class Deduplicator:
    """The changes that each client may still repeat. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: OrderedDict[bytes, _Client] = OrderedDict()

    def begin(self, client: bytes, number: int, floor: int) -> tuple[bool, bytes | None]:
        """Begin a change if it is new: it counts as running from now on.

        Args:
            floor: the client will not repeat changes below this number.

        Returns:
            True if it was new, and the body of its reply; None while it is running.
        """
        with self._lock:
            known = self._clients.setdefault(client, _Client())
            self._clients.move_to_end(client)
            while len(self._clients) > _MAX_CLIENTS:
                self._clients.popitem(last=False)
            if floor > known.floor:
                known.floor = floor
                for old in [n for n in known.replies if n < floor]:
                    del known.replies[old]
            if number < known.floor:
                return False, b""
            if number in known.replies:
                return False, known.replies[number]
            if len(known.replies) >= MAX_REQUESTS:
                raise ValueError(f"too many unanswered changes (limit {MAX_REQUESTS})")
            known.replies[number] = None
            return True, None

    def end(self, client: bytes, number: int, reply: bytes | None) -> None:
        """Store the reply to a change that was new; None if it failed and may be tried again."""
        with self._lock:
            known = self._clients.get(client)
            if known is None or number not in known.replies:
                return
            if reply is None:
                del known.replies[number]
            else:
                known.replies[number] = reply
