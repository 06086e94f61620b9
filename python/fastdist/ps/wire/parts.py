"""Large dense values travel in parts: memory for a part is used again, that for all would be fresh.

A variable of up to `PART_SIZE` elements is one message, called part 0. A larger one is the parts 1,
2, … of as many elements, the last of what is left.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

PART_SIZE = 1 << 19
_MAX_OPEN = 4096


def parts_of(size: int) -> range:
    """The numbers of the parts of a variable.

    Args:
        size: elements.
    """
    return range(1) if size <= PART_SIZE else range(1, -(-size // PART_SIZE) + 1)


def extent(part: int, size: int) -> slice:
    """The elements of a part; all for part 0, whatever the size.

    Raises:
        ValueError: the variable has no such part.
    """
    begin = max(0, part - 1) * PART_SIZE
    if part and begin >= size:
        raise ValueError(f"part {part} of a variable of {size} elements")
    return slice(begin, min(size, begin + PART_SIZE) if part else size)


def extents(size: int) -> Iterator[slice]:
    """The elements of all parts, in order."""
    return (extent(part, size) for part in parts_of(size))


@dataclass(slots=True)
class _Push:
    step: int
    left: int


class OpenPushes:
    """Pushes of which some parts have been applied. Safe for several threads.

    Of one that never ends the step is forgotten in the end; what had come of it stays applied.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pushes: OrderedDict[tuple[bytes, int], _Push] = OrderedDict()

    def step(
        self, push: tuple[bytes, int], parts: int, begin: Callable[[], int]
    ) -> tuple[int, bool]:
        """A part is to be applied.

        Args:
            push: which one it is of: the client, and the number of the request before its parts.
            parts: of the whole.
            begin: gives the first part its step.

        Returns:
            The push's step, and whether this is its first part.
        """
        with self._lock:
            known = self._pushes.get(push)
            is_first = known is None
            if known is None:
                known = self._pushes[push] = _Push(begin(), parts)
                while len(self._pushes) > _MAX_OPEN:
                    self._pushes.popitem(last=False)
            known.left -= 1
            if known.left == 0:
                self._pushes.pop(push, None)
            return known.step, is_first
