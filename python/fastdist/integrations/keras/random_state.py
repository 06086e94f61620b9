"""The state of all random generators that a `fit` may draw from."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from fastdist.integrations.keras.internals import get_global_attribute, global_seed_generator
from fastdist.integrations.keras.trainer import trainer_of


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
