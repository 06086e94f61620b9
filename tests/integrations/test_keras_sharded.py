"""Keras' optimizers, whose states are divided among replicas."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastdist as fd
import keras
import numpy as np
import pytest
import torch
from ranks import ProcessRanks
from test_keras import compare

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01, amsgrad=True),
    "adamw": lambda: keras.optimizers.AdamW(0.01, use_ema=True, ema_overwrite_frequency=3),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "muon": lambda: keras.optimizers.Muon(0.01),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
    "accumulated": lambda: keras.optimizers.RMSprop(0.01, gradient_accumulation_steps=2),
}


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def replicas(request: pytest.FixtureRequest) -> Iterator[ProcessRanks]:
    ranks = ProcessRanks(request.param)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(
    "name",
    [
        "averaged_weights",
        pytest.param("accumulated_gradients", marks=pytest.mark.slow),
        pytest.param("batches_of_one", marks=pytest.mark.slow),
        pytest.param("clipped_gradients", marks=pytest.mark.slow),
        pytest.param("frozen_layer", marks=pytest.mark.slow),
        pytest.param("own_train_step", marks=pytest.mark.slow),
        pytest.param("skipped_steps", marks=pytest.mark.slow),
    ],
)
def test_trains_like_one_device(replicas: ProcessRanks, name: str) -> None:
    replicas.run(compare, name, "sharded")


def made(optimizer: str, shard: bool) -> Any:
    # Of Keras itself, when it makes an array of a variable.
    warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
    keras.utils.set_random_seed(3)
    options = fd.CommunicationOptions(shard_optimizer=shard)
    with fd.MirroredStrategy(
        ["cpu:0", "cpu:1", "cpu:2"][: fd.init().world_size], options=options
    ).scope():
        layers = [keras.layers.Dense(20, "relu") for _ in range(6)]
        model = keras.Sequential([keras.Input((20,)), *layers, keras.layers.Dense(1)])
        model.compile(OPTIMIZERS[optimizer](), "mse")
    return model


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(60, 20)).astype("float32")
    return x, x[:, :1] * 2


def values(model: Any) -> list[np.ndarray]:
    return [v.value.detach().numpy().copy() for v in [*model.variables, *model.optimizer.variables]]


def elements(model: Any) -> int:
    return sum(v.value.numel() for v in model.optimizer.variables)


def same_bits(comm: fd.Communicator, optimizer: str, folder: str) -> None:
    """Weights and states are those without sharding, which a replica has a part of in `fit`."""
    found, sizes = [], []
    for shard in (False, True):
        model = made(optimizer, shard)
        seen: list[int] = []
        look = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, model=model, seen=seen: seen.append(
                elements(model)
            )
        )
        history = model.fit(*data(), batch_size=12, epochs=2, callbacks=[look], verbose=0)
        sizes.append(seen[-1])
        model.train_on_batch(*data())  # divided again
        model.save_weights(f"{folder}/{comm.rank}.weights.h5")
        found.append([*values(model), *history.history["loss"]])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    assert sizes[1] < sizes[0]
    if optimizer in ("sgd", "adam", "nadam", "muon"):
        assert comm.all_gather(np.array([sizes[1]])).sum() <= sizes[0] + 5 * comm.world_size
        assert sizes[1] <= sizes[0] * (1 / comm.world_size + 0.1)  # of few tensors


@pytest.mark.parametrize(
    "optimizer",
    ["adam", *(pytest.param(o, marks=pytest.mark.slow) for o in OPTIMIZERS if o != "adam")],
)
def test_bits_are_those_without_sharding(
    replicas: ProcessRanks, optimizer: str, tmp_path: Path
) -> None:
    replicas.run(same_bits, optimizer, str(tmp_path))


def saves(comm: fd.Communicator, folder: str) -> None:
    """A checkpoint in `fit` has all states; a model that loads it goes on with the same bits."""
    path = f"{folder}/model.keras"
    model = made("adam", True)
    saved: list[list[np.ndarray]] = []
    held: list[int] = []
    callbacks = [
        keras.callbacks.ModelCheckpoint(path),
        keras.callbacks.ModelCheckpoint(f"{folder}/{{batch}}.keras", save_freq=2),
        keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: held.append(elements(model))
        ),
        fd.keras.BackupAndRestore(f"{folder}/backup", save_freq=2),
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: saved.append(values(model))
        ),
    ]
    model.fit(*data(), batch_size=20, epochs=2, callbacks=callbacks, verbose=0)
    assert len(set(held[::2])) == 1  # divided where nothing is saved
    assert held[0] < held[1] == held[3]
    again = keras.models.load_model(path)
    for one, other in zip(values(again), values(model), strict=True):
        np.testing.assert_array_equal(one, other)
    model.train_on_batch(*data())
    comm.barrier()
    model.load_weights(path)  # into divided states
    for one, other in zip(values(again), values(model), strict=True):
        np.testing.assert_array_equal(one, other)


def test_what_is_saved_is_whole(replicas: ProcessRanks, tmp_path: Path) -> None:
    replicas.run(saves, str(tmp_path))


def at_batch(model: Any, call: Any) -> Any:
    """A callback that makes a call in the second step."""
    return keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: call() if batch == 1 else None
    )


def fail() -> None:
    raise ZeroDivisionError


def goes_on(comm: fd.Communicator, folder: str) -> None:
    """States outlast errors on all replicas; another number of variables in each step is right."""
    found = []
    for shard in (False, True):
        model = made("nadam", shard)
        fit = {"batch_size": 12, "verbose": 0}
        with pytest.raises(ZeroDivisionError):
            model.fit(*data(), **fit, callbacks=[at_batch(model, fail)])
        model.save(f"{folder}/{comm.rank}.keras")
        saved = keras.models.load_model(f"{folder}/{comm.rank}.keras")
        with pytest.raises(ValueError, match="incompatible"):
            model.predict(np.ones((3, 7)), verbose=0)
        model.fit(*data(), **fit)
        for layer in model.layers[:4]:
            layer.trainable = False
        for _ in range(2):
            model.fit(*data(), **fit)
        found.append([*values(saved), *values(model)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_training_goes_on_after_errors(replicas: ProcessRanks, tmp_path: Path) -> None:
    replicas.run(goes_on, str(tmp_path))


class OwnStates(keras.optimizers.Optimizer):  # type: ignore[misc]
    """Has states in a dict, of matrices alone."""

    def build(self, variables: Any) -> None:
        if self.built:
            return
        super().build(variables)
        self.moments = {
            id(v): self.add_variable_from_reference(v, name="moment")
            for v in variables
            if len(v.shape) == 2
        }

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if (moment := self.moments.get(id(variable))) is not None:
            self.assign(moment, 0.9 * moment + gradient)
            gradient = moment
        self.assign_sub(variable, 0.01 * gradient)

    def get_config(self) -> dict[str, Any]:
        return {"learning_rate": 0.01}


class Normed(keras.optimizers.SGD):  # type: ignore[misc]
    def _backend_update_step(self, grads: Any, variables: Any, rate: Any) -> None:
        norm = sum((g * g).sum() for g in grads) ** 0.5
        super()._backend_update_step([g / norm for g in grads], variables, rate)


class Noisy(OwnStates):
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient + torch.randn_like(gradient), variable, learning_rate)


class LookingBack(OwnStates):
    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        super().apply(grads, trainable_variables)


OPTIMIZERS["own"] = lambda: OwnStates(0.01)
OPTIMIZERS["normed"] = lambda: Normed(0.01)
OPTIMIZERS["noisy"] = lambda: Noisy(0.01)
OPTIMIZERS["looking back"] = lambda: LookingBack(0.01)


def own_optimizers(comm: fd.Communicator, folder: str) -> None:
    same_bits(comm, "own", folder)
    for name, why in (
        ("normed", "depends on other"),
        ("noisy", "or draws random numbers"),
        ("looking back", "its own apply may need"),
    ):
        with pytest.raises(fd.errors.UnsupportedError, match=why):
            made(name, True).fit(*data(), verbose=0)


def test_optimizers_of_users(replicas: ProcessRanks, tmp_path: Path) -> None:
    replicas.run(own_optimizers, str(tmp_path))


def saves_alone(comm: fd.Communicator, folder: str) -> None:
    model = made("adam", True)
    model.train_on_batch(*data())
    if comm.rank == 0:
        with pytest.raises(fd.errors.CollectiveMismatchError, match="every replica must save"):
            model.save(f"{folder}/model.keras")
    else:
        with pytest.raises(fd.errors.CollectiveMismatchError):
            model.train_on_batch(*data())


def test_the_chief_does_not_save_alone(replicas: ProcessRanks, tmp_path: Path) -> None:
    replicas.run(saves_alone, str(tmp_path))
