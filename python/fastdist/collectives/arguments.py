"""Checks of arguments that users pass; errors name the argument."""

from __future__ import annotations

from operator import index
from typing import Any

_END = 1 << 63


def to_integer(value: Any, argument: str) -> int:
    """Convert to an integer of 64 bits."""
    try:
        integer = index(value)
    except TypeError:
        raise TypeError(f"{argument} must be an integer, got {value!r}") from None
    if not -_END <= integer < _END:
        raise ValueError(f"{argument} must fit in 64 bits, got {value!r}")
    return integer


def to_integers(values: Any, argument: str) -> list[int]:
    """Convert to a list of integers of 64 bits."""
    try:
        integers = [index(value) for value in values]
    except TypeError:
        raise TypeError(f"{argument} must be integers, got {values!r}") from None
    if not all(-_END <= integer < _END for integer in integers):
        raise ValueError(f"{argument} must fit in 64 bits, got {values!r}")
    return integers


def to_rank(value: Any, argument: str, size: int, this: int | None = None) -> int:
    """Convert to a rank below `size`, which must differ from `this` if that is given."""
    expected = f"{argument} must be an integer from 0 to {size - 1}"
    if this is not None:
        expected += f", but not this rank, {this}"
    try:
        rank = index(value)
    except TypeError:
        raise TypeError(f"{expected}, got {value!r}") from None
    if not 0 <= rank < size or rank == this:
        raise ValueError(f"{expected}, got {value!r}")
    return rank


def check_timeout(timeout: Any) -> None:
    """Raise unless `timeout` is a valid number of seconds to wait."""
    expected = "timeout must be a positive number of seconds"
    try:
        is_good = timeout > 0
    except TypeError:
        raise TypeError(f"{expected}, got {timeout!r}") from None
    if not is_good:
        raise ValueError(f"{expected}, got {timeout!r}")
