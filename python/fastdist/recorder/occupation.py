"""Tells what a rank does while the others wait for it: by the kernel, its stack and its phase."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from fastdist.recorder.observation import ObservedRank
from fastdist.recorder.phases import Phase
from fastdist.recorder.words import at

# Functions of the kernel in which threads sleep.
_FUTEX = re.compile(r"^futex")
_NETWORK = re.compile(r"^(poll_|do_poll|ep_poll|do_select|sk_wait|wait_woken|inet_|tcp_|unix_)")
_FILES = re.compile(
    r"^(io_schedule|folio_wait|wait_on_page|wait_on_buffer|fifo_|wait_for_partner|wait_for_space"
    r"|nfs|rpc_|fuse_|request_wait|ceph|cifs|smb|lustre|ll_|ext4|xfs|btrfs|jbd2|f2fs|overlay|v9fs"
    r"|locks_lock|flock|rwsem_down|blk_|submit_bio|balance_dirty|do_fsync|sync_inode)"
)
_SWAP = re.compile(r"^(swap|do_swap|shrink_|mem_cgroup|try_to_free|throttle_direct)")
_SLEEP = re.compile(r"nanosleep")
_CHILD = re.compile(r"^(do_wait|kernel_wait|pidfd)")

# Files of Python in which data is loaded, or work on GPUs is waited for.
_DATA = re.compile(r"/torch/utils/data/|/fastdist/data/|/(datasets|webdataset|torchdata)/")
_GPU = re.compile(r"/torch/cuda/")

BUSY_SHARE = 0.5  # of a core
_FAULTS_PER_S = 200
_STALLED_SHARE = 0.1


class Kind(Enum):
    """The reasons why a job does not continue; `UNKNOWN`: the cause is not on this machine."""

    DEAD = "dead"
    STOPPED = "stopped"
    OTHER_CALL = "other call or size"
    OTHER_ORDER = "other order of communicators"
    # Occupations of ranks, the most certain first.
    MEMORY = "out of memory or swapping"
    FILES = "file system"
    LINK = "link down or lossy"
    GPU = "GPU work unfinished"
    DATA = "waiting for data"
    THREADS = "deadlock of threads or of the GIL"
    USER = "never arrived, still in user code"
    SLOW = "slow, not stuck"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Occupation:
    """A reason why a rank does not arrive, as predicates of one rank and of several ranks."""

    kind: Kind
    one: str
    several: str


def _waits(kind: Kind, what: str) -> Occupation:
    return Occupation(kind, f"waits {what}", f"wait {what}")


def occupation_of(rank: ObservedRank) -> Occupation:
    """Return a running rank's occupation, by the first rule that fits."""
    return next(found for rule in _RULES if (found := rule(rank)) is not None)


def is_outside_calls(rank: ObservedRank) -> bool:
    """Return True if the main thread certainly does something other than wait in a call."""
    thread = rank.main_thread
    if thread is None or rank.is_dead or rank.stopped_by or rank.gave_up is not None:
        return False
    if rank.main_cpu_share > BUSY_SHARE:
        return True
    waits_in = thread.waits_in
    return bool(waits_in) and not _FUTEX.match(waits_in) and not _NETWORK.match(waits_in)


def _memory(rank: ObservedRank) -> Occupation | None:
    process = rank.process
    if process is None:
        return None
    reads = rank.page_faults_per_s
    is_swapping = process.swapped_bytes > 0 and reads > _FAULTS_PER_S
    is_stalled = process.memory_stall > _STALLED_SHARE and reads > 0
    if not (is_swapping or is_stalled or any(_SWAP.match(t.waits_in) for t in process.threads)):
        return None
    return _waits(
        Kind.MEMORY,
        f"for memory: {process.swapped_bytes >> 20:,} MiB are swapped out, {reads:,.0f} pages/s "
        f"are read back, and all tasks stood still for memory {process.memory_stall:.0%} of the "
        "last 10 s",
    )


