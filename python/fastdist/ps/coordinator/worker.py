"""A worker: runs the functions that a coordinator sends, one after another, in this thread."""

from __future__ import annotations

import contextlib
import os
import pickle
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import cloudpickle  # type: ignore[import-untyped]
import zmq

from fastdist.errors import FastdistError
from fastdist.ps.coordinator.messages import (
    CALL,
    HELLO,
    TO_WORKER,
    WEIGHT,
    Kind,
    Outcome,
    pack,
    set_options,
    unpack,
)
from fastdist.ps.coordinator.shipping import Library
from fastdist.ps.server.listening import admit
from fastdist.ps.wire.access import guard
from fastdist.ps.wire.keys import Keys


class Stopped(SystemExit):
    """This task is told to end."""


_PLAIN = frozenset((type(None), bool, int, float, str, bytes))


_OF_STEPS = (Kind.LEAD, Kind.GO, Kind.ABORT)


class StepAborted(BaseException):
    """Another worker was lost in a step of all; not for users' functions to catch."""


class _Message(NamedTuple):
    identity: bytes
    kind: Kind
    number: int
    frames: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Turn:
    """A call as the worker's host sees it.

    Attributes:
        number: no other call of the job, and no repetition of this one, has it.
        group: of calls that take their steps together; equal to `number` where it is alone.
        size: calls in the group.
        has_state: whether it refers to values that workers share.
        commit: ends a step of the group: the weight of the own gradients, NaN where they could not
            be staged, and a function that commits everybody's, given the sum of weights; called on
            one of the workers, of those with NaN if there are any. What it raises, all get.
        is_last: whether no further call waits here already.
    """

    number: int
    group: int
    size: int
    has_state: bool
    commit: Callable[[float, Callable[[float], None]], None]
    is_last: Callable[[], bool]


class Host(Protocol):
    """What a worker needs of the strategy whose functions it runs."""

    def begin(self, index: int, seed: int) -> None:
        """A coordinator has come, which knows nothing of those before it."""

    def parts(self, made: Any) -> Sequence[Any]:
        """What functions may refer to in something that was made for them."""

    def take_news(self, news: bytes) -> None:
        """Something has changed on the coordinator."""

    def run(self, call: Callable[[], Any], turn: Turn) -> Any:
        """Call it, with everything around that a function needs."""

    def news(self) -> bytes:
        """What the coordinator has to know after a call; nothing: empty."""


