"""A campaign of seeded faults: every rank ends in time, and no result is ever wrong.

FASTDIST_CHAOS is the number of faults on one machine, 24 if it is not set;
FASTDIST_CHAOS_MACHINES that on two machines (network namespaces), 4 if it is not set. A failing
test names its seed; `pytest -m slow "tests/chaos/test_chaos.py::test_a_fault[SEED]"` repeats it.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from fork_server import python
from machines import MACHINES, Network, network, ports

__all__ = ["network"]  # a fixture
RANK = Path(__file__).parent / "chaos_rank.py"
COUNT = int(os.environ.get("FASTDIST_CHAOS", "24"))
COUNT_ON_MACHINES = int(os.environ.get("FASTDIST_CHAOS_MACHINES", "4"))
DEATHS = ("kill", "exit", "kill behind a late rank")
IN_RANK = (*DEATHS, "raise", "close", "late", "mismatch", "deadlock")
FROM_OUTSIDE = ("stop", "SIGINT to one", "SIGINT to all", "none")
AT_START = ("files", "memory", "kill amid init", "never comes", "tiny timeout")
# "deadlock" is detected on one machine only.
ON_MACHINES = (*DEATHS, "raise", "close", "late", "mismatch", *FROM_OUTSIDE)
LIMIT_S = 20.0
# After these faults, all ranks must finish their work.
HARMLESS = ("none", "stop", "late", "mismatch")
# From a rank's death to an error on another, on one machine and between two.
notices_s: dict[int, list[float]] = {1: [], 2: []}


@dataclass(frozen=True)
class Plan:
    """A job and its fault, all chosen by the seed."""

    seed: int
    size: int
    fault: str
    victim: int
    late: int  # -1: no rank is late
    steps: int
    step: int
    delay_s: float
    timeout_s: float
    limit: int

    @staticmethod
    def of(seed: int, machines: int = 1) -> Plan:
        rng = random.Random(seed)
        size, steps = rng.choice((2, 2, 3, 4)), rng.randrange(5, 40)
        fault = rng.choice((*IN_RANK, *FROM_OUTSIDE, *AT_START))
        if machines == 2:
            size, fault = sum(map(len, MACHINES)), rng.choice(ON_MACHINES)
        victim = rng.randrange(size)
        timeout_s = {"tiny timeout": rng.choice((1e-3, 1e-2)), "deadlock": 4.0}.get(fault, 15.0)
        limit = rng.randrange(8, 24) if fault == "files" else rng.choice((100, 300, 1000, 4000))
        return Plan(
            seed=seed,
            size=size,
            fault=fault,
            victim=victim,
            late=(victim + 1) % size if fault == "kill behind a late rank" else -1,
            steps=steps,
            step=rng.randrange(steps),
            delay_s=rng.random() * 0.03,
            timeout_s=timeout_s,
            limit=limit,
        )


def start(
    plan: Plan, rank: int, place: dict[str, str], local: int, local_size: int, netns: str = ""
) -> subprocess.Popen[str]:
    environ = {k: v for k, v in os.environ.items() if k != "FASTDIST_JOB"} | place
    environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(plan.size),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(local_size),
        "FASTDIST_RENDEZVOUS_TIMEOUT_S": "3" if plan.fault in AT_START else "15",
    }
    pipe = subprocess.PIPE
    words = (str(RANK), json.dumps(asdict(plan)))
    return python(*words, env=environ, stdout=pipe, stderr=pipe, text=True, netns=netns)


def disturb(plan: Plan, ranks: list[subprocess.Popen[str]]) -> None:
    for rank in ranks:
        assert rank.stdout is not None
        # Byte by byte: `communicate` would not find what a buffer holds.
        while os.read(rank.stdout.fileno(), 1) not in (b"\n", b""):
            continue
    time.sleep(plan.delay_s)
    if plan.fault == "stop":
        ranks[plan.victim].send_signal(signal.SIGSTOP)
        time.sleep(0.3)
        ranks[plan.victim].send_signal(signal.SIGCONT)
    elif plan.fault == "SIGINT to one":
        ranks[plan.victim].send_signal(signal.SIGINT)
    elif plan.fault == "SIGINT to all":
        for rank in ranks:
            rank.send_signal(signal.SIGINT)


def may_end(plan: Plan, rank: int, code: int, how: str) -> bool:
    """Return True if a rank may end so."""
    is_victim = rank == plan.victim
    if plan.fault in HARMLESS:
        return code == 0 and how == "done"
    if "SIGINT" in plan.fault:  # also amid the interpreter's own end
        return code in (0, 1, -signal.SIGINT)
    if is_victim and plan.fault.startswith("kill"):
        return code == -signal.SIGKILL or how == "done"
    if is_victim and plan.fault == "exit":
        return code == 7
    if is_victim and plan.fault in ("files", "memory"):
        return code in (0, 1)  # the interpreter may lack memory, too
    return code == 0 and (how == "done" or how.startswith("error "))


@pytest.fixture(scope="module", autouse=True)
def report() -> Iterator[None]:
    yield
    for machines, notices in notices_s.items():
        notices.sort()
        if notices:
            p99 = notices[len(notices) * 99 // 100]
            print(f"\nmachines: {machines}, deaths noticed: {len(notices)}, p99 {p99:.2f} s")


@pytest.mark.slow
@pytest.mark.xdist_group("chaos")
@pytest.mark.parametrize("seed", range(COUNT))
def test_a_fault(seed: int) -> None:
    plan = Plan.of(seed)
    job = {"FASTDIST_JOB": secrets.token_hex(8)}
    come = [r for r in range(plan.size) if plan.fault != "never comes" or r != plan.victim]
    end_well(plan, {rank: start(plan, rank, job, rank, plan.size) for rank in come})


@pytest.mark.slow
@pytest.mark.xdist_group("chaos")
@pytest.mark.parametrize("seed", range(COUNT_ON_MACHINES))
def test_a_fault_on_machines(network: Network, seed: int) -> None:
    plan = Plan.of(seed, machines=2)
    job = {"MASTER_ADDR": network.addresses[0], "MASTER_PORT": str(next(ports))}
    ranks = {
        rank: start(plan, rank, job, local, len(places), network.names[machine])
        for machine, places in enumerate(MACHINES)
        for local, rank in enumerate(places)
    }
    end_well(plan, ranks, machines=2)


def end_well(plan: Plan, ranks: dict[int, subprocess.Popen[str]], machines: int = 1) -> None:
    """Disturb a job as planned, and check how its ranks end."""
    try:
        if plan.fault in FROM_OUTSIDE:
            disturb(plan, list(ranks.values()))
        deadline = time.monotonic() + LIMIT_S
        ends: dict[int, tuple[int, str, float]] = {}
        for rank, process in ranks.items():
            out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            last, _, at = (out.splitlines() or [""])[-1].partition(" at ")
            assert "AssertionError" not in err, f"{plan}, rank {rank}: {err}"
            assert may_end(plan, rank, process.returncode, last), (
                f"{plan}, rank {rank}: {process.returncode} {last} {err}"
            )
            ends[rank] = process.returncode, last, float(at or "nan")
    finally:
        for process in ranks.values():
            process.kill()
            with process:  # closes its pipes
                process.wait()
    if plan.fault in DEATHS:
        dead = ends.pop(plan.victim)
        ends.pop(plan.late, None)
        if dead[1] == "dies":
            notices_s[machines] += [at - dead[2] for _, how, at in ends.values() if how != "done"]
