"""Keras models and their data, for the comparison of replicas with Keras alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import fastdist as fd
import keras
import numpy as np
import torch
from keras import layers, ops

N = 33  # with batches of 8 the last batch has one example, which one replica gets


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and the arguments of its fit, evaluate and predict."""

    make: Callable[[], Any]
    fit: Callable[[], dict[str, Any]]
    test: Callable[[], dict[str, Any]]


CASES: dict[str, Case] = {}


def case(**given: Any) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    """Register a model under its function's name; `given` are changes of the usual arguments."""

    def register(make: Callable[[], Any]) -> Callable[[], Any]:
        data = given.get("data", regression)
        fit = {"batch_size": 8, "epochs": 2, **given.get("fit", {})}
        test = {"batch_size": 8, **given.get("test", {})}
        CASES[make.__name__] = Case(make, lambda: data() | fit, lambda: data() | test)
        return make

    return register


def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def regression() -> dict[str, Any]:
    x = rng().normal(size=(N, 5))
    return {"x": x, "y": x.sum(1, keepdims=True) + 0.1 * x[:, :1] ** 2}


def classes() -> dict[str, Any]:
    x = rng().normal(size=(N, 5))
    return {"x": x, "y": (x[:, 0] > 0).astype(int) + (x[:, 1] > 0)}


def sequences() -> dict[str, Any]:
    ids = rng().integers(0, 6, (N, 4))
    ids[:, 0] = np.maximum(ids[:, 0], 1)
    return {"x": ids, "y": rng().normal(size=(N, 4, 1))}


def two_of_each() -> dict[str, Any]:
    a, b = rng().normal(size=(2, N, 4))
    y = {"value": (a - b).sum(1, keepdims=True), "sign": (a[:, :1] > 0).astype(float)}
    return {"x": {"a": a, "b": b}, "y": y}


def dense(*more: Any, **options: Any) -> Any:
    return keras.Sequential([layers.Dense(6, activation="tanh", **options), *more, layers.Dense(1)])


def compiled(model: Any, optimizer: Any = "sgd", loss: Any = "mse", **options: Any) -> Any:
    model.compile(optimizer, loss, **options)
    return model


@case()
def built_by_the_first_batch() -> Any:
    return compiled(dense(), metrics=["mae"])


@case(fit={"validation_split": 0.25, "shuffle": False})
def validation_split() -> Any:
    return compiled(dense(), "adam", metrics=["mae", keras.metrics.RootMeanSquaredError()])


@case(data=classes)
def classification() -> Any:
    model = keras.Sequential([layers.Dense(6, activation="relu"), layers.Dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return compiled(model, keras.optimizers.RMSprop(0.01), loss, metrics=["accuracy"])


@case(data=lambda: {"x": regression()["x"], "y": (regression()["y"] > 0).astype(float)})
def binary_metrics() -> Any:
    model = dense(layers.Dense(1, activation="sigmoid"))
    model.pop()
    metrics = [
        keras.metrics.AUC(name="auc"),
        keras.metrics.Precision(name="precision"),
        keras.metrics.F1Score(threshold=0.5, name="f1"),
    ]
    return compiled(model, "adam", "binary_crossentropy", metrics=[*metrics, "accuracy"])


@case(data=two_of_each)
def inputs_and_outputs() -> Any:
    a, b = keras.Input((4,), name="a"), keras.Input((4,), name="b")
    both = layers.Concatenate()([layers.Dense(3)(a), layers.Dense(3)(b)])
    value = layers.Dense(1, name="value")(both)
    sign = layers.Dense(1, activation="sigmoid", name="sign")(both)
    model = keras.Model({"a": a, "b": b}, {"value": value, "sign": sign})
    losses = {"value": "mse", "sign": "binary_crossentropy"}
    weights = {"value": 0.5, "sign": 2.0}
    return compiled(model, "adam", losses, loss_weights=weights, metrics={"sign": ["accuracy"]})


class Subclassed(keras.Model):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.inner = [layers.Dense(6, activation="gelu"), layers.LayerNormalization()]
        self.last = layers.Dense(1)

    def call(self, x: Any, training: bool = False) -> Any:
        for layer in self.inner:
            x = layer(x)
        return self.last(x)


@case()
def subclassed() -> Any:
    return compiled(Subclassed(), "adam", metrics=["mae"])


class OwnStep(Subclassed):
    def train_step(self, data: Any) -> Any:
        x, y = data
        self.zero_grad()
        predicted = self(x, training=True)
        loss = self.compute_loss(y=y, y_pred=predicted)
        loss.backward()
        with torch.no_grad():
            self.optimizer.apply(
                [v.value.grad for v in self.trainable_weights], self.trainable_weights
            )
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=len(x))
            else:
                metric.update_state(y, predicted)
        return {metric.name: metric.result() for metric in self.metrics}


@case()
def own_train_step() -> Any:
    return compiled(OwnStep(), "adam", metrics=["mae"])


class PlainLogs(Subclassed):
    def train_step(self, data: Any) -> Any:
        x, y = data
        self.zero_grad()
        loss = ops.mean((self(x, training=True) - y) ** 2)
        loss.backward()
        with torch.no_grad():
            self.optimizer.apply(
                [v.value.grad for v in self.trainable_weights], self.trainable_weights
            )
        return {"my_loss": loss.detach()}


@case()
def logs_that_are_no_metrics() -> Any:
    return compiled(PlainLogs(), "adam")


class OwnLoss(Subclassed):
    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None
    ) -> Any:
        return ops.mean(ops.abs(y_pred - y)) + 0.01 * ops.mean(y_pred**2)


