"""Rendezvous of ranks on several machines, through torch's TCPStore.

Rank 0 opens the store at the address that all ranks were given and listens on that address only;
under torchrun, all ranks use the store that torchrun's agent has opened there. Each rank posts the
machine on which it runs, and the address at which it accepts connections of ranks on other
machines. The ranks of one machine then meet without the network (rendezvous.py). Values in the
store are JSON, so that no value that a stranger writes there is executed.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import ipaddress
import json
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import fastdist._core as _core
from fastdist._version import __version__
from fastdist.cluster.address import split_address
from fastdist.cluster.own_address import own_address
from fastdist.collectives.engines.layout import Layout
from fastdist.collectives.rendezvous import run_checks
from fastdist.errors import ClusterConfigError

_POLL_S = 0.05
_STORE_GRACE_S = 2.0  # for ranks that tell each other why they end
_TELL_S = 1.5
_REFUSAL_PATIENCE = datetime.timedelta(seconds=2)
# Stores are kept: a store ends with its last reference, and the next `init` needs it.
_stores: list[Any] = []


@dataclass(frozen=True, slots=True)
class Meeting:
    """The result of a rendezvous.

    Attributes:
        layout: the ranks of each machine.
        addresses: IP address and port of each rank's listener.
        listener: this rank's listener.
        key: equal on all ranks, and secret to processes that were not in the rendezvous.
    """

    layout: Layout
    addresses: tuple[tuple[str, int], ...]
    listener: _core.Listener
    key: str


@dataclass(frozen=True, slots=True)
class Arrival:
    """The data that a rank posts for the others in a rendezvous.

    Attributes:
        world_size: the number of ranks that it expects.
        machine: see `machine_id`.
        ip: IP address of its listener.
        port: port of its listener.
        version: of fastdist.
    """

    world_size: int
    machine: str
    ip: str
    port: int
    version: str = __version__

    def pack(self) -> str:
        """Encode as JSON."""
        return json.dumps(astuple(self))

    @classmethod
    def unpack(cls, text: str | bytes) -> Arrival:
        """Decode the output of `pack`."""
        world_size, machine, ip, port, version = json.loads(text)
        return cls(int(world_size), str(machine), str(ip), int(port), str(version))


def arrive(
    host: str, port: int, world_size: int, deadline: float
) -> tuple[Arrival, _core.Listener]:
    """Open this rank's listener, at the address of the route to `host`, which may come back."""
    ip = own_address(host, port, deadline)
    try:
        listener = _core.Listener(ip)
    except (OSError, ValueError) as error:
        raise ClusterConfigError(f"rendezvous: {error}") from None
    return Arrival(world_size, machine_id(), ip, listener.port), listener


def conclude(arrivals: Sequence[Arrival], listener: _core.Listener, key: str) -> Meeting:
    """Make the meeting of ranks that have told each other how they arrived.

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
    return Meeting(layout, addresses, listener, key)


def machine_id() -> str:
    """Identify the kernel's boot and the network namespace: equal if processes can share memory."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"


