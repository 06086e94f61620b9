"""Training that goes on when ranks come and go."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import fastdist as fd
import torch
from launched import Launcher

Script = Callable[[str], Path]
STEPS = 36
# Trains for three epochs, and writes what came of it: parameters, and the examples of each step.
TRAIN = """
import json, os, signal, sys, time
import torch
import fastdist as fd
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
step_folder, elastic_job = os.environ.get("STEP"), "FASTDIST_ROSTER" in os.environ
if step_folder and elastic_job:
    os.mkdir(f"{step_folder}/started{os.getpid()}")
options = fd.CommunicationOptions(shard_optimizer="SHARD" in os.environ)
make = fd.MultiWorkerMirroredStrategy
strategy = make(options=options) if elastic_job else fd.OneDeviceStrategy("cpu")
x = torch.randn(93, 8)
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin(), torch.arange(93.0))
torch.manual_seed(0 if not elastic_job else os.getpid())
with strategy.scope():
    teacher = torch.nn.Linear(8, 1)
torch.manual_seed(0)
with strategy.scope():
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
batches = strategy.distribute_dataset(data, global_batch_size=8, shuffle=True, seed=1)
checkpoint = fd.Checkpoint(
    model=model, optimizer=optimizer, schedule=schedule, batches=batches, epoch=0, step=0, seen=[],
    sizes=[],
)

def once(name):
    try:
        os.mkdir(f"{step_folder}/{name}")
    except FileExistsError:
        return False
    return True

def wait_for(processes):
    while sum(name.startswith("started") for name in os.listdir(step_folder)) < processes:
        time.sleep(0.05)
    time.sleep(1.5)  # for the new one to ask to be taken in

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def step(batch):
    x, y, number = batch
    optimizer.zero_grad()
    loss = (model(x) - y).square().mean()
    loss.backward()
    HARM_IN_STEP
    optimizer.step()
    return number.sum()

def train():
    while checkpoint.epoch < 3:
        for batch in batches:
            rank, size = strategy.local_replica_ids[0], strategy.num_replicas_in_sync
            HARM
            result = strategy.run(step, args=(batch,))
            checkpoint.seen = [*checkpoint.seen, float(strategy.reduce("sum", result))]
            checkpoint.sizes = [*checkpoint.sizes, size]
            schedule.step()
            checkpoint.step += 1
            commit()
            PAUSE
        checkpoint.epoch += 1
    return "done"

if elastic_job:
    elastic = fd.Elastic(strategy, checkpoint, MANAGER)
    commit = elastic.commit
    assert elastic.run(train) == "done"
    strategy.check_in_sync()
else:
    commit = lambda: None
    train()
if strategy.is_chief:
    weights = [p.tolist() for p in model.parameters()]
    print("RESULT", json.dumps([checkpoint.step, checkpoint.seen, checkpoint.sizes, weights]))
