"""Makes communicators for the ranks that a launcher started, or for threads of this process."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import sys
import threading
import time
import traceback
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

import fastdist._core as _core
from fastdist._config import settings
from fastdist.cluster.address import join_address, split_address
from fastdist.cluster.environ import join_master
from fastdist.cluster.launch import Launch, detect_launch, note_launch, require_own_place
from fastdist.cluster.replicas import patience_s, started_replica
from fastdist.cluster.roster import SILENT_S, roster_place
from fastdist.collectives.arguments import check_timeout, to_integer, to_rank
from fastdist.collectives.communicator import Communicator
from fastdist.collectives.elastic import BrokenWorldError, Member
from fastdist.collectives.engines.engine import Engine
from fastdist.collectives.engines.host import HostEngine
from fastdist.errors import ClusterConfigError, FastdistError, LostRankError
from fastdist.link.addresses import is_loopback
from fastdist.recorder.phases import Phase, phase

if TYPE_CHECKING:
    from fastdist.collectives.rendezvous.board import Bootstrap

_DEFAULT_PORT = 29500  # the same as torch's
_WORLD_S = 10.0  # that the ranks of a new world of an elastic job have to connect
_MAX_THREADS = 1024  # memory grows with the square of the number


class _World:
    """The default communicator, and what else this process remembers of its worlds."""

    communicator: Communicator | None = None
    member: Member | None = None  # of an elastic job
    meetings: ClassVar[Counter[str]] = Counter()  # through a store, by its address
    process = 0  # id of the process that called init
    exit_code: int | None = None  # of a program that ended well, but whose replicas did not


def init(
    *,
    bootstrap: Bootstrap | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    address: str | None = None,
    elastic: bool = False,
    timeout: float | None = None,
) -> Communicator:
    """Return the communicator of all ranks of this job. Every rank must call.

    The ranks are the processes that `fastdist run`, torchrun, mpiexec or srun started; a process
    without a launcher is a world of one rank. Later calls return the same communicator until it is
    closed. Ranks of one machine share memory. In a job on several machines, the rendezvous is
    torch's TCPStore at MASTER_ADDR:MASTER_PORT, and the ranks connect by TCP.

    Args:
        bootstrap: an mpi4py communicator that defines the ranks instead.
        rank: this process's rank, from 0, in a program that starts its ranks itself (Ray, dask,
            multiprocessing); with world_size and address.
        world_size: number of ranks.
        address: "host:port" of the machine of rank 0, the same on all ranks. The port must be
            free: rank 0 listens there. 127.0.0.1 if all ranks are on one machine.
        elastic: ranks may come and go (`fastdist run --min 2 --max 4`). This process is a world
            of one rank until it joins the others by `Communicator.regroup`.
        timeout: default number of seconds that each collective waits for other ranks; None:
            FASTDIST_TIMEOUT_S, or 600 if it is not set.

    Raises:
        ClusterConfigError: the launcher's variables are invalid, a rank did not arrive in time, or
            only one of launcher and program is elastic.
        ImportError: the job has several machines, and torch is not installed.
        ValueError: the ranks are defined twice, or rank, world_size and address are not all given
            and valid.
    """
    if _World.communicator is not None:
        return default_communicator()
    if timeout is not None:
        check_timeout(timeout)
    is_named = (rank, world_size, address) != (None, None, None)
    if is_named + (bootstrap is not None) + elastic > 1:
        raise ValueError("init takes one of bootstrap=, rank= and elastic=, got several")
    ranks = _named_ranks(rank, world_size, address) if is_named else None
    config = settings()
    started_replica()
    waits_s = config.rendezvous_timeout_s + patience_s()
    if elastic or roster_place() is not None:
        engine = _elastic_alone(elastic)
    elif bootstrap is not None:
        engine, _ = _from_bootstrap(bootstrap, waits_s)
    elif ranks is not None:
        engine, launch = _connect(*ranks, waits_s)
        note_launch(launch)
    else:
        engine = _from_launch(waits_s)
    seconds = config.timeout_s if timeout is None else timeout
    atexit.unregister(_close)
    # Registered first so that it runs last: others still need to read why this rank leaves.
    atexit.register(_close)
    _World.communicator = Communicator(engine, seconds, _replace, _regroup if elastic else None)
    _World.process = os.getpid()
    return _World.communicator


def elastic_member() -> Member | None:
    """Return this process's membership in an elastic job; None if its job is not elastic."""
    return _World.member if _World.process == os.getpid() else None


