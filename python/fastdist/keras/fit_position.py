"""The position of a running `fit` in its data, and how to return to it.

Keras draws batches from passes over the data; an epoch is one pass, or with `steps_per_epoch` the
next part of a pass. The order of a pass follows from the random state at its beginning, so a
position is that state and the number of batches drawn since.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from fastdist.checkpoints.checkpoint import has_state
from fastdist.data import DistributedDataset
from fastdist.keras.internals import get_global_attribute, global_seed_generator
from fastdist.keras.parts import DistributedAdapter, PartAdapter
from fastdist.keras.trainer import trainer_of


class FitPosition:
    """Records the position of a `fit`, and lets another `fit` begin there.

    Args:
        iterator: Keras' iterator over batches, whose methods are replaced until `release`.
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


_NEVER = 1 << 62  # an epoch that no fit reaches


class _GeneratorState:
    """The random generator of a user's DataLoader."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._generator.set_state(state["generator"])


def _source(adapter: Any) -> Any:
    """Return the part of the data that has a state of its own; None without one."""
    if isinstance(adapter, DistributedAdapter):
        return adapter._dataset
    whole = adapter._whole if isinstance(adapter, PartAdapter) else adapter
    dataset = getattr(whole, "py_dataset", None)
    if has_state(dataset):
        return dataset
    generator = getattr(getattr(whole, "_dataloader", None), "generator", None)
    return None if generator is None else _GeneratorState(generator)


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
