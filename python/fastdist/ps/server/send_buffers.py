"""Memory for replies, which are sent without a copy."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from fastdist.link.stream import Upload
from fastdist.ps.wire.protocol import BusyError

_MIN_COUNTED_BYTES = 64 << 10  # the kernel takes smaller replies at once
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class _Unsent(NamedTuple):
    upload: Upload
    client: bytes
    nbytes: int


class SendBuffers:
    """The replies of one thread that clients have not taken yet, `max_unsent_bytes` at most.

    Beyond that, a client with such a reply is refused further ones; another may always have one.
    """

    def __init__(self, max_unsent_bytes: int) -> None:
        self._max_unsent_bytes = max_unsent_bytes
        self._unsent: list[_Unsent] = []
        self._unsent_bytes = 0
        self._lent: list[Upload] = []
        self.may_lend = True  # as replies, the memory of values, which `keep_lent` copies

    def take(self, nbytes: int, client: bytes) -> Bytes:
        """Return memory for a reply, if there is room."""
        self.require_room(nbytes, client)
        return np.empty(nbytes, np.uint8)

    def require_room(self, nbytes: int, client: bytes) -> None:
        """Raise BusyError if too many replies have not been taken, some of them by this client."""
        if self._unsent_bytes + nbytes > self._max_unsent_bytes:
            self._unsent = [unsent for unsent in self._unsent if not unsent.upload.done]
            self._unsent_bytes = sum(unsent.nbytes for unsent in self._unsent)
            is_full = self._unsent_bytes + nbytes > self._max_unsent_bytes
            if is_full and any(unsent.client == client for unsent in self._unsent):
                raise BusyError(f"{self._unsent_bytes} bytes of replies are not sent yet")

    def note_sent(self, upload: Upload, body: Any, client: bytes) -> None:
        """Take note of a reply: bytes, the memory from `take`, or lent values."""
        if upload.done or isinstance(body, bytes):
            return
        if body.base is not None:  # a part of a value; memory from `take` is whole
            self._lent = [each for each in self._lent if not each.done]
            self._lent.append(upload)
        nbytes = sum(part.nbytes for part in upload.parts)
        if nbytes >= _MIN_COUNTED_BYTES:
            self._unsent.append(_Unsent(upload, client, nbytes))
            self._unsent_bytes += nbytes

    def keep_lent(self) -> None:
        """Copy lent values that are not sent, since values are about to change."""
        for upload in self._lent:
            upload.copy()
        self._lent.clear()
