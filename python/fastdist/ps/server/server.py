"""A parameter server: receives requests from any number of clients, and sends replies."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import zmq

from fastdist.ps.link.keys import Keys
from fastdist.ps.link.listener import Listener
from fastdist.ps.server.send_buffers import SendBuffers
from fastdist.ps.server.service import Service
from fastdist.ps.wire.frames import keep_freed_memory
from fastdist.ps.wire.open_files import allow_open_files
from fastdist.ps.wire.protocol import MAX_FRAME_BYTES, Op, kind_of

_DONE = "inproc://done"
_MAX_WAITING = 1000  # requests of a client that have not been read
_MAX_UNSENT_BYTES = 512 << 20  # of replies that clients have not taken yet
_SLOW = frozenset((Op.CREATE, Op.SAVE, Op.RESTORE))  # answered in other threads


class Server:
    """Keeps dense variables and tables of rows, and applies the gradients that clients push.

    Answers requests until it is closed. Slow requests (creating variables, files) run in other
    threads.

    Args:
        address: where to listen, as ZeroMQ names it; `*` is a free port.
        keys: the job's keys. A server without keys may only listen on this machine's own addresses.
        max_frame_bytes: connections that send larger frames are dropped.
        max_staged_bytes: limit for gradients that wait for their round.

    Attributes:
        address: the address with the actual port.
        ended: set when a client has ended the job, or the server has failed.
        failure: the error that ended the server's thread; None while the server works.

    Raises:
        ValueError: the address is beyond this machine, and there are no keys.
        zmq.ZMQError: the address cannot be bound.

    Examples:
        >>> from fastdist import ps
        >>> server = ps.Server()  # on a free port of this machine
        >>> server.address.split(":")[:2]
        ['tcp', '//127.0.0.1']
        >>> server.close()
    """

    def __init__(
        self,
        address: str = "tcp://127.0.0.1:*",
        *,
        keys: Keys | None = None,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        max_staged_bytes: int = 4 << 30,
    ) -> None:
        allow_open_files(100, "a server's connections")
        keep_freed_memory()
        self._service = Service(max_staged_bytes)
        self.ended = self._service.ended
        self.failure: BaseException | None = None
        self._listener = Listener(
            address, keys, max_frame_bytes=max_frame_bytes, max_waiting=_MAX_WAITING
        )
        self.address = self._listener.address
        # Two pools: a worker that connects again must not wait for a checkpoint.
        self._files = ThreadPoolExecutor(2, "fastdist-ps-files")
        self._creations = ThreadPoolExecutor(1, "fastdist-ps-create")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop answering, and drop everything that the server keeps."""
        for pool in (self._files, self._creations):
            pool.shutdown(wait=False, cancel_futures=True)
        self._listener.close()
        self._thread.join()

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
        """Answer the requests until the context ends."""
        buffers = SendBuffers(_MAX_UNSENT_BYTES)
        listener, router = self._listener, self._listener.socket
        with router, suppress(zmq.ContextTerminated), listener.context.socket(zmq.PULL) as done:
            done.bind(_DONE)
            poller = zmq.Poller()
            poller.register(router, zmq.POLLIN)
            poller.register(done, zmq.POLLIN)
            slow_requests = 0
            while True:
                if slow_requests:  # otherwise waiting for one socket alone is faster
                    ready = dict(poller.poll())
                    if done in ready:
                        slow_requests -= 1
                        listener.send(*done.recv_multipart())
                    if router not in ready:
                        continue
                identity, *frames = router.recv_multipart(copy=False)
                views = [frame.buffer for frame in frames]
                kind = kind_of(views[0] if views else b"")
                if kind in _SLOW:
                    slow_requests += 1
                    pool = self._creations if kind == Op.CREATE else self._files
                    with suppress(RuntimeError):  # the server is closing
                        pool.submit(self._answer_slowly, identity.bytes, views)
                else:
                    answer = self._service.answer(views, buffers)
                    if answer is not None:
                        header, body = answer
                        has_body = body is not None
                        is_sent = listener.send(identity.bytes, header.pack(), more=has_body)
                        if is_sent and has_body:
                            buffers.send(router, body, header.client)
                del frames, views

    def _answer_slowly(self, identity: bytes, frames: Sequence[memoryview]) -> None:
        """Pass the answer to the thread of the socket; an empty message means no answer."""
        answer = self._service.answer(frames, SendBuffers(0))
        with suppress(zmq.ZMQError), self._listener.context.socket(zmq.PUSH) as socket:
            socket.setsockopt(zmq.LINGER, 1000)
            socket.connect(_DONE)
            parts = [b""]
            if answer is not None:
                header, body = answer
                parts = [identity, header.pack(), *([] if body is None else [body])]
            socket.send_multipart(parts)
