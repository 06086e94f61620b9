"""A Gloo process group for exchanges of bytes, and the diagnosis of exchanges that fail.

The group is made directly from a store and is private to its owner: it does not affect the user's
own use of torch.distributed.
"""

from __future__ import annotations

import ctypes
import datetime
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fastdist.collectives.engines.c10d import c10d, stay_out_at_exit
from fastdist.collectives.engines.engine import Bytes
from fastdist.collectives.engines.failure_board import Cause, FailureBoard, StoreLostError
from fastdist.errors import (
    ClusterConfigError,
    CollectiveTimeoutError,
    FastdistError,
    PeerFailureError,
)

_LONGEST_S = 1e8
# How long a rank whose call fails waits for the explanations of other ranks.
_GRACE_S = 0.3
_POLL_S = 0.02
FAILURE_POLL_S = 0.5
"""Seconds between two polls of failures by a rank that waits."""
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 20e-6, 2e-3
# Gloo's thread drops its references shortly after the end of an operation.
_RELEASE_S = 0.05
_ADDRESS = re.compile(r"\[([0-9a-fA-F.:%]+)\]:[0-9]+")


class GlooGroup:
    """Connected ranks. Every rank must make the group, and call its methods in the same order.

    Args:
        store: torch's store, with a prefix that only this group uses.
        rank: this rank.
        size: the number of ranks.
        address: address of this machine, reachable from the others.
        board: where the ranks post why they leave.
        poll_failures: called regularly while a rank waits; raises FastdistError to end the wait.
        timeout_s: seconds to wait for the other ranks to connect; None does not connect.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        address: str,
        board: FailureBoard,
        poll_failures: Callable[[], None],
        timeout_s: float | None,
    ) -> None:
        self.rank = rank
        self.size = size
        self._board = board
        self._poll_failures = poll_failures
        self._in_flight = 0
        self._addresses: list[str] = []  # of all ranks
        self._group: Any = None
        if size > 1 and timeout_s is not None:
            self._group = self._connect(store, address, timeout_s)

    def _connect(self, store: Any, address: str, timeout_s: float) -> Any:
        gloo = c10d().ProcessGroupGloo
        device = gloo.create_device(hostname=address, lazy_init=False)
        options = gloo._Options()
        options._devices = [device]
        options._timeout = _duration(timeout_s)
        options._threads = 2
        try:
            # A connection of its own: while one thread waits for a key, the connection passes no
            # other request, such as the one that sets the key.
            store = store.clone()
            store.set(f"address/{self.rank}", address)
            own = c10d().PrefixStore("gloo", store)
            group = gloo(own, self.rank, self.size, options)
            keys = [f"address/{rank}" for rank in range(self.size)]
            self._addresses = [bytes(store.get(key)).decode() for key in keys]
            return group
        except RuntimeError as error:
            raise ClusterConfigError(
                f"rank {self.rank} of {self.size} could not connect to the other machines from "
                f"{address} within {timeout_s:g} s: {_first_line(error)}"
            ) from None

    def exchange(
        self,
        incoming: Bytes,
        outgoing: Bytes,
        received: Sequence[int],
        sent: Sequence[int],
        step_s: float,
    ) -> None:
        """Send `sent[p]` bytes to each rank p and receive `received[p]`, packed in rank order."""
        self.finish(self.begin_exchange(incoming, outgoing, received, sent, step_s), step_s)

    def begin_exchange(
        self,
        incoming: Bytes,
        outgoing: Bytes,
        received: Sequence[int],
        sent: Sequence[int],
        step_s: float,
    ) -> GlooOperation | None:
        """Begin an `exchange`. Every rank must begin its exchanges in the same order."""
        if self.size == 1:
            incoming[:] = outgoing
            return None
        options = c10d().AllToAllOptions()
        options.timeout = _duration(step_s)
        tensors = [_tensor(incoming), _tensor(outgoing)]
        return self._begin(
            lambda group: group.alltoall_base(*tensors, list(received), list(sent), options),
            tensors,
            step_s,
        )

    def all_gather_direct(self, own: Bytes, step_s: float) -> Bytes:
        """Return every rank's bytes, sent in one step; all ranks have equally many."""
        n, length = self.size, own.nbytes
        everyone = np.empty(n * length, np.uint8)
        self.exchange(everyone, np.tile(own, n), [length] * n, [length] * n, step_s)
        return everyone

    def _begin(
        self, start: Callable[[Any], Any], tensors: list[Any], step_s: float
    ) -> GlooOperation | None:
        group = self._group
        if group is None:  # closed by another thread: raises
            self._poll_failures()
        try:
            return GlooOperation(start(group), group, tensors)
        except RuntimeError as error:
            raise self._explain_failure(str(error), step_s) from None

    def finish(self, operation: GlooOperation | None, step_s: float) -> None:
        """Wait for an operation.

        Raises:
            CollectiveTimeoutError: `step_s` seconds have passed.
            PeerFailureError: a rank has died or left.
        """
        if operation is None:
            return
        self._in_flight += 1
        try:
            operation.wait(self._poll_failures)
        except FastdistError:
            raise
        except RuntimeError as error:
            raise self._explain_failure(str(error), step_s) from None
        finally:
            self._in_flight -= 1

    def broadcast(self, memory: Bytes, root: int, step_s: float) -> None:
        """Copy the root's bytes to all ranks."""
        if self.size == 1 or memory.nbytes == 0:
            return
        options = c10d().BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        options.timeout = _duration(step_s)
        tensors = [_tensor(memory)]
        operation = self._begin(lambda group: group.broadcast(tensors, options), tensors, step_s)
        self.finish(operation, step_s)

    def all_gather(self, own: Bytes, everyone: Bytes, step_s: float) -> None:
        """Join every rank's bytes, in rank order."""
        if self.size == 1 or own.nbytes == 0:
            everyone[:] = own
            return
        options = c10d().AllgatherOptions()
        options.timeout = _duration(step_s)
        tensors = [_tensor(everyone), _tensor(own)]
        operation = self._begin(
            lambda group: group._allgather_base(*tensors, options), tensors, step_s
        )
        self.finish(operation, step_s)

    def close(self, error: FastdistError | None) -> None:
        """Leave, and post why."""
        if self.size > 1:
            if error is None and not self._in_flight:
                self._board.post_closed()
            elif error is None:
                text = f"rank {self.rank} has closed the communicator"
                self._board.post_cause(Cause(False, (self.rank,), text))
            else:
                self._board.post_cause(Cause.from_error(error))
        self._group = None  # closes the connections as soon as no call uses them

    # --- failure

    def _explain_failure(self, message: str, step_s: float) -> FastdistError:
        """Find out why Gloo failed and which ranks are at fault."""
        timed_out = "timed out" in message.lower() or "timeout" in message.lower()
        suspect = self._rank_at(message)
        if self.size == 2:
            suspect = 1 - self.rank
        try:
            self._board.post_notice("timeout" if timed_out else "closure")
            cause, missing = self._read_board(timed_out, suspect)
        except StoreLostError:  # report rank 0, which usually holds the store
            cause, missing = None, [0 if suspect is None else suspect]
        if cause is not None:
            return cause
        if timed_out:
            late = missing if suspect is None else [suspect]
            names = ", ".join(map(str, late))
            return CollectiveTimeoutError(
                f"timed out after {step_s:.1f} s waiting for rank {names}", tuple(late)
            )
        gone = missing if suspect is None else [suspect]
        names = ", ".join(map(str, gone)) or "of another machine"
        return PeerFailureError(f"rank {names} has died or cannot be reached", tuple(gone))

    def _read_board(
        self, timed_out: bool, suspect: int | None
    ) -> tuple[FastdistError | None, list[int]]:
        """Return the cause that other ranks posted, or None and the ranks that posted nothing."""
        until = time.monotonic() + _GRACE_S
        while True:
            causes = self._board.causes()
            if causes:
                return error_from(causes), []
            closed = self._board.closed_ranks()
            if closed and not timed_out:
                text = f"rank {closed[0]} has closed the communicator"
                return PeerFailureError(text, (closed[0],)), []
            noticed = self._board.notices()
            silent = [r for r in range(self.size) if r != self.rank and r not in noticed]
            # After a timeout, late ranks differ from waiting ranks only by what they post in time.
            if not timed_out and suspect in silent:
                return None, silent
            if time.monotonic() > until:
                if timed_out and not silent:  # late ranks find the connections of others closed
                    silent = [r for r, what in noticed.items() if what == "closure"]
                return None, silent
            time.sleep(_POLL_S)

    def _rank_at(self, message: str) -> int | None:
        """Return the rank whose address is in a message of Gloo, or None if it is ambiguous."""
        found = _ADDRESS.search(message)
        ranks = [r for r, address in enumerate(self._addresses) if found and address == found[1]]
        return ranks[0] if len(ranks) == 1 and ranks != [self.rank] else None


