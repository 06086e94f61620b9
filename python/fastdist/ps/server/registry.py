"""The variables and tables of a server, by number and by name."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import fastdist._core as _core
from fastdist.ps.wire.protocol import IDS, PART_SIZE, Entry, RestartedError
from fastdist.ps.wire.specs import DenseSpec, RowsSpec, Spec, to_json


class Registry:
    """Dense variables and tables of a server; one thread creates and clears, others may read.

    The high half of an object's number is the incarnation, chosen at random when the server starts:
    numbers from an earlier server at the same address never refer to this server's objects.
    """

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop all objects. Their numbers are never used again."""
        self._first = (1 + secrets.randbelow((1 << 32) - 1)) << 32  # the first object's number
        self._stored: list[tuple[Spec, Any]] = []
        self._numbers: dict[str, int] = {}

    def all(self) -> list[tuple[int, Spec, Any]]:
        """Return the number, spec and object of everything that is kept."""
        first = self._first
        return [(first + i, spec, stored) for i, (spec, stored) in enumerate(list(self._stored))]

    def create(self, spec: Spec, make: Callable[[], _core.DenseVariable | _core.RowTable]) -> int:
        """Return the number of the object of this name, which is made if there is none.

        Raises ValueError if there is one with another spec.
        """
        number = self._numbers.get(spec.name)
        if number is not None:
            known = self.find(number)[0]
            if to_json(known) != to_json(spec):
                raise ValueError(f"{spec.name!r} exists as {known}, got {spec}")
            return number
        self._stored.append((spec, make()))
        self._numbers[spec.name] = self._first + len(self._stored) - 1
        return self._numbers[spec.name]

    def find(self, number: int) -> tuple[Spec, Any]:
        """Return the spec and the object with this number.

        Raises RestartedError if an earlier server kept it, ValueError if it is unknown.
        """
        index = number - self._first
        if index < 0 or index >> 32:
            raise RestartedError(
                "the server was restarted, or serves another job, since these variables and tables "
                "were made, and no longer has them"
            )
        if index >= len(self._stored):
            raise ValueError(f"object {index} does not exist, there are {len(self._stored)}")
        return self._stored[index]

    def of_message(self, entries: Sequence[Entry], most: float) -> list[tuple[Spec, Any]]:
        """Return the objects that one message names."""
        if len(entries) > PART_SIZE:
            raise ValueError(f"{len(entries)} objects in a message, the limit is {PART_SIZE}")
        found: list[tuple[Spec, Any]] = []
        size = 0
        for entry in entries:
            spec, stored = self.find(entry.object)
            found.append((spec, stored))
            kind = RowsSpec if entry.begin == IDS else DenseSpec
            if not isinstance(spec, kind):
                raise ValueError(
                    f"{spec.name!r} is a {type(spec).__name__}, expected a {kind.__name__}"
                )
            if isinstance(spec, DenseSpec):
                size += entry.size
                if entry.begin + entry.size > spec.size:
                    raise ValueError(
                        f"{spec.name!r}: {entry.size} elements from {entry.begin} on, the "
                        f"variable has {spec.size}"
                    )
                if entry.begin % PART_SIZE:
                    raise ValueError(
                        f"{spec.name!r}: a range from {entry.begin} on, not a multiple of "
                        f"{PART_SIZE}"
                    )
        if size > most:
            raise ValueError(f"variables of {size} elements in a message, the limit is {most}")
        return found
