"""Memory for messages that are arriving at a listener."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Room(Generic[T]):
    """Limits the memory for arriving messages; beyond the limit, messages wait in their order.

    A message larger than the limit arrives alone.
    """

    def __init__(self, nbytes: float) -> None:
        self.inside: dict[T, int] = {}  # sizes of the messages that connections are receiving
        self.waiting: dict[T, int] = {}  # and of those that others will receive, in their order
        self._free = nbytes

    def enter(self, who: T, nbytes: int) -> bool:
        """Take memory for a message; return False if it must wait."""
        self.waiting[who] = nbytes
        return len(self.waiting) == 1 and self.let_in() is not None

    def let_in(self) -> T | None:
        """Take memory, if there is enough, for the message that has waited the longest.

        Returns its connection; None if no message is let in.
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