class GlooOperation:
    """A running operation of Gloo; it holds the process group and the arrays until it ends."""

    def __init__(self, work: Any, group: Any, tensors: list[Any]) -> None:
        self._work = work
        self._group = group
        self._tensors = tensors

    def wait(self, poll_failures: Callable[[], None]) -> None:
        """Wait for the end.

        Gloo's own wait cannot be interrupted and crashes at the end of the interpreter. This method
        polls instead, at growing intervals, and regularly calls `poll_failures`.

        Raises:
            RuntimeError: the operation failed.
            FastdistError: raised by `poll_failures`; the operation is abandoned.
        """
        began = last_poll = time.monotonic()
        while not self._work.is_completed():
            stay_out_at_exit()
            now = time.monotonic()
            if now - last_poll > FAILURE_POLL_S:
                last_poll = now
                try:
                    poll_failures()
                except BaseException:
                    # Leak a reference: dropping a process group waits for its operations.
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
                    raise
            time.sleep(min(max((now - began) / 16, _SHORTEST_SLEEP_S), _LONGEST_SLEEP_S))
        self._work.wait()
        self._work = None
        until = time.monotonic() + _RELEASE_S
        while any(t._use_count() > 1 for t in self._tensors) and time.monotonic() < until:
            time.sleep(0)
        self._tensors.clear()


def error_from(causes: dict[int, Cause]) -> FastdistError:
    """Make the error for the causes that other ranks posted."""
    rank, cause = min(causes.items())
    seen = "" if rank in cause.ranks else f" (noticed by rank {rank})"
    return replace(cause, text=cause.text + seen).to_error()


def _duration(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=max(0.001, min(seconds, _LONGEST_S)))


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _tensor(memory: Bytes) -> Any:
    import torch

    return torch.from_numpy(memory)
