"""Works: the results of a process group's asynchronous calls."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import DistBackendError
from torch.distributed import Work as TorchWork

from fastdist.collectives.types import Work
from fastdist.errors import FastdistError

_FOREVER = timedelta(0)
_making_future = threading.Lock()


class Done(TorchWork):
    """A call that has succeeded: the tensors that it has written, and the source of a message."""

    def __init__(self, tensors: Sequence[torch.Tensor], source: int = -1) -> None:
        super().__init__()
        self._tensors = tensors
        self._source = source

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        return True

    is_completed = is_success = wait

    def get_future(self) -> torch.futures.Future[Any]:
        future = _new_future(self._tensors)
        future.set_result(list(self._tensors))
        return future

    def exception(self) -> None: ...

    def result(self) -> list[torch.Tensor]:
        return list(self._tensors)

    def source_rank(self) -> int:
        return self._source

    _source_rank = source_rank

    def synchronize(self) -> None: ...


class Pending(TorchWork):
    """A call that may still run, and writes `tensors`.

    `finish` is called once after the call, in the first thread that waits. The completer is the
    thread that completes the futures of works.
    """

    # Class attributes as defaults: most works set none, which makes them cheaper.
    _outcome: Any = None
    _error: Exception | None = None
    _future: torch.futures.Future[Any] | None = None
    _gpu: torch.device | None = None
    _finished: torch.cuda.Event | None = None  # on the stream that `finish` ran on
    _lock: threading.Lock | None = None  # of `_finish`, if there is one
    _is_asked = False  # for its future

    def __init__(
        self,
        work: Work,
        tensors: Sequence[torch.Tensor],
        finish: Callable[[], None] | None,
        completer: Completer,
    ) -> None:
        TorchWork.__init__(self)
        self._work: Any = work  # on GPUs a StreamWork
        self._tensors = tensors
        self._completer = completer
        if tensors and tensors[0].is_cuda:
            self._gpu = tensors[0].device
        if finish is not None:
            self._finish: Callable[[], None] | None = finish
            self._lock = threading.Lock()
            self._make_future()  # so that `finish` is called even if nobody waits

    def wait(self, timeout: timedelta = _FOREVER) -> bool:
        """Wait for the end of the call; for GPU tensors, make the current stream wait."""
        self._await(timeout.total_seconds() if timeout > _FOREVER else None)
        if self._is_asked and self._gpu is None:
            self._await_future()
        return True

    def _await(self, timeout_s: float | None, **options: bool) -> None:
        try:
            self._outcome = self._work.wait(timeout_s, **options)
        except FastdistError as error:
            failure = DistBackendError(str(error))
            if self._work.is_done():
                self._error = failure
            raise failure from error
        except Exception as error:
            self._error = error
            raise
        if self._lock is None:
            return
        with self._lock:
            finish, self._finish = self._finish, None
            if finish is not None:
                try:
                    with torch.inference_mode(self._tensors[0].is_inference()):
                        finish()
                    self._mark_finished()
                except Exception as error:
                    self._error = error
            if self._error is not None:
                raise self._error
        if self._finished is not None:
            self._finished.wait(torch.cuda.current_stream(self._gpu))

    def _mark_finished(self) -> None:
        """Record an event on the GPU's current stream, after the work that writes the tensors."""
        if self._gpu is None:
            return
        stream = torch.cuda.current_stream(self._gpu)
        for tensor in self._tensors:
            tensor.record_stream(stream)
        self._finished = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._finished.record(stream)

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensors that the call writes; it has them after `wait`."""
        future = self._make_future()
        self._is_asked = True
        if self._gpu is None and self._work.is_done():
            self._await_future()
        return future

    def _await_future(self) -> None:
        """Wait until the completer has completed the future, unless this is its thread."""
        if self._future is not None and not self._completer.runs_here():
            with contextlib.suppress(Exception):  # of the call, which `wait` raises
                self._future.wait()

    def _make_future(self) -> torch.futures.Future[Any]:
        with _making_future:
            if self._future is not None:
                return self._future
            self._future = _new_future(self._tensors)
        is_here = self._work.is_done() if self._gpu is None else self._work.is_enqueued()
        if is_here:
            self.complete(self._future)
        else:
            self._completer.complete(self, self._future)
        return self._future

    def complete(self, future: torch.futures.Future[Any]) -> None:
        """Complete the future when the call has ended, or on a GPU when it is enqueued."""
        try:
            if self._gpu is None:
                self._await(None)
                future.set_result(list(self._tensors))
                return
            # The future records an event on the current stream: on the call's own, so that it waits
            # for no call on another. The context manager for streams takes 10 us, this 3.
            before = torch.cuda.current_stream(self._gpu)
            torch.cuda.set_stream(_stream_of(self._work.stream, self._gpu))
            try:
                self._await(None, compared=False)
                future.set_result(list(self._tensors))
            finally:
                torch.cuda.set_stream(before)
        except Exception as error:
            future.set_exception(error)

    def is_completed(self) -> bool:
        """Return True if the call has ended, successfully or not."""
        if not self._work.is_done():
            return False
        with contextlib.suppress(Exception):  # which `exception` returns
            self._await(None)
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        self.is_completed()
        return self._error

    def result(self) -> list[torch.Tensor]:
        return list(self._tensors)

    def source_rank(self) -> int:
        """Return the rank that a message came from; -1 before the end of the call."""
        return getattr(self._outcome, "source", -1)

    _source_rank = source_rank

    def synchronize(self) -> None:
        self.wait()


class Completer:
    """A thread that waits for calls in order, and completes their futures.

    It also runs the callbacks added by `then`. If a callback waits for a later call of the group,
    a second thread completes that call's future.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Pending, Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._inner: Completer | None = None  # for calls that this thread's callbacks make
        self._is_closed = False
        self._lock = threading.Lock()

    def complete(self, work: Pending, future: torch.futures.Future[Any]) -> None:
        if self._is_closed:  # so all calls have ended
            work.complete(future)
            return
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, daemon=True, name="fastdist futures"
                )
                self._thread.start()
            if not self.runs_here():
                self._queue.put((work, future))
                return
            self._inner = inner = self._inner or Completer()
        inner.complete(work, future)

    def runs_here(self) -> bool:
        """Return True in a thread that completes futures."""
        is_inner = self._inner is not None and self._inner.runs_here()
        return is_inner or threading.current_thread() is self._thread

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, future = item
            work.complete(future)
            del item, work, future

    def close(self) -> None:
        """Complete all futures, after their calls have ended, and stop the thread."""
        self._is_closed = True
        self._queue.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        if self._inner is not None:
            self._inner.close()


@functools.lru_cache(maxsize=64)
def _stream_of(handle: int, gpu: torch.device) -> torch.cuda.Stream:
    return torch.cuda.ExternalStream(handle, gpu)  # type: ignore[no-untyped-call]


def _new_future(tensors: Sequence[torch.Tensor]) -> torch.futures.Future[Any]:
    gpus: list[int | str | torch.device] = list({t.device for t in tensors if t.is_cuda})
    return torch.futures.Future(devices=gpus)
