"""Pickles Keras models for workers object by object, with the variables they share.

Keras' own pickles are files of `model.save`, which cannot leave parameters on servers.
"""

from __future__ import annotations

from typing import Any

import keras

from fastdist.integrations.keras.internals import KerasSaveable, TrackedDict, TrackedList
from fastdist.ps.coordinator.shipping import Reduction, reducers

# Attributes that stay on the chief, besides the methods that a trainer replaces.
_OF_CHIEF = ("history", "train_function", "test_function", "predict_function")


def send_as_they_are(replaced: tuple[str, ...]) -> None:
    """Pickle Keras' objects one by one from now on.

    Args:
        replaced: the methods of a model that its trainer replaces on the chief.
    """
    left_out = frozenset((*_OF_CHIEF, *replaced))

    def reduce(thing: Any) -> Reduction | None:
        if isinstance(thing, KerasSaveable):
            state = vars(thing)
            if isinstance(thing, keras.Model):
                state = {name: value for name, value in state.items() if name not in left_out}
                state |= dict.fromkeys(_OF_CHIEF)
            return _hollow, (type(thing),), _unwound(state)
        if isinstance(thing, TrackedList):  # needs its tracker before its items
            return type(thing), (), None, iter(thing)
        if isinstance(thing, TrackedDict):
            return type(thing), (), None, None, iter(thing.items())
        return None

    reducers[:] = [reduce]


def _unwound(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state in an order in which deep models need no deep recursion.

    A model's layers come first, from input to output, and do not know which layers follow.
    """
    layers = {"_layers": state["_layers"]} if "_layers" in state else {}
    outbound: dict[str, Any] = {"_outbound_nodes": []} if "_outbound_nodes" in state else {}
    return layers | state | outbound


def _hollow(kind: type) -> Any:
    return object.__new__(kind)
