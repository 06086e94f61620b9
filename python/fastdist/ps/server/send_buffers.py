"""Memory for replies that ZeroMQ sends without a copy, reused once they are sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import zmq

_MAX_BUFFERS = 40
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class SendBuffers:
    """The reply buffers of one thread. Fresh memory would cost a page fault for each 4 KiB."""

    def __init__(self) -> None:
        self._buffers: list[Bytes] = []
        self._trackers: list[zmq.MessageTracker | None] = []
        self._taken = -1

    def take(self, nbytes: int) -> Bytes:
        """Return memory to fill, which must be passed to `send` before the next call."""
        self._taken = -1
        for i, (buffer, tracker) in enumerate(zip(self._buffers, self._trackers, strict=True)):
            if tracker is None or tracker.done:
                if buffer.nbytes < nbytes:
                    self._buffers[i] = np.empty(nbytes, np.uint8)
                self._trackers[i] = None
                self._taken = i
                return self._buffers[i][:nbytes]
        fresh: Bytes = np.empty(nbytes, np.uint8)
        if len(self._buffers) < _MAX_BUFFERS:
            self._buffers.append(fresh)
            self._trackers.append(None)
            self._taken = len(self._buffers) - 1
        return fresh

    def send(self, socket: zmq.Socket[bytes], body: Any) -> None:
        """Send the last frame of a message: bytes, or the memory from `take`."""
        if isinstance(body, bytes):
            socket.send(body)
            return
        tracker = socket.send(body, copy=False, track=True)
        if self._taken >= 0:
            self._trackers[self._taken] = tracker
