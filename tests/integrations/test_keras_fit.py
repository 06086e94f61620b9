"""Keras' fit on two replicas: callbacks, stopping, data, mistakes, what is on disk."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import fastdist as fd
import keras
import numpy as np
import pytest
import torch
from fastdist.errors import FastdistError, PeerFailureError, UnsupportedError
from full_disk import full_disk
from keras_cases import Batches, Subclassed, compiled, dense, regression
from ranks import ProcessRanks
from test_keras import in_float64
from test_strategies import KINDS, own_devices


@pytest.fixture(scope="module")
def replicas() -> Iterator[ProcessRanks]:
    ranks = ProcessRanks(2)
    yield ranks
    ranks.close()


def mirrored() -> fd.Strategy:
    in_float64()
    return fd.MirroredStrategy(own_devices())


def made(strategy: fd.Strategy, *more: Any, optimizer: Any = "adam", **options: Any) -> Any:
    with strategy.scope():
        return compiled(dense(*more), optimizer, **options)


def fit(model: Any, callbacks: Any = (), **options: Any) -> Any:
    given = regression() | {"batch_size": 8, "epochs": 4, "verbose": 0} | options
    return model.fit(**given, callbacks=list(callbacks)).history


# --- callbacks ----------------------------------------------------------------------------------


def writers(folder: Path) -> list[Any]:
    return [
        keras.callbacks.ModelCheckpoint(folder / "{epoch}.keras", monitor="loss"),
        keras.callbacks.CSVLogger(folder / "log.csv"),
    ]


def in_batch_softmax(y_true: Any, y_pred: Any) -> Any:
    scores = keras.ops.matmul(y_pred, keras.ops.transpose(y_pred))
    return keras.losses.sparse_categorical_crossentropy(
        keras.ops.arange(len(y_pred)), scores, from_logits=True
    )


def write(comm: fd.Communicator, folder: Path) -> None:
    own = folder / str(comm.rank)
    own.mkdir()
    model = made(mirrored(), metrics=["mae"])
    fit(model, writers(own), epochs=2)
    model.save(own / "last.keras")


def test_writers_act_on_the_chief(replicas: ProcessRanks, tmp_path: Path) -> None:
    replicas.run(write, tmp_path)
    names = [sorted(p.name for p in (tmp_path / str(rank)).iterdir()) for rank in range(2)]
    assert names == [["1.keras", "2.keras", "last.keras", "log.csv"], ["last.keras"]]
    in_float64()
    keras.utils.set_random_seed(3)
    loaded = [keras.models.load_model(tmp_path / str(rank) / "last.keras") for rank in range(2)]
    for first, second in zip(*(model.get_weights() for model in loaded), strict=True):
        np.testing.assert_array_equal(first, second)
    fit(loaded[0])  # without a strategy
    assert len((tmp_path / "0/log.csv").read_text().splitlines()) == 3


def test_tensorboard_and_monitors_act_on_the_chief() -> None:
    from fastdist.keras.callbacks import is_chief_only

    given = [keras.callbacks.TensorBoard("logs"), keras.callbacks.RemoteMonitor()]
    assert all(map(is_chief_only, given))
    assert not is_chief_only(keras.callbacks.EarlyStopping())


class Noted(keras.callbacks.Callback):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append((batch, dict(logs)))


def note(comm: fd.Communicator) -> tuple[list[Any], list[Any], Any]:
    strategy = mirrored()
    keras.utils.set_random_seed(2 + comm.rank)
    on_all, on_chief = Noted(), fd.keras.chief_only(Noted())
    history = fit(made(strategy, metrics=["mae"]), [on_all, on_chief], epochs=1)
    return on_all.seen, on_chief.seen, history


def test_callbacks_get_the_logs_of_all_replicas(replicas: ProcessRanks) -> None:
    (chief, chief_only, history), (other, nothing, other_history) = replicas.run(note)
    assert chief == other == chief_only
    assert nothing == []
    assert history == other_history
    assert [batch for batch, _ in chief] == [0, 1, 2, 3, 4]
    assert chief[-1][1] == {name: values[0] for name, values in history.items()}


def count(comm: fd.Communicator) -> list[int]:
    from fastdist.keras import callback_list, trainer

    strategy = mirrored()
    model = made(strategy, metrics=["mae"])
    counts = []
    for verbose, every_s, callbacks in [
        (0, 0, []),
        (1, 1e9, []),
        (2, 0, []),
        (1, 0, []),
        (0, 0, [Noted()]),
    ]:
        with (
            mock.patch.object(callback_list, "_DRAWN_EVERY_S", every_s),
            mock.patch.object(trainer, "global_logs", wraps=trainer.global_logs) as reductions,
        ):
            fit(model, callbacks, epochs=2, verbose=verbose, validation_split=0.5)
        counts.append(reductions.call_count)
    return counts


def test_metrics_are_reduced_where_they_are_read(replicas: ProcessRanks) -> None:
    # In 2 epochs of 2 steps, each with an evaluation of 3 steps: at the end of each pass, and for
    # a bar that is drawn after the first step, for none, and for readers of every step.
    assert replicas.run(count) == [[4, 6, 4, 8, 8]] * 2


def decide(comm: fd.Communicator, kind: str) -> tuple[dict[str, Any], float]:
    in_float64()
    keras.utils.set_random_seed(8)
    strategy = KINDS[kind](fd.CommunicationOptions())
    model = made(strategy, optimizer=keras.optimizers.SGD(0.5))
    plateau = keras.callbacks.ReduceLROnPlateau(monitor="loss", patience=1, factor=0.5)
    early = keras.callbacks.EarlyStopping(monitor="loss", patience=3, restore_best_weights=True)
    history = fit(model, [plateau, early], epochs=30)
    strategy.check_in_sync()
    return history, float(model.optimizer.learning_rate.numpy())


def test_callbacks_decide_alike(replicas: ProcessRanks) -> None:
    (history, rate), other = replicas.run(decide, "mirrored")
    assert other == (history, rate)
    assert len(history["loss"]) < 30
    for got, got_rate in replicas.run(decide, "central"):
        assert got_rate == rate
        assert got["loss"] == pytest.approx(history["loss"], rel=1e-6)


class Stops(keras.callbacks.Callback):  # type: ignore[misc]
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.model.stop_training |= batch == 2


def stop(comm: fd.Communicator) -> tuple[int, int]:
    model = made(mirrored())
    history = fit(model, [Stops()] if comm.rank else [])
    return len(history["loss"]), int(model.optimizer.iterations.numpy())


def test_one_replica_stops_all_after_the_same_step(replicas: ProcessRanks) -> None:
    assert replicas.run(stop) == [(1, 3), (1, 3)]


class Raises(keras.callbacks.Callback):  # type: ignore[misc]
    def on_train_batch_end(self, batch: Any, logs: Any = None) -> None:
        raise ZeroDivisionError("of this callback")


def raise_on_one(comm: fd.Communicator) -> None:
    strategy = mirrored()
    model = made(strategy)
    expected = ZeroDivisionError if comm.rank else PeerFailureError
    for moment in ("train_begin", "train_batch_end", "test_end", "train_end"):
        callback = keras.callbacks.Callback()
        setattr(callback, f"on_{moment}", Raises().on_train_batch_end)
        with pytest.raises(expected):
            fit(model, [callback] if comm.rank else [], epochs=1, validation_split=0.5)
        assert len(fit(model, epochs=1)["loss"]) == 1  # goes on
    strategy.check_in_sync()


def test_a_callback_that_raises_keeps_nobody_waiting(replicas: ProcessRanks) -> None:
    replicas.run(raise_on_one)


def back_up(comm: fd.Communicator, folder: Path) -> list[Any]:
    strategy = mirrored()
    keras.utils.set_random_seed(5 + comm.rank)
    backup = keras.callbacks.BackupAndRestore(folder / f"backup{comm.rank}")
    model = made(strategy)
    with pytest.raises((ZeroDivisionError, PeerFailureError)):
        fit(model, [backup, *([RaisesLater()] if comm.rank else [])])
    keras.utils.set_random_seed(9 + comm.rank)
    again = made(strategy)
    history = fit(again, [keras.callbacks.BackupAndRestore(folder / f"backup{comm.rank}")])
    strategy.check_in_sync()
    return [len(history["loss"]), int(again.optimizer.iterations.numpy())]


class RaisesLater(Raises):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.model.optimizer.iterations.numpy() == 12:
            super().on_train_batch_end(batch)


def test_keras_own_backup_restores_all_replicas(replicas: ProcessRanks, tmp_path: Path) -> None:
    assert replicas.run(back_up, tmp_path) == [[2, 20], [2, 20]]


# --- data ---------------------------------------------------------------------------------------


class Counted(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> Any:
        self.read.append(i)
        return np.full(5, float(i)), np.zeros(1)


def load(comm: fd.Communicator) -> list[int]:
    model = made(mirrored())
    model.build((None, 5))
    dataset = Counted()
    model.fit(torch.utils.data.DataLoader(dataset, 6), shuffle=False, verbose=0, epochs=1)
    return dataset.read


def test_each_example_is_loaded_once(replicas: ProcessRanks) -> None:
    first, second = replicas.run(load)
    # Keras itself reads the first batch once more, to build the model's loss.
    assert sorted([*first[3:], *second[3:]]) == list(range(20))


def distributed(comm: fd.Communicator) -> tuple[Any, Any]:
    strategy = mirrored()
    keras.utils.set_random_seed(4)
    model = made(strategy)
    data = regression()
    batches = strategy.distribute_dataset((data["x"], data["y"]), global_batch_size=8)
    history = model.fit(batches, epochs=2, verbose=0).history
    keras.utils.set_random_seed(4)
    return history, fit(made(strategy), epochs=2, shuffle=False)


def test_a_distributed_dataset_trains_like_arrays(replicas: ProcessRanks) -> None:
    for got, expected in replicas.run(distributed):
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-6)


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras' own
def test_a_distributed_dataset_of_one_replica() -> None:
    found = []
    for is_distributed in (False, True):
        strategy = fd.OneDeviceStrategy("cpu")
        keras.utils.set_random_seed(4)
        model, data = made(strategy), regression()
        given = {**data, "batch_size": 8, "shuffle": False}
        if is_distributed:
            pairs = (data["x"], data["y"])
            given = {"x": strategy.distribute_dataset(pairs, global_batch_size=8)}
        validation = given["x"] if is_distributed else (data["x"], data["y"])
        history = model.fit(**given, epochs=2, verbose=0, validation_data=validation).history
        if not is_distributed:
            validation = data["x"]
        found.append((history, model.evaluate(given["x"], given.get("y"), 8, verbose=0)))
        assert model.predict(validation, verbose=0).shape == data["y"].shape
    assert found[0] == found[1]


def short(comm: fd.Communicator) -> str:
    model = made(mirrored())
    batches = (Batches()[i] for i in range(5 - comm.rank))
    with pytest.raises(ValueError, match="different data in step 4") as caught:
        model.fit(batches, verbose=0, shuffle=False)
    return str(caught.value)


def test_a_generator_that_ends_early_on_one_replica(replicas: ProcessRanks) -> None:
    assert len(set(replicas.run(short))) == 1


def unequal(comm: fd.Communicator) -> None:
    model = made(mirrored())
    data = regression()
    with pytest.raises(ValueError, match=r"replicas \[1\], .* differ .* seed the gen"):
        model.fit(data["x"] + comm.rank, data["y"], verbose=0)
    with pytest.raises(ValueError, match="33 on replica 0, 32 on replica 1"):
        model.predict(data["x"][comm.rank :], verbose=0)


def test_arrays_that_differ_between_replicas(replicas: ProcessRanks) -> None:
    replicas.run(unequal)


def vary(comm: fd.Communicator) -> list[str]:
    """Call fit with another argument on each replica."""
    said = []
    for arguments in [
        {"batch_size": 8 - 4 * comm.rank},
        {"shuffle": bool(comm.rank)},
        {"epochs": 2 + comm.rank},
        {"steps_per_epoch": 3 - comm.rank},
        {"validation_freq": 1 + comm.rank, "validation_split": 0.5},
    ]:
        with pytest.raises((ValueError, FastdistError)) as caught:
            fit(made(mirrored()), **arguments)
        said.append(f"{type(caught.value).__name__}: {caught.value}")
    return said


def test_arguments_that_differ_between_replicas(replicas: ProcessRanks) -> None:
    for said in replicas.run(vary):
        assert "got 33 on replica 0, 33 on replica 1 examples and batch_size=" in said[0]
        assert "batch_size and shuffle on all replicas" in said[1]
        assert said[2].startswith("CollectiveMismatchError")
        # One replica notices that all wait, and leaves.
        assert "ranks wait for each other" in said[3] or "PeerFailureError" in said[3]
        assert said[4].startswith("CollectiveMismatchError")


class Broken(Batches):
    def __getitem__(self, i: int) -> tuple[Any, Any]:
        if i == 3:
            raise OSError("the disk is gone")
        return super().__getitem__(i)


def read_from_one(comm: fd.Communicator) -> None:
    strategy = mirrored()
    model = made(strategy)
    with pytest.raises(OSError if comm.rank else FastdistError, match=r"is gone|workers \[1\]"):
        model.fit(Broken() if comm.rank else Batches(), shuffle=False, verbose=0)
    fit(model, epochs=1)
    strategy.check_in_sync()


def test_data_that_one_replica_cannot_read(replicas: ProcessRanks) -> None:
    replicas.run(read_from_one)


# --- models -------------------------------------------------------------------------------------


def normalize(comm: fd.Communicator) -> list[Any]:
    strategy = mirrored()
    model = made(strategy, keras.layers.BatchNormalization(momentum=0.5))
    x = np.arange(12.0).reshape(6, 2)
    model.fit(x, x[:, :1], batch_size=6, verbose=0)
    strategy.check_in_sync()
    moving = model.layers[1].moving_mean.numpy()
    hidden = keras.Sequential(model.layers[:1])
    return [moving, comm.rank, hidden.predict(x, verbose=0).mean(0)]


def test_moving_statistics_are_those_of_all_examples(replicas: ProcessRanks) -> None:
    # The weights move by one step of size 0.001 after the statistics were taken.
    for moving, _, mean in replicas.run(normalize):
        np.testing.assert_allclose(moving, 0.5 * mean, atol=0.02)


def dropped(comm: fd.Communicator) -> list[Any]:
    strategy = mirrored()
    keras.utils.set_random_seed(1)
    seen: list[Any] = []

    class Seen(keras.layers.Layer):  # type: ignore[misc]
        def call(self, x: Any, training: bool = False) -> Any:
            if training:
                seen.append((x == 0).detach().numpy().copy())
            return x

    with strategy.scope():
        inner = [keras.layers.Dropout(0.5), keras.layers.Dropout(0.5, seed=3), Seen()]
        model = compiled(keras.Sequential([keras.Input((64,)), *inner, keras.layers.Dense(1)]))
    model.fit(np.ones((16, 64)), np.ones((16, 1)), batch_size=8, verbose=0)
    strategy.check_in_sync()
    return seen


def test_dropout_differs_between_replicas_and_steps(replicas: ProcessRanks) -> None:
    first, second = replicas.run(dropped)
    masks = [mask.tobytes() for mask in [*first, *second]]
    assert len(set(masks)) == len(masks) == 4
    assert [m.tolist() for m in replicas.run(dropped)[0]] == [m.tolist() for m in first]


def in_scope(comm: fd.Communicator, folder: Path) -> int:
    strategy = mirrored()
    with strategy.scope():
        model = compiled(dense(), "adam")
        data = regression()
        # Saving makes a layer, on the chief alone.
        files = keras.callbacks.ModelCheckpoint(folder / "{epoch}.keras")
        fit(model, [files], epochs=1, validation_data=(data["x"], data["y"]))
        second = compiled(dense(), "adam")
        for _ in range(2):  # makes layers, then adopts them
            second.train_on_batch(data["x"], data["y"])
        with mock.patch("gc.collect") as collect:
            second.train_on_batch(data["x"], data["y"])
        collect.assert_not_called()
    fit(second, epochs=1)
    strategy.check_in_sync()
    return int(model.optimizer.iterations.numpy())


def test_fit_inside_the_scope(replicas: ProcessRanks, tmp_path: Path) -> None:
    assert replicas.run(in_scope, tmp_path) == [5, 5]


def mirror(comm: fd.Communicator) -> None:
    strategy = mirrored()
    keras.utils.set_random_seed(comm.rank)
    model = strategy.mirror(compiled(dense(), "adam"))
    fit(model, epochs=1)
    strategy.check_in_sync()
    with strategy.scope():
        compiled(model, "sgd")
    with strategy.scope():
        inside = dense()
    fit(compiled(inside), epochs=1)
    strategy.check_in_sync()


def compile_outside(comm: fd.Communicator) -> None:
    strategy = mirrored()
    model = dense()
    expected = pytest.raises(ValueError, match=r"Sequential .* was made outside the scope of <fast")
    with expected, strategy.scope():
        model.compile("adam", "mse")
    model.compile("adam", "mse")
    with expected, strategy.scope():
        fit(model)


def test_a_model_that_was_made_outside_is_refused_inside(replicas: ProcessRanks) -> None:
    replicas.run(compile_outside)


def test_a_model_that_was_made_outside_is_mirrored(replicas: ProcessRanks) -> None:
    replicas.run(mirror)


def on_batches(comm: fd.Communicator) -> Any:
    strategy = mirrored()
    keras.utils.set_random_seed(0)
    model = made(strategy, metrics=["mae"])
    data = regression()
    logs = [model.train_on_batch(data["x"][:n], data["y"][:n]) for n in (7, 1, 8)]
    tested = model.test_on_batch(data["x"], data["y"], return_dict=True)
    keras.utils.set_random_seed(0)
    alone = compiled(dense(), "adam", metrics=["mae"])
    expected = [alone.train_on_batch(data["x"][:n], data["y"][:n]) for n in (7, 1, 8)]
    assert np.array(logs) == pytest.approx(np.array(expected), rel=1e-6)
    assert tested == pytest.approx(
        alone.test_on_batch(data["x"], data["y"], return_dict=True), rel=1e-6
    )
    np.testing.assert_allclose(
        model.predict_on_batch(data["x"][:3]), alone.predict_on_batch(data["x"][:3]), rtol=1e-9
    )


def test_calls_for_one_batch(replicas: ProcessRanks) -> None:
    replicas.run(on_batches)


def what_scopes_replace() -> tuple[Any, ...]:
    model, layer = keras.Model, keras.layers.Layer
    return layer.__dict__["__new__"], model.compile, model.make_train_function


def open_scope(comm: fd.Communicator) -> None:
    before = what_scopes_replace()
    with mirrored().scope():
        during = what_scopes_replace()
    after = what_scopes_replace()
    assert all(a is not b for a, b in zip(before, during, strict=True))
    assert all(a is b for a, b in zip(before, after, strict=True))


def test_keras_is_unchanged_after_the_scope(replicas: ProcessRanks) -> None:
    replicas.run(open_scope)


def load_in_scope(comm: fd.Communicator, folder: Path) -> None:
    strategy = mirrored()
    model = made(strategy)
    fit(model, epochs=1)
    model.save(folder / f"{comm.rank}.keras")
    with strategy.scope():
        loaded = keras.models.load_model(folder / f"{comm.rank}.keras")
    expected, history = fit(model, shuffle=False), fit(loaded, shuffle=False)
    assert history["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert int(loaded.optimizer.iterations.numpy()) == 25
    strategy.check_in_sync()


def test_a_loaded_model_goes_on(replicas: ProcessRanks, tmp_path: Path) -> None:
    replicas.run(load_in_scope, tmp_path)


def test_another_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    with (
        pytest.raises(UnsupportedError, match="set KERAS_BACKEND=torch"),
        fd.OneDeviceStrategy("cpu").scope(),
    ):
        keras.layers.Dense(1)


# --- programs that do it in other ways ----------------------------------------------------------


class OwnLogs(Subclassed):
    """Logs that are named like a metric without being its result, and the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.tracker = keras.metrics.Mean(name="tracker")

    def train_step(self, data: Any) -> Any:
        x, y = data
        self.zero_grad()
        loss = keras.ops.mean((self(x, training=True) - y) ** 2)
        weights = self.trainable_weights
        grads = torch.autograd.grad(loss, [w.value for w in weights])  # not by backward
        self.optimizer.apply(list(grads), weights)
        self.tracker.update_state(loss, sample_weight=len(x))
        return {"loss": loss.detach(), "mean_loss": self.tracker.result()}


