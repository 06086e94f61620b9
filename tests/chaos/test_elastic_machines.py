"""Elastic jobs on several machines, which are network namespaces and lose ranks, power and cables.

No step is lost, none counts twice, and the others go on within seconds.

FASTDIST_CHAOS_MACHINES is the number of jobs with random faults, 1 if it is not set.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from held_ports import free_port
from launched import wait_until
from machines import Network, network_of_three

__all__ = ["network_of_three"]  # a fixture

COUNT = int(os.environ.get("FASTDIST_CHAOS_MACHINES", "1"))
# The programs go slowly until `hurry` is there, so that they do not end before machines return.
STEPS = """
    import pathlib, sys, time, numpy as np, fastdist as fd
    hurry = pathlib.Path(__file__).with_name("hurry")
    from fastdist.errors import CollectiveTimeoutError, LostRankError
    comm = fd.init(elastic=True)
    state = np.zeros(3)  # steps, sum of their numbers, sum of the numbers of ranks
    work = np.zeros(50_000)
    while state[0] < int(sys.argv[1]):
        try:
            before, comm = comm, comm.regroup()
            if comm is not before:
                comm.broadcast(state, root=0)
            work[:] = state[0] + comm.rank
            comm.all_reduce(work)
            n = comm.world_size
            assert (work == n * state[0] + n * (n - 1) / 2).all(), (work[0], state, n)
            state += 1, state[0], n
            if comm.rank == 0 and comm is not before:
                print("world", n, flush=True)
        except (LostRankError, CollectiveTimeoutError):
            pass
        time.sleep(0.02 if hurry.exists() else 0.1)
    print("done", *state.astype(int).tolist(), flush=True)
"""

SLOW = """
    import time, numpy as np, fastdist as fd
    comm = fd.init(elastic=True)
    while comm.world_size < 3:
        comm = comm.regroup()
        time.sleep(0.05)
    work = np.ones(4_000_000)
    for rank in range(3):
        if comm.rank == rank:
            time.sleep(6)  # longer than the silence of a lost machine
        comm.all_reduce(work, "mean")
        if comm.rank == (rank + 1) % 3:
            comm.send(work, rank)
        elif comm.rank == rank:
            time.sleep(6)
            comm.recv(work, (rank + 1) % 3)
    print("done", work.min() == work.max() == 1, comm.world_size, flush=True)
"""
TRAIN = """
    import pathlib, sys, time, torch, fastdist as fd
    hurry = pathlib.Path(__file__).with_name("hurry")
    strategy = fd.MultiWorkerMirroredStrategy()
    torch.manual_seed(0)
    x = torch.randn(400, 8, dtype=torch.float64)
    with strategy.scope():
        model = torch.nn.Linear(8, 1).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    batches = strategy.distribute_dataset(
        (x, x.sum(1, keepdim=True)), global_batch_size=20, shuffle=True
    )
    seen = torch.zeros(1, dtype=torch.float64)
    checkpoint = fd.Checkpoint(model=model, optimizer=optimizer, data=batches, epoch=0, seen=seen)
    elastic = fd.Elastic(strategy, checkpoint)
    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        return x.sum().reshape(1)
    def train():
        if strategy.is_chief:
            print("world", strategy.num_replicas_in_sync, flush=True)
        while checkpoint.epoch < int(sys.argv[1]):
            for batch in batches:
                seen.add_(strategy.reduce("sum", strategy.run(step, args=(batch,))))
                elastic.commit()
                time.sleep(0.02 if hurry.exists() else 0.2)
            checkpoint.epoch += 1
    elastic.run(train)
    print("done", *seen.tolist(), *model.weight[0].tolist(), flush=True)
