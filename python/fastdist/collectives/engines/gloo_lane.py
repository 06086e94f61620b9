"""send and recv between machines: for each direction a group of two, made when first used."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from fastdist.collectives.engines.c10d import c10d
from fastdist.collectives.engines.departures import Departures, StoreLostError
from fastdist.collectives.engines.gloo_group import PATROL_S, GlooGroup
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
    """Transfers from one rank to another, in order. In its group the sender is rank 0.

    Args:
        store: torch's; of the communicator.
        rank: this rank.
        peer: the other one.
        sends: this rank is the sender.
        address: of this machine.
        departures: of the communicator.
        patrol: called now and then while a rank waits; raises FastdistError to end that.
        connect_s: seconds for the two to connect once both are there.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        peer: int,
        sends: bool,
        address: str,
        departures: Departures,
        patrol: Callable[[], None],
        connect_s: float,
    ) -> None:
        self.queue = CallQueue(f"fastdist rank {rank} with {peer}")
        src, dst = (rank, peer) if sends else (peer, rank)
        self._store: Any = c10d().PrefixStore(f"lane/{src}-{dst}", store)
        self._rank = rank
        self._peer = peer
        self._sends = sends
        self._address = address
        self._departures = departures
        self._patrol = patrol
        self._connect_s = connect_s
        self._transfers = 0
        self._pair: GlooGroup | None = None

    def transfer(self, signature: Signature, site: str, view: View, step_s: float) -> None:
        """Both ranks compare what they call, then the bytes go."""
        if self._pair is None:
            self._pair = self._meet(step_s)
        self._transfers += 1
        try:
            self._transfer(self._pair, signature, site, view, step_s)
        except CollectiveMismatchError:
            raise
        except (CollectiveTimeoutError, PeerFailureError) as error:
            self._patrol()  # knows more where the whole communicator was given up
            late = isinstance(error, CollectiveTimeoutError)
            what = "did not come in time" if late else "has died or left"
            raise type(error)(f"rank {self._peer} {what}", (self._peer,)) from None

    def close(self) -> None:
        """Let go of the connection."""
        if self._pair is not None:
            self._pair.close(None)

    def _transfer(
        self, pair: GlooGroup, signature: Signature, site: str, view: View, step_s: float
    ) -> None:
        own = signature.pack(self._transfers) + pack_site(site)
        both = pair.share(np.frombuffer(own, np.uint8), step_s).reshape(2, len(own))
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
                f"send and recv do not fit (transfer {number} between these ranks):"
                + "".join(lines),
                (self._peer,),
            )
        if view.nbytes == 0:
            return
        nothing = np.empty(0, np.uint8)
        if self._sends:
            pair.swap(nothing, view.memory, [0, 0], [0, view.nbytes], step_s)
        else:
            pair.swap(view.memory, nothing, [view.nbytes, 0], [0, 0], step_s)

    def _meet(self, step_s: float) -> GlooGroup:
        """Connect; both wait here for the other, and can be stopped."""
        store = self._store
        try:
            store.set(f"here/{self._rank}", b"1")
            began = patrolled = time.monotonic()
            while not store.check([f"here/{self._peer}"]):
                now = time.monotonic()
                if now - began > step_s:
                    raise CollectiveTimeoutError(
                        f"timed out after {step_s:.1f} s waiting for rank {self._peer}",
                        (self._peer,),
                    )
                if now - patrolled > PATROL_S:
                    patrolled = now
                    self._patrol()
                    if self._peer in self._departures.closed():
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
            store, rank, 2, self._address, Departures(store, rank, 2), self._patrol, self._connect_s
        )
