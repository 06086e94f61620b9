"""Making communicators: the ranks that a launcher started, or threads of this process."""

from __future__ import annotations

import atexit
import ipaddress
import os
import secrets
import socket
import threading
import time
from typing import Any, Protocol

import fastdist._core as _core
from fastdist._config import settings
from fastdist.cluster.address import join_address, split_address
from fastdist.cluster.launch import Launch, detect_launch
from fastdist.cluster.replicas import patience_s, started_replica
from fastdist.collectives.arguments import check_timeout, to_integer
from fastdist.collectives.communicator import Communicator
from fastdist.collectives.engines.engine import Engine
from fastdist.collectives.engines.host import HostEngine
from fastdist.errors import ClusterConfigError, FastdistError

_DEFAULT_PORT = 29500  # torch's
_MOST_THREADS = 1024  # memory grows with their square


class Bootstrap(Protocol):
    """What `init` needs of an mpi4py communicator."""

    def Get_rank(self) -> int:  # noqa: D102
        ...

    def Get_size(self) -> int:  # noqa: D102
        ...

    def bcast(self, obj: Any, root: int = 0) -> Any:  # noqa: D102
        ...


class Cluster(Protocol):
    """What `init` needs of a cluster resolver."""

    @property
    def rank(self) -> int | None:
        """This process's rank; None where it is no rank at all."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    @property
    def coordinator_address(self) -> str:
        """The "host:port" where rank 0 listens, and the others find it."""


class _World:
    """The default communicator, and how many meetings this process has been to."""

    communicator: Communicator | None = None
    meetings = 0
    process = 0  # the one that called init


def init(
    *,
    bootstrap: Bootstrap | None = None,
    cluster: Cluster | None = None,
    timeout: float | None = None,
) -> Communicator:
    """The communicator of all ranks of this job; every rank must call.

    The ranks are those that `fastdist run`, torchrun, mpiexec or srun started; a process started
    alone is a world of one. Called again it returns the same communicator until that is closed.
    Ranks of one machine share memory. Where there are several machines, the ranks find each other
    at MASTER_ADDR:MASTER_PORT, and torch's Gloo connects the machines.

    Args:
        bootstrap: an mpi4py communicator to take the ranks from instead.
        cluster: a cluster resolver to take the ranks from instead.
        timeout: seconds that each collective waits for other ranks by default; 600 if None, or
            FASTDIST_TIMEOUT_S.

    Raises:
        ClusterConfigError: the launcher's variables make no sense, or not all ranks came.
        ImportError: there are several machines and torch is not installed.
    """
    if _World.communicator is not None:
        return default_communicator()
    if timeout is not None:
        check_timeout(timeout)
    if bootstrap is not None and cluster is not None:
        raise ValueError("init takes bootstrap= or cluster=, got both")
    config = settings()
    started_replica()
    waits_s = config.rendezvous_timeout_s + patience_s()
    if bootstrap is not None:
        engine = _from_bootstrap(bootstrap, waits_s)
    elif cluster is not None:
        engine = _from_cluster(cluster, waits_s)
    else:
        engine = _from_launch(waits_s)
    _World.meetings += 1
    communicator = _DefaultCommunicator(engine, config.timeout_s if timeout is None else timeout)
    _World.communicator = communicator
    _World.process = os.getpid()
    atexit.register(communicator.close)
    return communicator


def local_group(size: int, *, timeout: float | None = None) -> list[Communicator]:
    """Communicators for `size` ranks that are threads of this process, one for each.

    Args:
        size: number of ranks, at most 1024.
        timeout: as for `init`.
    """
    size = to_integer(size, "size")
    if not 1 <= size <= _MOST_THREADS:
        raise ValueError(f"size must be an integer from 1 to {_MOST_THREADS}, got {size}")
    timeout_s = settings().timeout_s if timeout is None else timeout
    check_timeout(timeout_s)
    return [Communicator(engine, timeout_s) for engine in HostEngine.of_threads(size)]


def in_groups(flat: Communicator, width: int, *, timeout: float | None = None) -> Communicator:
    """The same ranks, whose reductions go through groups of neighbours and their first ranks.

    Every rank must call. The result takes the place of `flat`, and closes it when it is closed.

    Args:
        flat: the ranks.
        width: of a group; the last one may be smaller.
        timeout: as for `init`.
    """
    from fastdist.collectives.engines.groups import engine_in_groups

    timeout_s = settings().timeout_s if timeout is None else timeout
    return Communicator(engine_in_groups(flat.engine, width, timeout_s), timeout_s)


def has_communicator() -> bool:
    """True after `init`, until the communicator is closed."""
    return _World.communicator is not None


def default_communicator() -> Communicator:
    """The communicator that `init` made.

    Raises:
        FastdistError: `init` has not been called, or its communicator was closed.
    """
    if _World.communicator is None:
        raise FastdistError("there is no communicator yet: call fastdist.init() first")
    if _World.process != os.getpid():
        raise FastdistError(
            "the communicator belongs to the parent process; start ranks by a launcher, not by fork"
        )
    return _World.communicator


class _DefaultCommunicator(Communicator):
    """The communicator of all ranks; `init` makes another one after it is closed."""

    def close(self) -> None:
        if _World.communicator is self:
            _World.communicator = None
            atexit.unregister(self.close)
        super().close()

    def _succeeded_by(self, engine: Engine) -> Communicator:
        was_default = _World.communicator is self
        self.close()
        made = _DefaultCommunicator(engine, self._timeout_s)
        if was_default:
            _World.communicator = made
            atexit.register(made.close)
        return made


def _let_threads_go() -> None:
    """At exit: daemon threads stay in their calls, since the interpreter would unwind them."""
    _core.begin_exit()
    if threading.active_count() > 1:
        time.sleep(0.05)  # those on their way back into Python get there first


atexit.register(_let_threads_go)


def _from_launch(timeout_s: float) -> Engine:
    launch = detect_launch()
    if launch is None:
        launch = Launch("alone", 0, 1, 0, 1, secrets.token_hex(8))
    if launch.local_world_size == launch.world_size:
        return HostEngine.of_launch(launch, _World.meetings, timeout_s)
    coordinator = coordinator_of_launch(launch)
    return _on_machines(launch.rank, launch.world_size, coordinator, timeout_s)


def coordinator_of_launch(launch: Launch) -> str:
    """Where rank 0 of a job on several machines can be reached, "host:port".

    Raises:
        ClusterConfigError: MASTER_ADDR is not set, or makes no sense.
    """
    if not os.environ.get("MASTER_ADDR"):
        raise ClusterConfigError(
            f"{launch.launcher} started {launch.world_size} ranks, {launch.local_world_size} of "
            "them on this machine; expected MASTER_ADDR and MASTER_PORT, where rank 0 can be "
            "reached"
        )
    host, port = os.environ["MASTER_ADDR"], os.environ.get("MASTER_PORT", str(_DEFAULT_PORT))
    try:
        return join_address(host, port)
    except ValueError as error:
        raise ClusterConfigError(f"MASTER_ADDR={host!r}, MASTER_PORT={port!r}: {error}") from None


def _from_cluster(cluster: Cluster, timeout_s: float) -> Engine:
    _require(cluster, "cluster", "a cluster resolver", "rank", "world_size")
    rank, size = cluster.rank, cluster.world_size
    if rank is None:
        raise ClusterConfigError("this task does not train: a parameter server or evaluator")
    if size == 1:
        alone = Launch("cluster", 0, 1, 0, 1, secrets.token_hex(8))
        return HostEngine.of_launch(alone, _World.meetings, timeout_s)
    coordinator = cluster.coordinator_address
    if _is_loopback(coordinator):
        launch = Launch("cluster", rank, size, rank, size, f"cluster/{coordinator}")
        return HostEngine.of_launch(launch, _World.meetings, timeout_s)
    return _on_machines(rank, size, coordinator, timeout_s)


def _from_bootstrap(bootstrap: Bootstrap, timeout_s: float) -> Engine:
    from fastdist.collectives.engines.machine_rendezvous import machine_id

    _require(bootstrap, "bootstrap", "an mpi4py communicator", "Get_rank", "Get_size", "bcast")
    rank, size = bootstrap.Get_rank(), bootstrap.Get_size()
    key = bootstrap.bcast(secrets.token_hex(16))
    machines = [bootstrap.bcast(machine_id(), root) for root in range(size)]
    if len(set(machines)) == 1:
        launch = Launch("bootstrap", rank, size, rank, size, key)
        return HostEngine.of_launch(launch, _World.meetings, timeout_s)
    coordinator = bootstrap.bcast(_free_address() if rank == 0 else "")
    return _on_machines(rank, size, coordinator, timeout_s)


def _require(value: object, argument: str, expected: str, *attributes: str) -> None:
    missing = [name for name in attributes if not hasattr(value, name)]
    if missing:
        raise TypeError(
            f"{argument} must be {expected}, got {value!r}, which has no {', '.join(missing)}"
        )


def _on_machines(rank: int, size: int, coordinator: str, timeout_s: float) -> Engine:
    """Meet through a store; then the engine for what was found."""
    # Imported where there are several machines: `import fastdist` is to be quick.
    from fastdist.collectives.engines.gloo import GlooEngine
    from fastdist.collectives.engines.hierarchical import HierarchicalEngine
    from fastdist.collectives.engines.machine_links import MachineLinks
    from fastdist.collectives.engines.machine_rendezvous import meet_machines

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    meeting = meet_machines(
        rank, size, coordinator, f"fastdist/{attempt}/{_World.meetings}", timeout_s, has_agent
    )
    layout = meeting.layout
    place, local = layout.place_of(rank)
    here = len(layout.places[place])
    key = f"{meeting.key}/{place}"
    own = Launch("machines", local, here, local, here, key)
    inner = HostEngine.of_launch(own, _World.meetings, timeout_s)
    if len(layout.places) == 1:
        return inner
    several = layout.width > 1
    flat = GlooEngine(meeting.store, rank, size, meeting.address, timeout_s, lanes_only=several)
    if not several:
        return flat
    links = MachineLinks(flat, layout, meeting.store, timeout_s)
    return HierarchicalEngine(layout, rank, inner, links)


def _is_loopback(coordinator: str) -> bool:
    try:
        host, _ = split_address(coordinator)
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _free_address() -> str:
    """Where this machine can listen: MASTER_ADDR, or the address of its name; at a free port."""
    host = os.environ.get("MASTER_ADDR") or socket.gethostname()
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.bind(address)
            name = probe.getsockname()
    except OSError as error:
        raise ClusterConfigError(
            f"rank 0 cannot listen at {host!r} ({error}); expected MASTER_ADDR, an address of its "
            "machine that the others can reach"
        ) from None
    if ipaddress.ip_address(name[0]).is_loopback:
        raise ClusterConfigError(
            f"{host!r} is {name[0]} on the machine of rank 0; expected MASTER_ADDR, an address "
            "that other machines can reach"
        )
    return join_address(name[0], name[1])
