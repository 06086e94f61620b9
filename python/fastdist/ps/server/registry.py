"""What a server keeps, by number and by name."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from typing import Any

import fastdist._core as _core
from fastdist.ps.wire.batches import SMALL_SIZE
from fastdist.ps.wire.frames import Array
from fastdist.ps.wire.parts import PART_SIZE
from fastdist.ps.wire.protocol import RestartedError
from fastdist.ps.wire.specs import DenseSpec, RowsSpec, Spec, to_json

_INDEX_BITS = 32


class Objects:
    """Dense variables and tables. Safe for several threads.

    The high half of a number is chance, chosen when the server begins: what was kept by one that
    ran at the same address before is never taken for what this one keeps.
    """

    def __init__(self) -> None:
        self._creating = threading.Lock()
        self.clear()

    def clear(self) -> None:
        """Drop everything; numbers that were given out are never used again."""
        with self._creating:
            self._incarnation = secrets.randbelow((1 << 32) - 1) + 1
            self._kept: list[tuple[Spec, Any]] = []
            self._numbers: dict[str, int] = {}

    def all(self) -> list[tuple[int, Spec, Any]]:
        """Numbers, specs, and what was made of them."""
        first = self._incarnation << _INDEX_BITS
        return [(first | i, spec, kept) for i, (spec, kept) in enumerate(list(self._kept))]

    def create(self, spec: Spec, make: Callable[[], _core.DenseVariable | _core.RowTable]) -> int:
        """Make what does not exist yet.

        Returns:
            Its number.

        Raises:
            ValueError: it exists with another spec.
        """
        with self._creating:
            number = self._numbers.get(spec.name)
            if number is not None:
                known = self.find(number)[0]
                if to_json(known) != to_json(spec):
                    raise ValueError(f"{spec.name!r} exists as {known}, got {spec}")
                return number
            self._kept.append((spec, make()))
            number = self._incarnation << _INDEX_BITS | len(self._kept) - 1
            self._numbers[spec.name] = number
            return number

    def find(self, number: int) -> tuple[Spec, Any]:
        """Spec and object.

        Raises:
            RestartedError: it was kept by a server before this one.
            ValueError: there is none.
        """
        self.require_same(number)
        index = number & (1 << _INDEX_BITS) - 1
        if index >= len(self._kept):
            raise ValueError(f"object {index} does not exist, there are {len(self._kept)}")
        return self._kept[index]

    def require_same(self, number: int) -> None:
        """Raise unless a number was given by this server.

        Raises:
            RestartedError: it was another one.
        """
        if number >> _INDEX_BITS != self._incarnation:
            raise RestartedError(
                "the server has been started again, or serves another job, since these variables "
                "and tables were made, and keeps nothing of them"
            )

    def dense(self, number: int) -> tuple[DenseSpec, _core.DenseVariable]:
        """A dense variable.

        Raises:
            ValueError: it is none.
        """
        spec, kept = self.find(number)
        if not isinstance(spec, DenseSpec):
            raise ValueError(f"{spec.name!r} is a RowsSpec, expected a DenseSpec")
        return spec, kept

    def small(self, numbers: Array) -> list[tuple[DenseSpec, _core.DenseVariable]]:
        """Dense variables that one message is about.

        Raises:
            ValueError: one is none, or larger than `SMALL_SIZE`, or all are than `PART_SIZE`.
        """
        if numbers.size > PART_SIZE:
            raise ValueError(f"{numbers.size} variables in a message, allowed are {PART_SIZE}")
        found, size = [], 0
        for number in numbers.tolist():
            spec, variable = self.dense(number)
            if spec.size > SMALL_SIZE:
                raise ValueError(
                    f"{spec.name!r} of {spec.size} elements in a message of several variables, "
                    f"which takes those of up to {SMALL_SIZE}"
                )
            size += spec.size
            if size > PART_SIZE:
                raise ValueError(f"variables of over {PART_SIZE} elements in one message")
            found.append((spec, variable))
        return found

    def rows(self, number: int) -> tuple[RowsSpec, _core.RowTable]:
        """A table of rows.

        Raises:
            ValueError: it is none.
        """
        spec, kept = self.find(number)
        if not isinstance(spec, RowsSpec):
            raise ValueError(f"{spec.name!r} is a DenseSpec, expected a RowsSpec")
        return spec, kept
