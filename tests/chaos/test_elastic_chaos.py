"""Elastic jobs whose ranks are killed or stopped at random moments.

No step is lost, and none counts twice.

FASTDIST_CHAOS_ELASTIC is the number of jobs with kills, 6 if it is not set, and half of them with
stops.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import Launcher

Script = Callable[[str], Path]
COUNT = int(os.environ.get("FASTDIST_CHAOS_ELASTIC", "6"))
# Each process may be killed soon, also while it starts, meets others or gets their state; it is
# stopped only as a rank: the launcher waits for one that takes long to start or to end. That of
# slot 0 is never stopped: a job whose ranks are all stopped is one that its user has suspended.
STEPS = """
import json, os, random, signal, sys, threading, time
place = json.loads(os.environ["FASTDIST_ROSTER"])
chance = random.Random(f"{sys.argv[1]}/{place}/{time.time_ns()}")
stops = int(sys.argv[3]) if place["slot"] > 0 else 0
fault = chance.choice([signal.SIGKILL, *[signal.SIGSTOP] * stops])
has_fault = chance.random() < float(sys.argv[2])
kill = None
def begin():
    global has_fault, kill
    if has_fault:
        kill = threading.Timer(chance.expovariate(1.5), os.kill, (os.getpid(), fault))
        kill.daemon = True
        kill.start()
    has_fault = False
if fault == signal.SIGKILL:
    begin()
import numpy as np
import fastdist as fd
from fastdist.errors import LostRankError
comm = fd.init(elastic=True)
state = np.zeros(3)  # steps, sum of their numbers, sum of the numbers of ranks
work = np.zeros(50_000)
while state[0] < 150:
    try:
        before, comm = comm, comm.regroup()
        begin()
        if comm is not before:
            comm.broadcast(state, root=0)
        work[:] = state[0] + comm.rank
        comm.all_reduce(work)
        n = comm.world_size
        assert (work == n * state[0] + n * (n - 1) / 2).all(), (work[0], state, n)
        state += 1, state[0], n
    except LostRankError:
        pass
    time.sleep(0.01)
if kill is not None and fault == signal.SIGSTOP:
    kill.cancel()
print([*state.astype(int).tolist()], flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(COUNT))
def test_random_kills(launcher: Launcher, script: Script, seed: int) -> None:
    least = 1 + seed % 3
    done = launcher.run(
        *("--min", least, "--max", 4, "--max-restarts", 999, "--no-prefix"),
        *(script(STEPS), seed, 0.6, 0),
    )
    check(done, least)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(COUNT // 2))
def test_random_stops(launcher: Launcher, script: Script, seed: int) -> None:
    """A stopped rank is killed, also if nobody of its world is left."""
    launcher.environ["FASTDIST_TIMEOUT_S"] = "2"
    least = 1 + seed % 3
    done = launcher.run(
        *("--min", least, "--max", 3, "--max-restarts", 999, "--no-prefix"),
        *(script(STEPS), seed, 0.3, 1),
    )
    check(done, least)


def check(done: subprocess.CompletedProcess[bytes], least: int) -> None:
    errors = done.stderr.decode()
    assert done.returncode == 0, errors
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert results, errors
    for steps, numbers, ranks in results:
        assert (steps, numbers) == (150, 149 * 150 // 2)
        assert least * 150 <= ranks <= 4 * 150
    assert len({ranks for *_, ranks in results}) == 1
    assert "Error" not in errors
