"""Sends and receives between GPUs outside groups.

Each direction between two ranks is a lane: a communicator of NCCL of its own, since NCCL runs the
calls of one communicator in order, and a send must not wait for a receive that was called before
it. The first call in a direction connects its lane, in a thread: the other rank may call much
later.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import fastdist._core as _core
from fastdist.collectives.engines.engine import Calls
from fastdist.errors import CollectiveTimeoutError, FastdistError

ID_BYTES = 128
"""The size of the ids by which NCCL connects ranks."""

_POLL_S = 0.001


class LaneWork:
    """An asynchronous call of a lane that may not be connected yet."""

    def __init__(self, lane: Lane, array: Any, ready: _core.GpuMark, timeout_s: float) -> None:
        self.array = array
        self.ready = ready
        self.timeout_s = timeout_s
        self.work: _core.GpuWork | None = None
        self.failure: Exception | None = None  # of this call
        self._lane = lane

    def is_done(self) -> bool:
        """Return True if the call has ended, successfully or not."""
        if self.work is not None:
            return self.work.is_done()
        return (self.failure or self._lane.failure) is not None

    def is_enqueued(self) -> bool:
        """Return True if the lane is connected, and the call is on the GPU."""
        return self.work is not None

    @property
    def stream(self) -> int:
        """The handle of the lane's stream; makes the host wait until the lane is connected."""
        return self._begun(None).stream

    def wait(self, stream: int, *, compared: bool = True) -> Any:
        """Make the host wait until the lane is connected, and the stream for the call's end."""
        return self._begun(None).wait(stream, compared=compared)

    def synchronize(self, timeout: float | None = None) -> Any:
        """Make the host wait for the end of the call."""
        begin = time.monotonic()
        work = self._begun(timeout)
        left = None if timeout is None else max(0.0, timeout - (time.monotonic() - begin))
        return work.synchronize(left)

    def _begun(self, timeout: float | None) -> _core.GpuWork:
        self._lane.wait(timeout)
        if self.failure is not None:
            raise self.failure
        assert self.work is not None
        return self.work


class Lane:
    """The sends of one rank to another, or this rank's receives from another."""

    def __init__(
        self,
        op: str,  # "send" or "recv"
        peer: int,
        gpu: _core.NcclCommunicator,  # of all ranks
        connect: Callable[[bytes], _core.NcclCommunicator],  # by an id that NCCL made
        mail: Calls,  # of a host engine of the same ranks that nothing else uses
        timeout_s: float,  # that a call waits for the other rank's first call
    ) -> None:
        self.failure: BaseException | None = None
        self._op = op
        self._peer = peer
        self._to = {"dst" if op == "send" else "src": peer}
        self._all = gpu
        self._connect_by = connect
        self._mail = mail
        self._timeout_s = timeout_s
        self._gpu: _core.NcclCommunicator | None = None
        self._call: Any = None  # of the compiled engine, once it is connected
        self._lock = threading.Lock()
        self._waiting: deque[LaneWork] = deque()
        self._ended = threading.Event()  # the attempt to connect
        self._is_closed = False
        threading.Thread(target=self._connect, name="fastdist-lane", daemon=True).start()

    def call(self, array: Any, stream: int, timeout_s: float, async_op: bool) -> Any:
        """Make a call; an asynchronous one returns a GpuWork or a LaneWork."""
        if async_op:
            kept = tuple(array) if isinstance(array, list) else array  # the caller may change it
            with self._lock:
                if self._call is None and self.failure is None:
                    work = LaneWork(self, kept, self._all.record(stream), timeout_s)
                    self._waiting.append(work)
                    return work
        self.wait(timeout_s)
        return self._call(array, stream=stream, timeout=timeout_s, async_op=async_op)

    def wait(self, timeout: float | None) -> None:
        """Make the host wait until the lane is connected; it may still be after the timeout."""
        if not self._ended.wait(timeout):
            assert timeout is not None
            raise self._late(timeout)
        if isinstance(self.failure, FastdistError):
            raise type(self.failure)(str(self.failure), self.failure.ranks)
        if self.failure is not None:
            raise self.failure

    def keep_for_last(self, stream: int, arrays: tuple[Any, ...]) -> None:
        """Keep arrays alive until the last call, which was made on this stream, has ended."""
        assert self._gpu is not None
        self._gpu.keep_for_last(stream, arrays)

    def abort(self, why: str) -> None:
        """End the calls that run."""
        with self._lock:
            self._is_closed = True
        if self._gpu is not None:
            self._gpu.abort(why)

    def close(self) -> None:
        """Wait for the calls that were enqueued, and leave."""
        with self._lock:
            self._is_closed = True
        if self._gpu is not None:
            self._gpu.close()

    def _connect(self) -> None:
        try:
            gpu = self._connect_by(self._shared_id())
            self._all.share_failures(gpu)
            call = partial(gpu.calls(self._timeout_s)[self._op], **self._to)
            with self._lock:
                if self._is_closed:
                    gpu.abort("the communicator is closed")
                    raise FastdistError("the communicator is closed")
                self._gpu, self._call = gpu, call
                for work in self._waiting:
                    gpu.follow(work.ready)
                    own, timeout_s = gpu.own_stream, work.timeout_s
                    try:
                        work.work = call(work.array, stream=own, timeout=timeout_s, async_op=True)
                    except Exception as error:
                        work.failure = error
                self._waiting.clear()
        except BaseException as error:
            self.failure = error
            self._all.abort(str(error))
        finally:
            self._ended.set()

    def _shared_id(self) -> bytes:
        """Exchange the id asynchronously, so that the deadlock check sees no blocked rank."""
        made = _core.new_nccl_id() if self._op == "send" else bytes(ID_BYTES)
        shared = np.frombuffer(made, np.uint8).copy()
        letter = getattr(self._mail, self._op)(shared, **self._to, async_op=True)
        while not letter.is_done():
            if self._is_closed:
                raise FastdistError("the communicator is closed")
            time.sleep(_POLL_S)
        try:
            letter.wait()
        except CollectiveTimeoutError:
            raise self._late(self._timeout_s) from None
        return bytes(shared)

    def _late(self, timeout_s: float) -> CollectiveTimeoutError:
        return CollectiveTimeoutError(
            f"{self._op} has not begun after {timeout_s:g} s: rank {self._peer} has not called its "
            "part",
            (self._peer,),
        )
