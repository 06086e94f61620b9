"""Runs Keras' own tests of its trainer in a strategy's scope.

    python keras_trainer_suite.py one_device [--only RE] [--compile] [--outcomes FOLDER]
    fastdist run -n 2 keras_trainer_suite.py mirrored

The tests lie in Keras' wheel. Without `--compile` torch.compile does nothing, which saves
minutes. The models of most tests are layers that mix Keras' Trainer in, which several replicas
refuse by name; there these classes become subclasses of keras.Model.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import fastdist as fd
import keras
import pytest
import torch
import torch._dynamo
from keras.src.backend.torch import trainer as trainers

STRATEGIES: dict[str, Callable[[], fd.Strategy]] = {
    "one_device": lambda: fd.OneDeviceStrategy("cpu"),
    "mirrored": lambda: fd.MirroredStrategy(["cpu"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("strategy", choices=STRATEGIES)
    parser.add_argument("--only", default="", help="regular expression of test names")
    parser.add_argument("--compile", action="store_true", help="let torch.compile compile")
    parser.add_argument("--outcomes", type=Path, help="folder of each replica's outcomes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch._dynamo.config.disable = not options.compile
    strategy = STRATEGIES[options.strategy]()
    if strategy.num_replicas_in_sync > 1:
        trainers.TorchTrainer = Trainer  # the tests mix it into their models
    plugin = InScope(strategy, options.only)
    file = str(Path(keras.__file__).parent / "src/trainers/trainer_test.py")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        config = ["--rootdir", folder, "-c", os.devnull, "--noconftest", "-p", "no:cacheprovider"]
        pytest.main([file, "-q", "--durations=5", "-W", "ignore", *config], [plugin])
    if options.outcomes:
        own = options.outcomes / f"{os.environ.get('RANK', '0')}.json"
        own.write_text(json.dumps(plugin.outcomes, indent=1))


class InScope:
    """A plugin of pytest that runs each test in the scope of a strategy.

    Attributes:
        outcomes: the kind ("passed", "failed" or "skipped") and the message of each test.
    """

    def __init__(self, strategy: fd.Strategy, only: str) -> None:
        self.outcomes: dict[str, tuple[str, str]] = {}
        self._strategy = strategy
        self._only = only

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if re.search(self._only, item.name)]
        gc.collect()
        gc.freeze()  # scopes collect garbage

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        Trainer.may_compile = "test_fit_with_data_adapter" not in item.name  # it always wants it
        with self._strategy.scope():
            return (yield)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self.outcomes[report.nodeid.rpartition("::")[2]] = report.outcome, report.longreprtext


class Trainer(keras.Model):  # type: ignore[misc]
    """Stands in for the trainer that tests mix into layers: their classes become models."""

    may_compile = True

    def __init__(self) -> None:
        super(keras.Model, self).__init__()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if issubclass(cls, keras.layers.Dense):  # whose methods come after those of a model
            cls.call = keras.layers.Dense.call

    def compile(self, *arguments: Any, jit_compile: Any = "auto", **options: Any) -> None:
        compiles = jit_compile if self.may_compile else False
        super().compile(*arguments, jit_compile=compiles, **options)


if __name__ == "__main__":
    main()
