"""A campaign of seeded faults: every rank ends in time, and no result is ever wrong.

FASTDIST_CHAOS is the number of faults on one machine, 24 if it is not set;
FASTDIST_CHAOS_MACHINES that on two and on three machines (network namespaces), 6 if it is not set.
A failing test names its seed; `pytest -m slow "tests/chaos/test_chaos.py::test_a_fault[SEED]"`
repeats it.
"""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest
from fork_server import python
from machines import Network, network, network_of_three, ports

__all__ = ["network", "network_of_three"]  # fixtures
RANK = Path(__file__).parent / "chaos_rank.py"
COUNT = int(os.environ.get("FASTDIST_CHAOS", "24"))
COUNT_ON_MACHINES = int(os.environ.get("FASTDIST_CHAOS_MACHINES", "6"))
DEATHS = ("kill", "exit", "kill behind a late rank")
DEATHS_AMID_INIT = ("kill amid init", "exit amid init")
IN_RANK = (*DEATHS, "raise", "close", "late", "mismatch", "deadlock")
FROM_OUTSIDE = ("stop", "SIGINT to one", "SIGINT to all", "none")
AT_START = ("files", "memory", *DEATHS_AMID_INIT, "never comes", "tiny timeout")
# Cables are cut for good or for a while, all packets of a machine dropped or a share of them,
# reordered or slowed down, connections between two machines reset.
LASTING = ("cut", "drop", "reset", "cut amid init", "reset amid init")
PASSING = ("cut for a while", "loss", "reorder", "slow", "cut for a while amid init")
AMID_INIT = (*DEATHS_AMID_INIT, "never comes", "late amid init", "stop amid init")
ON_MACHINES = (*IN_RANK, *FROM_OUTSIDE, *LASTING, *PASSING, *AMID_INIT)
# What may hit the ranks while they connect: they wait for each other for 3 s.
IMPATIENT = (*AT_START, "cut amid init", "reset amid init")
LIMIT_S = 20.0
# After these faults, all ranks must finish their work.
HARMLESS = ("none", "stop", "late", "mismatch", "late amid init", "stop amid init", *PASSING)
# What ranks may raise after a fault that has cost them another; by default, any error of fastdist.
LOST = ("PeerFailureError",)
ERRORS = {
    **dict.fromkeys((*DEATHS, "raise", "close", "reset"), LOST),
    **dict.fromkeys(("cut", "drop"), (*LOST, "CollectiveTimeoutError")),
    **dict.fromkeys((*DEATHS_AMID_INIT, "reset amid init"), (*LOST, "ClusterConfigError")),
    "never comes": ("ClusterConfigError",),
    "cut amid init": (*LOST, "CollectiveTimeoutError", "ClusterConfigError"),
}
PLACES = {
    2: (((0,), (1,)), ((0, 1), (2, 3)), ((0, 1, 2), (3,))),
    3: (((0,), (1,), (2,)), ((0, 1), (2,), (3,)), ((0,), (1, 2), (3, 4))),
}
# From a rank's death to an error on another, by the number of machines.
notices_s: dict[int, list[float]] = {1: [], 2: [], 3: []}


@dataclass(frozen=True)
class Plan:
    """A job and its fault, all chosen by the seed."""

    seed: int
    places: tuple[tuple[int, ...], ...]  # the ranks of each machine
    fault: str
    victim: int
    late: int  # -1: no rank is late
    steps: int
    step: int
    delay_s: float
    timeout_s: float
    limit: int

    @property
    def size(self) -> int:
        return sum(map(len, self.places))

    @staticmethod
    def of(seed: int, machines: int = 1) -> Plan:
        rng = random.Random(f"{seed} {machines}")
        if machines == 1:
            places = (tuple(range(rng.choice((2, 2, 3, 4)))),)
            fault = rng.choice((*IN_RANK, *FROM_OUTSIDE, *AT_START))
        else:
            places, fault = rng.choice(PLACES[machines]), rng.choice(ON_MACHINES)
        size = sum(map(len, places))
        # Faults of the network come from outside, amid the calls of a job that lasts.
        steps = (
            rng.randrange(100, 300) if fault in ("cut", "drop", "reset") else rng.randrange(5, 40)
        )
        victim = rng.randrange(size)
        timeout_s = {"tiny timeout": rng.choice((1e-3, 1e-2)), "deadlock": 4.0}.get(fault, 15.0)
        if fault in ("cut", "drop", "cut amid init"):
            timeout_s = 3.0
        limit = rng.randrange(8, 24) if fault == "files" else rng.choice((100, 300, 1000, 4000))
        return Plan(
            seed=seed,
            places=places,
            fault=fault,
            victim=victim,
            late=(victim + 1) % size if fault == "kill behind a late rank" else -1,
            steps=steps,
            step=rng.randrange(steps),
            delay_s=rng.random() * (0.1 if "amid init" in fault else 0.03),
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
        "FASTDIST_RENDEZVOUS_TIMEOUT_S": "3" if plan.fault in IMPATIENT else "15",
    }
    pipe = subprocess.PIPE
    words = (str(RANK), json.dumps(asdict(plan)))
    return python(*words, env=environ, stdout=pipe, stderr=pipe, text=True, netns=netns)


def await_line(rank: subprocess.Popen[str], expected: bytes) -> None:
    """Read a rank's output up to this line, or to its end."""
    assert rank.stdout is not None
    line = b""
    while line != expected + b"\n":
        # Byte by byte: `communicate` would not find what a buffer holds.
        byte = os.read(rank.stdout.fileno(), 1)
        if not byte:
            return
        line = byte if line.endswith(b"\n") else line + byte


