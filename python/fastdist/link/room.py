"""Memory for messages that are arriving at a listener."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Room(Generic[T]):
    """Limits the memory for arriving messages; beyond the limit, messages wait in their order.

    A message larger than the limit arrives alone.

    Attributes:
        inside: the size of the message that each connection is receiving.
        waiting: the size of the message that each other connection will receive, in their order.
    """

    def __init__(self, nbytes: float) -> None:
        self.inside: dict[T, int] = {}
        self.waiting: dict[T, int] = {}
        self._free = nbytes

    def enter(self, who: T, nbytes: int) -> bool:
        """Take memory for a message; return False if it must wait."""
        self.waiting[who] = nbytes
        return len(self.waiting) == 1 and self.let_in() is not None

    def let_in(self) -> T | None:
        """Take memory for the message that has waited the longest; return its connection.

        Returns:
            None if no message waits, or there is no memory for it.
        """
        who = next(iter(self.waiting), None)
        if who is None or (self.inside and self.waiting[who] > self._free):
            return None
        self.inside[who] = self.waiting.pop(who)
        self._free -= self.inside[who]
        return who

    def leave(self, who: T) -> None:
        """Release a connection's memory, or its place among those that wait."""
        self.waiting.pop(who, None)
        self._free += self.inside.pop(who, 0)
