"""Keras' fit goes on from a backup: interrupted jobs end with the bits of undisturbed ones."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fastdist as fd
import keras
import numpy as np
import pytest
import torch
from digits_training import own_devices
from fastdist.cli.tasks import rank_tasks
from fastdist.keras.callback_states import CallbackAttributes
from fork_server import python
from keras_cases import Batches, compiled, dense, regression
from ranks import ProcessRanks
from test_keras import in_float64

EPOCHS = 4
Data = Callable[[fd.Strategy], dict[str, Any]]


@pytest.fixture(scope="module")
def replicas() -> Iterator[ProcessRanks]:
    ranks = ProcessRanks(2)
    yield ranks
    ranks.close()


# --- data: 5 steps per epoch ----------------------------------------------------------------------


def shuffled(strategy: fd.Strategy) -> dict[str, Any]:
    return regression() | {"batch_size": 8}


def validated(strategy: fd.Strategy) -> dict[str, Any]:
    return regression() | {"batch_size": 6, "validation_split": 0.2}


def in_parts(strategy: fd.Strategy) -> dict[str, Any]:
    """Three epochs are one pass, which Keras makes before the evaluation and uses after it."""
    data = regression()
    validation = {"validation_data": (data["x"][:7], data["y"][:7])}
    return data | validation | {"batch_size": 4, "steps_per_epoch": 3, "epochs": 6}


def generated(strategy: fd.Strategy) -> dict[str, Any]:
    def batches() -> Iterator[Any]:
        for i in range(5 * EPOCHS):
            x, y = Batches()[i % 5]
            yield x + i, y

    return {"x": batches(), "steps_per_epoch": 5, "shuffle": False}


def loaded(strategy: fd.Strategy) -> dict[str, Any]:
    data = regression()
    dataset = torch.utils.data.TensorDataset(torch.tensor(data["x"]), torch.tensor(data["y"]))
    generator = torch.Generator().manual_seed(2)
    loader = torch.utils.data.DataLoader(dataset, 8, shuffle=True, generator=generator)
    return {"x": loader, "shuffle": False}


def distributed(strategy: fd.Strategy) -> dict[str, Any]:
    data = regression()
    return {
        "x": strategy.distribute_dataset((data["x"], data["y"]), global_batch_size=8, shuffle=True)
    }


class Shuffles(Batches):
    def __init__(self) -> None:
        super().__init__()
        self.order = np.arange(5)

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        return super().__getitem__(int(self.order[i]))

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.order)

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order = state["order"]


def py_dataset(strategy: fd.Strategy) -> dict[str, Any]:
    return {"x": Shuffles()}


# --- a job ----------------------------------------------------------------------------------------


class Raises(keras.callbacks.Callback):  # type: ignore[misc]
    """Raises after a step; counts what it has seen."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.seen: dict[int, list[int]] = {}
        self.shared: list[int] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.seen[epoch] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen[max(self.seen)].append(batch)
        if self.model.optimizer.iterations.numpy() == self.at:
            raise ZeroDivisionError


def train(
    strategy: fd.Strategy, data: Data, folder: Path, seed: int, at: int = -1, **options: Any
) -> dict[str, Any]:
    """Fit, perhaps until an exception; what there is to compare, as bits."""
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        layers = keras.layers.Dropout(0.3), keras.layers.BatchNormalization()
        model = compiled(dense(*layers), "adam", metrics=["mae", "mse"])
    raises = Raises(at)
    given = {"verbose": 0, "epochs": EPOCHS} | data(strategy)
    history = model.fit(
        **given,
        callbacks=[
            raises,
            keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True),
            fd.keras.BackupAndRestore(folder, **options),
            keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=1.0),
        ],
    )
    strategy.check_in_sync()
    return {
        "history": history.history,
        "epochs": history.epoch,
        "seen": raises.seen,
        "weights": [w.tobytes() for w in model.get_weights()],
        "optimizer": [v.numpy().tobytes() for v in model.optimizer.variables],
        "random": (torch.get_rng_state().tolist(), random.getstate(), np.random.random()),
    }


def compare(strategy: fd.Strategy, data: Data, save_freq: Any, folder: Path) -> None:
    """Interrupt a job four times, first in its first epoch, at whose end backups may begin."""
    in_float64()
    expected = train(strategy, data, folder / "undisturbed", 1, save_freq=save_freq)
    for seed, at in ((1, 4), (1, 6), (2, 8), (3, 16)):
        with pytest.raises(ZeroDivisionError):
            train(strategy, data, folder / "again", seed, at, save_freq=save_freq)
    got = train(strategy, data, folder / "again", 4, save_freq=save_freq)
    for name, value in expected.items():
        assert got[name] == value, name


def compare_on_two(comm: fd.Communicator, *args: Any) -> None:
    compare(fd.MirroredStrategy(own_devices()), *args)


