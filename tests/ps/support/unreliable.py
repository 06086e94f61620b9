"""A proxy to a server whose connections break after some bytes."""

from __future__ import annotations

import contextlib
import math
import random
import socket
import threading


class Unreliable:
    """Passes bytes on between clients and a server.

    Args:
        address: of the server.
        requests: the least and most bytes after which a connection breaks, of any magnitude.
        replies: the same for the bytes of the other direction.
        changes: the last of these bytes is changed, and the connection goes on until an end
            breaks it off.

    Attributes:
        forgets: what comes on connections that were made before it grew is dropped.
    """

    def __init__(
        self,
        address: str,
        requests: tuple[int, int],
        replies: tuple[int, int],
        *,
        changes: bool = False,
    ) -> None:
        self._changes = changes
        self.forgets = 0
        self._target = ("127.0.0.1", int(address.rsplit(":", 1)[1]))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.broken = 0
        self._limits = requests, replies
        self._random = random.Random(3)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours, _ = self._listener.accept()
                try:
                    theirs = socket.create_connection(self._target)
                except OSError:  # the server is down
                    ours.close()
                    continue
                ends = (ours, theirs), (theirs, ours)
                age = self.forgets
                for (source, target), limits in zip(ends, self._limits, strict=True):
                    left = int(math.exp(self._random.uniform(*map(math.log, limits))))
                    way = (source, target, left, age)
                    threading.Thread(target=self._pump, args=way, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, left: int, age: int) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(min(1 << 16, left)):
                left -= len(data)
                if left <= 0 and self._changes:
                    data = data[:-1] + bytes([data[-1] ^ 1])
                if self.forgets == age:
                    target.sendall(data)
                if left > 0:
                    continue
                self.broken += 1
                if not self._changes:
                    break
                left = 1 << 40
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()

    def close(self) -> None:
        self._listener.close()