def own_logs(comm: fd.Communicator) -> Any:
    strategy = mirrored()
    keras.utils.set_random_seed(6)
    with strategy.scope():
        model = compiled(OwnLogs(), "adam")
    history = fit(model)
    strategy.check_in_sync()
    keras.utils.set_random_seed(6)
    alone = fit(compiled(OwnLogs(), "adam"))
    return [[*history["loss"], *history["mean_loss"]], [*alone["loss"], *alone["mean_loss"]]]


def test_logs_and_gradients_of_a_train_step(replicas: ProcessRanks) -> None:
    for got, expected in replicas.run(own_logs):
        assert got == pytest.approx(expected, rel=1e-6)


def rows(comm: fd.Communicator) -> tuple[Any, Any]:
    strategy = mirrored()
    with strategy.scope():  # not compiled
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(6)])
        model.add(keras.layers.Lambda(lambda x: torch.reshape(x, (-1, 2)), output_shape=(2,)))
    x = np.arange(36.0).reshape(9, 4)
    expected = x @ model.layers[0].kernel.numpy()
    return model.predict(x, batch_size=4, verbose=0), expected.reshape(-1, 2)


def test_predict_keeps_rows_and_needs_no_compilation(replicas: ProcessRanks) -> None:
    for got, expected in replicas.run(rows):
        np.testing.assert_allclose(got, expected, rtol=1e-9)


