"""Digests of recorded steps: flipped bits are found, and two runs are compared."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launched import Launcher, wait_until
from machines import Network, network_of_three

pytest.importorskip("torch")

import fastdist as fd
from fastdist._config import Recording
from fastdist.training.digests import StepDigests
from test_elastic_machines import KEPT, Job

__all__ = ["network_of_three"]  # a fixture

Script = Callable[[str], Path]
PROGRAM = """
import os, sys
import numpy as np
import torch
import torch.nn.functional as F
import fastdist as fd

harm = dict(pair.split("=") for pair in sys.argv[1:])
torch.set_num_threads(int(harm.get("threads", 1)))
options = fd.CommunicationOptions(
    shard_optimizer="shard" in harm, bucket_bytes=int(harm.get("bucket", 1 << 20))
)
make = getattr(fd, harm.get("strategy", "MirroredStrategy"))
strategy = make(options=options)
torch.manual_seed(int(harm.get("seed", 0)))
with strategy.scope():
    model = torch.nn.Sequential(torch.nn.Linear(6, 20), torch.nn.ReLU(), torch.nn.Linear(20, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=float(harm.get("lr", 1e-2)))
x = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
y = torch.arange(60) % 3

def flip(tensor):
    bits = tensor.detach().view(-1).view(torch.int32)
    bits[int(harm["element"]) % len(bits)] ^= 1 << int(harm["bit"])

def step(batch, turn):
    x, y = batch
    if harm.get("data") == str(turn) and fd.get_replica_context().replica_id_in_sync_group == 1:
        x = x.clone()
        x[0] += 1e-3
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    is_here = fd.get_replica_context().replica_id_in_sync_group == int(harm.get("replica", -1))
    if is_here and harm.get("gradient") == str(turn):
        flip(model[0].weight.grad)
    optimizer.step()
    if is_here and harm.get("state") == str(turn):
        flip(optimizer.state[model[0].weight]["exp_avg"])

turn = 0
for epoch in range(4):
    for batch in strategy.distribute_dataset((x, y), global_batch_size=12):
        turn += 1
        strategy.run(step, args=(batch, turn))
        is_here = strategy.local_replica_ids[0] == int(harm.get("replica", -1))
        if is_here and harm.get("parameter") == str(turn):
            flip(model[2].weight)
"""


# Trains with a flipped bit again and again, at places by seed, and checks who was blamed when.
CAMPAIGN = """
import random, re, sys
import torch
import torch.nn.functional as F
import fastdist as fd
from fastdist.errors import FastdistError

every, last = 5, 20
torch.set_num_threads(1)
x = torch.randn(60, 6, generator=torch.Generator().manual_seed(1))
y = torch.arange(60) % 3
found = 0
for seed in range(int(sys.argv[1])):
    chance = random.Random(seed)
    what = chance.choice(["gradient", "parameter", "state", "between"])
    victim, turn, bit = chance.randrange(3), chance.randint(1, last - every), chance.randrange(32)
    strategy = fd.MirroredStrategy()
    (replica,) = strategy.local_replica_ids
    torch.manual_seed(seed)
    with strategy.scope():
        model = torch.nn.Sequential(torch.nn.Linear(6, 20), torch.nn.ReLU(), torch.nn.Linear(20, 3))
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    parameter = chance.choice(list(model.parameters()))
    element = chance.randrange(parameter.numel())

    def flip(tensor):
        tensor.detach().view(-1).view(torch.int32)[element] ^= 1 << bit if bit < 31 else -(1 << 31)

    def step(batch, number):
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        is_here = (replica, number) == (victim, turn)
        if is_here and what == "gradient":
            flip(parameter.grad)
        if is_here and what == "parameter":
            flip(parameter)
        optimizer.step()
        if is_here and what == "state":
            flip(optimizer.state[parameter][chance.choice(["exp_avg", "exp_avg_sq"])])

    number = 0
    try:
        for epoch in range(4):
            for batch in strategy.distribute_dataset((x, y), global_batch_size=12):
                number += 1
                strategy.run(step, args=(batch, number))
                if (replica, number, what) == (victim, turn, "between"):
                    flip(parameter)
    except FastdistError as error:
        assert error.ranks == (victim,), (seed, what, victim, turn, bit, str(error))
        assert turn <= number <= turn + every, (seed, what, turn, number)
        found += 1
    else:
        strategy.check_in_sync()  # the bit was rounded away
if replica == 0:
    print("found", found, flush=True)
"""


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def train(launcher: Launcher, script: Script, tmp_path: Path) -> Callable[..., Any]:
    program = script(PROGRAM)

    def train(name: str, *harm: str, ranks: int = 3, every: int = 2) -> Any:
        record = ["--record", tmp_path / name, "--record-every", every]
        return launcher.run("-n", ranks, *record, program, *harm)

    return train


def compare(*arguments: object, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fastdist", "compare-runs", *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["shard=1"], ["strategy=CentralStorageStrategy"]])
def test_a_run_is_like_itself(
    train: Callable[..., Any], tmp_path: Path, options: list[str]
) -> None:
    """In buckets of another size, and one that is sharded like one that is not."""
    for name, bucket in (("a", 1 << 20), ("b", 400)):
        of = [] if (name, options) == ("b", ["shard=1"]) else options
        done = train(name, f"bucket={bucket}", *of)
        assert done.returncode == 0, done.stderr.decode()
    run, *found = records(tmp_path / "a")
    assert list(run) == ["run"]
    assert [record["step"] for record in found] == list(range(2, 21, 2))
    for record in found:
        assert len(set(record["replicas"])) == 3
        assert (
            list(record["parameters"])
            == list(record["gradients"])
            == [*("0.weight", "0.bias", "2.weight", "2.bias")]
        )
        assert len(record["states"]) == (0 if "Central" in str(options) else 12)
    done = compare("a", "b", folder=tmp_path)
    assert (done.returncode, done.stdout) == (
        0,
        "equal in all 10 steps that both have recorded, up to step 20\n",
    )


@pytest.mark.slow
def test_where_runs_part(train: Callable[..., Any], tmp_path: Path) -> None:
    assert train("a").returncode == 0
    for name, harm, said in (
        ("data", "data=7", "part at step 8; they are equal up to step 6"),
        ("lr", "lr=0.02", "part at step 2, the first of both files"),
    ):
        assert train(name, harm).returncode == 0
        done = compare("a", name, folder=tmp_path)
        assert done.returncode == 1
        assert said in done.stdout
    assert train("now", "data=8").returncode == 0
    done = compare("a", "now", "--json", folder=tmp_path)
    found = json.loads(done.stdout)["parting"]
    assert (found["step"], found["replicas"]) == (8, [1])
    assert found["gradients"][0] == found["parameters"][0] == "0.weight"
    done = compare("a", "lr", folder=tmp_path)
    assert "Gradients are equal" not in done.stdout  # step 1 had another learning rate
    assert train("threads", "data=2", "threads=2").returncode == 0
    done = compare("a", "threads", folder=tmp_path)
    assert "torch had [1, 1, 1] and [2, 2, 2] threads; set OMP_NUM_THREADS alike" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "replica", "bit"),
    [
        *(("gradient=5", 2, bit) for bit in (0, 30)),
        ("parameter=6", 0, 0),
        ("state=7", 1, 0),
        *(("gradient=5 shard=1", replica, 30) for replica in (0, 1, 2)),
    ],
)
def test_a_flipped_bit_names_the_replica(
    train: Callable[..., Any], tmp_path: Path, what: str, replica: int, bit: int
) -> None:
    done = train("a", *what.split(), f"replica={replica}", f"bit={bit}", "element=17", every=1)
    errors = done.stderr.decode()
    assert done.returncode != 0
    said = re.search(
        r"after step (\d+), (.*?) is not the same on all replicas: replica (\d)", errors
    )
    assert said is not None, errors
    step, name, found = said.groups()
    assert int(step) == {"gradient": 5, "parameter": 7, "state": 7}[what.partition("=")[0]]
    assert int(found) == replica
    assert ("2.weight" if "parameter" in what else "0.weight") in name
    assert "differs from the 2 others" in errors


@pytest.mark.slow
def test_flipped_bits_at_random(launcher: Launcher, script: Script, tmp_path: Path) -> None:
    """FASTDIST_CHAOS_BITS is their number, 20 if it is not set."""
    count = int(os.environ.get("FASTDIST_CHAOS_BITS", "20"))
    record = ["--record", tmp_path / "a", "--record-every", 5]
    done = launcher.run("-n", 3, *record, script(CAMPAIGN), count)
    assert done.returncode == 0, done.stderr.decode()
    assert int(done.stdout.split()[-1]) >= 0.6 * count


@pytest.mark.slow
def test_of_two_replicas_both_are_named(train: Callable[..., Any]) -> None:
    done = train("a", "parameter=3", "replica=1", "bit=3", "element=5", ranks=2)
    assert re.search(r"replicas 0 \(on \S+\) and 1 \(on \S+\) differ", done.stderr.decode())


@pytest.mark.slow
def test_files_that_cannot_be_compared(tmp_path: Path) -> None:
    kinds = {"threads": [1, 1], "gradients": {}, "parameters": {}, "states": {}}
    for name, step, replicas in (("a", 1, "xy"), ("b", 2, "xy"), ("c", 1, "xyz"), ("d", 3, "xy")):
        record = {"step": step, "replicas": list(replicas), **kinds}
        # The first line of a file, and one of a job that was killed.
        (tmp_path / name).write_text('{"run": ""}\n{"st\n' + json.dumps(record) + "\n")
    odd = [{"step": 1, "replicas": None}, {"step": 1, "replicas": [], **kinds, "states": 5}]
    odd += [{"step": math.inf, "replicas": [], **kinds}]
    lines = ['{"step": 1}', "[]", "5", *map(json.dumps, odd)]
    (tmp_path / "wrong").write_text("\n".join(lines))
    longer = (tmp_path / "a").read_text() + (tmp_path / "d").read_text()
    (tmp_path / "longer").write_text(longer)
    (tmp_path / "grows").write_text(longer.replace('3, "replicas": [', '3, "replicas": ["z", '))
    for other, said in (
        ("missing", "No such file"),
        ("wrong", "has no record"),
        ("b", "no step in common"),
        ("c", "the runs have 2 and 3 replicas"),
    ):
        done = compare("a", other, folder=tmp_path)
        assert done.returncode == 2
        assert said in done.stderr
    assert compare("a", "a", folder=tmp_path).returncode == 0
    done = compare("longer", "grows", folder=tmp_path)
    assert (done.returncode, "from step 3 on, the runs have 2 and 3 rep" in done.stderr) == (
        2,
        True,
    )


def test_a_run_without_records(launcher: Launcher, tmp_path: Path) -> None:
    """The file is that of this run, and not of one before."""
    (tmp_path / "a").write_text('{"run": ""}\n{"step": 1}\n')
    done = launcher.run("-n", 2, "--record", tmp_path / "a", "true")
    assert b"no step was recorded; strategies record each 100th run" in done.stderr
    (run,) = records(tmp_path / "a")
    assert list(run) == ["run"]


def test_options_that_do_not_fit(launcher: Launcher, tmp_path: Path) -> None:
    for words, said in (
        (["-n", 2, "--record", "missing/a"], "there is no folder"),
        (["-n", 1, "--record", "a"], "at least two ranks"),
        (["--keep", 1, "--record", "a"], "at least two ranks"),
        (["-n", 2, "--record-every", 3], "--record-every needs --record FILE"),
        (["--workers", 1, "--ps", 1, "--record", "a"], "at least two ranks"),
    ):
        done = launcher.run(*words, "true")
        assert done.returncode == 2
        assert said in done.stderr.decode()


def test_one_rank_on_each_of_two_machines(launcher: Launcher, tmp_path: Path) -> None:
    place = ["--nnodes", 2, "--node-rank", 0, "--rdzv", "127.0.0.1:2950", "-n", 1]
    done = launcher.run(*place, "--record", tmp_path / "a", "sh", "-c", "echo $FASTDIST_RECORD")
    assert done.stdout.decode().split()[1:] == [str(tmp_path / "a")]


def test_a_file_that_becomes_unwritable(tmp_path: Path) -> None:
    """Training goes on, and says once that nothing more is recorded."""
    (alone,) = fd.local_group(1)
    digests = StepDigests(Recording(str(tmp_path), 1, ""), is_sharded=False)
    digests.watch([], alone, is_exact=True)
    digests.note_step()
    with pytest.warns(UserWarning, match="no more steps are recorded: .*Is a directory"):
        digests.end_run(alone, [])
    digests.note_step()
    digests.end_run(alone, [])


def test_another_run_begins_anew_and_the_same_goes_on(tmp_path: Path) -> None:
    (alone,) = fd.local_group(1)
    path = tmp_path / "a"
    for name in ("first", "second", "second"):
        digests = StepDigests(Recording(str(path), 2, name), is_sharded=False)
        digests.watch([], alone, is_exact=True)
        for _ in range(4):
            digests.note_step()
            digests.end_run(alone, [])
    run, *found = records(path)
    assert run == {"run": "second"}
    assert len(found) == 4


def test_steps_of_one_replica_count(tmp_path: Path) -> None:
    """An elastic job may shrink to one replica, and grow again."""
    (alone,) = fd.local_group(1)
    digests = StepDigests(Recording(str(tmp_path / "a"), 1, ""), is_sharded=False)
    before = StepDigests.steps
    for workers in (alone, None, alone):
        if workers is not None:
            digests.watch([], workers, is_exact=True)
        digests.note_step()
        digests.end_run(workers, [])
    assert [record["step"] - before for record in records(tmp_path / "a")[1:]] == [1, 3]


@pytest.mark.slow
def test_machines(network_of_three: Network, tmp_path: Path) -> None:
    """The file is on the machine of rank 0, and steps that are made again have their numbers."""
    with Job(network_of_three, tmp_path, 1, 0, 25, KEPT, keep=4, record=tmp_path / "a") as job:
        wait_until(lambda: job.worlds()[-1:] == ["world 4"], 90)
        job.cut_power(2)
        job.await_world(4, 60)
        job.results()
    network_of_three.heal(2)
    _, *found = records(tmp_path / "a")
    assert {record["step"] for record in found} == set(range(5, 501, 5))