@case()
def own_compute_loss() -> Any:
    return compiled(OwnLoss(), "adam", metrics=["mae"])


@case(data=classes, fit={"class_weight": {0: 1.0, 1: 3.0, 2: 0.5}})
def class_weights() -> Any:
    return classification()


def weighted() -> dict[str, Any]:
    return regression() | {"sample_weight": rng().uniform(0, 2, N)}


@case(data=weighted)
def sample_weights() -> Any:
    return compiled(dense(), metrics=["mae"], weighted_metrics=["mse"])


@case(data=weighted)
def mean_by_sample_weight() -> Any:
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    return compiled(dense(), loss=loss)


@case()
def summed_loss() -> Any:
    return compiled(dense(), keras.optimizers.SGD(0.001), keras.losses.MeanSquaredError("sum"))


@case(data=sequences)
def masks() -> Any:
    model = keras.Sequential(
        [layers.Embedding(6, 4, mask_zero=True), layers.GRU(3, return_sequences=True)]
    )
    model.add(layers.Dense(1))
    return compiled(model, "adam", metrics=["mae"])


@case(data=lambda: {"x": sequences()["x"], "y": sequences()["x"][:, ::-1].copy()})
def ignored_class() -> Any:
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0)
    return compiled(keras.Sequential([layers.Embedding(6, 4), layers.Dense(6)]), "adam", loss)


@case()
def regularizers() -> Any:
    penalty = keras.regularizers.L2(0.1)
    return compiled(dense(kernel_regularizer=penalty, activity_regularizer="l1"))


class AddsLoss(layers.Layer):  # type: ignore[misc]
    def call(self, x: Any) -> Any:
        self.add_loss(0.1 * ops.mean(x**2))
        return x


@case()
def added_loss() -> Any:
    return compiled(dense(AddsLoss()))


@case()
def accumulated_gradients() -> Any:
    return compiled(dense(), keras.optimizers.Adam(0.01, gradient_accumulation_steps=3))


@case()
def clipped_gradients() -> Any:
    return compiled(dense(), keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.3))


@case()
def averaged_weights() -> Any:
    return compiled(dense(), keras.optimizers.AdamW(0.01, use_ema=True, ema_momentum=0.9))


@case()
def scaled_loss() -> Any:
    inner = keras.optimizers.SGD(0.05)
    return compiled(dense(), keras.optimizers.LossScaleOptimizer(inner, initial_scale=8.0))


@case()
def constraints_and_schedule() -> Any:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.9)
    model = dense(kernel_constraint=keras.constraints.MaxNorm(0.5))
    return compiled(model, keras.optimizers.SGD(schedule))


@case()
def frozen_layer() -> Any:
    model = keras.Sequential([keras.Input((5,)), layers.Dense(4), layers.Dense(1)])
    model.layers[0].trainable = False
    return compiled(model, "adam")


@case(data=lambda: {"x": rng().normal(size=(N, 6, 6, 1)), "y": rng().normal(size=(N, 1))})
def convolution() -> Any:
    inner = keras.Sequential([layers.Conv2D(3, 3, activation="relu"), layers.GroupNormalization(3)])
    return compiled(keras.Sequential([inner, layers.Flatten(), layers.Dense(1)]), "adam")


@case(data=lambda: {k: v[:32] for k, v in regression().items()})
def synchronized_batch_norm() -> Any:
    # Keras alone refuses the argument on torch.
    whole = {"synchronized": True} if fd.has_strategy() else {}
    return compiled(dense(layers.BatchNormalization(**whole)), "adam")


@case(fit={"batch_size": 4, "steps_per_epoch": 4}, test={"steps": 3})
def steps_per_epoch() -> Any:
    return compiled(dense())


@case(data=lambda: {k: torch.tensor(v) for k, v in regression().items()})
def torch_tensors() -> Any:
    return compiled(dense())


def loader(**options: Any) -> dict[str, Any]:
    data = regression()
    dataset = torch.utils.data.TensorDataset(torch.tensor(data["x"]), torch.tensor(data["y"]))
    return {"x": torch.utils.data.DataLoader(dataset, 8, **options)}