def save_one_path(comm: fd.Communicator, path: Path) -> None:
    model = made(mirrored())
    fit(model, epochs=1)
    for _ in range(5):
        model.save(path)
        model.save_weights(path.with_suffix(".weights.h5"))
        loaded = keras.models.load_model(path)
        np.testing.assert_array_equal(loaded.get_weights()[0], model.get_weights()[0])


def test_replicas_save_to_one_path(replicas: ProcessRanks, tmp_path: Path) -> None:
    replicas.run(save_one_path, tmp_path / "model.keras")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.keras", "model.weights.h5"]


class Streamed(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        data = regression()
        return iter(zip(data["x"], data["y"], strict=True))


class Rate(keras.callbacks.Callback):  # type: ignore[misc]
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.optimizer.learning_rate = 0.25


class Summing(keras.layers.Layer):  # type: ignore[misc]
    def __init__(self, aggregation: str) -> None:
        super().__init__()
        self.total = self.add_weight(
            shape=(), trainable=False, aggregation=aggregation, name="total"
        )

    def call(self, x: Any) -> Any:
        self.total.assign_add(keras.ops.sum(x).detach())
        return x


def several(comm: fd.Communicator) -> None:
    strategy = mirrored()
    model = made(strategy)
    loader = torch.utils.data.DataLoader(Streamed(), 8)
    with pytest.warns(UserWarning, match="ran out of data"):  # Keras does not know the length
        model.fit(loader, verbose=0, shuffle=False)
    fit(model, [fd.keras.chief_only(Rate())], epochs=2)
    assert float(model.optimizer.learning_rate.numpy()) == 0.25
    strategy.check_in_sync()

    class OwnFit(Subclassed):
        def fit(self, data: Any) -> Any:
            return super().fit(*data)

    with strategy.scope():
        own, dice = compiled(OwnFit()), compiled(dense(), loss=keras.losses.Dice())
    with pytest.raises(UnsupportedError, match="OwnFit overrides fit"):
        own.fit((1, 2))
    with pytest.raises(UnsupportedError, match="Dice without axis"):
        fit(dice)
    with strategy.scope():
        summed = compiled(dense(), loss=lambda y, p: keras.ops.sum((y - p) ** 2))
    with pytest.warns(UserWarning, match="returns one number for a batch"):
        fit(summed, epochs=1)

    # Each half of a part has two examples of one label.
    labels = {"epochs": 1, "y": np.arange(len(regression()["x"])) // 2 % 4, "shuffle": False}
    for loss in (keras.losses.Circle(), in_batch_softmax):
        with strategy.scope():
            compares = compiled(keras.Sequential([keras.layers.Dense(4)]), loss=loss)
        with pytest.warns(UserWarning, match="compares the examples of a batch with each other"):
            fit(compares, **labels)
    for aggregation in ("sum", "mean"):
        with strategy.scope():
            counts = compiled(dense(Summing(aggregation)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            fit(counts, epochs=1)
        texts = [str(w.message) for w in caught if "each replica wrote diff" in str(w.message)]
        assert len(texts) == (aggregation == "sum" and comm.rank == 0)
        assert all("Summing has buffers" in text and "/total." in text for text in texts)
    with strategy.scope():
        layer = keras.layers.Dense(4, activation="softmax")
        plain = compiled(keras.Sequential([layer]), loss="sparse_categorical_crossentropy")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(plain, **labels)

    class Mixed(keras.src.backend.torch.trainer.TorchTrainer, keras.layers.Dense):
        def __init__(self) -> None:
            keras.layers.Dense.__init__(self, 1)
            keras.src.backend.torch.trainer.TorchTrainer.__init__(self)

    with strategy.scope():
        mixed = Mixed()
    with pytest.raises(UnsupportedError, match="fit of Mixed, which trains and is no"):
        mixed.fit(np.ones((4, 5)), np.ones((4, 1)))
    divided = mock.patch.object(keras.distribution, "distribution", return_value=strategy)
    with divided, pytest.raises(UnsupportedError, match="would divide the data of the model a sec"):
        fit(model)


def eagerly(comm: fd.Communicator) -> None:
    in_float64()
    keras.utils.set_random_seed(3)
    alone = compiled(dense(), "adam", run_eagerly=True)
    expected = fit(alone)
    keras.utils.set_random_seed(3)
    model = made(mirrored(), run_eagerly=True)
    assert fit(model)["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    for value, wanted in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-9)


def test_eager_steps(replicas: ProcessRanks) -> None:
    replicas.run(eagerly)


def on_a_full_disk(comm: fd.Communicator, folder: Path) -> None:
    strategy = mirrored()
    model = made(strategy)
    with full_disk(100), pytest.raises(OSError, match="cannot write the checkpoint"):
        fit(model, [fd.keras.BackupAndRestore(folder, 3)])
    comm.barrier()
    assert {path.name for path in folder.iterdir()} == {".lock"}
    fit(model, [fd.keras.BackupAndRestore(folder, 3)])
    strategy.check_in_sync()


def test_a_full_disk_raises_on_all_replicas(replicas: ProcessRanks, tmp_path: Path) -> None:
    replicas.run(on_a_full_disk, tmp_path)


def unfit(comm: fd.Communicator) -> list[str]:
    strategy = mirrored()
    with strategy.scope():
        jit = compiled(dense(), jit_compile=True)
        stateful = compiled(
            keras.Sequential(
                [keras.Input(batch_shape=(2, 3, 4)), keras.layers.GRU(1, stateful=True)]
            )
        )
        plain = compiled(dense(), run_eagerly=True)
    sequences, strings = np.ones((4, 3, 4)), np.full((4, 1), "text")
    ragged = [np.ones(3), np.ones(4)]
    said = []
    for model, x in [
        (jit, np.ones((4, 5))),
        (stateful, sequences),
        (plain, strings),
        (plain, ragged),
    ]:
        with pytest.raises((UnsupportedError, TypeError, ValueError)) as caught:
            model.fit(x, np.ones((4, 1)), batch_size=4, verbose=0)
        said.append(str(caught.value))
    assert len(fit(plain, epochs=1)["loss"]) == 1  # goes on
    strategy.check_in_sync()
    return said


def test_unfit_models_and_data_are_refused_alike(replicas: ProcessRanks) -> None:
    said, other = replicas.run(unfit)
    assert said == other
    assert "jit_compile=True" in said[0]
    assert "GRU gru has stateful=True" in said[1]


def test_tpus_are_refused() -> None:
    from fastdist.keras import extension

    model = compiled(dense())
    strategy = type("TPUStrategy", (), {})()
    extension._attach(strategy, model)
    with pytest.raises(UnsupportedError, match="TPUStrategy: Keras on torch has no XLA devices"):
        model.fit(np.ones((4, 5)), np.ones((4, 1)))


def test_what_is_adapted_or_refused(replicas: ProcessRanks) -> None:
    replicas.run(several)


class OwnResults(keras.Sequential):  # type: ignore[misc]
    def get_metrics_result(self) -> dict[str, Any]:
        return super().get_metrics_result() | {"own": 7.0}


def beside_a_process_group(comm: fd.Communicator, folder: Path) -> None:
    """Keras 3.16 would wrap the model in DDP, and sum metrics over the process group."""
    in_float64()
    metrics = {"metrics": ["mae", keras.metrics.TruePositives(name="counted")]}
    keras.utils.set_random_seed(3)
    alone = compiled(dense(), "adam", **metrics)
    expected = fit(alone), alone.get_weights()
    store = torch.distributed.FileStore(str(folder / "store"), comm.world_size)
    torch.distributed.init_process_group(
        "fastdist", store=store, rank=comm.rank, world_size=comm.world_size
    )
    try:
        keras.utils.set_random_seed(3)
        strategy = mirrored()
        model = made(strategy, **metrics)
        calls = torch.distributed.group.WORLD._get_sequence_number_for_group()
        got = fit(model), model.get_weights()
        assert torch.distributed.group.WORLD._get_sequence_number_for_group() == calls
        strategy.check_in_sync()
        for name, values in expected[0].items():
            assert got[0][name] == pytest.approx(values, rel=1e-6), name
        for value, wanted in zip(got[1], expected[1], strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-9)
        with strategy.scope():
            model = compiled(OwnResults([keras.layers.Dense(1)]))
        if hasattr(keras.src.trainers.trainer, "BaseTrainer"):  # from 3.16 on
            with pytest.raises(UnsupportedError, match="OwnResults overrides get_metrics_result"):
                fit(model)
        else:
            assert fit(model)["own"] == [7.0] * 4
    finally:
        torch.distributed.destroy_process_group()


def test_gradients_are_reduced_once(replicas: ProcessRanks, tmp_path: Path) -> None:
    replicas.run(beside_a_process_group, tmp_path)


IMPORTED_IN_SCOPE = """
import fastdist as fd, numpy as np
strategy = fd.MirroredStrategy(["cpu:0", "cpu:1"])
with strategy.scope():
    import keras
    model = keras.Sequential([keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.compile("adam", "mse")
model.fit(np.ones((8, 2)), np.ones((8, 1)), verbose=0)
print(type(model.fit.__self__).__name__)
strategy.check_in_sync()
"""


@pytest.mark.slow
def test_keras_imported_in_the_scope(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(IMPORTED_IN_SCOPE)
    env = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    run = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert (run.returncode, run.stdout) == (0, "ReplicatedTrainer\n"), run.stderr
