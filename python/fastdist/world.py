"""Making communicators: the ranks that a launcher started, or threads of this process."""

from __future__ import annotations

import atexit
import os
import secrets
import threading
import time
from typing import Any, Protocol

from fastdist import _core
from fastdist._config import settings
from fastdist.cluster.launch import Launch, detect_launch
from fastdist.communicator import Communicator
from fastdist.errors import FastdistError, UnsupportedError
from fastdist.rendezvous import meet


class Bootstrap(Protocol):
    """What `init` needs of an mpi4py communicator."""

    def Get_rank(self) -> int:  # noqa: D102
        ...

    def Get_size(self) -> int:  # noqa: D102
        ...

    def bcast(self, obj: Any, root: int = 0) -> Any:  # noqa: D102
        ...


class _World:
    """The default communicator, and how many meetings this process has been to."""

    communicator: Communicator | None = None
    meetings = 0
    process = 0  # the one that called init


def init(*, bootstrap: Bootstrap | None = None, timeout: float | None = None) -> Communicator:
    """The communicator of all ranks of this job; every rank must call.

    The ranks are those that `fastdist run`, torchrun, mpiexec or srun started; a process started
    alone is a world of one. Called again it returns the same communicator until that is closed.

    Args:
        bootstrap: an mpi4py communicator to take the ranks from instead.
        timeout: seconds that each collective waits for other ranks by default; 600 if None, or
            FASTDIST_TIMEOUT_S.

    Raises:
        ClusterConfigError: the launcher's variables make no sense, or not all ranks came.
    """
    if _World.communicator is not None:
        return default_communicator()
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout}")
    config = settings()
    launch = _from_bootstrap(bootstrap) if bootstrap is not None else detect_launch()
    if launch is None:
        launch = Launch("alone", 0, 1, 0, 1, secrets.token_hex(8))
    if launch.local_world_size != launch.world_size:
        raise UnsupportedError(
            f"ranks on several machines are not supported yet: {launch.launcher} started "
            f"{launch.world_size} ranks, {launch.local_world_size} of them on this machine"
        )
    tuning = _core.tuning_for(launch.world_size)
    own_fd = _core.create_segment_file(launch.world_size, tuning)
    try:
        fds = meet(launch, _World.meetings, own_fd, config.rendezvous_timeout_s)
    except BaseException:
        os.close(own_fd)
        raise
    _World.meetings += 1
    machine = _core.Machine.of_processes(fds, launch.rank)
    block = _core.SharedBlock(machine, launch.rank, launch.world_size, tuning)
    ranks = list(range(launch.world_size))
    host = _core.HostCommunicator(
        machine, ranks, launch.rank, [block.offset] * len(ranks), block, tuning
    )
    communicator = _DefaultCommunicator(host, config.timeout_s if timeout is None else timeout)
    _World.communicator = communicator
    _World.process = os.getpid()
    atexit.register(communicator.close)
    return communicator


def local_group(size: int, *, timeout: float | None = None) -> list[Communicator]:
    """Communicators for `size` ranks that are threads of this process, one for each.

    Args:
        size: number of ranks.
        timeout: as for `init`.
    """
    if size < 1:
        raise ValueError(f"a group needs at least 1 rank, got {size}")
    timeout_s = settings().timeout_s if timeout is None else timeout
    machine = _core.Machine.of_threads(size)
    tuning = _core.tuning_for(size)
    blocks = [_core.SharedBlock(machine, rank, size, tuning) for rank in range(size)]
    offsets = [block.offset for block in blocks]
    ranks = list(range(size))
    return [
        Communicator(
            _core.HostCommunicator(machine, ranks, rank, offsets, blocks[rank], tuning), timeout_s
        )
        for rank in ranks
    ]


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


def _let_threads_go() -> None:
    """At exit: daemon threads stay in their calls, since the interpreter would unwind them."""
    _core.begin_exit()
    if threading.active_count() > 1:
        time.sleep(0.05)  # those on their way back into Python get there first


atexit.register(_let_threads_go)


def _from_bootstrap(bootstrap: Bootstrap) -> Launch:
    rank, size = bootstrap.Get_rank(), bootstrap.Get_size()
    key, machine = bootstrap.bcast((secrets.token_hex(16), _machine_id()))
    return Launch("bootstrap", rank, size, rank, size if machine == _machine_id() else 1, key)


def _machine_id() -> tuple[str, int]:
    """Equal for processes that can share memory: one boot of one kernel, one network namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip(), os.stat("/proc/self/ns/net").st_ino
