"""Keras' fit on parameter servers, compared with Keras alone in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fastdist as fd
import keras
import numpy as np
import pytest
from fastdist.errors import UnsupportedError
from keras import layers, optimizers
from keras.src.backend.common import dtypes

pytest.importorskip("cryptography")
pytest.importorskip("cloudpickle")

from ps_cluster import PsCluster

# Of Keras itself, when it makes an array of a variable.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

SIZE = 8


@pytest.fixture(scope="module")
def one() -> Iterator[PsCluster]:
    cluster = PsCluster(workers=1, servers=2)
    yield cluster
    cluster.close()


@pytest.fixture(scope="module")
def two() -> Iterator[PsCluster]:
    cluster = PsCluster(workers=2, servers=2)
    yield cluster
    cluster.close()


def data(count: int = 64) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    x = np.random.default_rng(3).normal(size=(count, 5))
    return x, x.sum(1, keepdims=True) + 0.1 * x[:, :1] ** 2


def batches(context: fd.InputContext) -> Iterator[Any]:
    x, y = data()
    for begin in range(
        context.input_pipeline_id * SIZE, len(x), SIZE * context.num_input_pipelines
    ):
        yield x[begin : begin + SIZE], y[begin : begin + SIZE]


def network() -> Any:
    hidden = [layers.Dense(6, activation="tanh"), layers.BatchNormalization()]
    return keras.Sequential([keras.Input((5,)), *hidden, layers.Dense(1)])


def compiled(strategy: Any, model: Callable[[], Any] = network, **options: Any) -> Any:
    given = {"optimizer": optimizers.SGD(0.05), "loss": "mse", "metrics": ["mae"]} | options
    with strategy.scope():
        made = model()
        made.compile(**given)
    return made


def use_floats(name: str) -> None:
    keras.config.set_floatx(name)
    keras.config.set_dtype_policy(name)


@pytest.fixture(autouse=True)
def float32() -> Iterator[None]:
    before = keras.config.floatx()  # other tests of this process use float64
    use_floats("float32")
    yield
    use_floats(before)


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def begin() -> None:
        # On torch Keras promotes two float64 to float32.
        monkeypatch.setitem(dtypes.BIT64_TO_BIT32_DTYPE, "float64", "float64")
        use_floats("float64")

    return begin


def without_biases() -> Any:
    made = optimizers.AdamW(0.01, weight_decay=0.3)
    made.exclude_from_weight_decay(var_names=["bias"])
    return made


OPTIMIZERS = {
    "adam": lambda: optimizers.Adam(0.01, beta_1=0.8, epsilon=1e-3),
    "adagrad": lambda: optimizers.Adagrad(0.1, 0.05, epsilon=1e-3),
    "sgd": lambda: optimizers.SGD(0.05, weight_decay=0.1),
    "nesterov": lambda: optimizers.SGD(0.02, momentum=0.9, nesterov=True),
    "momentum": lambda: optimizers.SGD(0.02, momentum=0.9),
    "adamw": without_biases,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_trains_like_keras_alone(one: PsCluster, name: str, float64: Callable[[], None]) -> None:
    model = compiled(one.strategy(synchronous=True), optimizer=OPTIMIZERS[name]())
    initial = model.get_weights()
    # Keras' momentum keeps the rates of earlier steps, that of servers does not.
    factor = 1.0 if name in ("nesterov", "momentum") else 0.9
    rates = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * factor)
    test = data(24)
    given = {"epochs": 2, "steps_per_epoch": 8, "verbose": 0, "callbacks": [rates]}
    history = model.fit(batches, validation_data=test, **given).history
    evaluated = model.evaluate(*test, verbose=0)
    float64()
    alone = network()
    alone.compile(OPTIMIZERS[name](), "mse", metrics=["mae"])
    alone.set_weights(initial)
    x, y = data()
    expected = alone.fit(x, y, batch_size=SIZE, shuffle=False, validation_data=test, **given)
    for got, value in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(got, value, 1e-6, 1e-6)
    assert history.keys() == expected.history.keys()
    for key, values in expected.history.items():
        np.testing.assert_allclose(history[key], values, 2e-6, err_msg=key)
    np.testing.assert_allclose(evaluated, alone.evaluate(*test, verbose=0), 2e-6)
    # The servers have the slots.
    assert [v.name for v in model.optimizer.variables] == ["iteration", "learning_rate"]


# --- what is refused ------------------------------------------------------------------------------


class OwnSgd(optimizers.SGD):  # type: ignore[misc]
    pass


def refused_optimizers() -> Iterator[tuple[Any, str]]:
    sgd = optimizers.SGD
    yield optimizers.RMSprop(), "cannot apply RMSprop; expected SGD, Adagrad, Adam or AdamW"
    yield OwnSgd(), "cannot apply OwnSgd"
    yield optimizers.LossScaleOptimizer(sgd()), "cannot apply LossScaleOptimizer"
    yield optimizers.Adam(amsgrad=True), "Adam with amsgrad=True"
    yield sgd(clipnorm=1.0), "SGD with clipnorm=1.0"
    yield sgd(use_ema=True), "SGD with use_ema=True"
    yield sgd(gradient_accumulation_steps=2), "SGD with gradient_accumulation_steps=2"
    yield sgd(weight_decay=0.1, momentum=0.9), "SGD with weight_decay=0.1 and momentum"
    yield optimizers.Adagrad(weight_decay=0.1), "Adagrad with weight_decay=0.1"
    yield sgd(optimizers.schedules.ExponentialDecay(0.1, 2, 0.9)), "the ExponentialDecay of SGD"


@pytest.mark.slow
def test_refused_before_anything_trains(one: PsCluster) -> None:
    strategy = one.strategy()
    for optimizer, message in refused_optimizers():
        model = compiled(strategy, optimizer=optimizer)
        with pytest.raises(UnsupportedError, match=message):
            model.fit(batches, steps_per_epoch=2)
    model = compiled(strategy)
    x, y = data()
    for args, options, message in [
        ((x, y), {}, r"got ndarray; write fit\(make_dataset, steps_per_epoch=...\)"),
        ((batches,), {}, "needs steps_per_epoch, .* got None"),
        ((batches,), {"steps_per_epoch": 2, "validation_split": 0.1}, "takes no validation_split"),
        ((batches,), {"steps_per_epoch": 2, "batch_size": 4}, "takes no batch_size"),
    ]:
        with pytest.raises(UnsupportedError, match=message):
            model.fit(*args, **options)
    with pytest.raises(UnsupportedError, match="train_on_batch under ParameterServerStrategy"):
        model.train_on_batch(x, y)
    model.discriminator = optimizers.SGD()
    with pytest.raises(UnsupportedError, match="discriminator is a second optimizer"):
        model.fit(batches, steps_per_epoch=2)
    assert strategy.coordinator() is None
    assert np.shape(model.predict(x, verbose=0)) == (64, 1)


@pytest.mark.slow
def test_mistakes(one: PsCluster, tmp_path: Path) -> None:
    strategy = one.strategy()

    def arrays(context: fd.InputContext) -> Any:
        return data()

    def nothing(context: fd.InputContext) -> Any:
        return []

    def constrained() -> Any:
        return keras.Sequential([keras.Input((5,)), layers.Dense(1, kernel_constraint="non_neg")])

    def fails(context: fd.InputContext) -> Iterator[Any]:
        yield from batches(context)
        raise OSError("the disk is gone")

    model = compiled(strategy)
    with pytest.raises(TypeError, match=r"must return an iterable over batches .* got tuple"):
        model.fit(arrays, steps_per_epoch=2)
    with pytest.raises(ValueError, match="no batch for InputContext"):
        model.fit(nothing, steps_per_epoch=2)
    with pytest.raises(UnsupportedError, match="has the constraint NonNeg"):
        compiled(strategy, constrained).fit(batches, steps_per_epoch=2, verbose=0)
    with pytest.raises(OSError, match="the disk is gone"):
        model.fit(fails, steps_per_epoch=20, verbose=0)
    model.fit(batches, steps_per_epoch=2, verbose=0)  # goes on
    for backup, message in [
        (fd.keras.BackupAndRestore(tmp_path, 2), "backs up each epoch; got save_freq=2"),
        (keras.callbacks.BackupAndRestore(tmp_path), "use fastdist.keras.BackupAndRestore"),
    ]:
        with pytest.raises(UnsupportedError, match=message):
            model.fit(batches, steps_per_epoch=2, verbose=0, callbacks=[backup])
    with pytest.raises(UnsupportedError, match="compile after a fit"):
        model.compile("sgd", "mse")


# --- workers ----------------------------------------------------------------------------------


class OwnStep(keras.Model):  # type: ignore[misc]
    """Has a train_step of its own, which logs a number that is no metric."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = [layers.Dense(8, activation="tanh"), layers.Dropout(0.1)]
        self.last = layers.Dense(1)
        self.error = keras.metrics.Mean(name="error")

    def call(self, x: Any, training: bool = False) -> Any:
        for layer in self.inner:
            x = layer(x)
        return self.last(x)

    def train_step(self, data: Any) -> Any:
        x, y = data
        self.zero_grad()
        loss = keras.ops.mean((self(x, training=True) - y) ** 2)
        loss.backward()
        weights = self.trainable_weights
        gradients = [w.value.grad for w in weights]
        self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
        self.error.update_state(loss, sample_weight=len(x))
        return {"error": self.error.result(), "examples": float(len(x))}