"""


def program(
    *, harm: str = "pass", in_step: str = "pass", pause: str = "pass", manager: str = "None"
) -> str:
    text = TRAIN.replace("HARM_IN_STEP", in_step).replace("HARM", harm).replace("PAUSE", pause)
    return text.replace("MANAGER", manager)


def result(output: str) -> list[Any]:
    line = next(line for line in output.splitlines() if "RESULT" in line)
    found: list[Any] = json.loads(line.partition("RESULT")[2])
    return found


@pytest.fixture(scope="module")
def expected() -> list[Any]:
    done = subprocess.run([sys.executable, "-c", program()], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return result(done.stdout)


@pytest.mark.slow
class TestTraining:
    def run(
        self, launcher: Launcher, script: Script, expected: list[Any], **harm: str
    ) -> tuple[list[int], str]:
        """Train, compare with one device; return the number of replicas of each step."""
        done = launcher.run("--min", 2, "--max", 3, script(program(**harm)))
        errors = done.stderr.decode()
        assert done.returncode == 0, errors
        steps, seen, sizes, weights = result(done.stdout.decode())
        assert (steps, seen) == (STEPS, expected[1])  # no example left out, none twice
        for own, theirs in zip(weights, expected[3], strict=True):
            torch.testing.assert_close(
                torch.tensor(own), torch.tensor(theirs), rtol=0, atol=1e-9, check_dtype=False
            )
        return sizes, errors

    def test_as_one_device(self, launcher: Launcher, script: Script, expected: list[Any]) -> None:
        sizes, errors = self.run(launcher, script, expected)
        assert sizes == [3] * STEPS
        assert errors == ""

    def test_killed_ranks_come_back(
        self, launcher: Launcher, script: Script, step: Path, expected: list[Any]
    ) -> None:
        sizes, errors = self.run(
            launcher,
            script,
            expected,
            harm="if (checkpoint.step, rank) in ((7, 0), (28, 2)) and once(f'{rank}'): die()",
            pause="if size == 2: wait_for(4 if checkpoint.step <= 28 else 5)",
        )
        assert sizes[:7] == [3] * 7
        assert (sizes[7], sizes[27], sizes[28], sizes[-1]) == (2, 3, 2, 3)
        for commit in (7, 28):
            assert f"2 replicas train now, 3 before; they go on from commit {commit}" in errors
        assert errors.count("3 replicas train now, 2 before; they go on from commit") == 2

    @pytest.mark.parametrize("shard", [{}, {"SHARD": "1"}], ids=["whole", "sharded"])
    def test_ranks_are_lost_in_many_ways(
        self,
        launcher: Launcher,
        script: Script,
        step: Path,
        expected: list[Any],
        shard: dict[str, str],
    ) -> None:
        launcher.environ |= shard
        lost = {
            "at once": "checkpoint.step == 0 and rank == 0",
            "first": "checkpoint.step == 6",  # whoever comes first
            "second": "checkpoint.step == 24",
            "in the last step": "checkpoint.step == 35 and rank == 0",
        }
        harm = [f"if {when} and once({name!r}): die()" for name, when in lost.items()]
        harm += ["if checkpoint.step == 29 and rank == 1 and once('stopped'): stop()"]
        replica = "fd.get_replica_context().replica_id_in_sync_group"
        launcher.environ["FASTDIST_TIMEOUT_S"] = "4"
        sizes, errors = self.run(
            launcher,
            script,
            expected,
            harm="\n            ".join(harm),
            in_step=f"if checkpoint.step == 12 and {replica} == 1 and once('killed'): die()\n"
            f"    if checkpoint.step == 18 and {replica} == 1 and once('raised'): raise OSError(9)",
            pause="time.sleep(0.0 if size == 3 else 0.5)",
        )
        assert 2 in sizes
        assert errors.count("restarting it") == 7

    def test_an_error_that_the_function_handles(
        self, launcher: Launcher, script: Script, step: Path, expected: list[Any]
    ) -> None:
        text = program(harm="if checkpoint.step == 7 and rank == 1 and once('killed'): die()")
        handled = "try: result = strategy.run(step, args=(batch,))\n"
        handled += "            except Exception: commit()"
        text = text.replace("result = strategy.run(step, args=(batch,))", handled)
        done = launcher.run("--min", 2, "--max", 3, script(text))
        assert done.returncode == 0, done.stderr
        assert result(done.stdout.decode())[:2] == [STEPS, expected[1]]

    def test_all_are_lost(
        self, launcher: Launcher, script: Script, step: Path, expected: list[Any], tmp_path: Path
    ) -> None:
        _, errors = self.run(
            launcher,
            script,
            expected,
            harm="if checkpoint.step == 11 and once(f'killed{rank}'): die()",
            pause="if checkpoint.step % 5 == 0: elastic._manager.save(checkpoint)",
            manager=f"fd.CheckpointManager({str(tmp_path / 'saved')!r})",
        )
        assert errors.count("restarting it") == 3
        names = [path.name for path in (tmp_path / "saved").glob("checkpoint-*")]
        assert sorted(names)[-1] == "checkpoint-35"


def test_elsewhere_it_only_calls_the_function() -> None:
    strategy = fd.OneDeviceStrategy("cpu")
    with strategy.scope():
        model = torch.nn.Linear(1, 1)
    elastic = fd.Elastic(strategy, fd.Checkpoint(model=model))
    elastic.commit()
    assert elastic.run(lambda: 3) == 3


def test_of_other_strategies() -> None:
    with pytest.raises(TypeError, match="expected a MirroredStrategy or MultiWorkerMirrored"):
        fd.Elastic(object(), fd.Checkpoint(step=0))  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "said"),
    [
        ("fd.CentralStorageStrategy()", "an elastic job has one strategy, a MirroredStrategy or"),
        ("fd.MirroredStrategy()\nother = fd.MirroredStrategy()", "an elastic job has one strategy"),
        (
            "fd.MirroredStrategy()\ndel strategy\nother = fd.MirroredStrategy()\nraise OSError(2)",
            "OSError",
        ),
        (
            "fd.MirroredStrategy()\n"
            "batches = strategy.distribute_datasets_from_function(lambda context: [])\n"
            "fd.Elastic(strategy, fd.Checkpoint(batches=batches)).run(lambda: None)",
            "the ranks of an elastic job must read the same data",
        ),
    ],
)
def test_what_is_not_elastic(launcher: Launcher, script: Script, made: str, said: str) -> None:
    path = script(f"import fastdist as fd\nstrategy = {made}")
    done = launcher.run("--min", 2, "--max", 2, "--max-restarts", 0, path)
    assert done.returncode == 1
    assert said in done.stderr.decode()


METRIC = """
import os, signal
import torch, torchmetrics
import fastdist as fd
strategy = fd.MirroredStrategy()
with strategy.scope():
    metric = torchmetrics.SumMetric()
checkpoint = fd.Checkpoint(metric=metric, step=0)
elastic = fd.Elastic(strategy, checkpoint)
def update(x):
    metric.update(x)
def train():
    while checkpoint.step < 12:
        strategy.run(update, args=(torch.tensor(1.0) / strategy.num_replicas_in_sync,))
        name = f"{os.environ['STEP']}/{checkpoint.step}"
        if checkpoint.step % 3 and strategy.local_replica_ids == (1,) and not os.path.exists(name):
            os.mkdir(name)
            os.kill(os.getpid(), signal.SIGKILL)
        checkpoint.step += 1
        if checkpoint.step % 3 == 0:
            elastic.commit()
elastic.run(train)
print(float(metric.compute()))
"""


@pytest.mark.slow
def test_metrics_go_back(launcher: Launcher, script: Script, step: Path) -> None:
    pytest.importorskip("torchmetrics")
    done = launcher.run("--min", 1, "--max", 2, "--no-prefix", script(METRIC))
    assert done.returncode == 0, done.stderr
    assert {float(line) for line in done.stdout.split()} == {12.0}


@pytest.mark.slow
def test_a_second_run(launcher: Launcher, script: Script) -> None:
    path = script(
        "import fastdist as fd\n"
        "elastic = fd.Elastic(fd.MirroredStrategy(), fd.Checkpoint(step=0))\n"
        "elastic.run(lambda: None)\n"
        "elastic.run(lambda: None)\n"
    )
    done = launcher.run("--min", 2, "--max", 2, "--max-restarts", 0, path)
    assert done.returncode == 1
    assert b"was called twice; train in one call" in done.stderr
