"""Rendezvous of ranks on several machines, through torch's TCPStore.

Rank 0 opens the store at the address that all ranks were given and listens on that address only;
under torchrun, all ranks use the store that torchrun's agent has opened there. Each rank posts the
machine on which it runs, and the address at which it accepts connections of ranks on other
machines. The ranks of one machine then exchange memory without the network (rendezvous.py). Values
in the store are JSON, and sealed with the job's secret (secret.py): strangers may write there.
"""

from __future__ import annotations

import atexit
import contextlib
import ipaddress
import json
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import fastdist._core as _core
from fastdist._version import __version__
from fastdist.cluster.address import split_address
from fastdist.cluster.launch import LAUNCHER_VARIABLE
from fastdist.cluster.own_address import own_address
from fastdist.collectives.engines.agent_round import agree_on_name
from fastdist.collectives.engines.net import Layout
from fastdist.collectives.engines.torch_store import await_told, open_store, with_prefix
from fastdist.collectives.rendezvous import run_checks
from fastdist.errors import ClusterConfigError
from fastdist.link.secret import Secret, UnsealedError, job_secret
from fastdist.recorder.encoding import decode, encode

_POLL_S = 0.05
_END_S = 5.0  # for attempts to reach the store, as the interpreter ends
_STORE_GRACE_S = 2.0  # for ranks that tell each other why they end


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The result of a rendezvous.

    Attributes:
        layout: the ranks of each machine.
        addresses: IP address and port of each rank's listener.
        listener: this rank's listener.
        key: equal on all ranks, and unknown to processes that do not have the job's secret.
        launchers: the address at which each rank's launcher answers questions, or "".
    """

    layout: Layout
    addresses: tuple[tuple[str, int], ...]
    listener: _core.Listener
    key: str
    launchers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Arrival:
    """The data that a rank posts for the others in a rendezvous.

    Attributes:
        world_size: the number of ranks that it expects.
        machine: the result of `machine_id`.
        ip: IP address of its listener.
        port: port of its listener.
        version: fastdist's version.
        nonce: a random number.
        launcher: "ip:port" at which the launcher of its machine answers questions; "" if none does.
    """

    world_size: int
    machine: str
    ip: str
    port: int
    version: str
    nonce: str = ""
    launcher: str = ""

    def pack(self) -> str:
        """Encode as JSON."""
        return encode(self)

    @classmethod
    def unpack(cls, text: str | bytes) -> Arrival:
        """Decode the output of `pack`.

        Raises:
            ValueError: a field is missing, or has an impossible value.
        """
        found = decode(cls, text)
        ipaddress.ip_address(found.ip.partition("%")[0])
        if not 0 < found.port < 1 << 16:
            raise ValueError(f"port {found.port}")
        return found


def arrive(
    host: str, port: int, world_size: int, deadline: float
) -> tuple[Arrival, _core.Listener]:
    """Open this rank's listener on the interface that routes to `host`; wait for the network."""
    ip = own_address(host, port, deadline)
    try:
        listener = _core.Listener(ip)
    except (OSError, ValueError) as error:
        raise ClusterConfigError(f"rendezvous: {error}") from None
    launcher = os.environ.get(LAUNCHER_VARIABLE, "")
    own = machine_id(), ip, listener.port, __version__, secrets.token_hex(16), launcher
    return Arrival(world_size, *own), listener


def conclude(arrivals: Sequence[Arrival], listener: _core.Listener, key: str) -> Rendezvous:
    """Make the rendezvous of ranks that have told each other how they arrived.

    Raises:
        ClusterConfigError: ranks have different versions of fastdist, or an address that other
            machines cannot reach.
    """
    places: dict[str, list[int]] = {}
    for rank, arrival in enumerate(arrivals):
        places.setdefault(arrival.machine, []).append(rank)
        if arrival.version != arrivals[0].version:
            raise ClusterConfigError(
                "rendezvous: all ranks must have the same version of fastdist: rank 0 has "
                f"{arrivals[0].version}, rank {rank} has {arrival.version}",
                (rank,),
            )
    for rank, arrival in enumerate(arrivals):
        if len(places) > 1 and ipaddress.ip_address(arrival.ip.partition("%")[0]).is_loopback:
            raise ClusterConfigError(
                f"rendezvous: rank {rank} listens at {arrival.ip}, which other machines cannot "
                "reach; expected the address of rank 0 to be one of its network, not of loopback",
                (rank,),
            )
    layout = Layout(tuple(map(tuple, places.values())))
    addresses = tuple((arrival.ip, arrival.port) for arrival in arrivals)
    launchers = tuple(arrival.launcher for arrival in arrivals)
    return Rendezvous(layout, addresses, listener, key, launchers)


