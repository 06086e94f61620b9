"""The states of Keras callbacks: their plain attributes, or what their `state_dict` returns."""

from __future__ import annotations

import collections
import copy
import hashlib
import inspect
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fastdist.checkpoints.checkpoint import has_state
from fastdist.collectives.communicator import Communicator
from fastdist.keras.internals import MonitorCallback

_OF_KERAS = ("params", "_model")
_ATOMS = (bool, int, float, complex, str, bytes, type(None))
State = dict[str, Any]


class CallbackStates:
    """The states of one replica's callbacks.

    Numbers, strings, arrays, tensors and structures of them are saved. Arguments of a callback's
    constructor, which the program gives again, are saved only if they have changed since.
    """

    def __init__(self, callbacks: Sequence[Any], params: Any) -> None:
        self._params = params  # of `set_params`, which is called again after restoring
        self._callbacks: dict[str, Any] = {}
        counts: collections.Counter[str] = collections.Counter()
        for callback in callbacks:
            kind = f"{type(callback).__module__}.{type(callback).__qualname__}"
            self._callbacks[f"{kind}#{counts[kind]}"] = callback
            counts[kind] += 1
        self._given = {name: _given(callback) for name, callback in self._callbacks.items()}

    def collect(self, workers: Communicator | None) -> list[dict[str, State]]:
        """Return the states of replica 0, and the other replicas' states that differ from them.

        Every replica must call.
        """
        own = {name: self._state(name) for name in self._callbacks}
        if workers is None:
            return [own]
        digests = {name: _digest(state) for name, state in own.items()}
        chief = workers.broadcast_object(digests)
        differing = {name: own[name] for name in own if digests[name] != chief.get(name)}
        return [own, *workers.all_gather_object(differing)[1:]]

    def restore(self, saved: Sequence[dict[str, State]], replica: int) -> None:
        """Restore the states of a replica's callbacks."""
        states = saved[0] | (saved[replica] if replica < len(saved) else {})
        for name, callback in self._callbacks.items():
            state = states.get(name)
            if state is None:
                continue
            if has_state(callback):
                callback.load_state_dict(state)
            else:
                is_set = "monitor_op" not in state  # of functions only None is saved
                if is_set and isinstance(callback, MonitorCallback) and not callback.monitor_op:
                    callback._set_monitor_op()  # changes the sign of min_delta, once
                vars(callback).update(state)
                callback.set_params(self._params)  # a progress bar's epochs, for one

    def _state(self, name: str) -> State:
        callback, given = self._callbacks[name], self._given[name]
        if has_state(callback):
            state: State = callback.state_dict()
            return state
        return {
            key: value
            for key, value in vars(callback).items()
            if key not in _OF_KERAS
            and _is_plain(value)
            and (key not in given or given[key] != _digest(value))
        }


class CallbackAttributes:
    """The attributes that callbacks have now, for another `fit` of the same callbacks.

    Keras' own do not all begin anew by themselves.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._found = [(each, dict(vars(each)), _copies(vars(each))) for each in callbacks]

    def restore(self) -> None:
        """Give the callbacks these attributes again: the same objects, unless they have changed."""
        for callback, objects, copies in self._found:
            changed = {n: v for n, v in copies.items() if _digest(v) != _digest(objects[n])}
            vars(callback).clear()
            vars(callback).update(objects | _copies(changed))


def _copies(attributes: State) -> State:
    return {name: copy.deepcopy(v) for name, v in attributes.items() if _is_plain(v)}


def _given(callback: Any) -> dict[str, bytes]:
    """Return the digests of the attributes named like an argument of the constructor."""
    names = inspect.signature(type(callback)).parameters
    return {
        name: _digest(value)
        for name, value in vars(callback).items()
        if name in names and _is_plain(value)
    }


def _digest(value: Any) -> bytes:
    return hashlib.sha256(pickle.dumps(value)).digest()


def _is_plain(value: Any) -> bool:
    """Return True for a value that a checkpoint returns as the same type."""
    kind = type(value)
    if kind in (list, tuple, set):
        return all(map(_is_plain, value))
    if kind in (dict, collections.Counter):
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    if kind is np.ndarray or isinstance(value, np.generic):
        return value.dtype.kind in "biufc" and value.dtype.isnative
    return kind in _ATOMS or (kind is torch.Tensor and value.layout is torch.strided)
