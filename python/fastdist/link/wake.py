"""Wakes a thread that polls its connections."""

from __future__ import annotations

import os
import threading
from contextlib import suppress


class Wake:
    """An event that a poller can wait for, and that any thread may set, also after `close`."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # -1: closed
        self._lock = threading.Lock()

    def set(self) -> None:
        """Wake the thread."""
        with self._lock:
            if self.descriptor >= 0:
                os.eventfd_write(self.descriptor, 1)

    def clear(self) -> None:
        """Reset the event, in the thread that was woken."""
        with suppress(BlockingIOError):
            os.eventfd_read(self.descriptor)

    def close(self) -> None:
        """Release the descriptor."""
        with self._lock:
            os.close(self.descriptor)
            self.descriptor = -1