"""


# The digest of a model with dropout and of its optimizer's states, whose shards move.
KEPT = TRAIN
for old, new in (
    (
        "MirroredStrategy()",
        "MirroredStrategy(options=fd.CommunicationOptions(shard_optimizer=True))",
    ),
    (
        "torch.nn.Linear(8, 1).double()",
        "torch.nn.Sequential(torch.nn.Linear(8, 30), torch.nn.Dropout(), torch.nn.Linear(30, 1))"
        ".double()",
    ),
    (
        'print("done", *seen.tolist(), *model.weight[0].tolist(), flush=True)',
        """import hashlib
    state = optimizer.state_dict()["state"]
    tensors = [*model.state_dict().values(), *(t for s in state.values() for t in s.values())]
    digest = hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()
    print("done", *seen.tolist(), digest, flush=True)""",
    ),
):
    assert old in KEPT
    KEPT = KEPT.replace(old, new)


class Job:
    """A launcher on each machine of a network; the first one keeps the roster."""

    def __init__(
        self,
        network: Network,
        folder: Path,
        least: int,
        ranks: int,
        steps: int,
        program: str = STEPS,
        keep: int | None = None,
        record: Path | None = None,
        machines: int = 3,
    ) -> None:
        self._network = network
        self._folder = folder
        count = machines
        self._command = ["--nnodes", f"{least}:{count}", "-n", str(ranks)]
        if keep is not None:
            self._command = ["--nnodes", str(count), "--keep", str(keep)]
        if record is not None:
            self._command += ["--record", str(record), "--record-every", "5"]
        self._command += ["--max-restarts", "999", "--no-prefix"]
        self._steps = steps
        self._place = f"{network.addresses[0]}:{free_port()}"
        self._launchers: dict[int, subprocess.Popen[str]] = {}
        self.starts = 0
        (folder / "steps.py").write_text(textwrap.dedent(program))
        for machine in range(machines):
            self.start(machine)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        for launcher in self._launchers.values():
            launcher.kill()
            launcher.wait()

    def start(self, machine: int) -> None:
        """Start the launcher of a machine, whose power is on again."""
        run = [sys.executable, "-m", "fastdist", "run", *self._command]
        run += ["--node-rank", str(machine), "--rdzv", self._place]
        run += [str(self._folder / "steps.py"), str(self._steps)]
        self.starts += 1
        with open(self._folder / f"out{self.starts}", "w") as out:
            self._launchers[machine] = subprocess.Popen(
                self._network.command(machine, *run), stdout=out, stderr=subprocess.STDOUT
            )

    def cut_power(self, machine: int) -> None:
        """Kill all processes of a machine, of which the others hear nothing."""
        self._network.set_cable("down", machine)
        for pid in self._pids(machine):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._launchers.pop(machine).wait()

    def kill_a_rank(self, machine: int) -> None:
        """Kill a program of a machine, if one runs."""
        for pid in self._pids(machine):
            with suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                if words[1] == str(self._folder / "steps.py"):
                    os.kill(pid, signal.SIGKILL)
                    return

    def _pids(self, machine: int) -> list[int]:
        name = self._network.names[machine]
        said = subprocess.run(
            ["ip", "netns", "pids", name], capture_output=True, text=True, check=True
        ).stdout
        return [int(pid) for pid in said.split()]

    def signal(self, machine: int, number: int) -> None:
        """Signal a launcher, and wait for its end."""
        launcher = self._launchers.pop(machine)
        launcher.send_signal(number)
        launcher.wait(30)

    def wait(self, machine: int) -> int:
        """Return the exit code of a launcher that ends by itself."""
        return self._launchers.pop(machine).wait(30)

    def lines(self) -> list[str]:
        """Return all that was written."""
        outputs = [self._folder / f"out{number}" for number in range(1, self.starts + 1)]
        return [line for output in outputs for line in output.read_text().splitlines()]

    def worlds(self) -> list[str]:
        return [line for line in self.lines() if line.startswith("world")]

    def await_world(self, size: int, patience_s: float) -> float:
        """Wait for a new world of this size; return how long that took."""
        before = self.worlds().count(f"world {size}")
        began = time.monotonic()
        wait_until(lambda: self.worlds().count(f"world {size}") > before, patience_s)
        return time.monotonic() - began

    def results(self) -> list[list[str]]:
        """Let the program end; return the last line of each rank."""
        (self._folder / "hurry").touch()
        for machine, launcher in self._launchers.items():
            assert launcher.wait(120) == 0, (machine, self.lines()[-30:])
        results = [line.split()[1:] for line in self.lines() if line.startswith("done")]
        assert results, self.lines()
        return results

    def check(self, least: int, most: int) -> None:
        """Wait for the end, and check the sums."""
        results = self.results()
        assert len({ranks for *_, ranks in results}) == 1
        for steps, numbers, ranks in results:
            assert int(steps) == self._steps
            assert int(numbers) == self._steps * (self._steps - 1) // 2
            assert least * self._steps <= int(ranks) <= most * self._steps

    def check_training(self) -> None:
        """Wait for the end, and compare with the training of one device."""
        found = [[float(each) for each in one] for one in self.results()]
        alone = subprocess.run(
            [sys.executable, str(self._folder / "steps.py"), str(self._steps)],
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        expected = [float(each) for each in alone.split("done")[1].split()]
        for one in found:
            assert one == pytest.approx(expected, abs=1e-9, rel=1e-9)


@pytest.fixture
def network(network_of_three: Network) -> Iterator[Network]:
    yield network_of_three
    for machine in range(3):
        network_of_three.heal(machine)


def test_a_machine_is_lost_and_comes_back(network: Network, tmp_path: Path) -> None:
    with Job(network, tmp_path, least=1, ranks=2, steps=700) as job:
        wait_until(lambda: job.worlds() == ["world 6"], 60)
        job.cut_power(2)
        took_s = job.await_world(4, 20)
        assert took_s < 8, took_s  # 4 s of silence, and a busy machine
        network.set_cable("up", 2)
        job.start(2)
        job.await_world(6, 40)
        job.check(4, 6)


def test_a_cable_is_cut(network: Network, tmp_path: Path) -> None:
    """The machine's ranks begin anew; the others go on."""
    with Job(network, tmp_path, least=1, ranks=1, steps=700) as job:
        wait_until(lambda: job.worlds() == ["world 3"], 60)
        network.set_cable("down", 1)
        job.await_world(2, 20)
        network.set_cable("up", 1)
        job.await_world(3, 40)
        job.check(2, 3)


