"""Measures the cost of a lost and of a new rank in an elastic job, and checks its results.

    python benchmarks/elastic.py             # three ranks with 400 MB of state, one is killed
    python benchmarks/elastic.py --kills 4   # four ranks, a kill every 15 s, next to one device
    python benchmarks/elastic.py --machines  # a rank in each of three namespaces; one loses power

Prints one JSON object. Times are in seconds: `shrink_s` from the kill, or the last message of a
machine, until all others train again; `join_s` from the moment when the new rank is ready until all
ranks train.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

import fastdist as fd
import torch

STATE_ELEMENTS = 100_000_000
KILL_EVERY_S = 15.0


def say(event: str, **values: Any) -> None:
    """Write an event with the time of the clock that all processes of a machine share."""
    line = json.dumps({"event": event, "pid": os.getpid(), "at_s": time.monotonic(), **values})
    print(line, flush=True)


def train(elements: int, epochs: int, pause_s: float) -> None:
    """Train a small model beside some state, on this rank."""
    elastic_job = fd.cluster.roster.roster_place() is not None
    strategy = fd.MultiWorkerMirroredStrategy() if elastic_job else fd.OneDeviceStrategy("cpu")
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    x = torch.randn(1024, 16)
    with strategy.scope():
        model = torch.nn.Sequential(
            torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)
        )
        model.register_buffer("state", torch.zeros(elements, dtype=torch.float32))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches = strategy.distribute_dataset(
        (x, x.sum(1, keepdim=True).sin()), global_batch_size=32, shuffle=True
    )
    checkpoint = fd.Checkpoint(model=model, optimizer=optimizer, data=batches, epoch=0)
    elastic = fd.Elastic(strategy, checkpoint)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
        optimizer.step()

    def loop() -> None:
        say("trains", ranks=strategy.num_replicas_in_sync)
        while checkpoint.epoch < epochs:
            for batch in batches:
                strategy.run(step, args=(batch,))
                began_s = time.monotonic()
                elastic.commit()
                say("step", commit_s=time.monotonic() - began_s)
                time.sleep(pause_s)
            checkpoint.epoch += 1

    say("ready")
    elastic.run(loop)
    if strategy.is_chief:
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        say("ends", weights=weights.tolist())


def start(ranks: int, *options: object) -> subprocess.Popen[str]:
    launcher = ["-m", "fastdist", "run", "--min", "2", "--max", str(ranks), "--max-restarts", "99"]
    command = [sys.executable, *launcher, "--no-prefix", __file__, "--rank", *map(str, options)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


def events(job: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert job.stdout is not None
    return (json.loads(line) for line in job.stdout)


def kill(pids: Iterable[int], chance: random.Random) -> tuple[int, float]:
    pid = chance.choice(sorted(pids))
    os.kill(pid, signal.SIGKILL)
    return pid, time.monotonic()


class Machines:
    """Three launchers in network namespaces, the last of which loses its power."""

    def __init__(self, *options: object) -> None:
        self._options = [sys.executable, "-m", "fastdist", "run", "--nnodes", "1:3", "-n", "1"]
        self._options += ["--rdzv", "10.98.7.1:29400", "--no-prefix", "--node-rank"]
        self._program = [__file__, "--rank", *map(str, options)]
        self._read, self._write = os.pipe()
        self._launchers: dict[int, subprocess.Popen[bytes]] = {}
        _ip("netns add el-s; -n el-s link add br0 type bridge; -n el-s link set br0 up")
        for machine in range(3):
            name = f"el{machine}"
            _ip(
                f"netns add {name}; -n {name} link add e0 type veth peer name {name} netns el-s; "
                f"-n el-s link set {name} master br0 up; -n {name} link set lo up; "
                f"-n {name} addr add 10.98.7.{machine + 1}/24 dev e0; -n {name} link set e0 up"
            )
            self.start(machine)

    def start(self, machine: int) -> None:
        command = ["ip", "netns", "exec", f"el{machine}", *self._options, str(machine)]
        self._launchers[machine] = subprocess.Popen(
            [*command, *self._program], stdout=self._write, stderr=subprocess.DEVNULL
        )

    def events(self) -> Iterator[dict[str, Any]]:
        with open(self._read) as lines:
            yield from (json.loads(line) for line in lines)

    def cut_power(self) -> float:
        """Kill all processes of the last machine, unknown to the others; return the time."""
        at_s = time.monotonic()
        _ip("-n el2 link set e0 down")
        pids = subprocess.check_output(["ip", "netns", "pids", "el2"], text=True).split()
        for pid in map(int, pids):
            os.kill(pid, signal.SIGKILL)
        self._launchers.pop(2).wait()
        return at_s

    def come_back(self) -> None:
        _ip("-n el2 link set e0 up")
        self.start(2)

    def close(self) -> None:
        for launcher in self._launchers.values():
            launcher.terminate()
            launcher.wait()
        for name in ("el0", "el1", "el2", "el-s"):
            _ip(f"netns del {name}")


def _ip(commands: str) -> None:
    for command in commands.split("; "):
        subprocess.run(["ip", *command.split()], check=True)


def machine_times() -> dict[str, float]:
    """Cut the power of one of three machines; return the times of its loss and its return."""
    job = Machines(STATE_ELEMENTS, 1000, 0.1)
    cut_s = ready_s = shrunk_s = 0.0
    training: list[float] = []
    steps = 0
    try:
        for event in job.events():
            steps += event["event"] == "step"
            if event["event"] == "ready" and cut_s:
                ready_s = event["at_s"]
            if event["event"] == "trains" and event["ranks"] == 3 and ready_s:
                training.append(event["at_s"])
                if len(training) == 3:
                    break
            if event["event"] == "trains" and event["ranks"] == 2:
                shrunk_s = event["at_s"]
            if steps == 90 and not cut_s:
                cut_s = job.cut_power()
            if steps == 150 and cut_s and not ready_s and 2 not in job._launchers:
                job.come_back()
    finally:
        job.close()
    state_mb = STATE_ELEMENTS * 4 / 1e6
    return {
        "state_mb": state_mb,
        "shrink_s": shrunk_s - cut_s,
        "join_s": max(training) - ready_s,
    }


def times() -> dict[str, float]:
    """Kill one of three ranks; return the times of its loss and its return."""
    job = start(3, STATE_ELEMENTS, 1000, 0.1)
    seen: list[dict[str, Any]] = []
    killed_s = 0.0

    def trains(ranks: int, after_s: float) -> list[dict[str, Any]]:
        last = [e for e in seen if e["event"] == "trains" and e["at_s"] > after_s]
        return [e for e in last if e["ranks"] == ranks]

    for event in events(job):
        seen.append(event)
        steps = sum(e["event"] == "step" for e in seen)
        if steps == 60 and not killed_s:
            _, killed_s = kill({e["pid"] for e in trains(3, 0)}, random.Random(0))
        if killed_s and len(trains(3, killed_s)) == 3:
            break
    job.terminate()
    job.communicate()
    joined = trains(3, killed_s)
    ready = max(e["at_s"] for e in seen if e["event"] == "ready")
    return {
        "state_mb": STATE_ELEMENTS * 4 / 1e6,
        "commit_s": statistics.median(e["commit_s"] for e in seen if e["event"] == "step"),
        "shrink_s": max(e["at_s"] for e in trains(2, killed_s)) - killed_s,
        "join_s": max(e["at_s"] for e in joined) - ready,
    }


def kills(count: int) -> dict[str, Any]:
    """Train on four ranks with kills; compare the result with one device's."""
    epochs, pause_s = 4 * count, KILL_EVERY_S / 160
    alone = subprocess.run(
        [sys.executable, __file__, "--rank", "0", str(epochs), "0"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    expected = torch.tensor(json.loads(alone.stdout.splitlines()[-1])["weights"])
    chance, sizes, done = random.Random(1), [], 0
    training: set[int] = set()
    next_s = time.monotonic() + KILL_EVERY_S
    job = start(4, 0, epochs, pause_s)
    for event in events(job):
        if event["event"] == "trains":
            training.add(event["pid"])
            if not sizes or sizes[-1] != event["ranks"]:
                sizes.append(event["ranks"])
        if event["event"] == "ends":
            result = torch.tensor(event["weights"])
        if done < count and time.monotonic() > next_s and event["event"] == "step":
            pid, at_s = kill(training, chance)
            training.discard(pid)
            done, next_s = done + 1, at_s + KILL_EVERY_S
    job.communicate()
    return {
        "kills": done,
        "ranks": sizes,
        "exit_code": job.returncode,
        "difference": float((result - expected).abs().max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, help="train on four ranks with this many kills")
    parser.add_argument("--machines", action="store_true", help="lose a machine; needs root")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        elements, epochs, pause_s = options.rank
        train(int(elements), int(epochs), float(pause_s))
    else:
        measure = machine_times if options.machines else times
        print(json.dumps(measure() if options.kills is None else kills(options.kills)))


if __name__ == "__main__":
    main()