def disturb(plan: Plan, ranks: dict[int, subprocess.Popen[str]], network: Network | None) -> None:
    """Do to ranks or to the network what the plan says."""
    for rank in ranks.values():
        await_line(rank, b"starts" if "amid init" in plan.fault else b"ready")
    time.sleep(plan.delay_s)
    if plan.fault.startswith("stop"):
        ranks[plan.victim].send_signal(signal.SIGSTOP)
        time.sleep(0.3)
        ranks[plan.victim].send_signal(signal.SIGCONT)
    elif plan.fault == "SIGINT to one":
        ranks[plan.victim].send_signal(signal.SIGINT)
    elif plan.fault == "SIGINT to all":
        for rank in ranks.values():
            rank.send_signal(signal.SIGINT)
    elif network is not None:
        disturb_network(plan, network)


def disturb_network(plan: Plan, network: Network) -> None:
    rng = random.Random(plan.seed)
    machine = next(m for m, ranks in enumerate(plan.places) if plan.victim in ranks)
    others = [m for m in range(len(plan.places)) if m != machine]
    if plan.fault.startswith("cut"):
        network.set_cable("down", machine)
        if "for a while" in plan.fault:
            time.sleep(rng.choice((0.1, 0.5, 1.0, 2.0)))
            network.set_cable("up", machine)
    elif plan.fault.startswith("reset"):
        network.reset(machine, rng.choice(others))
    elif plan.fault == "drop":
        network.lose(machine, 1)
    elif plan.fault == "loss":
        network.lose(machine, rng.choice((0.01, 0.05, 0.1)))
    elif plan.fault == "reorder":
        network.reorder(machine, rng.choice((0.05, 0.3)), "50mbit")
    elif plan.fault == "slow":
        network.slow(machine, rng.choice(("50mbit", "200mbit")))


def may_end(plan: Plan, rank: int, code: int, how: str) -> bool:
    """Return True if a rank may end so."""
    is_victim = rank == plan.victim
    if plan.fault in HARMLESS:
        return code == 0 and how == "done"
    if "SIGINT" in plan.fault:  # also amid the interpreter's own end
        return code in (0, 1, -signal.SIGINT)
    if is_victim and plan.fault.startswith("kill"):
        return code == -signal.SIGKILL or how == "done"
    if is_victim and plan.fault.startswith("exit"):
        return code == 7 or (how == "done" and plan.fault in DEATHS_AMID_INIT)
    if is_victim and plan.fault in ("files", "memory"):
        return code in (0, 1)  # the interpreter may lack memory, too
    error = how.partition("error ")[2].partition(" ")[0]
    if not is_victim and plan.fault in ERRORS and error and error not in ERRORS[plan.fault]:
        return False
    return code == 0 and (how == "done" or error != "")


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
    end_well(plan, [""], {"FASTDIST_JOB": secrets.token_hex(8)})


@pytest.mark.slow
@pytest.mark.xdist_group("chaos")
@pytest.mark.parametrize("seed", range(COUNT_ON_MACHINES))
def test_a_fault_on_machines(network: Network, network_of_three: Network, seed: int) -> None:
    chosen = (network, network_of_three)[seed % 2]
    plan = Plan.of(seed, machines=len(chosen.names))
    job = {"MASTER_ADDR": chosen.addresses[0], "MASTER_PORT": str(next(ports))}
    try:
        end_well(plan, chosen.names, job, chosen)
    finally:
        for machine in range(len(chosen.names)):
            chosen.heal(machine)


def end_well(
    plan: Plan, names: Sequence[str], job: dict[str, str], network: Network | None = None
) -> None:
    """Start a job on the machines of these names, disturb it as planned, and check its ends."""
    ranks = {
        rank: start(plan, rank, job, local, len(places), names[machine])
        for machine, places in enumerate(plan.places)
        for local, rank in enumerate(places)
        if plan.fault != "never comes" or rank != plan.victim
    }
    try:
        ends = finish(plan, ranks, network)
    finally:
        for process in ranks.values():
            process.kill()
            with process:  # closes its pipes
                process.wait()
    if plan.fault in DEATHS:
        dead = ends.pop(plan.victim)
        ends.pop(plan.late, None)
        if dead[1] == "dies":
            notices = [at - dead[2] for _, how, at in ends.values() if how != "done"]
            assert max(notices, default=0) < 5, f"{plan}: noticed after {notices} s"
            notices_s[len(plan.places)] += notices


def finish(
    plan: Plan, ranks: dict[int, subprocess.Popen[str]], network: Network | None
) -> dict[int, tuple[int, str, float]]:
    """Return the exit code of each rank, how it ended and when."""
    if plan.fault in (*FROM_OUTSIDE, "stop amid init", *LASTING, *PASSING):
        disturb(plan, ranks, network)
    begin, begin_s = time.monotonic(), time.time()
    ends: dict[int, tuple[int, str, float]] = {}
    for rank, process in ranks.items():
        left = begin + LIMIT_S - time.monotonic()
        out, err = process.communicate(timeout=max(0.1, left))
        last, _, at = (out.splitlines() or [""])[-1].partition(" at ")
        assert "AssertionError" not in err, f"{plan}, rank {rank}: {err}"
        assert may_end(plan, rank, process.returncode, last), (
            f"{plan}, rank {rank}: {process.returncode} {last} {err}"
        )
        ends[rank] = process.returncode, last, float(at or "nan")
    if plan.fault in ("cut", "drop", "reset"):
        slowest_s = max(at for _, _, at in ends.values()) - begin_s
        limit_s = (0 if plan.fault == "reset" else plan.timeout_s) + 5
        assert slowest_s < limit_s, f"{plan}: {slowest_s} s, {ends}"
    return ends
