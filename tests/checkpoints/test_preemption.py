"""Jobs that are told to end, or are killed, and go on from their checkpoints."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("torch")

from example_jobs import Start
from launched import Launcher, finish, wait_until

STEPS = 40
# Trains from the newest checkpoint, and at the end writes all its parameters' bits.
TRAIN = f"""
import os, sys, time
from pathlib import Path
import torch
import fastdist as fd
torch.set_num_threads(1)
folder, pause_s, asynchronous = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "async"
strategy = fd.MirroredStrategy()
torch.manual_seed(0)
with strategy.scope():
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1)
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
x = torch.randn(24, 4)
batches = strategy.distribute_dataset(
    torch.utils.data.TensorDataset(x), global_batch_size=6, shuffle=True, seed=1
)
checkpoint = fd.Checkpoint(model=model, optimizer=optimizer, data=batches, step=0)
manager = fd.CheckpointManager(folder / "checkpoints", max_to_keep=2)
manager.restore(checkpoint)
rank = strategy.local_replica_ids[0]
if rank == 0:
    print("begins at", checkpoint.step, flush=True)
(folder / f"pid{{rank}}").write_text(str(os.getpid()))

def step(batch):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(batch[0]), batch[0].sum(1, keepdim=True))
    loss.backward()
    optimizer.step()

with fd.PreemptionCheckpointHandler(manager, checkpoint) as handler:
    while checkpoint.step < {STEPS}:
        for batch in batches:
            strategy.run(step, args=(batch,))
            checkpoint.step += 1
            if checkpoint.step % 5 == 0:
                manager.save(checkpoint, async_op=asynchronous)
            (folder / f"step{{rank}}").write_text(str(checkpoint.step))
            time.sleep(pause_s)
            handler.save_if_preempted()
            if checkpoint.step == {STEPS}:
                break
manager.close()
if rank == 0:
    bits = torch.cat([p.detach().reshape(-1).view(torch.int32) for p in model.parameters()])
    (folder / "result").write_text(" ".join(map(str, bits.tolist())))
