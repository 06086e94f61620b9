"""Checkpoints under every strategy, and what lies on the disk."""

from __future__ import annotations

import collections
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastdist as fd
import numpy as np
import pytest
import torch
from fastdist.checkpoints.directory_lock import DirectoryLock
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


class TestShardedOptimizer(CheckpointContract):
    sizes = (2,)
    slow_sizes = (3,)

    @staticmethod
    def make(size: int) -> ManyProcesses:
        return ManyProcesses(size, "sharded")


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


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_views_of_one_memory_and_complex_numbers(tmp_path: Path, async_op: bool) -> None:
    x, z = torch.arange(4.0).reshape(2, 2), torch.tensor([1 + 2j, 3 - 1j])
    w = z.to(torch.complex128)
    held = {
        "views": [x, x.t(), x[0], x[1], x.flatten()[1:3], x.expand(3, 2, 2)],
        "bits": [z, z.conj(), z.imag, z.conj().imag, z[1], w.conj(), w.imag],
        "other sizes": [w, z.to(torch.complex32), w[:0]],
        "numpy": [np.array([1j, 2]), np.ones(1, np.complex64)],
        "__metadata__": torch.ones(1),
    }
    with fd.CheckpointManager(tmp_path) as manager:
        manager.save(fd.Checkpoint(held=held), async_op=async_op)
        again = fd.Checkpoint(held=None)
        manager.restore(again)
    got = again.held
    assert torch.equal(got.pop("__metadata__"), torch.ones(1))
    for name, values in got.items():
        for ours, theirs in zip(values, held[name], strict=True):
            assert type(ours) is type(theirs)
            assert ours.dtype == theirs.dtype
            assert ours.shape == theirs.shape
            assert ours.tolist() == theirs.tolist()


def test_a_module_with_overlapping_complex_buffers(tmp_path: Path) -> None:
    class Tables(nn.Module):
        def __init__(self, start: float) -> None:
            super().__init__()
            self.register_buffer("table", torch.arange(start, start + 6))
            self.register_buffer("head", self.get_buffer("table")[:3])
            self.register_buffer("roots", self.get_buffer("head").to(torch.complex128))

    saved, again = Tables(1.0), Tables(0.0)
    fd.Checkpoint(model=saved).save(tmp_path / "saved")
    fd.Checkpoint(model=again).restore(tmp_path / "saved")
    assert all(torch.equal(again.get_buffer(n), x) for n, x in saved.state_dict().items())


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