def test_a_launcher_is_killed(network: Network, tmp_path: Path) -> None:
    with Job(network, tmp_path, least=1, ranks=1, steps=600) as job:
        wait_until(lambda: job.worlds() == ["world 3"], 60)
        job.signal(1, signal.SIGKILL)
        took_s = job.await_world(2, 20)
        assert took_s < 4, took_s
        job.check(2, 3)


def test_slow_ranks_are_not_lost(network: Network, tmp_path: Path) -> None:
    with Job(network, tmp_path, least=1, ranks=1, steps=0, program=SLOW) as job:
        assert job.results() == [["True", "3"]] * 3, job.lines()


def test_the_rosters_machine_is_lost(network: Network, tmp_path: Path) -> None:
    with Job(network, tmp_path, least=1, ranks=1, steps=100_000) as job:
        wait_until(lambda: job.worlds() == ["world 3"], 60)
        job.signal(0, signal.SIGTERM)
        for machine in (1, 2):
            assert job.wait(machine) == 143
        assert sum("the launcher at" in line for line in job.lines()) == 2


def test_training_goes_on(network: Network, tmp_path: Path) -> None:
    """Each example counts once in each epoch, and the result is that of one device."""
    with Job(network, tmp_path, 1, 1, 25, TRAIN) as job:
        wait_until(lambda: job.worlds()[-1:] == ["world 3"], 90)
        job.cut_power(1)
        job.await_world(2, 30)
        network.set_cable("up", 1)
        job.start(1)
        job.await_world(3, 60)
        job.check_training()


