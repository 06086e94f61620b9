"""A parameter server: receives requests from any number of clients, and sends replies."""

from __future__ import annotations

import os
import shutil
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from tempfile import mkdtemp
from typing import Any

from fastdist.link.listener import Listener
from fastdist.ps.server.send_buffers import SendBuffers
from fastdist.ps.server.service import Service
from fastdist.ps.wire.process import allow_open_files, keep_freed_memory
from fastdist.ps.wire.protocol import APPLIED_ONCE, MAX_FRAME_BYTES, Header, Op, kind_of

_MAX_UNSENT_BYTES = 512 << 20  # of replies that clients have not taken yet
_SLOW = frozenset((Op.SAVE, Op.RESTORE))  # answered in other threads


def _remove(folder: str, process: int) -> None:
    if os.getpid() == process:  # else it is a forked one, which serves nobody
        shutil.rmtree(folder, ignore_errors=True)


class Server:
    """Keeps dense variables and tables of rows, and applies the gradients that clients push.

    Answers requests until it is closed. Files are written and read in other threads.

    Args:
        address: listening address: "tcp://host:port", where port `*` is a free one, for peers
            that have the job's secret, or "ipc://path" of a socket, for programs of this user;
            by default a socket in a folder of its own.
        max_frame_bytes: connections that send larger frames are dropped.
        max_staged_bytes: the limit for gradients that wait for their round, and again for messages
            of more than 4 MiB that are arriving; messages beyond it wait.

    Attributes:
        address: the address with the actual port.
        ended: an event that is set when a client has ended the job, or the server has failed.
        failure: the error that ended the server's thread; None while the server works.

    Raises:
        ValueError: the address is invalid.
        ClusterConfigError: the job's secret cannot be read or made; see `FASTDIST_SECRET`.
        OSError: another process listens there, or the address is not this machine's.
        ImportError: TCP needs cryptography, which is not installed.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        max_staged_bytes: int = 4 << 30,
    ) -> None:
        allow_open_files(100, "a server's connections")
        keep_freed_memory()
        self._service = Service(max_staged_bytes)
        self.ended = self._service.ended
        self.failure: BaseException | None = None
        self._is_closing = False
        self._finished: deque[tuple[Any, ...]] = deque()  # answers to slow requests
        self._remove_folder = None
        if address is None:
            folder = mkdtemp(prefix="fastdist-server-")  # mode 0700
            address = f"ipc://{folder}/socket"
            self._remove_folder = weakref.finalize(self, _remove, folder, os.getpid())
        self._listener = Listener(
            address, max_frame_bytes=max_frame_bytes, max_arriving_bytes=max_staged_bytes
        )
        self.address = self._listener.address
        self._files = ThreadPoolExecutor(2, "fastdist-ps-files")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop answering, and drop everything that the server keeps."""
        self._files.shutdown(wait=False, cancel_futures=True)
        self._is_closing = True
        self._listener.wake()
        self._thread.join()
        if self._remove_folder is not None:
            self._remove_folder()

    def stats(self) -> dict[str, Any]:
        """See `Service.stats`."""
        return self._service.stats()

    # --- threads --------------------------------------------------------------------------------

    def _run(self) -> None:
        """Serve the socket. An error ends the server: it would live on and never answer."""
        try:
            self._serve()
        except BaseException as error:
            self.failure = error
            self.ended.set()

    def _serve(self) -> None:
        buffers = SendBuffers(_MAX_UNSENT_BYTES)
        listener = self._listener
        slow: list[Future[None]] = []  # requests
        with closing(listener):
            while not self._is_closing:
                received = listener.receive()
                while self._finished:
                    listener.send(*self._finished.popleft())
                if received is None:
                    continue
                connection, frames = received
                kind = kind_of(frames[0])
                if kind in APPLIED_ONCE:
                    buffers.keep_lent()
                slow = [each for each in slow if not each.done()]
                buffers.may_lend = not slow  # which change values in other threads
                if kind in _SLOW:
                    with suppress(RuntimeError):  # the server is closing
                        slow.append(self._files.submit(self._answer_slowly, connection, frames))
                else:
                    answer = self._service.answer(frames, buffers)
                    if answer is not None:
                        header, body = answer
                        upload = listener.send(connection, *_frames(header, body))
                        if upload is not None:
                            buffers.note_sent(upload, body, header.client)
                del received, frames

    def _answer_slowly(self, connection: int, frames: Sequence[memoryview]) -> None:
        """Pass the answer, if there is one, to the thread of the listener."""
        answer = self._service.answer(frames, SendBuffers(0))
        if answer is not None:
            self._finished.append((connection, *_frames(*answer)))
            self._listener.wake()


def _frames(header: Header, body: Any) -> tuple[Any, ...]:
    return (header.pack(),) if body is None else (header.pack(), body)
