"""The coordinator's thread that sends calls to workers."""

from __future__ import annotations

import functools
import itertools
import logging
import pickle
import threading
import time
import uuid
import weakref
from collections.abc import Sequence
from typing import Any

from fastdist._config import settings
from fastdist.errors import FastdistError, UnavailableError
from fastdist.link.connections import Connections
from fastdist.link.stream import require_whole
from fastdist.link.wake import Wake
from fastdist.ps.coordinator.backlog import MAX_LOST_WORKERS, Backlog, Call
from fastdist.ps.coordinator.messages import (
    CALL,
    HELLO,
    TO_COORDINATOR,
    WEIGHT,
    Kind,
    Outcome,
    unpack,
)
from fastdist.ps.coordinator.remote_value import RemoteTraceback
from fastdist.ps.coordinator.shipping import Definitions
from fastdist.ps.coordinator.worker_link import Group, WorkerLink
from fastdist.ps.wire.process import allow_open_files

_numbers = itertools.count(1)  # of calls, unique in the process: steps on servers use them
_log = logging.getLogger(__name__)


class Dispatcher:
    """Keeps every worker busy with the calls of a backlog, until it is closed.

    If the strategy is synchronous, calls are sent in groups, one to each worker, that take their
    steps together. Calls fail after FASTDIST_RENDEZVOUS_TIMEOUT_S without any worker.
    """

    # Uses of the strategy: worker_addresses, definitions, synchronous.
    def __init__(self, strategy: Any, backlog: Backlog, seed: int) -> None:
        self.state_update = b""  # for every worker, with its next call
        self.reports: list[bytes] = []  # state updates from workers
        self._backlog = backlog
        self._definitions: Definitions = strategy.definitions
        self._synchronous: bool = strategy.synchronous
        self._group = Group()  # stays empty unless synchronous
        self._timeout_s = settings().rendezvous_timeout_s
        self._seed = seed
        addresses: Sequence[str] = strategy.worker_addresses
        self._job = uuid.uuid4().bytes
        self._began = time.time_ns()
        allow_open_files(2 * len(addresses) + 100, f"{len(addresses)} workers")
        self._wake = Wake()
        weakref.finalize(self, self._wake.close)
        self._connections = Connections(addresses, self._wake, has_heartbeats=True)
        self.links = [WorkerLink(self._connections[i]) for i in range(len(addresses))]
        backlog.on_wait = functools.partial(self.wake, is_awaited=True)
        self._worker_seen_at = time.monotonic()
        self._has_room = True  # a worker can take another call
        self._is_closing = False
        self._is_end = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="fastdist dispatcher")
        self._thread.start()

    def wake(self, *, is_awaited: bool = False) -> None:
        """Notify the thread of a new call, or of a thread that waits for calls."""
        if (self._has_room or is_awaited) and not self._is_closing:
            self._wake.set()

    def close(self, *, is_end: bool) -> None:
        """Disconnect from the workers, which end with the job, or wait for another coordinator."""
        if self._is_closing:
            return
        self._is_end = is_end
        self._is_closing = True
        self._wake.set()
        if is_end:  # otherwise the garbage collector calls this, in any thread
            self._thread.join()

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        failure = FastdistError("the coordinator was closed, or is no longer referenced")
        try:
            while not self._is_closing:
                self._poll_once()
        except BaseException as error:  # pass it to threads that wait for calls
            failure = FastdistError(f"the coordinator's dispatcher has failed: {error!r}")
            failure.__cause__ = error
        finally:
            self._backlog.close(failure)
            for link in self.links:
                if link.connection.is_connected and self._is_end:
                    link.send(Kind.END)
            self._connections.close(linger_s=1.0)

    def _poll_once(self) -> None:
        for index, has_changed in self._connections.poll():
            link = self.links[index]
            for frames in link.connection.receive():
                try:
                    require_whole(frames, "a worker's message")
                    self._handle_message(link, [bytes(frame) for frame in frames])
                except (FastdistError, ValueError, MemoryError) as error:
                    self._reject_worker(link, str(error))
            if has_changed:  # a worker drops calls that arrive before the HELLO
                self._drop_worker(link)
                if link.connection.is_connected:
                    link.send(Kind.HELLO, 0, self._job, HELLO.pack(self._began, self._seed, index))
        while self._definitions.forgotten:
            number = self._definitions.forgotten.pop()
            for link in self.links:
                link.forget(number)
        self._assign_calls()
        self._require_workers()

    def _handle_message(self, link: WorkerLink, message: Sequence[bytes]) -> None:
        kind, number, frames = unpack(message, TO_COORDINATOR)
        if kind is Kind.READY:
            link.is_ready = True
            link.is_replaced = False
        elif kind is Kind.REPLACED:
            link.is_replaced = True
            self._drop_worker(link)
            link.last_error = "it belongs to a coordinator that began later"
            link.connection.retry_later()  # until that one is gone
        elif kind is Kind.REJECTED:
            self._reject_worker(link, f"it received {frames[0].decode(errors='replace')}")
        elif kind is Kind.RESULT:
            self._handle_result(link, number, frames)
        elif kind is Kind.STAGED:
            self._group.staged(number, WEIGHT.unpack(frames[0])[0])
        elif kind is Kind.COMMITTED:
            self._group.committed(number, frames[0])

    def _reject_worker(self, link: WorkerLink, why: str) -> None:
        """Send a worker no calls until it reconnects: it does not understand this coordinator."""
        self._drop_worker(link)
        link.last_error = why
        _log.warning("the worker at %s is not used: %s", link.address, why)

    def _handle_result(self, link: WorkerLink, number: int, frames: Sequence[bytes]) -> None:
        outcome, content, state_update = Outcome(frames[0][0]), frames[1], frames[2]
        call = link.end_call(number)
        if call is None:
            return
        if state_update:
            self.reports.append(state_update)
        if outcome is Outcome.ABORTED:
            self._backlog.give_back([call])
        elif outcome is Outcome.RETURNED:
            self._backlog.finish(call, content)
        else:
            self._backlog.finish(call, _error_in(content, link.address))
        self._group.leave(number)

    def _drop_worker(self, link: WorkerLink) -> None:
        numbers, calls = list(link.calls), list(link.calls.values())
        link.mark_lost()
        if calls:  # only the first one was running
            calls[0].lost_workers += 1
            if calls[0].lost_workers >= MAX_LOST_WORKERS:
                error = UnavailableError(
                    f"{MAX_LOST_WORKERS} workers were lost while they ran this function, the last "
                    f"at {link.address}: this function probably crashes its worker"
                )
                self._backlog.finish(calls.pop(0), error)
        self._backlog.give_back(calls)
        for number in numbers:
            self._group.lose(number)

    # --- handing out ----------------------------------------------------------------------------

    def _assign_calls(self) -> None:
        # Set before the backlog is read: a call that is added meanwhile must wake this thread.
        self._has_room = True
        ready = [link for link in self.links if link.is_ready]
        if self._synchronous:
            waiting = len(self._backlog.waiting)
            is_due = waiting >= len(ready) or self._backlog.is_awaited
            if ready and not self._group.links and is_due:
                self._assign_group(ready[:waiting])
            return
        while ready:
            link = min(ready, key=lambda link: (not link.has_room, len(link.calls)))
            self._has_room = link.has_room
            call = self._backlog.take() if self._has_room else None
            if call is None:
                return
            number = next(_numbers)
            self._send_call(link, call, number, number, 1)

    def _assign_group(self, links: Sequence[WorkerLink]) -> None:
        pairs = [(link, call) for link in links if (call := self._backlog.take()) is not None]
        numbers = [next(_numbers) for _ in pairs]
        for (link, call), number in zip(pairs, numbers, strict=True):
            self._group.links[number] = link
            self._send_call(link, call, number, numbers[0], len(pairs))

    def _send_call(self, link: WorkerLink, call: Call, number: int, group: int, size: int) -> None:
        latest = self.state_update
        state_update = b"" if link.state_update == latest else latest
        link.state_update = latest
        for definition in (call.function, *call.needs):
            link.define(definition)
        link.begin_call(number, call)
        has_state = call.function.has_state or any(needed.has_state for needed in call.needs)
        header = CALL.pack(call.function.number, group, size, has_state)
        link.send(Kind.CALL, number, header, call.arguments, state_update)

    def _require_workers(self) -> None:
        now = time.monotonic()
        if not len(self._backlog) or any(link.is_ready for link in self.links):
            self._worker_seen_at = now
        elif now - self._worker_seen_at > self._timeout_s:
            self._worker_seen_at = now
            places = "; ".join(f"{link.address}: {link.last_error}" for link in self.links)
            self._backlog.fail(
                UnavailableError(f"no worker could be reached for {self._timeout_s:g} s: {places}")
            )


def _error_in(content: bytes, address: str) -> Exception:
    error: Exception
    try:
        error, text = pickle.loads(content)
        if not isinstance(error, Exception):
            raise TypeError(f"{type(error).__name__} is not an exception")
    except BaseException as problem:  # unpickling runs users' code
        error, text = FastdistError(f"a worker's error cannot be unpickled here: {problem!r}"), ""
    if isinstance(error, StopIteration):
        error = FastdistError("StopIteration: the function called next() on an exhausted iterator")
    error.__cause__ = RemoteTraceback(f"worker at {address}:\n{text}")
    return error