def next_world(old: Communicator, timeout_s: float) -> Communicator:
    """Leave a communicator of an elastic job, and join the others; see `Communicator.regroup`."""
    member = _World.member
    assert member is not None
    old.abort()
    while True:
        member.join(timeout_s)
        try:
            with member.rendezvous():
                engine, ranks_here = _from_bootstrap(member, _WORLD_S)
        except BrokenWorldError:
            continue
        except ClusterConfigError as error:
            member.report(error.ranks)
            continue
        launch = Launch("fastdist run", engine.rank, engine.size, engine.rank, ranks_here, "")
        note_launch(launch)
        _World.communicator = Communicator(engine, old.timeout_s, _replace, _regroup)
        return _World.communicator


def must_regroup(comm: Communicator) -> bool:
    """Return True if an elastic job needs a new rendezvous. Every rank of `comm` must call."""
    member = _World.member
    if member is None:
        return False
    try:
        return bool(comm.all_reduce(np.array([member.must_join()]), "max")[0])
    except LostRankError:
        return True


def _regroup(comm: Communicator, timeout_s: float) -> Communicator:
    return next_world(comm, timeout_s) if must_regroup(comm) else comm


def _elastic_alone(is_asked: bool) -> Engine:
    """Make the engine of a process that has not joined the others yet."""
    place, launch = roster_place(), detect_launch()
    if not is_asked:
        raise ClusterConfigError(
            "fastdist run --min, --keep or --nnodes MIN:MAX started this program, whose ranks may "
            "come and go; expected fastdist.init(elastic=True), or start it without these options"
        )
    if place is not None:
        _World.member = Member(place)
    elif launch is not None and launch.world_size > 1:
        raise ClusterConfigError(
            f"fastdist.init(elastic=True) works under fastdist run --min; {launch.launcher} "
            f"started {launch.world_size} ranks, whose number cannot change"
        )
    return _alone()


def local_group(size: int, *, timeout: float | None = None) -> list[Communicator]:
    """Make communicators for `size` ranks that are threads of this process, one for each.

    There are at most 1024. `timeout` is that of `init`. `Communicator.all_reduce` has an example.
    """
    size = to_integer(size, "size")
    if not 1 <= size <= _MAX_THREADS:
        raise ValueError(f"size must be an integer from 1 to {_MAX_THREADS}, got {size}")
    timeout_s = settings().timeout_s if timeout is None else timeout
    check_timeout(timeout_s)
    return [Communicator(engine, timeout_s) for engine in HostEngine.of_threads(size)]


def communicator_of(
    bootstrap: Bootstrap, timeout_s: float, host: str | None
) -> tuple[Communicator, int]:
    """Make a communicator beside the default one, and count its ranks on this machine.

    Every rank of `bootstrap` must call. Strangers may use it too, so ranks on several machines
    prove the job's secret. `host` is a name or address of the machine of rank 0, if it is known.
    """
    with phase(Phase.RENDEZVOUS):
        engine, ranks_here = _from_bootstrap(bootstrap, timeout_s, host, is_trusted=False)
    return Communicator(engine, timeout_s), ranks_here


def has_communicator() -> bool:
    """Return True after `init`, until the communicator is closed."""
    return _World.communicator is not None


def default_communicator() -> Communicator:
    """Return the communicator that `init` made.

    Raises:
        FastdistError: `init` was not called in this process, or its communicator was closed.
    """
    if _World.communicator is None:
        raise FastdistError("there is no communicator yet: call fastdist.init() first")
    if _World.process != os.getpid():
        raise FastdistError(
            "the communicator belongs to the parent process; start ranks with a launcher, not by "
            "fork"
        )
    return _World.communicator


def existing_communicator() -> Communicator | None:
    """Return the communicator that `init` made in this process; None if there is none."""
    return _World.communicator if _World.process == os.getpid() else None


def is_chief() -> bool:
    """Return True in one process of the job: the one for work that is done once.

    Works before any strategy or communicator is made, and communicates with nobody. So it guards
    what a program does at its top, which each replica repeats: folders, logs, downloads. Afterwards
    it agrees with `strategy.is_chief`.

    Raises:
        ClusterConfigError: the variables of the launcher, or TF_CONFIG, are invalid.
    """
    replica = started_replica()
    if _World.communicator is not None:
        return default_communicator().rank == 0
    if (place := roster_place()) is not None:
        return (place.machine, place.slot) == (0, 0)
    if replica is not None:
        return replica.rank == 0
    if os.environ.get("TF_CONFIG", "").strip():
        from fastdist.cluster.tf_config import TFConfigClusterResolver

        return TFConfigClusterResolver().is_chief
    launch = detect_launch()
    return launch is None or launch.rank == 0


def _replace(ended: Communicator, successor: Communicator | None) -> None:
    if _World.communicator is ended:
        _World.communicator = successor


