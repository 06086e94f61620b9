"""How old the values are that gradients were computed from."""

from __future__ import annotations

import threading

from fastdist.ps.wire.protocol import UNKNOWN_STEP


class Staleness:
    """Pushes by how many others came between the pull and them. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[int, int] = {}

    def count(self, now: int, seen: int) -> None:
        """A push has come.

        Args:
            now: steps of the object.
            seen: steps that it had when its value was pulled; `UNKNOWN_STEP` is not counted.
        """
        if seen == UNKNOWN_STEP:
            return
        bits = max(0, now - seen).bit_length()
        with self._lock:
            self._counts[bits] = self._counts.get(bits, 0) + 1

    def histogram(self) -> dict[str, int]:
        """Pushes for each range of staleness: "0", "1", "2-3", "4-7" and so on."""
        with self._lock:
            return {_range(bits): count for bits, count in sorted(self._counts.items())}


def _range(bits: int) -> str:
    first, last = 1 << bits >> 1, (1 << bits) - 1
    return str(first) if first >= last else f"{first}-{last}"
