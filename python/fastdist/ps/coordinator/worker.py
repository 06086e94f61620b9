"""A worker: runs the functions that a coordinator sends, one after another, in one thread."""

from __future__ import annotations

import functools
import os
import pickle
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]

from fastdist.errors import FastdistError
from fastdist.link.listener import Listener
from fastdist.link.stream import require_whole
from fastdist.ps.coordinator.messages import (
    CALL,
    HELLO,
    TO_WORKER,
    WEIGHT,
    Kind,
    Outcome,
    pack,
    unpack,
)
from fastdist.ps.coordinator.shipping import Library

_PLAIN = frozenset((type(None), bool, int, float, str, bytes))
_STEP_KINDS = (Kind.COMMIT, Kind.RESUME, Kind.ABORT)


class Stopped(SystemExit):
    """Raised when a signal ends this task."""


class StepAborted(BaseException):
    """Raised in a step of all workers if one is lost; users' functions must not catch it."""


class _Message(NamedTuple):
    connection: int
    kind: Kind
    number: int
    frames: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class CallContext:
    """A call as the worker's host sees it."""

    group: int  # of the calls that take their steps together; unique, also among repetitions
    size: int  # calls in the group
    place: int  # of this call in their order, from 0; there may be gaps
    has_state: bool  # the call refers to values that workers share
    # Ends a step of the group. Takes the weight of this worker's gradients, NaN if they could not
    # be staged, and a function that commits the gradients of all workers, given the sum of weights.
    # One worker calls that function, one with NaN if there is any; all workers get its error.
    commit: Callable[[float, Callable[[float], None]], None]
    is_last: Callable[[], bool]  # returns True if no further call is waiting on this worker