@pytest.mark.slow
@pytest.mark.parametrize("synchronous", [False, True])
def test_own_steps_learn(two: PsCluster, synchronous: bool) -> None:
    model = compiled(two.strategy(synchronous=synchronous), OwnStep, loss=None, metrics=None)
    history = model.fit(batches, epochs=4, steps_per_epoch=20, verbose=0).history
    assert history["examples"] == [8.0] * 4
    assert history["error"][-1] < 0.5 * history["error"][0]  # workers may lag behind each other
    steps = 20 * (2 if synchronous else 1)  # a synchronous step has a batch of each worker
    assert float(model.error.count) == steps * SIZE
    x, y = data()
    assert np.mean((model.predict(x, verbose=0) - y) ** 2) < history["error"][0]
    assert int(model.optimizer.iterations) == 80


class Noted(keras.callbacks.Callback):  # type: ignore[misc]
    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        self.batches: list[int] = []
        self.losses: list[float] = []
        self._stop_at = stop_at

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.batches.append(batch)
        self.losses.append(logs["loss"])
        self.model.stop_training = batch == self._stop_at


@pytest.mark.slow
def test_callbacks_act_on_the_chief(two: PsCluster, tmp_path: Path) -> None:
    strategy = two.strategy()
    model = compiled(strategy, optimizer=optimizers.Adam(0.02))
    test = data(24)
    noted = Noted()
    best = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
    files = keras.callbacks.ModelCheckpoint(tmp_path / "{epoch}.keras")
    rates = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 10.0 if epoch == 4 else rate)
    given = {"epochs": 20, "steps_per_epoch": 10, "validation_data": test, "verbose": 0}
    history = model.fit(batches, callbacks=[noted, best, files, rates], **given).history
    assert len(history["loss"]) < 20
    assert noted.batches == list(range(10)) * len(history["loss"])
    assert noted.losses[-1] == pytest.approx(history["loss"][-1])
    at = int(np.argmin(history["val_loss"]))
    loaded = keras.models.load_model(tmp_path / f"{at + 1}.keras", compile=False)
    loaded.compile("sgd", "mse")
    for got, value in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(got, value)
    assert loaded.evaluate(*test, verbose=0) == pytest.approx(history["val_loss"][at], rel=1e-6)
    strategy.save(tmp_path / "servers")  # have the weights that were restored
    values = fd.ps.load(tmp_path / "servers").values
    for variable in model.trainable_variables:
        (name,) = [name for name in values if name.endswith(variable.path)]
        np.testing.assert_array_equal(values[name], variable.numpy())
    stops, backup = Noted(stop_at=3), fd.keras.BackupAndRestore(tmp_path / "backup")
    model.fit(batches, callbacks=[stops, backup], epochs=3, steps_per_epoch=10, verbose=0)
    assert stops.batches == [0, 1, 2, 3]
    assert list((tmp_path / "backup").iterdir()) == []