def meet_machines(
    rank: int,
    world_size: int,
    coordinator: str,
    prefix: str,
    timeout_s: float,
    has_agent: bool = False,
) -> Meeting:
    """Find all ranks and their machines. Every rank must call.

    Args:
        rank: this rank.
        world_size: the number of ranks.
        coordinator: "host:port" of the store.
        prefix: prefix of the keys, equal on all ranks and unique to this rendezvous.
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

    def meet() -> Meeting:
        store = _open_store(host, port, rank == 0 and not has_agent, prefix, rank, timeout_s)
        try:
            arrival, listener = arrive(host, port, world_size, deadline)
            return _meet(store, rank, arrival, listener, deadline, timeout_s)
        except RuntimeError as error:
            if isinstance(error, ClusterConfigError):
                raise
            raise ClusterConfigError(
                f"rendezvous: rank {rank} lost the store at {coordinator}: {error}", (0,)
            ) from None

    # In a thread: while the network is down, questions to the store take for ever.
    answer: queue.SimpleQueue[Meeting | BaseException] = queue.SimpleQueue()

    def body() -> None:
        try:
            answer.put(meet())
        except BaseException as error:
            answer.put(error)

    threading.Thread(target=body, daemon=True, name="fastdist rendezvous").start()
    while True:
        with contextlib.suppress(queue.Empty):
            found = answer.get(timeout=_POLL_S)
            if isinstance(found, BaseException):
                raise found
            return found
        run_checks()
        if time.monotonic() > deadline + _STORE_GRACE_S:
            raise ClusterConfigError(
                f"rendezvous: rank {rank} of {world_size} did not reach the store at {coordinator} "
                f"within {timeout_s:g} s",
                (0,),
            )


def _meet(
    store: Any,
    rank: int,
    arrival: Arrival,
    listener: _core.Listener,
    deadline: float,
    timeout_s: float,
) -> Meeting:
    if rank == 0:
        store.set("key", secrets.token_hex(16))
    if store.add(f"arrived/{rank}", 1) > 1:
        refusal = json.dumps([_twice(rank), rank])
        _decide(store, refusal)
        raise _refused(refusal)
    store.set(f"rank/{rank}", arrival.pack())
    try:
        arrivals = _await_all(store, rank, arrival.world_size, deadline, timeout_s)
        meeting = conclude(arrivals, listener, bytes(store.get("key")).decode())
        refusal = _decide(store, "")
        if refusal:
            raise _refused(refusal)
        return meeting
    except ClusterConfigError as error:
        text = str(error).removeprefix("rendezvous: ")
        refusal = _decide(store, json.dumps([text, *error.ranks[:1]]))
        if rank == 0:
            _await_told(store, arrival.world_size)
        else:
            store.add("told", 1)
        if refusal:
            raise _refused(refusal) from None
        raise


def _await_all(
    store: Any, rank: int, size: int, deadline: float, timeout_s: float
) -> list[Arrival]:
    found: dict[int, Arrival] = {}
    while True:
        for other in range(size):
            if other in found or not store.check([f"rank/{other}"]):
                continue
            arrival = Arrival.unpack(bytes(store.get(f"rank/{other}")))
            if arrival.world_size != size:
                raise ClusterConfigError(
                    f"rendezvous: ranks disagree on the number of ranks: rank {rank} expects "
                    f"{size}, rank {other} expects {arrival.world_size}",
                    (other,),
                )
            found[other] = arrival
        missing = tuple(other for other in range(size) if other not in found)
        if not missing:
            return [found[other] for other in range(size)]
        if store.check(["decision"]):
            refusal = _decide(store, "")
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


def _await_told(store: Any, size: int) -> None:
    """Keep the store, which ends with rank 0, until the ranks that came have read the decision."""
    arrived = sum(bool(store.check([f"rank/{rank}"])) for rank in range(1, size))
    until = time.monotonic() + _TELL_S
    while store.add("told", 0) < arrived and time.monotonic() < until:
        time.sleep(_POLL_S)


def _decide(store: Any, refusal: str) -> str:
    """Post whether the meeting is refused, as JSON, or not (""); return the first such decision."""
    decision: str = json.loads(bytes(store.compare_set("decision", "", json.dumps(refusal))))
    return decision


def _refused(refusal: str) -> ClusterConfigError:
    text, *ranks = json.loads(refusal)
    return ClusterConfigError(f"rendezvous: {text}", tuple(ranks))


def _open_store(
    host: str, port: int, listens: bool, prefix: str, rank: int, timeout_s: float
) -> Any:
    distributed = _c10d()
    patience = datetime.timedelta(seconds=max(1.0, timeout_s))
    options: dict[str, Any] = {"timeout": patience, "wait_for_workers": False}
    if listens:
        options |= {"is_master": True, "multi_tenant": True}
        listener = _listen(host, port)
        if listener is not None:  # else torch.distributed has opened a store in this process
            options["master_listen_fd"] = listener.detach()
    try:
        store = distributed.TCPStore(host, port, None, **options)
    except (RuntimeError, ValueError) as error:
        if listens and "EADDRINUSE" in str(error):
            _refuse_other_job(host, port, prefix)
        loopback = "" if listens else _loopback_hint(host)
        raise ClusterConfigError(
            f"rendezvous: rank {rank} cannot {'open' if listens else 'reach'} the store at "
            f"{host}:{port} within {timeout_s:g} s: {_reason(error)}{loopback}",
            (0,),
        ) from None
    _stores.append(store)
    return distributed.PrefixStore(prefix, store)


def _refuse_other_job(host: str, port: int, prefix: str) -> None:
    """End a meeting that has begun at the address of this job: its ranks might join this job's."""
    distributed = _c10d()

    def refuse() -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            other = distributed.TCPStore(host, port, None, timeout=_REFUSAL_PATIENCE)
            _decide(distributed.PrefixStore(prefix, other), json.dumps([_twice(0), 0]))

    # In a thread, since it never ends if the program at the port is no store and says nothing.
    thread = threading.Thread(target=refuse, daemon=True, name="fastdist refusal")
    thread.start()
    thread.join(_REFUSAL_PATIENCE.total_seconds())


def _twice(rank: int) -> str:
    return (
        f"rank {rank} arrived twice: two processes were given this rank, or two jobs meet at this "
        "address at the same time; give each job a port of its own"
    )


def _reason(error: Exception) -> str:
    if "EADDRINUSE" in str(error):
        return "another job or program uses the port; give each job a port of its own"
    return str(error).partition("\n")[0]


def _loopback_hint(host: str) -> str:
    try:
        address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return ""
    if not ipaddress.ip_address(str(address).partition("%")[0]).is_loopback:
        return ""
    return f"; {host} is this machine itself here, expected an address that all machines reach"


def _listen(host: str, port: int) -> socket.socket | None:
    """Open a socket that listens at this address only; return None if the address is in use."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ClusterConfigError(f"rendezvous: cannot resolve {host!r}: {error}") from None
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise ClusterConfigError(
            f"rendezvous: rank 0 cannot listen at {host}:{port}: {error.strerror}; expected an "
            "address of the machine of rank 0",
            (0,),
        ) from None
    return listener


def _c10d() -> Any:
    """Import the module of torch's stores.

    Raises:
        ImportError: torch is not installed.
    """
    try:
        import torch.distributed
    except ImportError:
        raise ImportError(
            "ranks on several machines meet in torch's TCPStore: pip install torch, or start them "
            "by mpiexec and pass fastdist.init(bootstrap=) an mpi4py communicator"
        ) from None
    if not torch.distributed.is_available():
        raise ImportError(
            "ranks on several machines meet in torch's TCPStore, which this build of torch lacks"
        )
    return torch._C._distributed_c10d  # torch.distributed exports only a part of it
