"""Checkpoints under every strategy, and what lies on the disk."""

from __future__ import annotations

import collections
import json
import math
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import fastdist as fd
import numpy as np
import pytest
import torch
from fastdist.errors import DamagedCheckpointError
from strategy_checkpoints import CheckpointContract
from test_strategies import ManyProcesses, OneProcess, pytest_generate_tests, strategies
from torch import nn

__all__ = ["pytest_generate_tests", "strategies"]


class TestOneDevice(CheckpointContract):
    slow_sizes = (1,)

    @staticmethod
    def make(size: int) -> OneProcess:
        return OneProcess(lambda options: fd.OneDeviceStrategy("cpu"))


class TestMirrored(CheckpointContract):
    sizes = (2,)
    slow_sizes = (3,)

    @staticmethod
    def make(size: int) -> ManyProcesses:
        return ManyProcesses(size)


class TestMultiWorkerMirrored(CheckpointContract):
    slow_sizes = (2,)

    @staticmethod
    def make(size: int) -> ManyProcesses:
        return ManyProcesses(size, "multi_worker")


class TestCentralStorage(CheckpointContract):
    slow_sizes = (3,)

    @staticmethod
    def make(size: int) -> ManyProcesses:
        return ManyProcesses(size, "central")


class Holder:
    """An object with a state of any structure."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def test_all_kinds_of_values(tmp_path: Path) -> None:
    held = {
        "numbers": [1, -(2**80), 0.1, math.inf, -0.0, True, None, 1 + 2j],
        "text": "a\nü$",
        "bytes": b"\0\xff",
        1: (2, "three", (4,)),
        ("a", 2): {"$tensor": "not one"},
        "counter": collections.Counter({3: 2}),
        "set": {1, 2},
        "kinds": [torch.bfloat16, torch.device("cpu"), torch.Size([2, 3])],
        "numpy": [np.arange(3.0), np.float32(0.1), np.int64(-1)],
        "tensors": [
            torch.tensor(1.5),
            torch.zeros(0, 3),
            torch.arange(6).reshape(2, 3).t(),
            torch.ones(3, dtype=torch.bfloat16),
            torch.ones(3, dtype=torch.float8_e4m3fn),
            torch.tensor([True]),
            torch.tensor([1 + 2j]),
        ],
    }
    fd.Checkpoint(held=Holder(held), nan=math.nan).save(tmp_path / "saved")
    again = fd.Checkpoint(held=Holder(None), nan=0)
    again.restore(tmp_path / "saved")
    assert math.isnan(again.nan)
    got = again.held.state
    assert list(got) == list(held)
    for key in ("numbers", "text", "bytes", 1, ("a", 2), "counter", "set", "kinds"):
        assert got[key] == held[key]
        assert type(got[key]) is type(held[key])
    assert math.copysign(1, got["numbers"][4]) == -1
    assert np.array_equal(got["numpy"][0], held["numpy"][0])
    assert [type(x) for x in got["numpy"]] == [type(x) for x in held["numpy"]]
    assert got["numpy"][1:] == held["numpy"][1:]
    for ours, theirs in zip(got["tensors"], held["tensors"], strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert (
            torch.equal(ours.float(), theirs.float())
            if ours.is_floating_point()
            else (torch.equal(ours, theirs))
        )


def test_shared_parameters_are_saved_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 8)
            self.head = nn.Linear(8, 50, bias=False)
            self.head.weight = self.embed.weight

    model, again, plain = Tied(), Tied(), Tied()
    fd.Checkpoint(model=model).save(tmp_path / "saved")
    fd.Checkpoint(model=again).restore(tmp_path / "saved")
    assert torch.equal(again.head.weight, model.embed.weight)
    assert again.head.weight is again.embed.weight
    file = tmp_path / "saved" / "model.safetensors"
    assert file.stat().st_size < 1.5 * 50 * 8 * 4
    from safetensors.torch import load_model

    load_model(plain, file)
    assert torch.equal(plain.head.weight, model.head.weight)


def test_every_byte_counts(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    checkpoint = fd.Checkpoint(model=model, step=3)
    checkpoint.save(tmp_path / "saved")
    shuffled = random.Random(1)
    for file in sorted((tmp_path / "saved").iterdir()):
        whole = file.read_bytes()
        if file.name == "random_generator.safetensors":
            continue  # which is not asked for here
        for at in range(len(whole)):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << shuffled.randrange(8)
            file.write_bytes(damaged)
            if file.suffix == ".json" and _content_of(damaged) == _content_of(whole):
                continue  # white space
            with pytest.raises(DamagedCheckpointError, match=file.name):
                checkpoint.restore(tmp_path / "saved")
        for size in {0, 1, 7, 8, 9, len(whole) // 2, len(whole) - 1}:
            file.write_bytes(whole[:size])
            with pytest.raises(DamagedCheckpointError, match=file.name):
                checkpoint.restore(tmp_path / "saved")
        file.write_bytes(whole)
    checkpoint.restore(tmp_path / "saved")


def _content_of(data: bytes | bytearray) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


def test_a_newer_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fastdist.checkpoints.files as files

    manager = fd.CheckpointManager(tmp_path)
    checkpoint = fd.Checkpoint(step=1)
    manager.save(checkpoint)
    with monkeypatch.context() as newer:
        newer.setattr(files, "FORMAT", 2)
        checkpoint.step = 2
        manager.save(checkpoint)
    with pytest.raises(ValueError, match=r"in format 2, .* which reads format 1: upgrade"):
        manager.restore(checkpoint)
    assert [path.name for path in manager.checkpoints] == ["checkpoint-1", "checkpoint-2"]
    manager.close()


def test_numbers_and_places(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_to_keep must be at least 1"):
        fd.CheckpointManager(tmp_path, max_to_keep=0)
    with pytest.raises(TypeError, match="at least one part"):
        fd.Checkpoint()
    with pytest.raises(TypeError, match="'save' cannot be the name"):
        fd.Checkpoint(save=1)
    checkpoint = fd.Checkpoint(value=1)
    with pytest.raises(AttributeError, match=r"has \['value'\], got 'step'"):
        checkpoint.step = 1
    with fd.CheckpointManager(tmp_path / "a" / "b", max_to_keep=None) as manager:
        assert manager.latest is None
        names = [manager.save(checkpoint).name, manager.save(checkpoint).name]
        assert names == ["checkpoint-0", "checkpoint-1"]
        checkpoint.value = 2
        assert manager.save(checkpoint, 1) == manager.latest  # in place of the other
        checkpoint.value = 3
        manager.restore(checkpoint)
        assert checkpoint.value == 2
        with pytest.raises(ValueError, match=r"must not fall: got 0, and .*checkpoint-1 exists"):
            manager.save(checkpoint, 0)
        with pytest.raises(OSError, match="another manager of this process"):
            fd.CheckpointManager(tmp_path / "a" / "b").save(checkpoint)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        fd.CheckpointManager(tmp_path / "file").save(checkpoint)


_SAVER = """
import sys
import fastdist as fd, torch
state = torch.zeros(1 << 18)
checkpoint = fd.Checkpoint(state=state, step=0)
manager = fd.CheckpointManager(sys.argv[1], max_to_keep=2)
manager.restore(checkpoint)
print("ready", flush=True)
while True:
    checkpoint.step += 1
    state.fill_(checkpoint.step)
    manager.save(checkpoint, checkpoint.step // 2, async_op=checkpoint.step % 3 == 0)
    print(checkpoint.step, flush=True)
"""


@pytest.fixture(params=[12, pytest.param(100, marks=pytest.mark.slow)])
def kills(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_killed_at_any_moment(tmp_path: Path, kills: int) -> None:
    """The newest reported checkpoint, or a later one, is found and whole."""
    from fork_server import python

    chance = random.Random(2)
    done = 0
    for _ in range(kills):
        with python("-c", _SAVER, str(tmp_path), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(chance.random() * 0.1)
            process.send_signal(signal.SIGKILL)
            told = [int(line) for line in process.stdout.read().split("\n")[:-1]]
        # The last of them may have been asynchronous.
        done = max([done, *(step for step in told if step % 3 != 0)])
        state = torch.empty(1 << 18)
        checkpoint = fd.Checkpoint(state=state, step=0)
        with fd.CheckpointManager(tmp_path) as manager:
            path = manager.restore(checkpoint)
            assert path is not None or done == 0
            assert len(manager.checkpoints) <= 3
        assert checkpoint.step >= done
        if path is not None:
            assert bool((state == checkpoint.step).all())
    shutil.rmtree(tmp_path)
    assert done > 0
