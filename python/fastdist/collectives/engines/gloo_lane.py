"""send and recv between machines: a group of two per direction, made at its first use."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from fastdist.collectives.engines.c10d import c10d, stay_out_at_exit
from fastdist.collectives.engines.failure_board import FailureBoard, StoreLostError
from fastdist.collectives.engines.gloo_group import FAILURE_POLL_S, GlooGroup
from fastdist.collectives.engines.queues import CallQueue
from fastdist.collectives.engines.signature import RECORD_BYTES, Signature, pack_site, unpack_site
from fastdist.collectives.engines.views import View
from fastdist.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    FastdistError,
    PeerFailureError,
)

_POLL_S = 0.01


class GlooLane:
    """Ordered transfers from one rank to another. The sender is rank 0 of the lane's group.

    Args:
        store: torch's store, with the communicator's prefix.
        rank: this rank.
        peer: the other rank.
        sends: True if this rank is the sender.
        address: address of this machine.
        board: the communicator's board.
        poll_failures: called regularly while a rank waits; raises FastdistError to end the wait.
        connect_s: seconds for the two ranks to connect after both have called.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        peer: int,
        sends: bool,
        address: str,
        board: FailureBoard,
        poll_failures: Callable[[], None],
        connect_s: float,
    ) -> None:
        self.queue = CallQueue(f"fastdist rank {rank} with {peer}")
        src, dst = (rank, peer) if sends else (peer, rank)
        self._store: Any = c10d().PrefixStore(f"lane/{src}-{dst}", store)
        self._rank = rank
        self._peer = peer
        self._sends = sends
        self._address = address
        self._board = board
        self._poll_failures = poll_failures
        self._connect_s = connect_s
        self._transfers = 0
        self._pair: GlooGroup | None = None

    def transfer(self, signature: Signature, site: str, view: View, step_s: float) -> None:
        """Compare the calls of both ranks, then move the bytes."""
        if self._pair is None:
            self._pair = self._meet(step_s)
        self._transfers += 1
        try:
            self._transfer(self._pair, signature, site, view, step_s)
        except CollectiveMismatchError:
            raise
        except (CollectiveTimeoutError, PeerFailureError) as error:
            self._poll_failures()  # raises the cause if the whole communicator is lost
            late = isinstance(error, CollectiveTimeoutError)
            what = "did not arrive in time" if late else "has died or left"
            raise type(error)(f"rank {self._peer} {what}", (self._peer,)) from None

    def close(self) -> None:
        """Close the connection."""
        if self._pair is not None:
            self._pair.close(None)

    def _transfer(
        self, pair: GlooGroup, signature: Signature, site: str, view: View, step_s: float
    ) -> None:
        own = signature.pack(self._transfers) + pack_site(site)
        both = pair.all_gather_direct(np.frombuffer(own, np.uint8), step_s).reshape(2, len(own))
        theirs = both[1 - pair.rank].tobytes()
        number, other = Signature.unpack(theirs[:RECORD_BYTES])
        if replace(other, op=signature.op, root=signature.root) != signature:
            lines = [
                f"\n  rank {rank}: {called}" + (f" at {where}" if where else "")
                for rank, called, where in (
                    (self._rank, signature, site),
                    (self._peer, other, unpack_site(theirs[RECORD_BYTES:])),
                )
            ]
            raise CollectiveMismatchError(
                f"send and recv do not match (transfer {number} between these ranks):"
                + "".join(lines),
                (self._peer,),
            )
        if view.nbytes == 0:
            return
        nothing = np.empty(0, np.uint8)
        if self._sends:
            pair.exchange(nothing, view.memory, [0, 0], [0, view.nbytes], step_s)
        else:
            pair.exchange(view.memory, nothing, [view.nbytes, 0], [0, 0], step_s)

    def _meet(self, step_s: float) -> GlooGroup:
        """Wait for the other rank and connect; a failure elsewhere ends the wait."""
        store = self._store
        try:
            store.set(f"here/{self._rank}", b"1")
            began = last_poll = time.monotonic()
            while not store.check([f"here/{self._peer}"]):
                stay_out_at_exit()
                now = time.monotonic()
                if now - began > step_s:
                    raise CollectiveTimeoutError(
                        f"timed out after {step_s:.1f} s waiting for rank {self._peer}",
                        (self._peer,),
                    )
                if now - last_poll > FAILURE_POLL_S:
                    last_poll = now
                    self._poll_failures()
                    if self._peer in self._board.closed_ranks():
                        raise PeerFailureError(
                            f"rank {self._peer} has closed the communicator", (self._peer,)
                        )
                time.sleep(_POLL_S)
        except FastdistError:
            raise
        except (RuntimeError, StoreLostError):
            raise PeerFailureError(f"rank {self._peer} cannot be reached", (self._peer,)) from None
        rank = 0 if self._sends else 1
        return GlooGroup(
            store,
            rank,
            2,
            self._address,
            FailureBoard(store, rank, 2),
            self._poll_failures,
            self._connect_s,
        )