@pytest.mark.slow
def test_backups_have_the_servers_state(one: PsCluster, tmp_path: Path) -> None:
    weights = []
    for interrupted in (False, True):
        keras.utils.set_random_seed(5)
        for epochs in (2, 4) if interrupted else (4,):
            model = compiled(one.strategy(synchronous=True), optimizer=optimizers.Adam(0.02))
            backup = fd.keras.BackupAndRestore(
                tmp_path / str(interrupted), delete_checkpoint=epochs == 4
            )
            given = {"epochs": epochs, "steps_per_epoch": 8, "verbose": 0}
            keras.backend.clear_session()  # names as in a program that is started again
            history = model.fit(batches, callbacks=[backup], **given)
        assert history.epoch == ([2, 3] if interrupted else [0, 1, 2, 3])
        weights.append(model.get_weights())
    for got, expected in zip(*weights, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.slow
def test_a_killed_worker_loses_nothing() -> None:
    cluster = PsCluster(workers=2, servers=1)

    class Kills(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 5:
                cluster.kill("worker", 0)

    try:
        model = compiled(cluster.strategy())
        model.fit(batches, steps_per_epoch=40, callbacks=[Kills()], verbose=0)
        assert float(model.metrics[0].count) == 40 * SIZE
        assert int(model.optimizer.iterations) == 40
    finally:
        cluster.close()


@pytest.mark.slow
def test_functional_models_with_inputs_and_outputs(two: PsCluster) -> None:
    def deep() -> Any:
        a, b = keras.Input((5,), name="a"), keras.Input((1,), name="b")
        x = layers.Concatenate()([a, b])
        for _ in range(60):  # deeper than Python's recursion
            x = x + layers.Activation("tanh")(layers.Dense(6, name=None)(x)) * 0.1
        value, sign = layers.Dense(1, name="value")(x), layers.Dense(1, name="sign")(x)
        return keras.Model({"a": a, "b": b}, {"value": value, "sign": sign})

    def pairs(context: fd.InputContext) -> Iterator[Any]:
        for x, y in batches(context):
            yield {"a": x, "b": y}, {"value": y, "sign": np.sign(y)}

    losses = {"value": "mse", "sign": "mae"}
    model = compiled(two.strategy(), deep, loss=losses, optimizer="adam", metrics=None)
    history = model.fit(pairs, epochs=3, steps_per_epoch=8, verbose=0).history
    assert history.keys() == {"loss", "value_loss", "sign_loss"}
    assert history["loss"][-1] < history["loss"][0]


@pytest.mark.slow
def test_a_loaded_model_trains(one: PsCluster, tmp_path: Path) -> None:
    strategy = one.strategy(synchronous=True)
    model = compiled(strategy, optimizer="adam")
    model.fit(batches, steps_per_epoch=4, verbose=0)
    model.save(tmp_path / "model.keras")
    with strategy.scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    x, y = data()
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
    before = loaded.evaluate(x, y, verbose=0)
    loaded.fit(batches, epochs=4, steps_per_epoch=16, verbose=0)
    assert loaded.evaluate(x, y, verbose=0)[0] < before[0]
