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
    callbacks = [
        keras.callbacks.ModelCheckpoint(path),
        keras.callbacks.ModelCheckpoint(f"{folder}/{{batch}}.keras", save_freq=2),
        fd.keras.BackupAndRestore(f"{folder}/backup", save_freq=2),
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: saved.append(values(model))
        ),
    ]
    model.fit(*data(), batch_size=20, epochs=2, callbacks=callbacks, verbose=0)
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
