"""Lets a job report why it stands still: in the log, and in the errors of its calls."""

from __future__ import annotations

import logging
import os
import threading
import time

import fastdist._core as _core
from fastdist.errors import PeerFailureError
from fastdist.recorder.diagnosis import diagnose
from fastdist.recorder.encoding import read
from fastdist.recorder.endings import Ending
from fastdist.recorder.jobs import Job, job_of
from fastdist.recorder.occupation import Kind
from fastdist.recorder.place import record_paths
from fastdist.recorder.ring import FIRST_REPORT_S, Call, Records, identity
from fastdist.recorder.words import at

_log = logging.getLogger("fastdist")

_SHORT_S = 2.0
_AGAIN = 6  # report a wait again once it is this many times as long


class _Speaker:
    """The wait that this process has reported."""

    wait = (0, 0)  # process and call
    next_s = FIRST_REPORT_S


def explain(is_late: bool, failed_s: float) -> str:
    """Explain why a call of this process failed at `failed_s`; return "" if that is unknown.

    Timeouts (`is_late`) shorter than 2 s are not explained, since programs use them for polling.
    After another failure, the exceptions of other ranks are quoted. Only an exception that a signal
    handler raises meanwhile gets out.
    """
    found: list[str] = []

    def search() -> None:
        try:
            found.append(_reason(is_late, failed_s))
        except Exception:
            _log.debug("no reason was found", exc_info=True)

    # Signal handlers run in the main thread, so that `search` does not catch their exceptions.
    thread = threading.Thread(target=search, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread can be made, or the interpreter is about to end
        return ""
    thread.join()
    return "".join(found)


def _reason(is_late: bool, failed_s: float) -> str:
    if not is_late:
        return _quote() or _left_early(job_of(os.getpid()))
    job = job_of(os.getpid())
    if not _has_waited(job, failed_s):
        return ""
    found = diagnose(job, 0.1, everywhere=True, may_signal=False)
    # Dead ranks have ended since: otherwise the call would have failed before its timeout.
    return "" if found.kind is Kind.DEAD else found.sentence


def _quote() -> str:
    """Quote the exceptions that ended ranks of this job, except consequences of other failures."""
    own = _core.recorded_job()
    found = []
    for place in record_paths():
        ending = read(Ending, place.beside("ending"))
        if ending is None or ending.error == PeerFailureError.__name__:
            continue
        who = identity(place.path)
        if who is not None and who.job == own:
            said = f"{ending.error}: {ending.message}".removesuffix(": ")
            found.append(f"rank {who.rank} is dead: {said}{at(ending.line)}")
    return "; ".join(sorted(found)[:3])


def _left_early(job: Job) -> str:
    """Tell of ranks that made fewer calls in the communicator of all, where none was killed.

    Of ranks on other machines nothing is known, nor of those outside of a smaller communicator.
    """
    own = next(each.records for each in job.ranks if each.records.pid == os.getpid())
    failed = max((c for c in own.calls if c.is_failed), key=lambda c: c.number, default=None)
    if failed is None or failed.member.engine != "host" or failed.member.size != job.world_size:
        return ""
    if not all(each.is_live for each in job.ranks):
        return ""
    found = []
    there = {each.records.rank: each.records for each in job.ranks}
    for rank in range(job.world_size):
        records = there.get(rank)
        if records is None:  # removed at its end, unless it has failed
            found.append(f"rank {rank} has ended its program")
            continue
        calls = [call for call in records.calls if call.member.key == failed.member.key]
        last = max(calls, key=lambda call: call.sequence, default=None)
        if last is None or last.done_s is None or last.sequence >= failed.sequence:
            continue
        found.append(f"rank {rank} has made {last.sequence} calls, the last{at(last.site)}")
    if not found:
        return ""
    here = f"rank {own.rank} makes call {failed.sequence}{at(failed.site)}"
    return (
        f"{', '.join(found[:3])}, while {here}: all ranks must make the same calls; a loop may "
        "have fewer steps there"
    )


def obituary(pid: int) -> str:
    """Tell the last action of a process whose death ended its job; "" if that is unknown."""
    try:
        job = job_of(pid)
        found = diagnose(job, 0.0, may_signal=False)
    except Exception:
        _log.debug("no reason was found", exc_info=True)
        return ""
    rank = next(each.records.rank for each in job.ranks if each.records.pid == pid)
    return found.sentence if found.ranks == (rank,) else ""


def _has_waited(job: Job, failed_s: float) -> bool:
    calls = next(each.records.calls for each in job.ranks if each.records.pid == os.getpid())
    return any(
        call.is_failed
        and failed_s - (call.done_s or 0.0) < 1.0
        and failed_s - call.entered_s > _SHORT_S
        for call in calls[-64:]
    )


def stalled(waited_s: float) -> None:
    """Log why a call of this process has waited for `waited_s`, if a report is due."""
    try:
        _tell(job_of(os.getpid()), waited_s)
    except Exception:
        _log.debug("no reason was found", exc_info=True)


def _tell(job: Job, waited_s: float) -> None:
    own = next(each.records for each in job.ranks if each.records.pid == os.getpid())
    speakers = [each.records for each in job.ranks if each.can_speak]
    waiting = {each.rank: calls for each in speakers if (calls := _worth_telling(each))}
    if min(waiting, default=None) != own.rank:
        return  # the lowest waiting rank of a machine reports
    call = min(waiting[own.rank], key=lambda each: each.entered_s)
    if _Speaker.wait != (os.getpid(), call.number):
        _Speaker.wait = (os.getpid(), call.number)
        _Speaker.next_s = FIRST_REPORT_S
    if waited_s < _Speaker.next_s:
        return
    _Speaker.next_s = _AGAIN * waited_s
    found = diagnose(job, everywhere=True, may_signal=False)
    # A server that is not known to stand still may just work for long.
    if found.kind is not Kind.SLOW and not (own.task and found.kind is Kind.UNKNOWN):
        _log.warning("%s", found.sentence)


def _worth_telling(records: Records) -> list[Call]:
    """Return calls that have waited 5 s, and 5 times the p99 of their line."""
    now_s = time.monotonic()
    return [
        call
        for call in records.calls
        if call.is_running
        and now_s - call.entered_s > max(FIRST_REPORT_S - 0.5, records.unusual_s(call) or 0.0)
    ]
