"""Memory for messages that are arriving at a listener."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Room(Generic[T]):
    """A limit of the memory for arriving messages, in whose order they wait if it is reached.

    A message larger than the limit arrives alone.

    Args:
        nbytes: the limit.

    Attributes:
        inside: the size of the message that each connection is receiving.
        waiting: the size of the message that each connection will receive, in their order.
    """

    def __init__(self, nbytes: float) -> None:
        self.inside: dict[T, int] = {}
        self.waiting: dict[T, int] = {}
        self._free = nbytes

    def enter(self, who: T, nbytes: int) -> bool:
        """Take memory for a message; if there is none, return False and wait for it."""
        self.waiting.setdefault(who, nbytes)
        if self.next() != who:
            return False
        self.inside[who] = self.waiting.pop(who)
        self._free -= nbytes
        return True

    def next(self) -> T | None:
        """Return the connection whose message may arrive next; None if there is none."""
        who = next(iter(self.waiting), None)
        if who is None or (self.inside and self.waiting[who] > self._free):
            return None
        return who

    def leave(self, who: T) -> None:
        """Release a connection's memory, or its place among those that wait."""
        self.waiting.pop(who, None)
        self._free += self.inside.pop(who, 0)
