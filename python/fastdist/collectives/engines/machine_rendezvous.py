"""Rendezvous of ranks on several machines, through torch's TCPStore.

Rank 0 opens the store at the address that all ranks were given and listens on that address only;
under torchrun, all ranks use the store that torchrun's agent has opened there. Each rank posts the
machine on which it runs. The ranks of one machine then meet without the network (rendezvous.py);
the machines' leaders, and ranks that send to each other, connect by Gloo. Values in the store are
JSON, so that no value that a stranger writes there is executed.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import secrets
import socket
import threading
import time
from dataclasses import dataclass
from typing import Any

from fastdist.cluster.address import split_address
from fastdist.cluster.own_address import own_address
from fastdist.collectives.engines.c10d import c10d
from fastdist.collectives.engines.layout import Layout
from fastdist.collectives.rendezvous import run_checks
from fastdist.errors import ClusterConfigError

_POLL_S = 0.05
_REFUSAL_PATIENCE = datetime.timedelta(seconds=2)
# Stores are kept: a store ends with its last reference, and the next `init` needs it.
_stores: list[Any] = []


@dataclass(frozen=True, slots=True)
class Meeting:
    """The result of a rendezvous.

    Attributes:
        store: torch's store, with a prefix of this rendezvous.
        layout: the ranks of each machine.
        address: address of this machine, reachable from the others.
        key: equal on all ranks, and secret to processes that cannot read the store.
    """

    store: Any
    layout: Layout
    address: str
    key: str


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
    deadline = time.monotonic() + timeout_s
    try:
        host, port = split_address(coordinator)
    except ValueError as error:
        raise ClusterConfigError(f"rendezvous: {error}") from None
    store = _open_store(host, port, rank == 0 and not has_agent, prefix, rank, timeout_s)
    try:
        return _meet(store, rank, world_size, own_address(host, port), deadline, timeout_s)
    except RuntimeError as error:
        if isinstance(error, ClusterConfigError):
            raise
        raise ClusterConfigError(
            f"rendezvous: rank {rank} lost the store at {coordinator}: {error}", (0,)
        ) from None


def _meet(
    store: Any, rank: int, world_size: int, address: str, deadline: float, timeout_s: float
) -> Meeting:
    if rank == 0:
        store.set("key", secrets.token_hex(16))
    if store.add(f"arrived/{rank}", 1) > 1:
        refusal = json.dumps([_twice(rank), rank])
        _decide(store, refusal)
        raise _refused(refusal)
    store.set(f"rank/{rank}", json.dumps([machine_id(), world_size]))
    places: dict[str, list[int]] = {}
    for other, machine in enumerate(_await_all(store, rank, world_size, deadline, timeout_s)):
        places.setdefault(machine, []).append(other)
    refusal = _decide(store, "")
    if refusal:
        raise _refused(refusal)
    layout = Layout(tuple(map(tuple, places.values())))
    return Meeting(store, layout, address, bytes(store.get("key")).decode())


def _await_all(store: Any, rank: int, size: int, deadline: float, timeout_s: float) -> list[str]:
    """Return the machine of each rank."""
    found: dict[int, str] = {}
    while True:
        for other in range(size):
            if other in found or not store.check([f"rank/{other}"]):
                continue
            machine, theirs = json.loads(bytes(store.get(f"rank/{other}")))
            if theirs != size:
                raise ClusterConfigError(
                    f"rendezvous: ranks disagree on the number of ranks: rank {rank} expects "
                    f"{size}, rank {other} expects {theirs}",
                    (other,),
                )
            found[other] = str(machine)
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
        run_checks()
        time.sleep(_POLL_S)


def _decide(store: Any, refusal: str) -> str:
    """Post whether the meeting is refused, as JSON, or not (""); return the first such decision."""
    decision: str = json.loads(bytes(store.compare_set("decision", "", json.dumps(refusal))))
    return decision


def _refused(refusal: str) -> ClusterConfigError:
    text, rank = json.loads(refusal)
    return ClusterConfigError(f"rendezvous: {text}", (rank,))


def _open_store(
    host: str, port: int, listens: bool, prefix: str, rank: int, timeout_s: float
) -> Any:
    distributed = c10d()
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
        raise ClusterConfigError(
            f"rendezvous: rank {rank} cannot {'open' if listens else 'reach'} the store at "
            f"{host}:{port} within {timeout_s:g} s: {_reason(error)}",
            (0,),
        ) from None
    _stores.append(store)
    return distributed.PrefixStore(prefix, store)


def _refuse_other_job(host: str, port: int, prefix: str) -> None:
    """End a meeting that has begun at the address of this job: its ranks might join this job's."""
    distributed = c10d()

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
