"""Keras models and running fits as parts of checkpoints.

Keras draws batches from passes over the data; an epoch is one pass, or with `steps_per_epoch` the
next part of a pass. The order of a pass follows from the random state at its beginning, so the
position of a `fit` in its data is that state and the number of batches drawn since.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from fastdist.checkpoints.agreement import Ranks
from fastdist.checkpoints.checkpoint import Checkpoint, has_state
from fastdist.collectives.communicator import Communicator
from fastdist.data import DistributedDataset
from fastdist.keras.callback_states import CallbackStates
from fastdist.keras.internals import get_global_attribute, global_seed_generator
from fastdist.keras.methods import trainer_of
from fastdist.keras.metrics import put_values, values_of, variables_of
from fastdist.keras.optimizers import gather_states, make_room
from fastdist.keras.steps import DistributedAdapter, PartAdapter

_NEVER = 1 << 62  # an epoch that no fit reaches


class KerasCheckpoint(Checkpoint):
    """A checkpoint of a built Keras model, its part "model", and of other parts."""

    def __init__(self, model: Any, **parts: Any) -> None:
        super().__init__(model=ModelVariables(model), **parts)
        self.__dict__["_keras_model"] = model

    def ranks(self) -> Ranks:
        """Return the replicas of the model."""
        return Ranks([self._keras_model])


class ModelVariables:
    """A model's weights and seeds, by number in Keras' order: names differ between two models."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the values by number."""
        return {str(i): value for i, value in enumerate(values_of(self._model.variables))}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Set the values."""
        saved = list(state.values())
        _require_same_shapes("model", self._model.variables, saved)
        put_values(self._model.variables, saved)


class FitState:
    """The optimizer, metrics, callbacks, position and random generators of a running `fit`.

    Metrics and callbacks have a state per replica. Every replica must call the methods.
    """

    def __init__(
        self, model: Any, iterator: Any, callbacks: Sequence[Any], params: dict[str, Any]
    ) -> None:
        self._model = model
        self._ranks = Ranks([model])
        self._callbacks = CallbackStates(callbacks, params)
        self.position = FitPosition(iterator, model)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all replicas."""
        gather_states(self._model)
        metrics = [tensor.cpu() for tensor in values_of(variables_of(self._model.metrics))]
        with self._ranks.communicator() as workers:
            return {
                "optimizer": values_of(self._optimizer_variables()),
                "metrics": [metrics] if workers is None else workers.all_gather_object(metrics),
                "callbacks": self._callbacks.collect(workers),
                "position": self.position.state(),
                "random": random_state(self._model),
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; if it does not fit, nothing is changed."""
        optimizer, metrics = self._optimizer_variables(), variables_of(self._model.metrics)
        with self._ranks.communicator() as workers:
            own_metrics = _own_metrics(state["metrics"], metrics, workers)
            _require_same_shapes("optimizer", optimizer, state["optimizer"])
            _require_same_shapes("set of metrics", metrics, own_metrics)
            make_room(self._model)
            put_values(optimizer, state["optimizer"])
            put_values(metrics, own_metrics)
            self._callbacks.restore(state["callbacks"], 0 if workers is None else workers.rank)
        self.position.load(state["position"])
        set_random_state(self._model, state["random"])

    def _optimizer_variables(self) -> list[Any]:
        optimizer = self._model.optimizer
        return [] if optimizer is None else list(optimizer.variables)


def _own_metrics(
    saved: Sequence[Sequence[torch.Tensor]], variables: Sequence[Any], workers: Communicator | None
) -> list[torch.Tensor]:
    """Return this replica's metrics; another number of replicas has the same results."""
    rank, replicas = (0, 1) if workers is None else (workers.rank, workers.world_size)
    if len(saved) == replicas:
        return list(saved[rank])
    own = []
    for variable, values in zip(variables, zip(*saved, strict=True), strict=False):
        if variable.aggregation == "sum":
            total = torch.stack(values).sum(0).to(values[0].dtype)
            own.append(torch.zeros_like(total) if rank else total)
        elif variable.aggregation == "mean":
            own.append(torch.stack(values).double().mean(0).to(values[0].dtype))
        else:
            own.append(values[0])
    return own


def _require_same_shapes(
    name: str, variables: Sequence[Any], values: Sequence[torch.Tensor]
) -> None:
    own = [(variable.path, tuple(variable.shape)) for variable in variables]
    shapes = [tuple(value.shape) for value in values]
    if len(own) != len(shapes):
        raise ValueError(
            f"{name}: the checkpoint is of another {name}: it has {len(shapes)} variables, "
            f"expected {len(own)}"
        )
    for (path, expected), shape in zip(own, shapes, strict=True):
        if expected != shape:
            raise ValueError(
                f"{name}: the checkpoint is of another {name}: {path} has shape {shape}, "
                f"expected {expected}"
            )


class FitPosition:
    """Records the position of a `fit`, and lets another `fit` begin there.

    Methods of Keras' iterator over batches are replaced until `release`.
    """

    def __init__(self, iterator: Any, model: Any) -> None:
        self._iterator = iterator
        self._model = model
        self._make_pass = iterator._get_iterator
        self._make_epoch = iterator._enumerate_iterator
        self._source = _source(iterator.data_adapter)
        self._pass: dict[str, Any] | None = None  # the state at the beginning of this pass
        self._step = 0
        self._drawn = 0  # batches of this pass before this step's
        self._has_drawn = False  # True once a batch of the newest pass is drawn
        self._epoch_began: dict[str, Any] | None = None  # the state then, until its first step
        self._is_behind = False  # True until the first pass of a restored fit has begun
        self.epoch = 0
        iterator._get_iterator = self._begin_pass
        iterator._enumerate_iterator = self._enumerate

    def note_step(self, step: int) -> None:
        """Note that a step of this epoch begins, whose batch is drawn already."""
        self._step = step
        self._drawn = self._iterator._steps_seen - 1
        if isinstance(self._source, DistributedDataset):  # continues inside a pass by itself
            assert self._pass is not None
            state = self._source.position()
            self._pass["source"] = {**state, "step": state["step"] - 1}

    def note_end(self, epochs: int) -> None:
        """Note that training has ended after this number of epochs, or was stopped."""
        is_stopped = self._model.stop_training
        self.epoch = _NEVER if is_stopped else epochs
        self._step = self._drawn = 0
        if self._iterator.steps_per_epoch is None or not self._has_drawn:
            self._pass = self._state_now()
        else:
            self._drawn = self._iterator._steps_seen

    def state(self) -> dict[str, Any]:
        """Return the position."""
        return {
            "epoch": self.epoch,
            "step": self._step,
            "drawn": self._drawn,
            "pass": self._pass,
            "start": None if self._pass else self._state_now()["source"],  # before the first pass
        }

    def load(self, state: dict[str, Any]) -> None:
        """Set the position."""
        self.epoch, self._step = state["epoch"], state["step"]
        self._drawn, self._pass = state["drawn"], state["pass"]
        if self._pass is None and self._source is not None:
            self._source.load_state_dict(state["start"])

    @property
    def has_begun(self) -> bool:
        """False at the beginning of training."""
        return self._pass is not None

    def resume(self) -> bool:
        """Let the first epoch begin at this position; return False if it is the beginning."""
        self._is_behind = self.has_begun
        return self._is_behind

    def release(self) -> None:
        """Give the iterator its own methods again."""
        for name in ("_get_iterator", "_enumerate_iterator"):
            vars(self._iterator).pop(name, None)

    def _enumerate(self) -> Iterator[Any]:
        """Enumerate the steps of an epoch, or its remaining steps, as Keras does."""
        if not self._is_behind:
            self._epoch_began = self._state_now()
            for step in self._make_epoch():
                self._epoch_began = None
                yield step
            return
        first, drawn = self._step, self._drawn
        assert self._pass is not None
        set_random_state(self._model, self._pass["random"])
        for begin, end, batches in self._make_epoch():
            if begin == first:
                self._iterator._steps_seen = drawn + 1
            if begin >= first:
                yield begin, end, batches

    def _begin_pass(self) -> Any:
        """Make the iterable of a pass over the data."""
        if not self._is_behind:
            self._has_drawn = False
            return self._draw(self._epoch_began)
        self._is_behind, self._has_drawn = False, True
        assert self._pass is not None
        if self._source is not None:
            self._source.load_state_dict(self._pass["source"])
        if not self._pass["is_epochs"]:
            set_random_state(self._model, self._pass["random"])
        batches = iter(self._make_pass())
        if not isinstance(self._source, DistributedDataset):
            for _ in range(self._drawn):
                next(batches)
        return batches

    def _draw(self, epoch_began: dict[str, Any] | None) -> Iterator[Any]:
        """Begin a pass with its first batch: one that Keras makes at the end of an epoch is late.

        Validation draws random numbers in between.
        """
        self._pass = epoch_began or {**self._state_now(), "is_epochs": False}
        self._has_drawn = True
        yield from self._make_pass()

    def _state_now(self) -> dict[str, Any]:
        source, position = self._source, None
        if source is not None:
            is_dataset = isinstance(source, DistributedDataset)
            position = source.next_position() if is_dataset else source.state_dict()
        return {"random": random_state(self._model), "source": position, "is_epochs": True}


def _source(adapter: Any) -> Any:
    """Return the part of the data that has a state of its own; None without one."""
    if isinstance(adapter, DistributedAdapter):
        return adapter._dataset
    whole = adapter._whole if isinstance(adapter, PartAdapter) else adapter
    dataset = getattr(whole, "py_dataset", None)
    if has_state(dataset):
        return dataset
    generator = getattr(getattr(whole, "_dataloader", None), "generator", None)
    if generator is None:
        return None
    return SimpleNamespace(
        state_dict=lambda: {"generator": generator.get_state()},
        load_state_dict=lambda state: generator.set_state(state["generator"]),
    )


def random_state(model: Any) -> dict[str, Any]:
    """Return the states of the generators of torch, Python, numpy, Keras and the model's trainer.

    The trainer exists with several replicas. Checkpoints hold the state of torch's GPU generator.
    """
    trainer = trainer_of(model)
    has_own = get_global_attribute("global_seed_generator") is not None
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "keras": global_seed_generator().state.value.detach().clone() if has_own else None,
        "trainer": None if trainer is None else trainer.steps.random_state(),
    }


def set_random_state(model: Any, state: dict[str, Any]) -> None:
    """Set the generators to a state that `random_state` has returned."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if state["keras"] is not None:
        with torch.no_grad():
            global_seed_generator().state.value.copy_(state["keras"])
    trainer = trainer_of(model)
    if trainer is not None and state["trainer"] is not None:
        trainer.steps.set_random_state(state["trainer"])
