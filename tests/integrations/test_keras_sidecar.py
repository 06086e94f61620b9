"""Evaluators, which wait for the checkpoints of a job that trains elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastdist as fd
import keras
import pytest
from digits_training import own_devices
from fastdist.errors import DamagedCheckpointError
from keras_cases import compiled, regression
from ranks import ProcessRanks
from test_keras import in_float64


def names(paths: Iterator[Path]) -> list[str]:
    return [path.name for path in paths]


def test_checkpoints_are_yielded_in_order_until_the_timeout(tmp_path: Path) -> None:
    folder = tmp_path / "made later"
    assert names(fd.checkpoints_iterator(folder, timeout_s=0)) == []
    with fd.CheckpointManager(folder, max_to_keep=3) as manager:
        for step in (8, 9, 10, 11):
            manager.save(fd.Checkpoint(step=step))
        found = fd.checkpoints_iterator(folder, timeout_s=0)
        assert next(found).name == "checkpoint-9"
        manager.save(fd.Checkpoint(step=12))
        (folder / ".unfinished-checkpoint-13").mkdir()
        assert names(found) == ["checkpoint-10", "checkpoint-11", "checkpoint-12"]
    with pytest.raises(ValueError, match="timeout_s must not be negative, got -1"):
        fd.checkpoints_iterator(folder, timeout_s=-1)


def test_the_iterator_ends_with_the_job(tmp_path: Path) -> None:
    found: list[str] = []
    waiting = threading.Thread(
        target=lambda: found.extend(names(fd.checkpoints_iterator(tmp_path / "jobs")))
    )
    waiting.start()
    with fd.CheckpointManager(tmp_path / "jobs") as manager:
        manager.save(fd.Checkpoint(step=1))
        manager.save(fd.Checkpoint(step=2), async_op=True)
        manager.end()
    waiting.join(60)
    assert found == ["checkpoint-1", "checkpoint-2"]


# --- Keras ----------------------------------------------------------------------------------------


def made() -> Any:
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(1)])
    return compiled(model, keras.optimizers.SGD(0.05), metrics=["mae"])


class Evaluates(keras.callbacks.Callback):  # type: ignore[misc]
    """Evaluates the model that is trained, when a checkpoint of it has just been saved."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: dict[int, float] = {}

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        step = int(keras.ops.convert_to_numpy(self.model.optimizer.iterations))
        self.losses[step] = logs["val_loss"]


class Noted(keras.callbacks.Callback):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.losses: dict[int, float] = {}

    def on_test_end(self, logs: Any = None) -> None:
        step = int(keras.ops.convert_to_numpy(self.model.optimizer.iterations))
        self.losses[step] = logs["loss"]


def train(folder: Path, epochs: int = 3) -> dict[int, float]:
    keras.utils.set_random_seed(1)
    noted = Evaluates()
    data = regression()
    backup = fd.keras.BackupAndRestore(folder, delete_checkpoint=False)
    model = made()
    model.fit(
        **data,
        batch_size=11,
        epochs=epochs,
        validation_data=(data["x"], data["y"]),
        callbacks=[noted, backup],
        verbose=0,
    )
    return noted.losses


def test_each_checkpoint_is_evaluated_and_the_best_kept(tmp_path: Path) -> None:
    in_float64()
    losses = train(tmp_path)
    kept = dict(list(losses.items())[-2:])
    noted, data = Noted(), regression()
    evaluator = fd.keras.SidecarEvaluator(
        made(), (data["x"], data["y"]), tmp_path, callbacks=[noted]
    )
    best = evaluator.start()
    assert noted.losses == pytest.approx(kept, rel=1e-6)
    assert best["loss"] == pytest.approx(min(kept.values()), rel=1e-6)
    assert names(fd.checkpoints_iterator(tmp_path / "best", timeout_s=0)) == ["checkpoint-9"]
    worst = fd.keras.SidecarEvaluator(
        made(), (data["x"], data["y"]), tmp_path, monitor="mae", mode="max"
    )
    assert worst.start() == best  # it goes on after the best, and there is nothing


def test_the_data_and_the_model_must_fit(tmp_path: Path) -> None:
    in_float64()
    train(tmp_path, epochs=1)
    data = regression()["x"], regression()["y"]
    with pytest.raises(ValueError, match="has no weights yet: begin it with"):
        fd.keras.SidecarEvaluator(keras.Sequential([keras.layers.Dense(1)]), data, tmp_path)
    with pytest.raises(ValueError, match=r"monitor must be one of \['loss', 'mae'\], got 'acc'"):
        fd.keras.SidecarEvaluator(made(), data, tmp_path, monitor="acc").start()
    other = keras.Sequential([keras.Input((5,)), keras.layers.Dense(2)])
    with pytest.raises(ValueError, match=r"of another model: .*kernel has shape \(5, 1\)"):
        fd.keras.SidecarEvaluator(compiled(other), data, tmp_path).start()
    (tmp_path / "checkpoint-3/model.safetensors").unlink()
    with pytest.raises(DamagedCheckpointError, match="safetensors is damaged or missing"):
        fd.keras.SidecarEvaluator(made(), data, tmp_path).start()


def evaluate(comm: fd.Communicator, folder: Path) -> dict[str, float]:
    in_float64()
    with fd.MirroredStrategy(own_devices()).scope():
        model = made()
    data = regression()
    return fd.keras.SidecarEvaluator(model, (data["x"], data["y"]), folder).start()


@pytest.mark.slow
def test_an_evaluator_may_have_two_replicas(tmp_path: Path) -> None:
    in_float64()
    losses = train(tmp_path)
    ranks = ProcessRanks(2)
    first, second = ranks.run(evaluate, tmp_path)
    ranks.close()
    assert first == second
    assert first["loss"] == pytest.approx(min(losses.values()), rel=1e-6)
