"""Rendezvous of ranks on several machines.

The ranks tell each other on which machine each runs. The ranks of one machine then exchange memory
without the network (local.py); ranks of several machines tell each other their addresses, and
connect (connections.py). They meet in torch's TCPStore, which rank 0 opens at the address that all
ranks were given, or torchrun's agent has opened there; in the store of a process group; by an
mpi4py communicator; or through the launcher of an elastic job (board.py). Strangers may write into
a store: so ranks seal what the connections depend on (link/secret.py).
"""

from __future__ import annotations

import atexit
import ipaddress
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from fastdist._version import __version__
from fastdist.cluster.address import join_address, own_address, split_address
from fastdist.cluster.launch import LAUNCHER_VARIABLE, Launch
from fastdist.collectives.engines.engine import Engine
from fastdist.collectives.engines.host import HostEngine
from fastdist.collectives.engines.net import NetEngine, Rendezvous, ranks_of
from fastdist.collectives.rendezvous.agent import agree_on_name
from fastdist.collectives.rendezvous.board import Bootstrap, StoreBoard, refuse_other_job
from fastdist.collectives.rendezvous.connections import listen_at
from fastdist.collectives.rendezvous.local import run_checks
from fastdist.collectives.rendezvous.store import open_store, telling_loss, with_prefix
from fastdist.errors import ClusterConfigError
from fastdist.link.secret import exchange, job_secret

_POLL_S = 0.05
_END_S = 5.0  # for attempts to reach the store, as the interpreter ends
_STORE_GRACE_S = 5.0  # for ranks that tell each other why they end


def machine_id() -> str:
    """Identify the kernel's boot and the network namespace: equal if processes can share memory."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"


def agree(
    board: Bootstrap,
    deadline: float,
    coordinator: str | None = None,
    host: str | None = None,
    is_trusted: bool = False,
) -> Rendezvous:
    """Find where all ranks are. Every rank must call.

    Args:
        deadline: until when to wait for the network, on the monotonic clock.
        coordinator: "host:port" of the machine of rank 0, if all ranks know it.
        host: a name or address of that machine, if rank 0 knows it.
        is_trusted: False if strangers may write on the board, so that ranks on several machines
            prove that they have the job's secret.
    """
    rank = board.Get_rank()
    own = [machine_id(), secrets.token_hex(16), __version__]
    machines: list[int] = []
    numbers: dict[str, int] = {}
    try:
        everyone = board.allgather(own)
        key = str(everyone[0][1])
        for other, (machine, _, version) in enumerate(everyone):
            machines.append(numbers.setdefault(machine, len(numbers)))
            if version != __version__:
                raise ClusterConfigError(
                    "rendezvous: all ranks must have the same version of fastdist: this rank has "
                    f"{__version__}, rank {other} has {str(version)[:40]!r}",
                    (other,),
                )
        if everyone[rank] != own:
            raise ValueError("a stranger writes on the board")
    except (TypeError, ValueError):
        raise ClusterConfigError("rendezvous: a rank has not said on which machine it is") from None
    if len(numbers) == 1:
        return Rendezvous(rank, machines, key)
    secret = None if is_trusted else job_secret()
    said = json.dumps(everyone)
    if coordinator is None:
        address = _free_address(host) if rank == 0 else ""
        coordinator = exchange(board.allgather, secret, rank, f"address/{said}", address)[0]
    try:  # on the interface that routes to rank 0
        listener = listen_at(own_address(*split_address(coordinator), deadline))
    except OSError as error:
        raise ClusterConfigError(f"rendezvous: {error}") from None
    try:
        launcher = os.environ.get(LAUNCHER_VARIABLE, "")
        text = json.dumps([*listener.getsockname()[:2], launcher])
        packed = exchange(board.allgather, secret, rank, f"arrival/{said}", text)
        arrivals = [_arrival(text, other) for other, text in enumerate(packed)]
    except BaseException:
        listener.close()
        raise
    if secret is not None:
        key = secret.derive("key", json.dumps([said, packed]))
    addresses = [(ip, port) for ip, port, _ in arrivals]
    launchers = [launcher for _, _, launcher in arrivals]
    return Rendezvous(rank, machines, key, addresses, listener, launchers)


def _arrival(text: str, rank: int) -> tuple[str, int, str]:
    """Decode what a rank has said: IP address and port of its listener, address of its launcher."""
    try:
        ip, port, launcher = json.loads(text)
        if (type(ip), type(port), type(launcher)) != (str, int, str):
            raise ValueError("expected an address, a port and an address")
        is_loopback = ipaddress.ip_address(ip.partition("%")[0]).is_loopback
        if not 0 < port < 1 << 16:
            raise ValueError(f"port {port}")
    except (TypeError, ValueError, RecursionError) as error:
        raise ClusterConfigError(
            f"rendezvous: rank {rank} has posted a malformed arrival ({error}); do all ranks "
            "have the same version of fastdist?",
            (rank,),
        ) from None
    if is_loopback:
        raise ClusterConfigError(
            f"rendezvous: rank {rank} listens at {ip}, which other machines cannot reach; "
            "expected the address of rank 0 to be one of its network, not of loopback",
            (rank,),
        )
    return ip, port, launcher


def connect(
    found: Rendezvous, launcher: str, timeout_s: float, silence_s: float = 0.0
) -> tuple[Engine, Launch]:
    """Connect this rank to all others; return the engine, and this rank's place.

    `launcher` is the program that started the ranks, for messages.
    """
    rank, machines, key = found.rank, found.machines, found.key
    here = ranks_of(machines, machines[rank])
    local, key_here = here.index(rank), f"{key}/{machines[rank]}"
    launch = Launch(launcher, rank, len(machines), local, len(here), key_here)
    own = key_here, local, len(here), timeout_s
    if found.listener is None:
        return HostEngine.of_processes(*own), launch
    with found.listener:
        try:
            inner = HostEngine.of_processes(*own)
        except ClusterConfigError as error:
            ranks = tuple(here[number] for number in error.ranks)
            raise ClusterConfigError(
                f"{error} (ranks of this machine, which are {here} of the job)", ranks
            ) from None
        return NetEngine(found, inner, timeout_s, silence_s=silence_s), launch


def _free_address(host: str | None) -> str:
    """Return a free port of this machine: at `host`, MASTER_ADDR or its host name's address."""
    host = host or os.environ.get("MASTER_ADDR") or socket.gethostname()
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.bind(address)
            name = probe.getsockname()
    except OSError as error:
        raise ClusterConfigError(
            f"rank 0 cannot listen at {host!r} ({error}); expected MASTER_ADDR, an address of its "
            "machine that the other machines can reach"
        ) from None
    if ipaddress.ip_address(name[0]).is_loopback:
        raise ClusterConfigError(
            f"{host!r} resolves to {name[0]} on the machine of rank 0; expected MASTER_ADDR, an "
            "address that other machines can reach"
        )
    return join_address(name[0], name[1])


