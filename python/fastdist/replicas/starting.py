"""Starts the running program once more for each other replica of this machine.

The first replica, which the user has started, owns the terminal. The other replicas run the same
command from its beginning, with an empty standard input, and their output is not shown. If one
fails, the first replica prints its traceback. They end with the first replica, however it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import multiprocessing
import os
import secrets
import stat
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any

from fastdist.cluster.replicas import (
    INITIAL_DIRECTORY,
    StartedReplica,
    become_first,
    started_replica,
)
from fastdist.collectives.init import exit_with, has_communicator
from fastdist.collectives.rendezvous.local import check_while_waiting
from fastdist.errors import ClusterConfigError, FastdistError, PeerFailureError
from fastdist.processes.children import Children
from fastdist.processes.process import StartError

_END_S = 30.0  # for the other replicas to end after the first one
_PEER_END_S = 10.0  # for a failed replica, which is still ending
_FAILED_END_S = 3.0
_STOP_S = 2.0


def join_replicas(
    strategy: str,
    devices: Sequence[object],
    worker: int = 0,
    workers: int = 1,
    coordinator: str = "",
) -> StartedReplica:
    """Return this process's place among the replicas; start the other replicas if necessary.

    There is one device per replica of this worker. Each of the `workers` starts its replicas in
    this way; the coordinator is the "host:port" of rank 0 among several workers.
    """
    names = tuple(str(device) for device in devices)
    replica = started_replica()
    if replica is not None:
        if replica.devices != names:
            raise ClusterConfigError(
                f"{strategy} got the devices {list(names)}; this program already runs with "
                f"replicas on {list(replica.devices)}, which an earlier strategy has started. Use "
                "these devices, or one device (OneDeviceStrategy)"
            )
        return replica
    why_not = _why_not_again()
    if why_not:
        raise ClusterConfigError(
            f"{strategy} has {len(names)} replicas, and must start the program once more for "
            f"each additional replica, but {why_not}. Put the training into a function and call "
            f"fastdist.launch(fn, replicas={len(names)}), or write a script"
        )
    if has_communicator():
        raise ClusterConfigError(
            f"{strategy} has {len(names)} replicas, but fastdist.init() has made a world of this "
            "process alone; make the strategy before calling fastdist.init()"
        )
    _note_opened_files()
    first = StartedReplica(names, 0, worker, workers, coordinator, secrets.token_hex(16))
    _Started(first)
    become_first(first)
    return first


def _why_not_again() -> str:
    """Explain why the running program cannot be started again; empty if it can."""
    if multiprocessing.parent_process() is not None:
        return "a process of multiprocessing cannot be started again"
    if "_pytest" in sys.modules and "PYTEST_CURRENT_TEST" in os.environ:
        return "a pytest test cannot be started again"
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        return "a notebook cannot be started again"
    if sys.flags.interactive or os.environ.get("PYTHONINSPECT") or hasattr(sys, "ps1"):
        return "an interactive Python cannot be started again"
    if sys.argv[:1] in ([], [""], ["-"]):
        return "a program that is read from standard input cannot be started again"
    return ""


class _Started:
    """The other replicas of this process, until it ends; functions called then keep it alive."""

    def __init__(self, first: StartedReplica) -> None:
        self._pid = os.getpid()
        self._error: BaseException | None = None  # the exception that ends this process
        self._children = Children()
        others = [replace(first, index=i) for i in range(1, len(first.devices))]
        command = [sys.executable, *sys.orig_argv[1:]]
        try:
            self._children.start(
                [f"replica {other.rank} of {first.world_size}" for other in others],
                command,
                [other.environment() for other in others],
                cwd=INITIAL_DIRECTORY,
            )
        except StartError as error:
            raise ClusterConfigError(f"cannot start {command[0]} again: {error.reason}") from None
        atexit.register(self._end)
        self._previous_hook = sys.excepthook
        sys.excepthook = self._note_failure
        check_while_waiting(self._require_alive)

    def _require_alive(self) -> None:
        """Check, during the rendezvous, that no replica has ended before it joined."""
        ended = self._children.ended
        if ended and os.getpid() == self._pid:
            first = next((child for child in ended if child.status), ended[0])
            hint = ""
            if b"EOFError" in first.streams[0].tail:
                hint = "\n(only the first replica can read standard input)"
            raise ClusterConfigError(
                f"a replica ended before it made the strategy. {first.describe()}{hint}"
            )

    def _note_failure(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> Any:
        self._error = error
        return self._previous_hook(kind, error, trace)

    def _end(self) -> None:
        """At exit, wait for the other replicas, report the first failure, and exit with it."""
        if os.getpid() != self._pid:
            return
        has_failed = self._error is not None
        with contextlib.suppress(KeyboardInterrupt):
            waits_s = _FAILED_END_S if has_failed else _END_S
            if isinstance(self._error, PeerFailureError):
                waits_s = _PEER_END_S
            all_ended = self._children.wait(waits_s)
            if not all_ended and not has_failed:
                late = [child.name for child in self._children.processes if child.status is None]
                _say(f"stopping {', '.join(late)}, still running after {_END_S:g} s")
        ended = list(self._children.ended)
        self._children.stop(_STOP_S)
        failed = [child for child in ended if child.status]
        causes = [child for child in failed if not child.is_consequence]
        if isinstance(self._error, PeerFailureError) and not causes:
            causes = ended
        if not has_failed or isinstance(self._error, PeerFailureError):
            for cause in (causes or failed)[:1]:
                _say(cause.describe())
        if not has_failed and (failed or len(ended) < len(self._children.processes)):
            exit_with((causes or failed)[0].exit_code if failed else 1)


def _say(message: str) -> None:
    with contextlib.suppress(Exception):  # standard error may be closed
        sys.stderr.write(f"fastdist: {message}\n")
        sys.stderr.flush()


# Files that were open for writing before the other replicas were started: their paths, descriptors
# and states. The replicas run the program from its top too, and may delete or empty such a file, as
# `open(path, "w")` and `shutil.rmtree` do. Its writer would go on without an error, in a file that
# nobody finds.
_opened_files: list[tuple[str, int, os.stat_result]] = []


def _note_opened_files() -> None:
    with contextlib.suppress(OSError):  # no /proc
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):
                status = os.fstat(descriptor)
                mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
                if stat.S_ISREG(status.st_mode) and status.st_nlink and mode != os.O_RDONLY:
                    path = os.readlink(f"/proc/self/fd/{descriptor}")
                    _opened_files.append((path, descriptor, status))


def require_intact_files() -> None:
    """Check that the other replicas, which have all come, have neither deleted nor emptied them."""
    files = _opened_files.copy()
    _opened_files.clear()
    for path, descriptor, before in files:
        if (what := _loss(path, descriptor, before)) is not None:
            raise FastdistError(
                f"another replica has {what} {path}, which this program had opened before it made "
                "the strategy: the strategy starts the program once more for each other replica, "
                "from its top. Make the strategy the first statement, or write files only "
                "`if fastdist.is_chief():`"
            )


def _loss(path: str, descriptor: int, before: os.stat_result) -> str | None:
    """Return what has happened to a file; None if it is intact or closed."""
    with contextlib.suppress(OSError):
        now = os.fstat(descriptor)
        if os.path.samestat(now, before):  # descriptors are used again
            if not now.st_nlink and os.path.exists(path):
                return "deleted and made anew"
            if now.st_size < before.st_size:
                return "emptied"
    return None
