"""The engine for ranks on several machines: the compiled engine over TCP connections."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final
from weakref import WeakKeyDictionary

import numpy as np

import fastdist._core as _core
from fastdist.collectives.engines.engine import CompiledEngine, Engine
from fastdist.collectives.engines.host import HostEngine
from fastdist.collectives.rendezvous.connections import Address, connect_ranks, listen_at
from fastdist.errors import ClusterConfigError, LostRankError, PeerFailureError, UnsupportedError
from fastdist.recorder.machines import Machine

# The file descriptors of the communicators that live in this process.
_connections: WeakKeyDictionary[object, list[int]] = WeakKeyDictionary()


def _leave_connections() -> None:
    """Close a parent's connections in its forked child.

    A connection lasts as long as any process holds it: peers would not notice that a rank has died
    while one of its children lives, such as a worker that loads data.
    """
    null = os.open(os.devnull, os.O_RDWR)
    for fds in _connections.values():
        for fd in fds:
            os.dup2(null, fd, inheritable=False)  # the number stays taken until the copy's end
    os.close(null)
    _connections.clear()


os.register_at_fork(after_in_child=_leave_connections)


def ranks_of(machines: Sequence[int], number: int) -> list[int]:
    """Return the ranks of a machine, given the number of each rank's machine."""
    return [rank for rank, machine in enumerate(machines) if machine == number]


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The addresses and keys that the ranks of one or several machines have exchanged.

    Attributes:
        machines: the number of each rank's machine, from 0 without a gap.
        key: equal on all ranks; of several machines, secret to processes that are not of the job.
        addresses: IP address and port of each rank's listener, if there are several machines.
        listener: this rank's listener.
        launchers: the address at which each rank's launcher answers questions, or "".
    """

    rank: int
    machines: Sequence[int]
    key: str
    addresses: Sequence[Address] = ()
    listener: socket.socket | None = None
    launchers: Sequence[str] = ()


@final
class NetEngine(CompiledEngine):
    """Ranks on several machines. Every rank must make the engine.

    Args:
        found: where the ranks are; its listener is closed.
        inner: the engine between the ranks of this machine, in their order.
        timeout_s: seconds to wait for other ranks to connect.
        parent: the engine of more ranks that this one is made from, if any.
        silence_s: seconds after which a silent machine is lost; 0: never.
    """

    compiled: _core.NetCommunicator

    def __init__(
        self,
        found: Rendezvous,
        inner: HostEngine,
        timeout_s: float,
        parent: _core.NetCommunicator | None = None,
        silence_s: float = 0.0,
    ) -> None:
        self.rank, self.key = rank, key = found.rank, found.key
        self._machines = machines = found.machines
        self.size = len(machines)
        self._silence_s = silence_s
        self._inner = inner
        self._ips = [ip for ip, _ in found.addresses]
        if found.launchers:
            everyone = [tuple(ranks_of(machines, number)) for number in range(max(machines) + 1)]
            self.machines = tuple(
                Machine(ranks, self._ips[ranks[0]], found.launchers[ranks[0]]) for ranks in everyone
            )
        secret = hashlib.sha256(key.encode()).digest()
        here = ranks_of(machines, machines[rank])

        def check() -> None:
            if parent is None:
                dead = inner.compiled.find_dead()
                lost = None if dead is None else here[dead]
            else:
                lost = parent.find_lost()
            if lost is not None:
                raise PeerFailureError(
                    f"rank {lost} has died or failed while the ranks connected", (lost,)
                )

        try:
            assert found.listener is not None
            with found.listener as listener:
                made = connect_ranks(
                    listener, rank, machines, found.addresses, secret, timeout_s, check
                )
            fds = [[-1 if each is None else each.detach() for each in own] for own in made]
            places = list(zip(machines, self._ips, strict=True))
            _connections[self] = [fd for own in fds for fd in own if fd >= 0]
            try:  # other threads may fork meanwhile: links are measured
                self.compiled = _core.NetCommunicator(
                    inner.compiled, rank, places, fds, parent, silence_s, timeout_s
                )
                _connections[self.compiled] = _connections[self]
            finally:
                del _connections[self]
        except (LostRankError, OSError) as error:
            if isinstance(error, PeerFailureError) and parent is not None:
                raise  # a rank of a communicator that worked has failed
            raise ClusterConfigError(
                f"rendezvous: {error}", getattr(error, "ranks", (rank,))
            ) from None

    def subset(self, groups: Sequence[Sequence[int]], timeout_s: float) -> Engine | None:
        """Make an inner engine for a group within one machine, else connect the group anew."""
        self._groups += 1
        here = ranks_of(self._machines, self._machines[self.rank])
        local = [[here.index(rank) for rank in group if rank in here] for group in groups]
        # The ranks of each machine are in the order of the group.
        inner = self._inner.subset([ranks for ranks in local if ranks], timeout_s)
        with listen_at(self._ips[self.rank]) as listener:
            ports = np.empty(self.size, np.int64)
            self.calls(timeout_s).all_gather(np.array([listener.getsockname()[1]]), out=ports)
            group = next((group for group in groups if self.rank in group), None)
            if group is None:
                return None
            assert inner is not None
            numbers = sorted({self._machines[rank] for rank in group})
            if len(numbers) == 1:
                return inner
            machines = [numbers.index(self._machines[rank]) for rank in group]
            addresses = [(self._ips[rank], int(ports[rank])) for rank in group]
            number = list(group).index(self.rank)
            found = Rendezvous(number, machines, self._key_of(group), addresses, listener)
            return NetEngine(found, inner, timeout_s, self.compiled, self._silence_s)

    def survivors(self, ranks: Sequence[int], timeout_s: float) -> Engine:
        """Raise UnsupportedError: the excluded ranks may be those that connect the machines."""
        del ranks, timeout_s
        raise UnsupportedError(
            "shrink works between the ranks of one machine only; restart the job without the "
            "excluded ranks"
        )
