"""Keras' fit goes on when ranks are lost and come back, with the numbers of one device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from launched import Launcher

pytest.importorskip("keras")

# A rank that is told so kills itself at an event, once.
PROGRAM = """
import json, os, signal, sys, time
os.environ["KERAS_BACKEND"] = "torch"
import fastdist as fd, keras, numpy as np, torch
from keras.src.backend.common import dtypes
torch.set_num_threads(1)
keras.config.set_floatx("float64")
keras.config.set_dtype_policy("float64")
dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"  # Keras on torch promotes to float32
kind, folder, kills = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
is_alone_at_times = "FASTDIST_ROSTER" in os.environ and kind == "parts"
options = fd.CommunicationOptions(shard_optimizer=kind == "dataset")
strategy = fd.MultiWorkerMirroredStrategy(options=options)
keras.utils.set_random_seed(0)
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
x = np.random.default_rng(3).normal(size=(70, 5))
y = x.sum(1, keepdims=True)
if kind == "parts":  # a pass ends in an epoch
    given = {"x": x, "y": y, "batch_size": 8, "steps_per_epoch": 5}
else:
    data = (torch.tensor(x), torch.tensor(y))
    given = {"x": strategy.distribute_dataset(data, global_batch_size=8, shuffle=True)}
given["validation_data"] = (x[:20], y[:20])

def once(name):
    try:
        os.mkdir(f"{folder}/{name}")
        return True
    except FileExistsError:
        return False

class Kills(keras.callbacks.Callback):
    epoch = 0
    def reach(self, event):
        victim = kills.get(f"{self.epoch} {event}")
        if victim in strategy.local_replica_ids and once(f"killed{self.epoch}{event}"):
            os.kill(os.getpid(), signal.SIGKILL)
    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        self.reach("begins")
    def on_train_batch_begin(self, batch, logs=None):
        if is_alone_at_times and self.epoch == 2 and batch == 1 and once("waited"):
            time.sleep(12)  # for a lost rank to come back
        self.reach(f"step {batch}")
    def on_test_batch_end(self, batch, logs=None):
        self.reach(f"test {batch}")
    def on_epoch_end(self, epoch, logs=None):
        self.reach("ends")

sizes = set()
class Sizes(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        sizes.add(strategy.num_replicas_in_sync)

history = model.fit(
    **given, epochs=4, verbose=0,
    callbacks=[
        Kills(),
        fd.keras.BackupAndRestore(f"{folder}/backup"),
        keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=1.0),
        Sizes(),
    ],
).history
strategy.check_in_sync()
if strategy.is_chief:
    weights = [w.tolist() for w in model.get_weights()]
    print("RESULT", json.dumps([history, weights, sorted(sizes)]))
"""


def result(output: str) -> list[Any]:
    line = next(line for line in output.splitlines() if "RESULT" in line)
    found: list[Any] = json.loads(line.partition("RESULT")[2])
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("kind", "words"), [("parts", ["--min", 1, "--max", 2]), ("dataset", ["--keep", 2])]
)
def test_goes_on_without_lost_ranks(
    launcher: Launcher, tmp_path: Path, kind: str, words: list[object]
) -> None:
    """The chief, and others, are killed in a step, in an evaluation, and between."""
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "alone").mkdir()
    program = [str(tmp_path / "train.py"), kind]
    alone = launcher.run("-n", 1, *program, tmp_path / "alone", "{}")
    assert alone.returncode == 0, alone.stderr.decode()
    kills = json.dumps({"0 step 3": 1, "1 test 0": 0, "3 test 0": 1})
    done = launcher.run(*words, "--no-prefix", *program, tmp_path, kills)
    assert done.returncode == 0, done.stderr.decode()
    expected, found = result(alone.stdout.decode()), result(done.stdout.decode())
    assert found[0].keys() == expected[0].keys()
    for name, values in expected[0].items():
        np.testing.assert_allclose(found[0][name], values, rtol=1e-9, err_msg=name)
    for value, other in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(value, other, rtol=1e-9, atol=1e-12)
    assert len(list(tmp_path.glob("killed*"))) == 3
    assert found[2] == ([1, 2] if kind == "parts" else [2])


REFUSALS = """
import os
os.environ["KERAS_BACKEND"] = "torch"
import fastdist as fd, keras, numpy as np
strategy = fd.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((8, 2))
backup = fd.keras.BackupAndRestore("BACKUP")
for given in (
    {"x": x, "y": x},
    {"x": ((x, x) for _ in range(3)), "callbacks": [backup]},
    {"x": x, "y": x[:, :1], "callbacks": backup},
    {"x": x, "y": x[:, :1], "callbacks": [backup]},
):
    try:
        print("trained", len(model.fit(**given, verbose=0).history["loss"]))
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


@pytest.mark.slow
def test_what_is_refused(launcher: Launcher, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(REFUSALS.replace("BACKUP", str(tmp_path / "backup")))
    done = launcher.run("--min", 1, "--max", 1, "--no-prefix", tmp_path / "train.py")
    lines = done.stdout.decode().splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "ValueError",
        "UnsupportedError",
        "trained 1",
        "RuntimeError",
    ], done.stderr.decode()
    assert "fit needs fd.keras.BackupAndRestore among its callbacks" in lines[0]
    assert "cannot be read again from an earlier batch; use arrays" in lines[1]