@case(
    data=lambda: loader(shuffle=True),
    fit={"batch_size": None, "shuffle": False},
    test={"batch_size": None},
)
def data_loader() -> Any:
    return compiled(dense(), metrics=["mae"])


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 5

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        data = regression()
        return data["x"][8 * i : 8 * i + 8], data["y"][8 * i : 8 * i + 8]


@case(data=lambda: {"x": Batches()}, fit={"batch_size": None}, test={"batch_size": None})
def py_dataset() -> Any:
    return compiled(dense(), metrics=["mae"])


def generated() -> Iterator[tuple[Any, Any]]:
    while True:
        for i in range(5):
            yield Batches()[i]


@case(
    data=lambda: {"x": generated()},
    fit={"batch_size": None, "steps_per_epoch": 5, "shuffle": False},
    test={"batch_size": None, "steps": 5},
)
def generator() -> Any:
    return compiled(dense(), metrics=["mae"])


# --- small batches, other structures ------------------------------------------------------------


@case(data=sequences, fit={"batch_size": 1, "epochs": 1}, test={"batch_size": 1})
def batches_of_one() -> Any:  # fewer examples than replicas
    return masks()


@case()
def overwritten_averages() -> Any:
    options = {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 3}
    return compiled(dense(), keras.optimizers.Nadam(0.01, clipvalue=0.5, **options))


def with_an_overflow() -> dict[str, Any]:
    data = regression()
    data["x"][7] = 1e200  # in the part of the last replica
    return data


@case(data=with_an_overflow, fit={"shuffle": False})
def skipped_steps() -> Any:
    inner = keras.optimizers.SGD(0.05)
    options = {"initial_scale": 8.0, "dynamic_growth_steps": 2}
    squared = keras.Sequential([layers.Dense(1), layers.Lambda(lambda x: x * x)])
    return compiled(squared, keras.optimizers.LossScaleOptimizer(inner, **options))


def nested() -> dict[str, Any]:
    a, b, c = rng().normal(size=(3, N, 4))
    y = {"u": [a[:, :1], b[:, :1]], "v": (c[:, :1],)}
    weights = {"u": [rng().uniform(0, 2, N), rng().uniform(0, 2, N)], "v": (np.ones(N),)}
    return {"x": (a, [b, c]), "y": y, "sample_weight": weights}


@case(data=nested)
def nested_structures() -> Any:
    a, b, c = keras.Input((4,)), keras.Input((4,)), keras.Input((4,))
    given = zip("tuv", (a, a + b, c), strict=True)
    first, second, third = (layers.Dense(1, name=name)(x) for name, x in given)
    model = keras.Model((a, [b, c]), {"u": [first, second], "v": (third,)})
    return compiled(model, "adam", {"u": ["mse", "mae"], "v": ("mse",)})


class Autoencoder(keras.Model):  # type: ignore[misc]
    """Has steps of its own, for inputs without targets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = layers.Dense(5)
        self.error = keras.metrics.Mean(name="error")
        self.of_batches = keras.metrics.Mean(name="of_batches")

    def call(self, x: Any) -> Any:
        return self.layer(x)

    def train_step(self, x: Any) -> Any:
        self.zero_grad()
        logs, loss = self._test(x)
        loss.backward()
        weights = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([v.value.grad for v in weights], weights)
        return logs

    def test_step(self, x: Any) -> Any:
        return self._test(x)[0]

    def predict_step(self, x: Any) -> Any:
        return {"outputs": self(x), "first": (x[:, :1],)}

    def _test(self, x: Any) -> Any:
        loss = ops.mean((self(x) - x) ** 2)
        self.error.update_state(loss, sample_weight=len(x))
        self.of_batches.update_state(loss)
        logs = {"error": self.error.result(), "of_batches": self.of_batches.result()}
        return logs | {"mean": ops.mean(x)}, loss


@case(data=lambda: {"x": regression()["x"]})
def inputs_without_targets() -> Any:
    return compiled(Autoencoder(), "adam", None)


@case(
    fit={"validation_batch_size": 3, "validation_freq": 2, "epochs": 4, "initial_epoch": 1}
    | {"validation_data": (regression()["x"][:7], regression()["y"][:7], np.arange(7.0))},
)
def weighted_validation() -> Any:
    return compiled(dense(), "adam", weighted_metrics=["mae"])


class Largest(keras.metrics.Metric):  # type: ignore[misc]
    """Keeps a maximum, as docs/keras.md says how to."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.value = self.add_variable((), "zeros", aggregation="only_first_replica", name="value")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        context = fd.get_replica_context()
        whole = context.all_reduce("max", ops.max(ops.abs(y_true - y_pred)).detach())
        self.value.assign(ops.maximum(self.value, whole))

    def result(self) -> Any:
        return self.value

    def reset_state(self) -> None:
        self.value.assign(0.0)


@case()
def a_metric_that_keeps_a_maximum() -> Any:
    return compiled(dense(), metrics=[Largest()])