@pytest.mark.parametrize("fused", [False, True])
def test_states_have_the_layout_of_their_parameters(tmp_path: Path, fused: bool) -> None:
    """A fused optimizer reads a parameter and its states in the order of the memory."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return module, torch.optim.Adam(module.parameters(), fused=fused)

    def train(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(3):
            optimizer.zero_grad()
            module(torch.linspace(-1, 1, 75).view(1, 3, 5, 5)).square().sum().backward()
            optimizer.step()

    module, optimizer = made()
    train(module, optimizer)
    fd.Checkpoint(module=module, optimizer=optimizer).save(tmp_path / "step")
    again, restored = made()
    fd.Checkpoint(module=again, optimizer=restored).restore(tmp_path / "step")
    for each in ((module, optimizer), (again, restored)):
        train(*each)
    for own, other in zip(module.parameters(), again.parameters(), strict=True):
        assert torch.equal(own, other)
        assert restored.state[other]["exp_avg"].stride() == other.stride()


def test_what_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    strategy = fd.OneDeviceStrategy("cpu")

    def made(value: float, size: int = 12, batch: int = 3) -> dict[str, Any]:
        model = nn.Linear(2, 1)
        nn.init.constant_(model.weight, value)
        batches = strategy.distribute_dataset(torch.zeros(size), global_batch_size=batch)
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=value)
        scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": batches}

    fd.Checkpoint(**made(0.5)).save(tmp_path / "saved")
    adam = torch.optim.Adam(made(0.25)["model"].parameters())
    constant = torch.optim.lr_scheduler.ConstantLR(adam)
    for parts, message in (
        (made(0.25, batch=4), "global_batch_size=3, this dataset has global_batch_size=4"),
        (made(0.25, size=13), "length=12, this dataset has length=13"),
        (made(0.25) | {"optimizer": adam}, "optimizer: .* of class SGD, expected Adam"),
        (made(0.25) | {"scheduler": constant}, "of class StepLR, expected ConstantLR"),
    ):
        with pytest.raises(ValueError, match=message):
            fd.Checkpoint(**parts).restore(tmp_path / "saved")
        assert parts["model"].weight.tolist() == [[0.25, 0.25]]
        assert parts["optimizer"].param_groups[0]["lr"] != 0.5

    class Own(torch.optim.SGD):
        """A class of the user, which takes the state of its base class."""

    parts = made(0.25)
    parts["optimizer"] = Own(parts["model"].parameters())
    fd.Checkpoint(**parts).restore(tmp_path / "saved")
    assert parts["optimizer"].param_groups[0]["lr"] == 0.5


class Refusing(nn.Module):
    """Keeps what it was given, and refuses any other extra state after its tensors were loaded."""

    def __init__(self, extra: str) -> None:
        super().__init__()
        self.layer, self.extra = nn.Linear(2, 2), extra

    def get_extra_state(self) -> str:
        return self.extra

    def set_extra_state(self, state: str) -> None:
        if state != self.extra:
            raise KeyError(state)


def test_a_module_that_refuses_its_state_changes_nothing(tmp_path: Path) -> None:
    def made(value: float, extra: str) -> dict[str, Any]:
        model = nn.Sequential(nn.BatchNorm1d(2), Refusing(extra), nn.Linear(2, 2))
        for parameter in model.parameters():
            nn.init.constant_(parameter, value)
        plain = nn.Linear(1, 1)
        nn.init.constant_(plain.weight, value)
        optimizer = torch.optim.SGD(model.parameters(), lr=value)
        return {"plain": plain, "model": model, "optimizer": optimizer, "step": value}

    fd.Checkpoint(**made(0.5, "one")).save(tmp_path / "saved")
    parts = made(0.25, "two")
    checkpoint = fd.Checkpoint(**parts)
    with pytest.raises(KeyError, match="one"):
        checkpoint.restore(tmp_path / "saved")
    assert all((p == 0.25).all() for p in parts["model"].parameters())
    assert parts["plain"].weight.item() == checkpoint.step == 0.25
    assert parts["optimizer"].param_groups[0]["lr"] == 0.25
    same = fd.Checkpoint(**made(0.25, "one"))
    same.restore(tmp_path / "saved")
    assert same.plain.weight.item() == same.step == 0.5
    assert all((p == 0.5).all() for p in same.model.parameters())


def test_a_number_that_is_damaged_again(tmp_path: Path) -> None:
    checkpoint = fd.Checkpoint(x=torch.ones(3))
    with fd.CheckpointManager(tmp_path) as manager:
        manager.save(checkpoint, 1)
        for _ in range(3):
            path = manager.save(checkpoint, 2)
            (path / "x.safetensors").write_bytes(b"x")
            with pytest.warns(UserWarning, match="checkpoint-2"):
                assert manager.restore(checkpoint) == tmp_path / "checkpoint-1"
    names = {path.name for path in tmp_path.glob("damaged-*")}
    assert names == {f"damaged-checkpoint-2{again}" for again in ("", ".2", ".3")}


def _saved(folder: Path) -> None:
    manager = fd.CheckpointManager(folder)
    for step in (1, 2, 3):
        manager.save(fd.Checkpoint(model=nn.Linear(2, 1), step=step))
    manager.close()


def in_child(work: Callable[[], str], uid: int | None = None) -> str:
    """Return what `work` returns, or its exception, in a forked process, perhaps of a user."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        if uid is not None and os.geteuid() == 0:
            os.setgid(uid)
            os.setuid(uid)
        try:
            said = work()
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        said = file.read()
    os.waitpid(pid, 0)
    return said


