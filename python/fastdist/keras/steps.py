"""The steps of a Keras model on one replica: training, evaluating or predicting for one batch."""

from __future__ import annotations

import random
import weakref
import zlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import torch

from fastdist.collectives.communicator import Communicator
from fastdist.collectives.init import default_communicator
from fastdist.keras.layers import separate_random_numbers
from fastdist.keras.losses import share_losses
from fastdist.keras.metrics import unchanged, weigh_means
from fastdist.keras.optimizers import share_steps
from fastdist.replicas.per_replica import Origin, PerReplica
from fastdist.strategies.replicated import ReplicatedStrategy


class ReplicaSteps:
    """Runs the steps of a model in `strategy.run`.

    Attributes:
        examples: examples of each replica in the next step's batch; None if unknown.
        origin: where that batch comes from; None if Keras has made it.
        last_examples: the `examples` of the last step.
    """

    def __init__(self, model: weakref.ref[Any], strategy: ReplicatedStrategy) -> None:
        self.examples: tuple[int, ...] | None = None
        self.origin: Origin | None = None
        self.last_examples: tuple[int, ...] | None = None
        self.strategy = strategy
        self._model = model
        self._result: Any = None  # of the last step
        self._seeds = torch.Generator()  # of the steps
        self._seeded_from = -1

    def workers(self) -> Communicator:
        """Return the communicator of all replicas."""
        return self.strategy._connected() or default_communicator()  # of one rank

    def begin_pass(self) -> None:
        """Give all replicas the chief's random state, so that all shuffle in the same order.

        The seeds of the next steps are derived from it, unless it has not changed.
        """
        state = torch.get_rng_state(), random.getstate(), np.random.get_state()
        workers = self.workers()
        torch_state, python_state, numpy_state = workers.broadcast_object(state)
        if workers.rank:
            torch.set_rng_state(torch_state)
            random.setstate(python_state)
            np.random.set_state(numpy_state)
        found = zlib.crc32(torch.get_rng_state().numpy().data)
        if found != self._seeded_from:
            self._seeded_from = found
            self._seeds.manual_seed(found)

    def random_state(self) -> tuple[int, torch.Tensor]:
        """Return the state of the generator of the steps' seeds, for backups."""
        return self._seeded_from, self._seeds.get_state()

    def set_random_state(self, state: tuple[int, torch.Tensor]) -> None:
        """Set what `random_state` has returned."""
        self._seeded_from, seeds = state
        self._seeds.set_state(seeds)

    def prepare(self) -> None:
        """Adapt what the model has built by now. Every replica must call."""
        model: Any = self._model()
        separate_random_numbers(model)
        share_losses(model)
        weigh_means(model.metrics)
        share_steps(model, self.strategy)
        self.strategy.refresh()

    def train_or_test(self, function: Callable[..., Any], data: Any) -> Any:
        """Call a function that updates the metrics; return this replica's logs."""
        is_borrowed = self._take_examples()
        model: Any = self._model()
        with unchanged(model.metrics if is_borrowed else ()):
            return self._run(function, data)

    def predict(self, function: Callable[..., Any], data: Any) -> Any:
        """Call a function; return the outputs for the examples of all replicas, in order."""
        is_borrowed = self._take_examples()
        return keras.tree.map_structure(
            lambda output: self.strategy.gather(output[:0] if is_borrowed else output, 0),
            self._run(function, data),
        )

    def _take_examples(self) -> bool:
        """Begin a step; return True if this replica computes a borrowed example."""
        (replica,) = self.strategy.local_replica_ids
        examples = self.last_examples = self.examples
        self.examples = None
        return examples is not None and not examples[replica]

    def _run(self, function: Callable[..., Any], data: Any) -> Any:
        """Call a function in `strategy.run`; the process's random state stays as it was.

        So several replicas and one device shuffle in the same order after any number of steps.
        """
        generator = torch.default_generator
        before = generator.get_state()
        seed = torch.empty((), dtype=torch.int64).random_(generator=self._seeds)
        generator.manual_seed(int(seed))
        try:
            given = PerReplica(((function, data),), self.last_examples, origin=self.origin)
            self.strategy.run(self._call, (given,))
        finally:
            generator.set_state(before)
        result, self._result = self._result, None
        return result

    def _call(self, step: tuple[Callable[..., Any], Any]) -> None:
        function, data = step
        self._result = function(data)