class Worker:
    """Serves one coordinator at a time: of those that are connected, the one that began last.

    Who has the job's secret sends code.
    """

    # The host is a `ServedWorker`, which is a layer above; used are begin_job, reconnect,
    # apply_state_update, run and state_update.
    def __init__(self, address: str, host: Any) -> None:
        self._host = host
        self._library = Library()
        self._inbox: deque[_Message] = deque()
        self._coordinator = 0  # its connection
        self._job = b""
        self._began = 0
        self._pid = os.getpid()
        self._listener = Listener(address, breaks_if_stuck=False)

    def serve(self) -> None:
        """Run functions until the coordinator ends the job; then stop listening."""
        try:
            while self._handle_next():
                pass
        finally:
            self._listener.close()

    def _handle_next(self) -> bool:
        """Handle a message; return False if it ends the job."""
        while not self._inbox:
            self._receive()
        self._drain()
        connection, kind, number, frames = self._inbox.popleft()
        if kind is Kind.HELLO:
            self._handle_hello(connection, frames)
        elif connection != self._coordinator:  # an earlier coordinator, or a lost connection
            return True
        elif kind is Kind.DEFINE:
            self._library.add(number, frames[0])
        elif kind is Kind.FORGET:
            self._library.forget(number)
        elif kind is Kind.CALL:
            self._call(number, frames)
        return kind is not Kind.END

    def _drain(self) -> None:
        while self._receive(0.0):
            pass

    def _receive(self, timeout_s: float | None = None) -> bool:
        """Receive a message; return False if none has arrived in time."""
        received = self._listener.receive(timeout_s)
        if received is None:
            return False
        connection, frames = received
        try:
            require_whole(frames, "the coordinator's message")
            message = _Message(connection, *unpack([bytes(each) for each in frames], TO_WORKER))
        except (FastdistError, MemoryError) as error:
            self._listener.send(connection, pack(Kind.REJECTED), str(error).encode(), waits=True)
            return True
        if self._ends_calls(message):
            # Other workers run the remaining calls by now.
            kept = (other for other in self._inbox if other.connection != self._coordinator)
            self._inbox = deque(kept)
        self._inbox.append(message)
        return True

    def _ends_calls(self, message: _Message) -> bool:
        """Return True if a message ends the job, or comes from a coordinator no older than ours."""
        if message.kind is Kind.HELLO:
            return self._may_replace(HELLO.unpack(message.frames[1])[0])
        return message.kind is Kind.END and message.connection == self._coordinator

    def _handle_hello(self, connection: int, frames: Sequence[bytes]) -> None:
        job, header = frames
        began, seed, index = HELLO.unpack(header)
        if not self._may_replace(began):
            self._listener.send(connection, pack(Kind.REPLACED), waits=True)
            return
        if job != self._job:
            if self._job:
                self._send(Kind.REPLACED)
            self._job, self._began = job, began
            self._library = Library()
            self._host.begin_job(index, seed)
        else:
            self._host.reconnect()
        self._coordinator = connection
        self._send(Kind.READY)

    def _may_replace(self, began: int) -> bool:
        """Return True if a coordinator that began at this time may take over from the present one.

        The clock of a chief that was started again may be behind the clock of the one before.
        """
        return began >= self._began or not self._send(Kind.READY)

    def _send(self, kind: Kind, number: int = 0, *frames: bytes) -> bool:
        """Send a message to the coordinator; return False if it is gone."""
        header = pack(kind, number)
        return self._listener.send(self._coordinator, header, *frames, waits=True) is not None

    def _call(self, number: int, frames: Sequence[bytes]) -> None:
        header, arguments, state_update = frames
        function, group, size, has_state = CALL.unpack(header)

        def call() -> Any:
            fn = self._library.get((function, None))
            args, kwargs = self._library.loads(arguments)
            return fn(*args, **kwargs)

        commit = functools.partial(self._wait_for_step, number)
        context = CallContext(group, size, number - group, has_state, commit, self._is_last)
        outcome, content = Outcome.RETURNED, b""
        try:
            if state_update:
                self._host.apply_state_update(state_update)
            content = _pickle_result(self._host.run(call, context))
        except StepAborted:
            outcome = Outcome.ABORTED
        except (Stopped, KeyboardInterrupt):
            raise
        except BaseException as error:  # includes SystemExit: sys.exit must not end the worker
            outcome, content = Outcome.RAISED, _pickle_error(error)
        if os.getpid() != self._pid:
            os._exit(0)  # this is a child that the function has forked
        self._send(Kind.RESULT, number, bytes([outcome]), content, self._host.state_update())

    def _is_last(self) -> bool:
        self._drain()
        return not any(message.kind is Kind.CALL for message in self._inbox)

    def _wait_for_step(
        self, number: int, weight: float, commit_all: Callable[[float], None]
    ) -> None:
        """Wait for the group's step, after this call's gradients have been staged."""
        self._send(Kind.STAGED, number, WEIGHT.pack(weight))
        set_aside: list[_Message] = []
        try:
            while True:
                while not self._inbox:
                    self._receive()
                message = self._inbox.popleft()
                if self._ends_calls(message):
                    set_aside = [message]
                    raise StepAborted
                connection, kind, call_number, frames = message
                is_ours = (connection, call_number) == (self._coordinator, number)
                if not is_ours or kind not in _STEP_KINDS:
                    set_aside.append(message)
                elif kind is Kind.RESUME:
                    if frames[0]:
                        raise FastdistError(
                            "the step of all workers was not taken, because the worker that had to "
                            f"commit it failed: {frames[0].decode(errors='replace')}"
                        )
                    return
                elif kind is Kind.ABORT:
                    raise StepAborted
                else:
                    self._commit(number, WEIGHT.unpack(frames[0])[0], commit_all)
        finally:
            self._inbox.extendleft(reversed(set_aside))

    def _commit(self, number: int, total: float, commit_all: Callable[[float], None]) -> None:
        try:
            commit_all(total)
        except Exception as error:  # the other workers wait for the outcome
            self._send(Kind.COMMITTED, number, f"{type(error).__name__}: {error}".encode())
            raise
        self._send(Kind.COMMITTED, number, b"")


def _pickle_result(value: Any) -> bytes:
    """Pickle a result; cloudpickle is slow to start, so simple types use pickle."""
    if type(value) in _PLAIN:
        return pickle.dumps(value)
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise TypeError(
            f"the function returned a {type(value).__name__} that cannot be pickled: {error}"
        ) from error


def _pickle_error(error: BaseException) -> bytes:
    """Pickle an error and its traceback, or as much of them as possible."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    error = error.with_traceback(None)
    try:
        if not isinstance(error, Exception):
            raise TypeError("it would end the coordinator's process")
        blob = cloudpickle.dumps((error, text))
        read, _ = pickle.loads(blob)  # some errors can be pickled but not unpickled
        if type(read) is not type(error):
            raise TypeError("its type changes")
        return bytes(blob)
    except Exception:
        stand_in = FastdistError(f"{type(error).__name__}: {error}")
        return bytes(cloudpickle.dumps((stand_in, text)))