class Worker:
    """Serves one coordinator at a time, the last that has begun.

    Args:
        address: where to listen, as ZeroMQ names it.
        keys: of the job. What a coordinator sends is code: nobody else may.
        host: runs the functions.

    Raises:
        zmq.ZMQError: the address cannot be bound.
    """

    def __init__(self, address: str, keys: Keys, host: Host) -> None:
        self._host = host
        self._library = Library(host.parts)
        self._inbox: deque[_Message] = deque()
        self._coordinator = b""
        self._job = b""
        self._began = 0
        self._pid = os.getpid()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        set_options(self._socket)
        self._authenticator = admit(self._context, keys)
        guard(self._socket, keys)
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            self.close()
            raise
        self.address: str = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def close(self) -> None:
        """Stop listening."""
        self._authenticator.stop()
        self._socket.close(linger=1000)
        self._context.term()

    def serve(self) -> None:
        """Run functions until the coordinator ends the job."""
        while True:
            identity, kind, number, frames = self._next()
            if kind is Kind.HELLO:
                self._greet(identity, frames)
            elif identity != self._coordinator:  # an earlier one, or a connection that was lost
                continue
            elif kind is Kind.END:
                return
            elif kind is Kind.DEFINE:
                self._library.add(number, frames[0])
            elif kind is Kind.FORGET:
                self._library.forget(number)
            elif kind is Kind.CALL:
                self._call(number, frames)

    def _next(self) -> _Message:
        while not self._inbox:
            self._receive()
        self._drain()
        return self._inbox.popleft()

    def _drain(self) -> None:
        """Take what has come."""
        with contextlib.suppress(zmq.Again):
            while True:
                self._receive(zmq.NOBLOCK)

    def _receive(self, flags: int = 0) -> None:
        identity, *frames = self._socket.recv_multipart(flags)
        try:
            message = _Message(identity, *unpack(frames, TO_WORKER))
        except FastdistError as error:
            self._socket.send_multipart([identity, pack(Kind.REFUSED), str(error).encode()])
            return
        if self._is_the_last_of_calls(message):
            # Those of a connection that was lost are somebody else's by now.
            kept = [other for other in self._inbox if other.identity != self._coordinator]
            self._inbox = deque(kept)
        self._inbox.append(message)

    def _is_the_last_of_calls(self, message: _Message) -> bool:
        """Whether the job ends, or a coordinator comes that is not earlier than the one here."""
        if message.kind is Kind.HELLO:
            return bool(HELLO.unpack(message.frames[1])[0] >= self._began)
        return message.kind is Kind.END and message.identity == self._coordinator

    def _greet(self, identity: bytes, frames: Sequence[bytes]) -> None:
        job, about = frames
        began, seed, index = HELLO.unpack(about)
        if began < self._began:
            self._socket.send_multipart([identity, pack(Kind.TAKEN)])
            return
        if job != self._job:
            if self._job:
                self._send(Kind.TAKEN)
            self._job, self._began = job, began
            self._library.clear()
            self._host.begin(index, seed)
        self._coordinator = identity
        self._send(Kind.READY)

    def _send(self, kind: Kind, number: int = 0, *frames: bytes) -> None:
        self._socket.send_multipart([self._coordinator, pack(kind, number), *frames])

    def _call(self, number: int, frames: Sequence[bytes]) -> None:
        about, arguments, news = frames
        function, group, size, has_state = CALL.unpack(about)

        def call() -> Any:
            fn = self._library.get((function, None))
            args, kwargs = self._library.loads(arguments)
            return fn(*args, **kwargs)

        def commit(weight: float, lead: Callable[[float], None]) -> None:
            self._step(number, weight, lead)

        turn = Turn(number, group, size, has_state, commit, self._is_last)
        outcome, content = Outcome.RETURNED, b""
        try:
            if news:
                self._host.take_news(news)
            content = _dumps(self._host.run(call, turn))
        except StepAborted:
            outcome = Outcome.ABORTED
        except (Stopped, KeyboardInterrupt):
            raise
        except BaseException as error:  # a function must not end its worker by sys.exit
            outcome, content = Outcome.RAISED, _pickled(error)
        if os.getpid() != self._pid:
            os._exit(0)  # the function has forked, and its child came here
        self._send(Kind.RESULT, number, bytes([outcome]), content, self._host.news())

    def _is_last(self) -> bool:
        self._drain()
        return not any(message.kind is Kind.CALL for message in self._inbox)

    def _step(self, number: int, weight: float, lead: Callable[[float], None]) -> None:
        """The gradients of this call are staged: wait for the others of its group."""
        self._send(Kind.STEP, number, WEIGHT.pack(weight))
        set_aside: list[_Message] = []
        try:
            while True:
                while not self._inbox:
                    self._receive()
                message = self._inbox.popleft()
                if self._is_the_last_of_calls(message):  # of steps, too
                    set_aside = [message]
                    raise StepAborted
                identity, kind, about, frames = message
                if (identity, about) != (self._coordinator, number) or kind not in _OF_STEPS:
                    set_aside.append(message)
                elif kind is Kind.GO:
                    _require_led(frames[0])
                    return
                elif kind is Kind.ABORT:
                    raise StepAborted
                else:
                    self._lead(number, WEIGHT.unpack(frames[0])[0], lead)
        finally:
            self._inbox.extendleft(reversed(set_aside))

    def _lead(self, number: int, total: float, lead: Callable[[float], None]) -> None:
        try:
            lead(total)
        except Exception as error:  # the others wait
            self._send(Kind.LED, number, f"{type(error).__name__}: {error}".encode())
            raise
        self._send(Kind.LED, number, b"")


def _require_led(error: bytes) -> None:
    if error:
        raise FastdistError(
            "the step of all workers was not taken, since the one that was to commit it got "
            + error.decode(errors="replace")
        )


def _dumps(value: Any) -> bytes:
    """A pickle; cloudpickle takes its time to begin."""
    if type(value) in _PLAIN:
        return pickle.dumps(value)
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:
        raise TypeError(
            f"the function returned a {type(value).__name__} that cannot be pickled: {error}"
        ) from error


def _pickled(error: BaseException) -> bytes:
    """An error and its traceback, or as much of them as can be pickled."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    error = error.with_traceback(None)
    try:
        if not isinstance(error, Exception):
            raise TypeError("raised on the coordinator it would end that")
        blob = cloudpickle.dumps((error, text))
        read, _ = pickle.loads(blob)  # some can be pickled, and not read
        if type(read) is not type(error):
            raise TypeError("it becomes another one")
        return bytes(blob)
    except Exception:
        stand_in = FastdistError(f"{type(error).__name__}: {error}")
        return bytes(cloudpickle.dumps((stand_in, text)))