def _files(rank: ObservedRank) -> Occupation | None:
    thread = rank.main_thread
    if thread is None:
        return None
    is_path = thread.file.startswith("/") and not thread.file.startswith("/dev/")
    if is_path and thread.waits_in:
        return _waits(Kind.FILES, f"for the file {thread.file}")
    if thread.state == "D" or _FILES.match(thread.waits_in):
        where = thread.waits_in or "uninterruptible sleep"
        return _waits(Kind.FILES, f"for the file system, in the kernel's {where}")
    return None


def _link(rank: ObservedRank) -> Occupation | None:
    """Find a connection that retransmits, if a call over the network does not end."""
    worst = rank.worst_connection
    if worst is None or all(call.member.engine != "net" for call in rank.running):
        return None
    return Occupation(Kind.LINK, f"gets no answers from {worst}", f"get no answers from {worst}")


def _gpu(rank: ObservedRank) -> Occupation | None:
    if rank.process is None or not rank.process.uses_gpu:
        return None
    waits = rank.stack is not None and rank.stack.passes(_GPU)
    if not waits and not any(call.signature.on_gpu for call in rank.running):
        return None
    return Occupation(Kind.GPU, "waits for work on its GPU", "wait for work on their GPUs")


def _data(rank: ObservedRank) -> Occupation | None:
    is_loading = rank.stack is not None and rank.stack.passes(_DATA)
    if not is_loading and rank.records.phase is not Phase.DATA:
        return None
    return _waits(Kind.DATA, f"for data, {_how(rank)}")


def _threads(rank: ObservedRank) -> Occupation | None:
    """Find a wait for a lock or the GIL, if nothing runs."""
    process = rank.process
    if process is None or rank.cpu_share > 0.2 or rank.running:
        return None
    if rank.starved:
        who = "its main thread wants" if process.pid in rank.starved else "a thread wants"
        what = f"{who} the GIL, which another thread holds{_others(rank)}"
        return Occupation(Kind.THREADS, f"stands still: {what}", f"stand still: {what}")
    main = rank.main_thread
    if main is None or not _FUTEX.match(main.waits_in) or _trains_in_thread(rank):
        return None
    return _waits(Kind.THREADS, f"for a lock or another thread{_others(rank)}")


def _trains_in_thread(rank: ObservedRank) -> bool:
    return rank.stack is not None and not rank.stack.is_main


def _others(rank: ObservedRank) -> str:
    """Return ": another thread is at load.py:3 in read", for the threads in user code."""
    lines = dict.fromkeys(stack.user_line for stack in rank.stacks if not stack.is_main)
    told = [at(line) for line in lines if line][:3]
    return f" (another thread is{', another'.join(told)})" if told else ""


def _user(rank: ObservedRank) -> Occupation:
    place = rank.records.phase.name.lower() if rank.records.phase else "user code"
    what = f"in {place}, {_how(rank)}"
    one, several = f"has not arrived: it is {what}", f"have not arrived: they are {what}"
    return Occupation(Kind.USER, one, several)


def _how(rank: ObservedRank) -> str:
    thread = rank.main_thread
    if rank.cpu_share > BUSY_SHARE or thread is None:
        return f"computing on {rank.cpu_share:.1f} cores"
    if _trains_in_thread(rank):
        return "waiting in a thread"
    if _SLEEP.search(thread.waits_in):
        return "asleep"
    if _CHILD.match(thread.waits_in):
        return "waiting for another process"
    if _NETWORK.match(thread.waits_in):
        return "waiting for a connection or a timer"
    if thread.waits_in:
        return f"waiting in the kernel's {thread.waits_in}"
    return "running"


_RULES: tuple[Callable[[ObservedRank], Occupation | None], ...] = (
    _memory,
    _files,
    _link,
    _gpu,
    _data,
    _threads,
    _user,
)
