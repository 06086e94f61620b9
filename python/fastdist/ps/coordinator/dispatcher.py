"""Hands calls to workers: a thread of the coordinator."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import pickle
import threading
import time
import uuid
import weakref
from collections.abc import Sequence

import zmq

from fastdist.errors import FastdistError, UnavailableError
from fastdist.ps.coordinator.backlog import MOST_LOSSES, Backlog, Call
from fastdist.ps.coordinator.group import Group
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
from fastdist.ps.coordinator.worker_link import WorkerLink
from fastdist.ps.wire.keys import Keys

_LOOK_S = 1.0
_numbers = itertools.count(1)  # of calls; servers know steps by them, whichever coordinator's
_log = logging.getLogger(__name__)


class Dispatcher:
    """Keeps every worker busy with the calls of a backlog, as long as it is not closed.

    Args:
        addresses: of the workers, as ZeroMQ names them.
        keys: of the job.
        backlog: the calls.
        definitions: what they refer to.
        synchronous: calls go out in groups, one to each worker, whose steps are taken together.
        timeout_s: without any worker for so long, calls fail.
        seed: of the workers' random numbers.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        keys: Keys,
        backlog: Backlog,
        definitions: Definitions,
        *,
        synchronous: bool,
        timeout_s: float,
        seed: int,
    ) -> None:
        self.news = b""  # for every worker, with its next call
        self.news_number = 0
        self.reports: list[bytes] = []  # news of workers
        self.is_replaced = False  # a later coordinator has come
        self._backlog = backlog
        self._definitions = definitions
        self._group = Group() if synchronous else None
        self._timeout_s = timeout_s
        self._seed = seed
        self._job = uuid.uuid4().bytes
        self._began = time.time_ns()
        self._context = zmq.Context()
        self._links = [WorkerLink(self._context, address, keys) for address in addresses]
        self._poller = zmq.Poller()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._wake)
        self._poller.register(self._wake, zmq.POLLIN)
        for link in self._links:
            self._watch(link)
        backlog.when_wanted = functools.partial(self.wake, is_waited_for=True)
        self._seen_at = time.monotonic()
        self._is_hungry = True  # a worker has room for a call
        self._is_closing = False
        self._is_end = False
        self._thread = threading.Thread(target=self._run, daemon=True, name="fastdist dispatcher")
        self._thread.start()

    def wake(self, *, is_waited_for: bool = False) -> None:
        """There is a new call, or somebody waits for those that there are."""
        if (self._is_hungry or is_waited_for) and not self._is_closing:
            os.eventfd_write(self._wake, 1)

    def close(self, *, is_end: bool) -> None:
        """Leave the workers.

        Args:
            is_end: the job has ended, and so do they; else they wait for another coordinator.
        """
        if self._is_closing:
            return
        self._is_end = is_end
        self._is_closing = True
        os.eventfd_write(self._wake, 1)
        if is_end:  # else the garbage collector calls, in any thread
            self._thread.join()

    @property
    def workers(self) -> list[int]:
        """The indexes of the workers that are there now."""
        return [index for index, link in enumerate(self._links) if link.is_ready]

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._turn()
        except BaseException as error:  # nobody else would tell those who wait
            failure = FastdistError(f"the coordinator's dispatcher has failed: {error!r}")
            failure.__cause__ = error
            self._backlog.close(failure)
        else:
            self._backlog.close(FastdistError("the coordinator was closed, or nobody held it"))
        finally:
            for link in self._links:
                if link.is_connected and self._is_end:
                    link.send(Kind.END)
                link.close()
            self._context.term()

    def _turn(self) -> None:
        ready = dict(self._poller.poll(int(1000 * _LOOK_S)))
        if self._wake in ready:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake)
        for index, link in enumerate(self._links):
            if link.monitor in ready or link.socket in ready:
                self._hear(index, link, is_eventful=link.monitor in ready)
            if link.has_given_up:
                self._poller.unregister(link.socket)
                self._poller.unregister(link.monitor)
                link.reopen()
                self._watch(link)
        self._forget()
        self._assign()
        self._require_workers()

    def _watch(self, link: WorkerLink) -> None:
        self._poller.register(link.socket, zmq.POLLIN)
        self._poller.register(link.monitor, zmq.POLLIN)

    def _hear(self, index: int, link: WorkerLink, *, is_eventful: bool) -> None:
        connected, lost = link.events() if is_eventful else (False, False)
        for frames in link.receive():  # also what was sent before the connection was lost
            try:
                self._take(link, frames)
            except (FastdistError, ValueError) as error:
                self._refuse(link, str(error))
        if lost or connected:  # a worker drops calls that came before it was greeted
            self._lose(link)
        if connected:
            link.send(Kind.HELLO, 0, self._job, HELLO.pack(self._began, self._seed, index))

    def _take(self, link: WorkerLink, message: Sequence[bytes]) -> None:
        kind, number, frames = unpack(message, TO_COORDINATOR)
        if kind is Kind.READY:
            link.is_ready = True
        elif kind is Kind.TAKEN:
            self.is_replaced = True
            self._lose(link)
            link.trouble = "a coordinator that began later has it"
        elif kind is Kind.REFUSED:
            self._refuse(link, f"it got {frames[0].decode(errors='replace')}")
        elif kind is Kind.RESULT:
            self._take_result(link, number, frames)
        elif self._group is not None and kind is Kind.STEP:
            self._group.arrive(number, WEIGHT.unpack(frames[0])[0])
        elif self._group is not None and kind is Kind.LED:
            self._group.led(number, frames[0])

    def _refuse(self, link: WorkerLink, why: str) -> None:
        """It and this do not understand each other: no calls for it, until it is another one."""
        self._lose(link)
        link.trouble = why
        _log.warning("the worker at %s is not used: %s", link.address, why)

    def _take_result(self, link: WorkerLink, number: int, frames: Sequence[bytes]) -> None:
        outcome, content, news = Outcome(frames[0][0]), frames[1], frames[2]
        call = link.end_call(number)
        if call is None:
            return
        if news:
            self.reports.append(news)
        if outcome is Outcome.ABORTED:
            self._backlog.give_back([call])
        elif outcome is Outcome.RETURNED:
            self._backlog.finish(call, content)
        else:
            self._backlog.finish(call, _error_in(content, link.address))
        if self._group is not None:
            self._group.leave(number)

    def _lose(self, link: WorkerLink) -> None:
        calls = list(link.calls.items())
        link.lose()
        kept = []
        for place, (_, call) in enumerate(calls):
            call.losses += place == 0  # those behind it have not begun
            if call.losses < MOST_LOSSES:
                kept.append(call)
                continue
            self._backlog.finish(
                call,
                UnavailableError(
                    f"{MOST_LOSSES} workers were lost while they ran this function, the last at "
                    f"{link.address}: is it what ends them?"
                ),
            )
        self._backlog.give_back(kept)
        if self._group is not None:
            for number, _ in calls:
                self._group.lose(number)

    # --- handing out ----------------------------------------------------------------------------

    def _assign(self) -> None:
        # Before the backlog is looked at, so that no call comes unnoticed in between.
        self._is_hungry = True
        ready = [link for link in self._links if link.is_ready]
        if self._group is not None:
            waiting = self._backlog.waiting
            if self._group or not waiting or not ready:
                return
            if waiting >= len(ready) or self._backlog.is_wanted:
                self._assign_group(self._group, ready[:waiting])
            return
        while ready:
            link = min(ready, key=lambda link: (not link.has_room, len(link.calls)))
            if not link.has_room:
                self._is_hungry = False
                return
            call = self._backlog.take()
            if call is None:
                return
            number = next(_numbers)
            if not self._send_call(link, call, number, number, 1):
                ready.remove(link)

    def _assign_group(self, group: Group, links: Sequence[WorkerLink]) -> None:
        pairs = [(link, call) for link in links if (call := self._backlog.take()) is not None]
        numbers = [next(_numbers) for _ in pairs]
        for (link, call), number in zip(pairs, numbers, strict=True):
            group.add(number, link)
            if not self._send_call(link, call, number, numbers[0], len(pairs)):
                group.lose(number)

    def _send_call(self, link: WorkerLink, call: Call, number: int, group: int, size: int) -> bool:
        news = b""
        if link.news_number != self.news_number:
            link.news_number, news = self.news_number, self.news
        for definition in (call.function, *call.needs):
            link.define(definition)
        link.begin_call(number, call)
        has_state = call.function.has_state or any(needed.has_state for needed in call.needs)
        about = CALL.pack(call.function.number, group, size, has_state)
        if link.send(Kind.CALL, number, about, call.arguments, news):
            return True
        self._lose(link)
        return False

    def _forget(self) -> None:
        forgotten = self._definitions.forgotten
        while forgotten:
            number = forgotten.pop()
            for link in self._links:
                link.forget(number)

    def _require_workers(self) -> None:
        now = time.monotonic()
        if not len(self._backlog) or any(link.is_ready for link in self._links):
            self._seen_at = now
        elif now - self._seen_at > self._timeout_s:
            self._seen_at = now
            places = "; ".join(f"{link.address}: {link.trouble}" for link in self._links)
            self._backlog.fail(
                UnavailableError(f"no worker could be reached for {self._timeout_s:g} s: {places}")
            )


def _error_in(content: bytes, address: str) -> Exception:
    error: Exception
    try:
        error, text = pickle.loads(content)
        if not isinstance(error, Exception):
            raise TypeError(f"{type(error).__name__} is no error")
    except BaseException as problem:  # what users' errors do when they are read, is theirs
        error, text = FastdistError(f"a worker's error that cannot be read here: {problem!r}"), ""
    if isinstance(error, StopIteration):
        error = FastdistError(
            "StopIteration: the function took more from an iterator than there was"
        )
    error.__cause__ = RemoteTraceback(f"worker at {address}:\n{text}")
    return error
