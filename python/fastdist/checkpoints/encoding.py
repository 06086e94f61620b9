"""Encodes the results of `state_dict` as JSON and tensors, without pickle.

Dictionaries with ordinary string keys, lists, strings, numbers and None stay as they are in JSON.
Everything else is an object with one key that begins with "$". `{"$tensor": name}` is the tensor of
that name in the part's safetensors file. `{"$tensor": {"complex": name}}` is complex: the last axis
of that tensor has the real and the imaginary parts.
"""

from __future__ import annotations

import base64
import collections
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

_SCALARS = (str, int, bool, type(None))
_COMPLEX = (torch.complex128, torch.complex32)  # dtypes that safetensors does not have
_RESERVED = "__metadata__"  # safetensors' name for its metadata


class Encoder:
    """Turns one state into JSON, and collects its tensors.

    Their names are the path in the state, joined by dots; a flat state_dict keeps its names.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}

    def encode(self, value: Any, path: tuple[str, ...] = ()) -> Any:
        """Return JSON for a value."""
        kind = type(value)
        if kind in _SCALARS or (kind is float and math.isfinite(value)):
            return value
        if isinstance(value, torch.Tensor):
            return {"$tensor": self._add(value, path)}
        if kind is np.ndarray:
            return {"$array": self._add(torch.from_numpy(value.copy()), path)}
        if isinstance(value, Mapping):
            return self._encode_mapping(value, path)
        if kind is list:
            return self._encode_items(value, path)
        for name, of_kind, encode, _ in _LEAVES:
            if isinstance(value, of_kind):
                return {name: encode(value)}
        if kind is tuple or isinstance(value, torch.Size):
            return {"$tuple": self._encode_items(value, path)}
        if kind is set:
            return {"$set": self._encode_items(sorted(value, key=repr), path)}
        raise TypeError(
            f"{'.'.join(path)}: a checkpoint holds tensors, arrays, numbers, strings and "
            f"structures of them, got {kind.__module__}.{kind.__qualname__}"
        )

    def _encode_mapping(self, value: Mapping[Any, Any], path: tuple[str, ...]) -> Any:
        pairs = [(key, self.encode(item, (*path, str(key)))) for key, item in value.items()]
        is_counter = isinstance(value, collections.Counter)
        if not is_counter and all(type(key) is str and key[:1] != "$" for key, _ in pairs):
            return dict(pairs)
        encoded = [[self.encode(key, (*path, "key")), item] for key, item in pairs]
        return {"$counter" if is_counter else "$dict": encoded}

    def _encode_items(self, values: Any, path: tuple[str, ...]) -> list[Any]:
        return [self.encode(value, (*path, str(i))) for i, value in enumerate(values)]

    def _add(self, tensor: torch.Tensor, path: tuple[str, ...]) -> Any:
        """Collect a tensor, and return its reference."""
        if tensor.layout is not torch.strided:
            raise TypeError(
                f"{'.'.join(path)}: a checkpoint holds dense tensors, got {tensor.layout}; use "
                "to_dense()"
            )
        # These bits may be the only difference between two tensors of the same memory.
        tensor = tensor.detach().resolve_conj().resolve_neg()
        if tensor.dtype in _COMPLEX:
            return {"complex": self._name(torch.view_as_real(tensor), path)}
        return self._name(tensor, path)

    def _name(self, tensor: torch.Tensor, path: tuple[str, ...]) -> str:
        name = unique = ".".join(path) or "value"
        suffix = 1
        while unique in self.tensors or unique == _RESERVED:
            suffix += 1
            unique = f"{name}#{suffix}"
        if tensor.numel():
            where = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
            if (known := self._names.setdefault(where, unique)) != unique:
                return known
        self.tensors[unique] = tensor
        return unique


def decode(encoded: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """Return the value that `Encoder.encode` turned into JSON."""
    if isinstance(encoded, list):
        return [decode(item, tensors) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    mark = next(iter(encoded), "")
    if mark[:1] != "$":
        return {key: decode(item, tensors) for key, item in encoded.items()}
    content = encoded[mark]
    if mark in ("$tensor", "$array"):
        name = content["complex"] if isinstance(content, dict) else content
        if name not in tensors:
            raise ValueError(f"the tensor {name!r} is missing")
        tensor = tensors[name]
        if name is not content:
            tensor = torch.view_as_complex(tensor)
        return tensor if mark == "$tensor" else tensor.numpy().copy()
    if mark in _STRUCTURES:
        return _STRUCTURES[mark](decode(content, tensors))
    for leaf, _, _, make in _LEAVES:
        if mark == leaf:
            return make(content)
    raise ValueError(f"unknown marker {mark!r}")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"unknown dtype {name!r}")
    return found


_STRUCTURES: dict[str, Any] = {
    "$dict": dict,
    "$counter": lambda pairs: collections.Counter(dict(pairs)),
    "$tuple": tuple,
    "$set": set,
}
# Marker, type, encoding and decoding of leaves.
_LEAVES: tuple[tuple[str, Any, Any, Any], ...] = (
    ("$float", float, str, float),
    ("$complex", complex, lambda x: [str(x.real), str(x.imag)], lambda x: complex(*map(float, x))),
    ("$bytes", bytes, lambda x: base64.b64encode(x).decode(), base64.b64decode),
    ("$dtype", torch.dtype, lambda x: str(x).removeprefix("torch."), _dtype),
    ("$device", torch.device, str, torch.device),
    ("$number", np.generic, lambda x: [x.dtype.str, x.item()], lambda x: np.dtype(x[0]).type(x[1])),
)