"""


class Job:
    """A job in a folder of its own."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._launcher = launcher
        self._folder = folder
        (folder / "train.py").write_text(TRAIN)

    def start(
        self, *options: object, pause_s: float = 0.0, mode: str = "sync"
    ) -> subprocess.Popen[bytes]:
        script = self._folder / "train.py"
        return self._launcher.start("-n", 2, *options, script, self._folder, pause_s, mode)

    @property
    def step(self) -> int:
        path = self._folder / "step0"
        return int(path.read_text() or 0) if path.exists() else 0

    def signal(self, rank: int, number: signal.Signals) -> None:
        os.kill(int((self._folder / f"pid{rank}").read_text()), number)

    @property
    def result(self) -> str:
        return (self._folder / "result").read_text()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The parameters of a job that nobody has disturbed."""
    return train_undisturbed(tmp_path_factory.mktemp("undisturbed"), 2)


def train_undisturbed(folder: Path, ranks: int) -> str:
    """Train in forks; return the result."""
    (folder / "train.py").write_text(TRAIN)
    Start(True, 0).ranks(str(folder / "train.py"), str(folder), "0", "sync", count=ranks)
    return (folder / "result").read_text()


@pytest.mark.slow
def test_a_told_rank_makes_all_save_and_the_launcher_restarts(
    launcher: Launcher, tmp_path: Path, undisturbed: str
) -> None:
    job = Job(launcher, tmp_path / "job")
    process = job.start("--max-restarts", 2, pause_s=0.02)
    for rank, step in ((0, 7), (1, 22)):
        wait_until(lambda step=step: job.step >= step)
        job.signal(rank, signal.SIGTERM)
    done = finish(process)
    assert done.returncode == 0, done.stderr
    begins = [int(number) for number in re.findall(rb"begins at (\d+)", done.stdout)]
    assert begins[0] == 0
    assert 7 <= begins[1] < 22 <= begins[2]
    assert done.stderr.count(b"asks to be started again: exit code 75") == 2
    for restart in (b"1", b"2"):
        assert b"fastdist run: restarting all ranks (restart " + restart + b" of 2)" in done.stderr
    assert job.result == undisturbed


@pytest.mark.slow
def test_a_told_launcher_lets_ranks_save(
    launcher: Launcher, tmp_path: Path, undisturbed: str
) -> None:
    job = Job(launcher, tmp_path / "job")
    process = job.start("--max-restarts", 3, "--grace-s", 30, pause_s=0.02)
    wait_until(lambda: job.step >= 6)
    process.terminate()
    done = finish(process)
    assert done.returncode == 128 + signal.SIGTERM
    assert done.stderr == b"fastdist run: stopped by SIGTERM\n"
    stopped_at = job.step
    done = finish(job.start())
    assert (done.returncode, done.stderr) == (0, b"")
    assert re.findall(rb"begins at (\d+)", done.stdout) == [str(stopped_at).encode()]
    assert job.result == undisturbed


@pytest.mark.slow
def test_a_killed_rank_costs_the_steps_since_the_checkpoint(
    launcher: Launcher, tmp_path: Path, undisturbed: str
) -> None:
    job = Job(launcher, tmp_path / "job")
    process = job.start("--max-restarts", 1, pause_s=0.02, mode="async")
    wait_until(lambda: job.step >= 12)
    job.signal(1, signal.SIGKILL)
    done = finish(process)
    assert done.returncode == 0, done.stderr
    assert b"rank 1 of 2 failed first: killed by signal 9 (SIGKILL)" in done.stderr
    assert re.findall(rb"begins at (\d+)", done.stdout) == [b"0", b"10"]
    assert job.result == undisturbed


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_kills_at_random_moments(launcher: Launcher, tmp_path: Path, undisturbed: str) -> None:
    """Ranks and the launcher are killed, in saves too; the end is the same to the bit.

    KILLS: how many, 3 if it is not set.
    """
    chance = random.Random(int(os.environ.get("KILLS_SEED", "3")))
    kills = number = 0
    while kills < int(os.environ.get("KILLS", "3")):
        job = Job(launcher, tmp_path / f"job{number}")
        number += 1
        mode = chance.choice(["sync", "async"])
        while (process := job.start("--max-restarts", 1, pause_s=0.01, mode=mode)).poll() is None:
            at = chance.randint(job.step, STEPS)
            wait_until(partial(has_come_to, job, process, at))
            time.sleep(chance.random() * 0.02)
            victim = chance.choice(["rank 0", "rank 1", "launcher"])
            if process.poll() is None:
                if victim == "launcher":
                    process.kill()
                else:
                    with contextlib.suppress(ProcessLookupError):  # it has just ended
                        job.signal(int(victim[-1]), signal.SIGKILL)
                kills += 1
            if finish(process).returncode == 0:
                break
        assert job.result == undisturbed


def has_come_to(job: Job, process: subprocess.Popen[bytes], step: int) -> bool:
    return job.step >= step or process.poll() is not None


@pytest.mark.slow
def test_a_watcher_and_what_is_refused(tmp_path: Path) -> None:
    code = f"""
import signal, sys, threading, time
import fastdist as fd
checkpoint = fd.Checkpoint(step=3)
manager = fd.CheckpointManager({str(tmp_path)!r})
before = signal.getsignal(signal.SIGTERM)
failing = fd.PreemptionCheckpointHandler(manager, checkpoint, watcher=lambda: 1 / 0)
time.sleep(1.3)
try:
    failing.save_if_preempted()
except ZeroDivisionError:
    print("told")
failing.close()
assert signal.getsignal(signal.SIGTERM) is before
def elsewhere():
    try:
        fd.PreemptionCheckpointHandler(manager, checkpoint)
    except ValueError as error:
        print(error)
thread = threading.Thread(target=elsewhere)
thread.start()
thread.join()
with fd.PreemptionCheckpointHandler(
    manager, checkpoint, watcher=lambda: True, exit_code=9
) as handler:
    for _ in range(100):
        time.sleep(0.1)
        handler.save_if_preempted()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (9, "")
    assert done.stdout == "told\nPreemptionCheckpointHandler must be made in the main thread\n"
    assert (tmp_path / "checkpoint-3").exists()