def machine_id() -> str:
    """Identify the kernel's boot and the network namespace: equal if processes can share memory."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"


def connect_machines(
    rank: int,
    world_size: int,
    coordinator: str,
    prefix: str,
    timeout_s: float,
    has_agent: bool = False,
) -> Rendezvous:
    """Find all ranks and their machines. Every rank must call.

    Args:
        rank: this rank.
        world_size: the number of ranks.
        coordinator: "host:port" of the store.
        prefix: prefix of the keys, equal on all ranks; without an agent, unique to this rendezvous
            in the store.
        timeout_s: seconds to wait for all ranks.
        has_agent: True if torchrun's agent holds the store; else rank 0 opens it.

    Raises:
        ClusterConfigError: a rank did not arrive in time, arrived twice, or disagrees on the number
            of ranks; the store cannot be opened or reached.
        ImportError: torch is not installed.
    """
    try:
        host, port = split_address(coordinator)
    except ValueError as error:
        raise ClusterConfigError(f"rendezvous: {error}") from None
    deadline = time.monotonic() + timeout_s
    secret = job_secret()

    def attempt(is_given_up: Callable[[], bool]) -> Rendezvous:
        def refuse_other_job(other: Any) -> None:
            with contextlib.suppress(ClusterConfigError):  # with another secret
                _Table(other, secret, rank).decide(json.dumps([_twice(0), 0]))

        listens = rank == 0 and not has_agent
        store = open_store(
            *(host, port, prefix, rank, timeout_s),
            refuse_other_job if listens else None,
            is_given_up,
        )
        try:
            if has_agent:
                name = agree_on_name(store, rank, world_size, deadline)
                store = with_prefix(store, name)
            arrival, listener = arrive(host, port, world_size, deadline)
            return _rendezvous(_Table(store, secret, rank), arrival, listener, deadline, timeout_s)
        except RuntimeError as error:
            if isinstance(error, ClusterConfigError):
                raise
            raise ClusterConfigError(
                f"rendezvous: rank {rank} lost the store at {coordinator}: {error}", (0,)
            ) from None

    late = ClusterConfigError(
        f"rendezvous: rank {rank} of {world_size} did not reach the store at {coordinator} within "
        f"{timeout_s:g} s",
        (0,),
    )
    return _in_thread(attempt, deadline + _STORE_GRACE_S, late)


def _in_thread(
    attempt: Callable[[Callable[[], bool]], Rendezvous], deadline: float, late: ClusterConfigError
) -> Rendezvous:
    """Call `attempt` in a thread: while the network is down, questions to the store take forever.

    The interpreter ends after the thread, which would abort the process if it came back from torch
    later. `attempt` takes a function that returns True once nobody waits any more.
    """
    answer: queue.SimpleQueue[Rendezvous | BaseException] = queue.SimpleQueue()
    given_up = threading.Event()

    def body() -> None:
        try:
            answer.put(attempt(given_up.is_set))
        except BaseException as error:
            answer.put(error)

    thread = threading.Thread(target=body, daemon=True, name="fastdist rendezvous")
    thread.start()
    try:
        while True:
            with contextlib.suppress(queue.Empty):
                found = answer.get(timeout=_POLL_S)
                if isinstance(found, BaseException):
                    raise found
                return found
            run_checks()
            if time.monotonic() > deadline:
                raise late
    finally:
        given_up.set()
        if thread.is_alive():
            atexit.register(thread.join, _END_S)


class _Table:
    """The store of a rendezvous, in which ranks seal what they post."""

    def __init__(self, store: Any, secret: Secret, rank: int) -> None:
        self.store = store
        self.secret = secret
        self.rank = rank

    def post(self, arrival: Arrival) -> None:
        """Post the arrival of this rank."""
        label = f"rank/{self.rank}"
        self.store.set(label, self.secret.seal(label, arrival.pack()))

    def arrival(self, rank: int) -> str | None:
        """Return the arrival that a rank has posted, as JSON; None if it has not.

        Raises:
            ClusterConfigError: it was posted without this rank's secret.
        """
        label = f"rank/{rank}"
        if not self.store.check([label]):
            return None
        try:
            return self.secret.open(label, bytes(self.store.get(label)))
        except UnsealedError:
            raise self.secret.mismatch(self.rank, rank) from None

    def decide(self, refusal: str) -> str:
        """Post whether the rendezvous is refused, as JSON, or not (""); return the first decision.

        Raises:
            ClusterConfigError: it was posted without this rank's secret.
        """
        sealed = self.secret.seal("decision", refusal)
        try:
            first = bytes(self.store.compare_set("decision", "", sealed))
            return self.secret.open("decision", first)
        except UnsealedError:
            raise self.secret.mismatch(self.rank, None) from None


def _rendezvous(
    table: _Table,
    arrival: Arrival,
    listener: _core.Listener,
    deadline: float,
    timeout_s: float,
) -> Rendezvous:
    store, rank = table.store, table.rank
    if store.add(f"arrived/{rank}", 1) > 1:
        refusal = json.dumps([_twice(rank), rank])
        table.decide(refusal)
        raise _refused(refusal)
    table.post(arrival)
    try:
        packed = _await_all(table, arrival.world_size, deadline, timeout_s)
        key = table.secret.derive("key", json.dumps(packed))
        rendezvous = conclude([Arrival.unpack(text) for text in packed], listener, key)
        refusal = table.decide("")
        if refusal:
            raise _refused(refusal)
        return rendezvous
    except ClusterConfigError as error:
        text = str(error).removeprefix("rendezvous: ")
        refusal = ""
        with contextlib.suppress(ClusterConfigError):  # of ranks with another secret
            refusal = table.decide(json.dumps([text, *error.ranks[:1]]))
        if rank == 0:
            await_told(store, "told", [f"rank/{rank}" for rank in range(1, arrival.world_size)])
        else:
            store.add("told", 1)
        if refusal:
            raise _refused(refusal) from None
        raise


def _await_all(table: _Table, size: int, deadline: float, timeout_s: float) -> list[str]:
    """Wait for the arrivals of all ranks, and return them as JSON, by rank."""
    found: dict[int, str] = {}
    while True:
        for other in range(size):
            packed = None if other in found else table.arrival(other)
            if packed is None:
                continue
            _check_arrival(packed, table.rank, size, other)
            found[other] = packed
        missing = tuple(other for other in range(size) if other not in found)
        if not missing:
            return [found[other] for other in range(size)]
        if table.store.check(["decision"]):
            refusal = table.decide("")
            if refusal:
                raise _refused(refusal)
            continue  # the last ranks have arrived since
        if time.monotonic() > deadline:
            raise ClusterConfigError(
                f"rendezvous: ranks {list(missing)} of {size} did not arrive within "
                f"{timeout_s:g} s",
                missing,
            )
        time.sleep(_POLL_S)


def _check_arrival(packed: str, rank: int, size: int, other: int) -> None:
    try:
        arrival = Arrival.unpack(packed)
    except ValueError as error:
        raise ClusterConfigError(
            f"rendezvous: rank {other} has posted a malformed arrival ({error}); do all ranks have "
            "the same version of fastdist?",
            (other,),
        ) from None
    if arrival.world_size != size:
        raise ClusterConfigError(
            f"rendezvous: ranks disagree on the number of ranks: rank {rank} expects "
            f"{size}, rank {other} expects {arrival.world_size}",
            (other,),
        )


def _refused(refusal: str) -> ClusterConfigError:
    try:
        text, *ranks = json.loads(refusal)
        if not all(isinstance(rank, int) for rank in ranks):
            raise TypeError("not a rank")
    except (ValueError, TypeError, RecursionError):
        text, ranks = "another rank has refused the rendezvous", []
    shown = "".join(c if c.isprintable() else " " for c in str(text))
    return ClusterConfigError(f"rendezvous: {shown}", tuple(ranks))


def _twice(rank: int) -> str:
    return (
        f"rank {rank} arrived twice: two processes were given this rank, or two jobs meet at this "
        "address at the same time; give each job a port of its own"
    )