def agree_in_store(
    rank: int, size: int, coordinator: str, prefix: str, timeout_s: float, has_agent: bool = False
) -> Rendezvous:
    """Find all ranks and their machines in torch's TCPStore. Every rank must call.

    The store is at `coordinator`, "host:port". Torchrun's agent holds it, or else rank 0 opens it,
    with a prefix of the keys that is unique to this rendezvous.
    """
    try:
        host, port = split_address(coordinator)
    except ValueError as error:
        raise ClusterConfigError(f"rendezvous: {error}") from None
    deadline = time.monotonic() + timeout_s

    def attempt(is_given_up: Callable[[], bool]) -> Rendezvous:
        refuse = refuse_other_job if rank == 0 and not has_agent else None
        store = open_store(host, port, prefix, rank, timeout_s, refuse, is_given_up)
        with telling_loss(rank, f" at {coordinator}"):
            if has_agent:
                store = with_prefix(store, agree_on_name(store, rank, size, deadline))
            board = StoreBoard(store, rank, size, deadline, timeout_s, is_new=True)
        try:
            return agree(board, deadline, coordinator)
        except BaseException as error:
            board.give_up(error)
            raise

    late = ClusterConfigError(
        f"rendezvous: rank {rank} of {size} did not reach the store at {coordinator} within "
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
    answer = Future[Rendezvous]()
    given_up = threading.Event()

    def body() -> None:
        try:
            found = attempt(given_up.is_set)
        except BaseException as error:
            answer.set_exception(error)
            return
        if given_up.is_set() and found.listener is not None:
            found.listener.close()  # before the answer, after which it is the caller's
        answer.set_result(found)

    thread = threading.Thread(target=body, daemon=True, name="fastdist rendezvous")
    thread.start()
    try:
        while not wait([answer], _POLL_S).done:
            run_checks()
            if time.monotonic() > deadline:
                raise late
        return answer.result()
    finally:
        given_up.set()
        if thread.is_alive():
            atexit.register(thread.join, _END_S)
