"""Counts how old the values were that gradients were computed from."""

from __future__ import annotations

import threading

from fastdist.ps.wire.protocol import UNKNOWN_STEP


class Staleness:
    """Counts pushes by the number of other pushes since the pull. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[int, int] = {}

    def count(self, now: int, seen: int) -> None:
        """Count a push.

        Args:
            now: steps of the object.
            seen: steps of the object when its value was pulled; `UNKNOWN_STEP` is not counted.
        """
        if seen == UNKNOWN_STEP:
            return
        bits = max(0, now - seen).bit_length()
        with self._lock:
            self._counts[bits] = self._counts.get(bits, 0) + 1

    def histogram(self) -> dict[str, int]:
        """Return the count of pushes for each range of staleness: "0", "1", "2-3", "4-7", …."""
        with self._lock:
            return {_range(bits): count for bits, count in sorted(self._counts.items())}


def _range(bits: int) -> str:
    first, last = 1 << bits >> 1, (1 << bits) - 1
    return str(first) if first >= last else f"{first}-{last}"