def _restored(folder: Path) -> str:
    checkpoint = fd.Checkpoint(model=nn.Linear(2, 1), step=-1)
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        with fd.CheckpointManager(folder) as manager:
            manager.restore(checkpoint)
    return f"step {checkpoint.step}"


@pytest.mark.parametrize("free", [1, 2, 3])
def test_a_checkpoint_that_cannot_be_read_now_is_not_damaged(tmp_path: Path, free: int) -> None:
    """A program that leaks descriptors, for example; the next start restores it."""
    _saved(tmp_path)

    def work() -> str:
        first = os.dup(0)
        os.close(first)
        resource.setrlimit(resource.RLIMIT_NOFILE, (first + free, 4096))
        return _restored(tmp_path)

    said = in_child(work)
    assert said == "step 3" or "open files" in said
    assert not list(tmp_path.glob("damaged-*"))
    assert _restored(tmp_path) == "step 3"


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_folder_that_may_only_be_read(is_damaged: bool) -> None:
    with tempfile.TemporaryDirectory() as name:  # pytest's own may be entered by its user alone
        folder = Path(name)
        _saved(folder)
        if is_damaged:
            (folder / "checkpoint-3" / "checkpoint.json").write_text("{}")
        paths = [*folder.rglob("*"), folder]
        for path in paths:
            path.chmod(0o555 if path.is_dir() else 0o444)
        before = sorted(path.name for path in folder.iterdir())
        assert in_child(lambda: _restored(folder), 65534) == f"step {2 if is_damaged else 3}"
        assert sorted(path.name for path in folder.iterdir()) == before
        for path in paths:
            path.chmod(0o755)


def test_what_is_no_checkpoint_is_set_aside(tmp_path: Path) -> None:
    _saved(tmp_path)
    shutil.rmtree(tmp_path / "checkpoint-3")
    (tmp_path / "checkpoint-3").write_text("a file")
    index = tmp_path / "checkpoint-2" / "checkpoint.json"
    content = json.loads(index.read_text())["content"]
    content["parts"]["model"] = {"$tensor": {"real": 1}}
    checksum = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    index.write_text(json.dumps({"checksum": checksum, "content": content}))
    assert _restored(tmp_path) == "step 1"
    assert len(list(tmp_path.glob("damaged-*"))) == 2


def test_a_part_is_a_name(tmp_path: Path) -> None:
    _saved(tmp_path)
    index = tmp_path / "checkpoint-3" / "checkpoint.json"
    content = json.loads(index.read_text())["content"]
    for names in (content["parts"], content["classes"]):
        names["../model"] = names.pop("model")
    checksum = zlib.crc32(json.dumps(content, sort_keys=True).encode())
    index.write_text(json.dumps({"checksum": checksum, "content": content}))
    with pytest.raises(DamagedCheckpointError, match="expected names of files"):
        fd.Checkpoint(model=nn.Linear(2, 1)).restore(tmp_path / "checkpoint-3")


def test_the_lock_is_its_owners_and_no_link(tmp_path: Path) -> None:
    precious = tmp_path / "thesis"
    precious.write_text("precious")
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / ".lock").symlink_to(precious)
    with pytest.raises(OSError, match=r"\.lock"):
        fd.CheckpointManager(folder).save(fd.Checkpoint(step=1))
    assert precious.read_text() == "precious"
    (folder / ".lock").unlink()
    (folder / ".lock").touch(0o644)
    manager = fd.CheckpointManager(folder)
    manager.save(fd.Checkpoint(step=1))
    assert (folder / ".lock").stat().st_mode & 0o777 == 0o600
    manager.close()


