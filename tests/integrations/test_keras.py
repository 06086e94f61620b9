"""Keras models on replicas, compared with Keras alone in float64."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import fastdist as fd
import keras
import numpy as np
import pytest
import torch
from keras.src.backend.common import dtypes
from keras_cases import CASES
from ranks import ProcessRanks
from test_strategies import KINDS

SIZES = (2, pytest.param(3, marks=pytest.mark.slow))


def test_a_missing_keras_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    public: Any = fd.keras
    # As an import of a module does whose library is not there.
    error = ModuleNotFoundError("No module named 'keras'", name="keras")
    monkeypatch.setattr(importlib, "import_module", Mock(side_effect=error))
    hint = "^fastdist.keras.BackupAndRestore needs Keras: pip install 'keras>=3.15'"
    with pytest.raises(ImportError, match=hint):
        public.__getattr__("BackupAndRestore")


def test_names_of_keras_itself_get_a_hint() -> None:
    with pytest.raises(AttributeError, match="'Sequential'; Keras' own names are in keras"):
        _ = fd.keras.Sequential


@pytest.fixture(scope="module", params=SIZES, ids=lambda n: f"replicas{n}")
def replicas(request: pytest.FixtureRequest) -> Iterator[ProcessRanks]:
    ranks = ProcessRanks(request.param)
    yield ranks
    ranks.close()


def in_float64() -> None:
    torch.set_num_threads(1)
    # Of Keras itself, when it makes an array of a variable.
    warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
    # On torch Keras promotes two float64 to float32, so that a matmul is exact to 1e-7 alone.
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")


def outcome(model: Any, name: str) -> dict[str, Any]:
    """Train, evaluate and predict; what there is to compare."""
    given = CASES[name]
    history = model.fit(**given.fit(), verbose=0).history
    test = given.test()
    evaluated = model.evaluate(**test, verbose=0, return_dict=True)
    for unused in ("y", "sample_weight"):
        test.pop(unused, None)
    predicted = model.predict(**test, verbose=0)
    return {
        "history": {key: np.array(values) for key, values in history.items()},
        "evaluated": evaluated,
        "predicted": keras.tree.flatten(predicted),
        "weights": model.get_weights(),
        "optimizer": [variable.numpy() for variable in model.optimizer.variables],
    }


def require_close(got: Any, expected: Any, place: str) -> None:
    if isinstance(expected, dict):
        assert got.keys() == expected.keys(), place
        for key, value in expected.items():
            require_close(got[key], value, f"{place}.{key}")
    elif isinstance(expected, list):
        assert len(got) == len(expected), place
        for i, value in enumerate(expected):
            require_close(got[i], value, f"{place}[{i}]")
    else:
        # Keras returns logs as float32.
        tolerance = 1e-6 if place.startswith(("history", "evaluated")) else 1e-9
        np.testing.assert_allclose(got, expected, tolerance, tolerance, err_msg=place)


def compare(comm: fd.Communicator, name: str, kind: str) -> None:
    """On a replica: train alone, then together; the others' seeds differ from the chief's."""
    in_float64()
    keras.utils.set_random_seed(7)
    expected = outcome(CASES[name].make(), name)
    keras.utils.set_random_seed(7 + comm.rank)
    strategy = KINDS[kind](fd.CommunicationOptions())
    with strategy.scope():
        model = CASES[name].make()
    got = outcome(model, name)
    strategy.check_in_sync()
    for part, value in expected.items():
        require_close(got[part], value, part)


QUICK = ("classification", "data_loader", "generator", "inputs_and_outputs", "own_train_step")
NAMES = [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in CASES]


@pytest.mark.parametrize("name", NAMES)
def test_trains_like_one_device(replicas: ProcessRanks, name: str) -> None:
    replicas.run(compare, name, "mirrored")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["central", "multi_worker"])
@pytest.mark.parametrize("name", ["averaged_weights", "classification", "scaled_loss"])
def test_trains_alike_under_other_strategies(replicas: ProcessRanks, name: str, kind: str) -> None:
    replicas.run(compare, name, kind)
