"""Begins to record this process's calls, and lets other processes ask for its stack."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import hashlib
import inspect
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import fastdist._core as _core
from fastdist._version import __version__
from fastdist.recorder.encoding import write
from fastdist.recorder.machines import Machine, Machines
from fastdist.recorder.place import RecordPath, new_path, record_paths
from fastdist.recorder.ring import identity
from fastdist.recorder.system import STACK_SIGNAL, start_of

_NO_CLIENT = 256
_KEPT_S = 10.0  # for launchers, which read records when a job ends


def write_on_signal(path: Path) -> None:
    """Let this process write its stack to a file when `STACK_SIGNAL` comes.

    Does nothing if the program handles the signal itself. The handler is Python's faulthandler: C
    that takes no lock, so that it works while the GIL is held and inside C code. It writes only one
    thread's stack: the frames of other threads may be freed while it reads them, which has crashed
    a healthy process.
    """
    if signal.getsignal(STACK_SIGNAL) != signal.SIG_DFL:
        return
    file = path.open("ab", buffering=0)  # faulthandler keeps it
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=False, chain=False)


_log = logging.getLogger("fastdist")


class _Own:
    """This process's records."""

    process = 0
    place: RecordPath | None = None
    is_task = False


def record(
    communicator: _core.Communicator,
    key: str,
    engine: str,
    machines: Sequence[Machine] = (),
    *,
    is_job: bool = False,
) -> None:
    """Record the calls of a communicator from now on, if there is memory for it.

    The first communicator counts as that of the whole job, until one with `is_job` is recorded.

    Args:
        key: the name of the communicator, the same on all of its ranks.
        engine: the name of its class.
        machines: the machines of its ranks, if there are several.
        is_job: True if its ranks are all ranks of the job.
    """
    digest = hashlib.sha256(key.encode())
    job = digest.hexdigest()[:16]
    is_first = _Own.process != os.getpid()
    if is_first:
        _start(communicator.rank, communicator.size, job)
    elif is_job:
        _core.set_recorded_job(communicator.rank, communicator.size, job)
    if communicator.size > 1:
        _answer_others()
    if machines and _Own.place is not None and (is_first or is_job):
        write(_Own.place.beside("machines"), Machines.of_job(key, machines))
    communicator.record(
        int.from_bytes(digest.digest()[:8], "little"), engine.removesuffix("Engine").lower()
    )


def record_task(task: str, place: int, tasks: int, key: str) -> None:
    """Record the requests of a task of a job with parameter servers from now on.

    `place` is its number among all `tasks`, and `key` the name of the job, the same on all of them.
    """
    if _Own.process != os.getpid():
        _start(place, tasks, hashlib.sha256(key.encode()).hexdigest()[:16], task)
        _answer_others()


def open_requests(servers: int) -> int:
    """Return a client's number for `_core.begin_request`; without a task, an unused number."""
    return _core.open_requests(servers) if _Own.is_task else _NO_CLIENT


def report_wait(waited_s: float) -> None:
    """Log why a request of this task has waited for `waited_s`, in a thread, if that is due."""
    if _Own.is_task and _Own.place is not None:
        with contextlib.suppress(RuntimeError):  # no thread can be made
            threading.Thread(target=_stalled, args=(waited_s,), daemon=True).start()


def _start(rank: int, world_size: int, job: str, task: str = "") -> None:
    _Own.process, _Own.place, _Own.is_task = os.getpid(), None, task != ""
    try:
        _remove_old(job)
        own = new_path()
        _core.start_recorder(
            str(own.path),
            rank=rank,
            world_size=world_size,
            version=__version__,
            job=job,
            host=socket.gethostname(),
            program=" ".join(sys.argv).encode("utf-8", "backslashreplace").decode()[:255],
            task=task,
        )
        _Own.place = own
        _at_exit(own)
        _core.set_speaker(_stalled, _explain)
        write_on_signal(own.beside("stacks"))
    except PermissionError as error:  # the folder may be another user's
        _log.warning("calls are not recorded, so fastdist why knows nothing of them: %s", error)
    except (OSError, ValueError) as error:
        _log.info("calls are not recorded: %s", error)


def _answer_others() -> None:
    """Let other processes ask for the stacks of this one, without a signal.

    A thread answers as soon as it gets the GIL, while this process waits or runs Python.
    """
    if _Own.place is None or (asks := _Own.place.beside("asks")).exists():
        return
    try:
        os.mkfifo(asks, 0o600)
        _core.answer_from_thread(str(asks), _answer)
    except (OSError, RuntimeError) as error:
        _log.info("stacks are not told: %s", error)


def _answer() -> None:
    if (own := _Own.place) is not None and own.pid == os.getpid():
        from fastdist.recorder.stacks import answered_stacks

        write(own.beside("answer"), answered_stacks())


def _at_exit(own: RecordPath) -> None:
    """Register `_end`, also in processes of multiprocessing, which exit without atexit."""
    atexit.register(_end, own)
    util = sys.modules.get("multiprocessing.util")
    if util is not None:
        util.Finalize(None, _end, (own,), exitpriority=0)


def _stalled(waited_s: float) -> None:
    from fastdist.recorder import speaking  # most jobs never need it

    speaking.stalled(waited_s)


def _explain(is_late: bool) -> str:
    failed_s = time.monotonic()  # the import may take long
    from fastdist.recorder import speaking

    return speaking.explain(is_late, failed_s)


def _end(own: RecordPath) -> None:
    """Remove the records of a process that succeeds; write the error of one that fails."""
    if own.pid != os.getpid() or _Own.place is not own:
        return
    _Own.place = None  # so that it runs once
    error = getattr(sys, "last_value", None) or sys.exc_info()[1] or _dropped_by_multiprocessing()
    # After Ctrl-C, an import that makes a dataclass would let the interpreter exit with code 1.
    if error is None or isinstance(error, KeyboardInterrupt | SystemExit):
        own.remove()
    else:
        from fastdist.recorder.endings import write_ending  # only when it is needed

        write_ending(own.beside("ending"), error)


def _dropped_by_multiprocessing() -> BaseException | None:
    """Return what stands for the exception of a process of multiprocessing; None: it succeeds.

    From Python 3.13 on, what runs at its exit only finds its exit code, in a caller's frame.
    """
    frame = inspect.currentframe() if sys.version_info >= (3, 13) else None
    while frame is not None:
        if frame.f_globals.get("__name__") in (
            "multiprocessing.popen_fork",
            "multiprocessing.forkserver",
        ):
            code = frame.f_locals.get("code")
            return ChildProcessError(f"the process exits with code {code}") if code else None
        frame = frame.f_back
    return None


def _remove_old(job: str) -> None:
    """Remove the records of jobs that ended a while ago, except the job that was last alive."""
    live = {job}
    ended: dict[str, list[tuple[float, RecordPath]]] = defaultdict(list)
    for found in record_paths():
        who = identity(found.path)
        if who is None:
            continue
        if found.is_locked or (found.is_here and start_of(who.pid) == who.started):
            live.add(who.job)
            continue
        with contextlib.suppress(OSError):  # another process may just be removing it
            at = found.path.stat().st_mtime
            ended[who.job].append((at, found))
    old_jobs = ended.keys() - live
    newest = max(old_jobs, key=lambda each: max(at for at, _ in ended[each]), default=None)
    for its_job in old_jobs - {newest}:
        for _, old in ended[its_job]:
            with contextlib.suppress(OSError):
                if old.seconds_ended() > _KEPT_S:
                    old.remove()