def test_a_lost_machines_ranks_are_kept(network: Network, tmp_path: Path) -> None:
    """The others take them over, and the result has the bits of a job that has lost nothing."""
    found = []
    for folder in (tmp_path / "lost", tmp_path / "whole"):
        folder.mkdir()
        with Job(network, folder, 1, 0, 25, KEPT, keep=4) as job:
            wait_until(lambda job=job: job.worlds()[-1:] == ["world 4"], 90)  # type: ignore[misc]
            if folder.name == "lost":
                job.cut_power(1)
                job.await_world(4, 60)
                network.set_cable("up", 1)
                job.start(1)
            results = job.results()
            assert len(results) >= 4
            assert [result for result in results if result != results[0]] == []
            found.append(results[0])
            said = [line for line in job.lines() if line.startswith("fastdist run: 4 ranks")]
            shares = [re.findall(r"(\d) on \d+ cores", line) for line in said]
            assert [sorted(each) for each in shares] == [
                ["1", "1", "2"],
                *([["2", "2"]] if folder.name == "lost" else []),
            ]
    assert found[0] == found[1]


@pytest.mark.parametrize("seed", range(COUNT))
def test_random_faults(network: Network, tmp_path: Path, seed: int) -> None:
    """Training goes on over three machines or two that lose power, cables and single ranks."""
    chance = random.Random(seed)
    keep = 4 if seed % 3 == 2 else None
    machines = 3 - seed % 2
    with Job(
        network, tmp_path, 1, 1 + seed // 2 % 2, 25, TRAIN, keep=keep, machines=machines
    ) as job:
        wait_until(lambda: bool(job.worlds()), 90)
        for _ in range(3):
            machine = chance.randrange(1, machines)
            fault: Callable[[int], None] = chance.choice(
                [job.cut_power, job.kill_a_rank, lambda one: network.set_cable("down", one)]
            )
            time.sleep(chance.uniform(0, 3))
            fault(machine)
            time.sleep(chance.uniform(0.1, 8))
            network.set_cable("up", machine)
            if machine not in job._launchers:
                job.start(machine)
        job.check_training()


@pytest.mark.parametrize(
    ("words", "left"), [(["--min", "2", "--max", "3"], 2), (["--keep", "3"], 3)]
)
def test_the_machines_of_hosts(
    network: Network, tmp_path: Path, words: list[str], left: int
) -> None:
    """One command starts all by ssh; a machine that was lost is tried until it is back."""
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(
        '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do case $1 in -o) shift 2;; *) shift;; esac; done\n'
        'host=$1; shift\nexec ip netns exec "$host" sh -c "$*"\n'
    )
    ssh.chmod(0o755)
    (tmp_path / "steps.py").write_text(textwrap.dedent(STEPS))
    run = ["-m", "fastdist", "run", "--hosts", ",".join(network.names[1:]), *words]
    run += ["--rdzv", f"{network.addresses[0]}:{free_port()}", "steps.py", "600"]
    env = os.environ | {"PATH": f"{ssh.parent}:{os.environ['PATH']}"}
    with open(tmp_path / "out", "w") as out:
        launcher = subprocess.Popen(
            network.command(0, sys.executable, *run), cwd=tmp_path, env=env, stdout=out, stderr=out
        )
    try:
        said = (tmp_path / "out").read_text
        wait_until(lambda: "world 3" in said(), 60)
        pids = subprocess.run(
            ["ip", "netns", "pids", network.names[2]], capture_output=True, text=True, check=True
        ).stdout.split()
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        if left == 2:
            wait_until(lambda: "world 2" in said(), 30)
        wait_until(lambda: said().count("world 3") == 2, 60)
        (tmp_path / "hurry").touch()
        assert launcher.wait(120) == 0, said()
        done = {line.split("done")[1] for line in said().splitlines() if "done" in line}
        assert [json.loads(f"[{one.strip().replace(' ', ',')}]")[0] for one in done] == [600]
        assert "restarting it (restart 1 of" in said()
    finally:
        launcher.kill()
        launcher.wait()