@pytest.mark.slow
@pytest.mark.parametrize("save_freq", ["epoch", 1])
def test_goes_on_with_the_same_bits(save_freq: Any, tmp_path: Path) -> None:
    compare(fd.get_strategy(), shuffled, save_freq, tmp_path)


DATA = [in_parts, *(pytest.param(d, marks=pytest.mark.slow) for d in (generated, loaded))]
DATA += [pytest.param(d, marks=pytest.mark.slow) for d in (py_dataset, validated)]


@pytest.mark.slow
@pytest.mark.parametrize("data", DATA)
def test_finds_its_place_in_the_data(data: Data, tmp_path: Path) -> None:
    compare(fd.OneDeviceStrategy("cpu"), data, 3, tmp_path)


@pytest.mark.slow
def test_two_replicas_go_on(replicas: ProcessRanks, tmp_path: Path) -> None:
    replicas.run(compare_on_two, shuffled, 3, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("data", [distributed, validated, in_parts, generated, loaded, py_dataset])
def test_two_replicas_find_their_place(replicas: ProcessRanks, data: Data, tmp_path: Path) -> None:
    replicas.run(compare_on_two, data, "epoch" if data is validated else 3, tmp_path)


# --- the end, and preemption ----------------------------------------------------------------------


def test_a_kept_backup_holds_the_end(tmp_path: Path) -> None:
    strategy = fd.get_strategy()
    in_float64()
    kept = {"save_freq": 4, "delete_checkpoint": False}
    first = train(strategy, shuffled, tmp_path, 1, **kept)
    again = train(strategy, shuffled, tmp_path, 2, **kept)
    assert [again[name] for name in ("history", "epochs", "weights")] == [
        first[name] for name in ("history", "epochs", "weights")
    ]
    assert again["seen"] == first["seen"]  # no step was done


def test_more_epochs_than_the_fit_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_float64()
    for epochs in (2, 3):
        data = regression() | {"epochs": epochs, "verbose": 2}
        train(fd.get_strategy(), lambda _: data, tmp_path, 1, delete_checkpoint=False)  # noqa: B023
    printed = re.findall(r"Epoch \d/\d", capsys.readouterr().out)
    assert printed == ["Epoch 1/2", "Epoch 2/2", "Epoch 3/3"]


def test_a_fit_that_was_stopped_stays_so(tmp_path: Path) -> None:
    in_float64()
    for _ in range(2):
        model = compiled(dense(), keras.optimizers.SGD(0.0))
        stops = keras.callbacks.EarlyStopping("loss", patience=1, min_delta=1.0)
        backup = fd.keras.BackupAndRestore(tmp_path, delete_checkpoint=False)
        given = regression() | {"epochs": 9, "callbacks": [stops, backup], "verbose": 0}
        keras.utils.set_random_seed(1)
        history = model.fit(**given, shuffle=False).history
        assert len(history["loss"]) == 2


def test_a_callbacks_list_stays_the_programs() -> None:
    shared: list[int] = [1]
    raises = Raises(-1)
    raises.shared = shared
    attributes = CallbackAttributes([raises])
    attributes.restore()
    assert raises.shared is shared
    shared.append(2)
    attributes.restore()
    assert (raises.shared, shared, raises.at) == ([1], [1, 2], -1)


def test_the_end_removes_backups(tmp_path: Path) -> None:
    in_float64()
    train(fd.get_strategy(), shuffled, tmp_path, 1, save_freq=4)
    assert {path.name for path in tmp_path.iterdir()} == {".ended", ".lock"}


def test_another_model_is_refused(tmp_path: Path) -> None:
    in_float64()
    with pytest.raises(ZeroDivisionError):
        train(fd.get_strategy(), shuffled, tmp_path, 1, 6, save_freq=2)
    model = compiled(keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(ValueError, match=r"of another model: it has \d+ variables, expected 2"):
        model.fit(
            **shuffled(fd.get_strategy()),
            callbacks=[fd.keras.BackupAndRestore(tmp_path)],
            verbose=0,
        )


@pytest.mark.parametrize("save_freq", [0, "step", True])
def test_what_save_freq_may_be(save_freq: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="save_freq must be 'epoch' or a number of steps, got"):
        fd.keras.BackupAndRestore(tmp_path, save_freq)


# --- killed programs ------------------------------------------------------------------------------

# Trains from the newest backup; one of two replicas ends itself with a signal at a moment: the
# number of a call that the backup or the training makes.
PROGRAM = """
import hashlib, os, signal, sys, threading, warnings
from pathlib import Path
import keras, numpy as np, torch
import fastdist as fd
from fastdist.checkpoints import files
warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
torch.set_num_threads(1)
folder, victim, moment = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
number = signal.Signals(int(sys.argv[4]))
strategy = fd.MirroredStrategy(None if "RANK" in os.environ else ["cpu:0", "cpu:1"])
rank = strategy.local_replica_ids[0]
calls = 0

def tick():
    global calls
    # What Keras, numpy and callbacks of the garbage collector call swallows a KeyboardInterrupt.
    if number == signal.SIGINT and threading.current_thread() is not threading.main_thread():
        return
    calls += 1
    if rank == victim and calls == moment:
        os.kill(os.getpid(), number)

class Ticks(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None): tick()
    def on_epoch_end(self, epoch, logs=None): tick()
    def on_train_batch_begin(self, batch, logs=None): tick()
    def on_train_batch_end(self, batch, logs=None): tick()
    def on_test_batch_end(self, batch, logs=None): tick()

plain_flush = files.flush
files.flush = lambda path: (tick(), plain_flush(path), tick())
keras.utils.set_random_seed(rank)
with strategy.scope():
    model = keras.Sequential(
        [keras.layers.Dense(6, activation="tanh"), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
    )
    model.compile("adam", "mse", metrics=["mae"])
x = np.random.default_rng(3).normal(size=(33, 5)).astype("float32")
history = model.fit(
    x, x.sum(1, keepdims=True), batch_size=8, epochs=3, validation_split=0.2, verbose=0,
    callbacks=[
        Ticks(),
        keras.callbacks.EarlyStopping("loss", patience=9, restore_best_weights=True),
        fd.keras.BackupAndRestore(folder / "backup", 2, save_before_preemption=True),
        keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=1.0),
        Ticks(),
    ],
).history
strategy.check_in_sync()
bits = b"".join(v.numpy().tobytes() for v in [*model.variables, *model.optimizer.variables])
if rank == 0:
    print(hashlib.sha256(bits).hexdigest(), {k: v for k, v in sorted(history.items())})
"""
MOMENTS = 70  # of calls on each replica, about


@dataclass
class Ended:
    codes: tuple[int, ...]
    printed: str
    errors: str


def start(
    folder: Path, victim: int = -1, moment: int = 0, number: signal.Signals = signal.SIGKILL
) -> Ended:
    """Train on two ranks, which are forks."""
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(PROGRAM)
    given = ("train.py", ".", str(victim), str(moment), str(int(number)))
    pipe = subprocess.PIPE
    ranks = [
        python(*given, env=task.environment, cwd=folder, stdout=pipe, stderr=pipe, text=True)
        for task in rank_tasks(2, {})
    ]
    try:
        (printed, errors), (_, others) = [rank.communicate(timeout=150) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return Ended(tuple(rank.returncode for rank in ranks), printed, errors + others)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return what an undisturbed job prints."""
    done = start(tmp_path_factory.mktemp("undisturbed"))
    assert done.codes == (0, 0), done.errors
    return done.printed


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_kills_at_random_moments(tmp_path: Path, undisturbed: str) -> None:
    """Replicas are killed in steps, evaluations and writes; the end is the same to the bit.

    KILLS: how many, 3 if it is not set.
    """
    chance = random.Random(int(os.environ.get("KILLS_SEED", "3")))
    kills = number = 0
    while kills < int(os.environ.get("KILLS", "3")):
        number += 1
        while True:
            done = start(tmp_path / f"job{number}", chance.randrange(2), chance.randint(1, MOMENTS))
            if done.codes == (0, 0):
                break
            assert -signal.SIGKILL in done.codes, done.errors
            kills += 1
        assert done.printed == undisturbed
    print(f"{kills} kills, {number} jobs")


@pytest.mark.slow
def test_a_told_replica_makes_all_save_and_exit(tmp_path: Path, undisturbed: str) -> None:
    told = start(tmp_path / "told", 1, 17, signal.SIGTERM)
    assert told.codes == (os.EX_TEMPFAIL, os.EX_TEMPFAIL), told.errors
    saved = [path.name for path in (tmp_path / "told/backup").glob("checkpoint-*")]
    again = start(tmp_path / "told")
    assert (again.codes, again.printed) == ((0, 0), undisturbed), again.errors
    assert saved


@pytest.mark.slow
def test_ctrl_c_ends_all_replicas(tmp_path: Path, undisturbed: str) -> None:
    """The other replica, which the program has started, ends too."""
    folder = tmp_path / "ended"
    folder.mkdir()
    (folder / "train.py").write_text(PROGRAM)
    given = [sys.executable, "train.py", ".", "0", "17", str(int(signal.SIGINT))]
    # Reads until all have ended.
    ended = subprocess.run(given, cwd=folder, capture_output=True, text=True, timeout=150)
    assert ended.returncode != 0
    assert "KeyboardInterrupt" in ended.stderr
    again = start(folder)
    assert (again.codes, again.printed) == ((0, 0), undisturbed), again.errors
