"""A rank of a job that stands still: stalled_rank.py KIND RANK FOLDER.

The rank RANK does what KIND says after some steps; the others go on with their steps. Records are
kept in FOLDER, so that no other job removes those of dead ranks.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import fastdist as fd
import numpy as np
from fastdist.recorder import place
from fastdist.recorder.jobs import jobs_here

KIND, RANK, FOLDER = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
STEPS = int(sys.argv[4]) if len(sys.argv) > 4 else 30
LONG_S = 100.0
if KIND == "loading":
    import torch.utils.data  # takes long
elif KIND == "apart":
    import torch.distributed as dist
place._folders = lambda: [FOLDER]
comm = fd.init()
others: list[fd.Communicator] = []  # that stay open


def step() -> None:
    comm.all_reduce(np.zeros(8))


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stopped() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def asleep() -> None:
    time.sleep(LONG_S)


def spinning() -> None:
    while True:
        pass


def waiting_for_a_lock() -> None:
    lock = threading.Lock()
    held = threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            time.sleep(LONG_S)

    threading.Thread(target=hold, daemon=True).start()
    held.wait()
    lock.acquire()


def without_the_gil() -> None:
    def hold() -> None:
        mutex = ctypes.create_string_buffer(64)
        library = ctypes.PyDLL(None)  # keeps the GIL
        library.pthread_mutex_lock(mutex)
        library.pthread_mutex_lock(mutex)

    threading.Thread(target=hold, daemon=True).start()
    while True:
        time.sleep(0.01)


def reading_a_pipe() -> None:
    path = FOLDER / f"pipe{os.getpid()}"
    os.mkfifo(path)
    os.read(os.open(path, os.O_RDWR), 1)


def waiting_for_a_file_lock() -> None:
    path = FOLDER / f"lock{os.getpid()}"
    with path.open("w") as ours, path.open("w") as theirs:
        fcntl.flock(ours, fcntl.LOCK_EX)
        fcntl.flock(theirs, fcntl.LOCK_EX)


def raising() -> None:
    raise ValueError("a bad batch")


def leaving() -> None:
    sys.exit(0)


def crashing() -> None:
    ctypes.string_at(0)


def other_size() -> None:
    comm.all_reduce(np.zeros(9))


def loading() -> None:
    class Slow(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> int:
            time.sleep(LONG_S)
            return index

    next(iter(torch.utils.data.DataLoader(Slow())))


def for_all(kind: str) -> None:
    """Make the calls that all ranks make together."""
    if kind == "all_killed":
        comm.barrier()
        if comm.rank == RANK:
            os.kill(os.getppid(), signal.SIGKILL)  # the ranks are killed with the launcher
        asleep()
    elif kind == "crossed":
        first, second = comm.split(0), comm.split(0)
        (second if comm.rank == RANK else first).barrier()
    elif kind == "late":  # rank RANK sleeps and has an asynchronous call that no other has made
        others.append(comm.split(0))
        if comm.rank == RANK:
            work = others[0].all_reduce(np.zeros(8), async_op=True)
            asleep()
            work.wait()
    elif kind == "chain":  # 2 waits for 0, which waits for 1
        pairs = [comm.split(int(comm.rank == alone)) for alone in (2, 1)]
        turns = {0: pairs[0], 2: pairs[1]}
        for _ in range(STEPS):
            for pair in pairs:
                meet(pair)
        if comm.rank == 1:
            asleep()
        meet(turns[comm.rank])
    elif kind == "slow":
        while True:
            if comm.rank == RANK:
                time.sleep(0.03)
            step()
    elif kind == "steady":
        while True:
            step()
    elif kind == "apart":
        dist.init_process_group("fastdist")
        if comm.rank == RANK:
            asleep()
        dist.new_group([0, 1, 2])
    elif kind in ("timed_out", "timed_out_late"):
        if comm.rank == RANK:
            asleep()
        comm.barrier(timeout=1.9 if kind == "timed_out" else 4.0)


def meet(pair: fd.Communicator) -> None:
    pair.barrier()


def await_others() -> None:
    """Wait until the other ranks of this machine stand in the step that this one will not make."""

    def are_there() -> bool:
        others = (each.records for job in jobs_here()[0] for each in job.ranks)
        last = [each.calls[-1] for each in others if each.rank != RANK and each.calls]
        return all(each.is_running and each.sequence > STEPS for each in last)

    while not are_there():
        time.sleep(0.01)


ACTIONS: dict[str, Callable[[], None]] = {
    function.__name__: function
    for function in (
        *(killed, stopped, asleep, spinning, waiting_for_a_lock, without_the_gil, reading_a_pipe),
        *(waiting_for_a_file_lock, raising, leaving, crashing, other_size, loading),
    )
}

for _ in range(STEPS):
    step()
if KIND not in ACTIONS:
    for_all(KIND)
elif comm.rank == RANK:
    await_others()
    ACTIONS[KIND]()
step()