def _close() -> None:
    if _World.communicator is None:
        return
    try:
        _World.communicator.close()
    except FastdistError:  # of a call on GPUs that has returned
        traceback.print_exc()
        exit_with(1)


def _let_threads_go() -> None:
    """Keep daemon threads in their calls at exit; the interpreter would unwind their stacks."""
    _core.begin_exit()
    if threading.active_count() > 1:
        time.sleep(0.05)  # lets threads that are returning to Python finish returning
    if _World.exit_code is not None:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(_World.exit_code)  # an atexit function can set the exit code only like this


def exit_with(code: int) -> None:
    """Set the exit code of this process, from an atexit function."""
    _World.exit_code = code


atexit.register(_let_threads_go)  # early, so that it runs after nearly all others


def _from_launch(timeout_s: float) -> Engine:
    launch = detect_launch()
    if launch is None:
        return _alone()
    if launch.world_size > 1:
        require_own_place()
    place = launch.rank, launch.world_size
    if launch.local_world_size == launch.world_size:
        return HostEngine.of_processes(launch.job_key, *place, timeout_s)
    coordinator = coordinator_of_launch(launch)
    return _on_machines(launch.launcher, *place, coordinator, timeout_s)[0]


def _alone() -> Engine:
    return HostEngine.of_processes(secrets.token_hex(8), 0, 1, 1.0)


def coordinator_of_launch(launch: Launch) -> str:
    """Return the "host:port" of rank 0 of a job on several machines."""
    if not os.environ.get("MASTER_ADDR"):
        raise ClusterConfigError(
            f"{launch.launcher} started {launch.world_size} ranks, {launch.local_world_size} of "
            "them on this machine; expected MASTER_ADDR and MASTER_PORT, the address and port of "
            "rank 0"
        )
    port = os.environ.get("MASTER_PORT", str(_DEFAULT_PORT))
    return join_master(os.environ["MASTER_ADDR"], port)


def _connect(rank: int, size: int, coordinator: str, timeout_s: float) -> tuple[Engine, Launch]:
    """Make the engine of ranks that the program names, and find this rank's place."""
    if size > 1 and not is_loopback(split_address(coordinator)[0]):
        return _on_machines("init", rank, size, coordinator, timeout_s)
    key = secrets.token_hex(8) if size == 1 else f"init/{coordinator}"
    engine = HostEngine.of_processes(key, rank, size, timeout_s)
    return engine, Launch("init", rank, size, rank, size, key)


def _named_ranks(rank: Any, world_size: Any, address: Any) -> tuple[int, int, str]:
    """Check the ranks that a program names; return rank, world size and address."""
    if rank is None or world_size is None or address is None:
        raise ValueError(
            f"init needs rank=, world_size= and address= together, got rank={rank!r}, "
            f"world_size={world_size!r}, address={address!r}"
        )
    size = to_integer(world_size, "world_size")
    if size < 1:
        raise ValueError(f"world_size must be at least 1, got {size}")
    try:
        address = join_address(*split_address(address))
    except (ValueError, AttributeError, TypeError):
        raise ValueError(f'address must be "host:port", got {address!r}') from None
    return to_rank(rank, "rank", size), size, address


def _from_bootstrap(
    bootstrap: Bootstrap, timeout_s: float, host: str | None = None, is_trusted: bool = True
) -> tuple[Engine, int]:
    """Make the engine, and count this machine's ranks; see `agree`."""
    from fastdist.collectives.rendezvous.machines import agree, connect

    needed = ("Get_rank", "Get_size", "allgather")
    if missing := [name for name in needed if not hasattr(bootstrap, name)]:
        raise TypeError(
            f"bootstrap must be an mpi4py communicator, got {bootstrap!r}, which has no "
            f"{', '.join(missing)}"
        )
    deadline = time.monotonic() + timeout_s
    found = agree(bootstrap, deadline, host=host, is_trusted=is_trusted)
    # Others go on without a machine of an elastic job that is silent.
    silence_s = 0.0 if _World.member is None else SILENT_S
    engine, launch = connect(found, "bootstrap", timeout_s, silence_s)
    return engine, launch.local_world_size


def _on_machines(
    launcher: str, rank: int, size: int, coordinator: str, timeout_s: float
) -> tuple[Engine, Launch]:
    """Rendezvous through a store, and make the engine that fits the ranks' machines."""
    # Imported here since `import fastdist` must be quick.
    from fastdist.collectives.rendezvous.machines import agree_in_store, connect

    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    _World.meetings[coordinator] += 1  # also one that fails
    prefix = f"fastdist/{_World.meetings[coordinator]}"
    found = agree_in_store(rank, size, coordinator, prefix, timeout_s, has_agent)
    return connect(found, launcher, timeout_s)
