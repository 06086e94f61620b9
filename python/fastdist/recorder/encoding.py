"""Encodes observations as JSON, and decodes them by the types of their fields; also in files."""

from __future__ import annotations

import contextlib
import functools
import json
import types
import typing
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar, cast

_T = TypeVar("_T")


def encode(value: Any) -> str:
    """Encode dataclasses of dataclasses, tuples, paths, enums, numbers and texts."""
    return json.dumps(value, default=_plain)


def decode(kind: type[_T], text: str | bytes) -> _T:
    """Decode the output of `encode`; raise ValueError if the text is no value of this class."""
    try:
        found: _T = _typed(kind, json.loads(text))
        return found
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def write(path: Path, value: Any) -> None:
    """Write a value that `encode` takes to a file, if there is memory for it."""
    with contextlib.suppress(OSError):
        path.write_text(encode(value), "utf-8")


def read(kind: type[_T], path: Path) -> _T | None:
    """Read a value of this class from a file of `write`; None if it is not there."""
    try:
        return decode(kind, path.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return [getattr(value, name) for name in _types_of(value.__class__)]


def _typed(kind: Any, value: Any) -> Any:
    parts = typing.get_args(kind)
    if isinstance(kind, types.UnionType):  # with None
        return None if value is None else _typed(parts[0], value)
    if typing.get_origin(kind) is tuple:
        values = _checked(list, value)
        hints = parts[:1] * len(values) if parts[-1] is ... else parts
        return tuple(_typed(hint, each) for hint, each in zip(hints, values, strict=True))
    if typing.get_origin(kind) is dict:
        return {name: _typed(parts[1], each) for name, each in _checked(dict, value).items()}
    if is_dataclass(kind):
        hints = tuple(_types_of(cast(type, kind)).values())
        return cast(type, kind)(*_typed(types.GenericAlias(tuple, hints), value))
    if issubclass(kind, Enum | Path):
        return kind(value)
    if kind is float and type(value) is int:
        return float(value)
    return _checked(kind, value)


def _checked(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"expected {kind.__name__}, got {type(value).__name__}")
    return value


@functools.cache
def _types_of(kind: type[Any]) -> dict[str, Any]:
    """Return the types of a dataclass's fields, in their order."""
    hints = typing.get_type_hints(kind)
    return {each.name: hints[each.name] for each in fields(kind)}