def test_the_lock_outlives_a_copy_and_ends_with_its_process(tmp_path: Path) -> None:
    from fork_server import python

    hold = (
        "import os, sys\nfrom pathlib import Path\n"
        "from fastdist.checkpoints.directory_lock import DirectoryLock\n"
        "DirectoryLock(Path(sys.argv[1]))\n"
        "if os.fork() == 0:\n"  # a child that outlives the holder
        "    print('held', flush=True); sys.stdin.read()\n    os._exit(0)\n"
        "os._exit(0)"
    )
    (tmp_path / "at").mkdir()
    lock = DirectoryLock(tmp_path / "at")
    shutil.copytree(tmp_path / "at", tmp_path / "copy")
    other = "import pathlib, sys\nfrom fastdist.checkpoints import directory_lock as module\n"
    other += "module.PATIENCE_S = 0.1\n"
    other += "try: module.DirectoryLock(pathlib.Path(sys.argv[1]))\n"
    other += "except OSError as error: print(error, end='')"
    with python("-c", other, str(tmp_path / "at"), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "in use by another job" in process.stdout.read()
    lock.release()
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with python("-c", hold, str(tmp_path / "at"), **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        process.wait()
        DirectoryLock(tmp_path / "at").release()  # the child is still there


_ENDS = """
import concurrent.futures.thread, sys, threading, time
import fastdist as fd, torch
from fastdist.checkpoints import files
write = files.write
def wait_for_the_end():
    while not concurrent.futures.thread._shutdown:  # the interpreter is about to end
        time.sleep(0.01)
def late(path, *arguments):
    wait_for_the_end()
    if "full" in str(path):
        raise OSError("no space left")
    write(path, *arguments)
files.write = late
checkpoint = fd.Checkpoint(state=torch.ones(1000), step=1)
for name in sys.argv[2:]:
    fd.CheckpointManager(name).save(checkpoint, async_op=True)
def save_last():
    wait_for_the_end()
    checkpoint.save(sys.argv[1])
threading.Thread(target=save_last).start()
"""


@pytest.mark.slow
def test_a_program_that_ends_while_it_saves(tmp_path: Path) -> None:
    """The last acts are saves in threads: they are written, and a failure is told."""
    run = [sys.executable, "-W", "error", "-c", _ENDS]
    names = [str(tmp_path / name) for name in ("last", "good", "full")]
    done = subprocess.run([*run, *names], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.count("OSError: no space left") == done.stderr.count("Traceback") == 1
    again = fd.Checkpoint(state=torch.zeros(1000), step=0)
    for path in (tmp_path / "good" / "checkpoint-1", tmp_path / "last"):
        again.state.zero_()
        again.restore(path)
        assert bool((again.state == 1).all())


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


@pytest.fixture(params=[4, pytest.param(100, marks=pytest.mark.slow)])
def kills(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def test_killed_at_any_moment(tmp_path: Path, kills: int) -> None:
    """The newest reported checkpoint, or a later one, is found and whole."""
    from fork_server import python

    chance = random.Random(2)
    done, kept = 0, 2
    for i in range(kills):
        with python("-c", _SAVER, str(tmp_path), stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            first = "" if done or i < kills - 1 else process.stdout.readline()
            time.sleep(chance.random() * 0.1)
            process.send_signal(signal.SIGKILL)
            told = [int(line) for line in (first + process.stdout.read()).split("\n")[:-1]]
        # The last of them may have been asynchronous.
        done = max([done, *(step for step in told if step % 3 != 0)])
        state = torch.empty(1 << 18)
        checkpoint = fd.Checkpoint(state=state, step=0)
        with fd.CheckpointManager(tmp_path) as manager:
            path = manager.restore(checkpoint)
            assert path is not None or done == 0
            # A kill between writing one and removing the oldest leaves one more; a save that has
            # returned has removed all that were left so.
            most = 3 if any(step % 3 != 0 for step in told) else kept + 1
            kept = len(manager.checkpoints)
            assert kept <= most
        assert checkpoint.step >= done
        if path is not None:
            assert bool((state == checkpoint.step).all())
    shutil.rmtree(tmp_path)
    assert done > 0
