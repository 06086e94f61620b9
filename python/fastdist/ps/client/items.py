"""Items, which clients read and change: rows and ranges of dense values, many in one message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

import fastdist._core as _core
from fastdist.ps.wire.batches import (
    PART_SIZE,
    SMALL_SIZE,
    Entry,
    Kinds,
    extents_of,
    pack_names,
    pack_values,
    split_steps,
)
from fastdist.ps.wire.frames import Array, decode_floats_into
from fastdist.ps.wire.protocol import UNKNOWN_STEP


@dataclass(slots=True)
class Item:
    """Elements of a dense variable on one server, or rows of a table there.

    Attributes:
        server: its number.
        number: the object's number on that server.
        values: contiguous float32: where to put what is read, or the gradient.
        ids: the rows, contiguous 64-bit integers; None for a dense variable.
        wire: encoding of the values; None for float32.
        step: how many pushes it has seen: when it was read, or, with a gradient, when the value was
            read that the gradient was computed from.
        lr: learning rate of a gradient; None for the update rule's own.
        begin: the first of the elements of a dense variable.

    Examples:
        >>> import numpy as np
        >>> from fastdist import ps
        >>> server = ps.Server()
        >>> client = ps.Client([server.address])
        >>> table = client.create(0, ps.RowsSpec("t", 2, ps.RuleSpec("SGD", {"lr": 0.5})))
        >>> item = ps.Item(0, table, np.ones((1, 2), np.float32), np.array([7]))
        >>> for ticket in client.begin_change([item]):
        ...     _ = client.wait(ticket)
        >>> client.pull_rows(0, table, [7], 2)
        array([[-0.5, -0.5]], dtype=float32)
        >>> client.close()
        >>> server.close()
    """

    server: int
    number: int
    values: Array
    ids: Array | None = None
    wire: _core.WireFormat | None = None
    step: int = UNKNOWN_STEP
    lr: float | None = None
    begin: int = 0

    @property
    def is_large(self) -> bool:
        """True for dense elements that do not share messages."""
        return self.ids is None and (self.values.size > SMALL_SIZE or self.begin > 0)

    def entry(self) -> Entry:
        """Return what a message says of the item."""
        lr = math.nan if self.lr is None else self.lr
        if self.ids is None:
            return Entry(self.number, self.step, lr, self.values.size, self.begin)
        return Entry(self.number, self.step, lr, self.ids.size)

    def cut(self) -> list[Item]:
        """Return items of up to a message each."""
        if self.ids is None:
            flat = self.values.reshape(-1)
            begins = range(0, max(1, flat.size), PART_SIZE)
            return [replace(self, values=flat[b : b + PART_SIZE], begin=b) for b in begins]
        most = max(1, PART_SIZE // max(1, self.values.shape[1]))
        pieces = [slice(begin, begin + most) for begin in range(0, self.ids.size, most)]
        return [replace(self, values=self.values[p], ids=self.ids[p]) for p in pieces]


def messages_of(items: Sequence[Item]) -> list[list[Item]]:
    """Group items by server, and by the size of a message.

    Large items are messages alone: grouping them would take a copy.
    """
    last: dict[int, list[Item]] = {}  # the last group of each server
    room: dict[int, int] = {}  # the elements that it may still take
    messages = []
    for item in items:
        if item.is_large:
            messages.append([item])
            continue
        if item.values.size > room.get(item.server, -1):
            last[item.server], room[item.server] = [], PART_SIZE
            messages.append(last[item.server])
        last[item.server].append(item)
        room[item.server] -= item.values.size
    return messages


def names_of(items: Sequence[Item]) -> bytes:
    """Return the frame that names what a message reads or changes."""
    ids = [item.ids.data for item in items if item.ids is not None]
    return pack_names([item.entry() for item in items], ids)


def values_of(items: Sequence[Item]) -> Array:
    """Return the frame of the items' values."""
    return pack_values([item.values for item in items], _kinds(items))


class Destination:
    """The memory that the reply to a READ goes to: the items' values and steps.

    Args:
        items: what the message reads.
    """

    def __init__(self, items: Sequence[Item]) -> None:
        self._items = items
        self._steps = bytearray(8 * len(items))

    def memory(self, nbytes: int) -> list[memoryview] | None:
        """Return where a reply of so many bytes can be received as it is; None if nowhere."""
        if any(item.wire is not None for item in self._items):
            return None
        values = (item.values.reshape(-1).view(np.uint8).data for item in self._items)
        places = [memoryview(self._steps), *values]
        return places if sum(place.nbytes for place in places) == nbytes else None

    def store(self, reply: memoryview | None) -> None:
        """Store a reply; None if it was received in `memory`.

        Raises:
            ValueError: the reply has another size than these values take.
        """
        steps, body = split_steps(
            memoryview(self._steps) if reply is None else reply, len(self._items)
        )
        if reply is not None:
            self._decode(body)
        for item, step in zip(self._items, steps, strict=True):
            item.step = step

    def _decode(self, body: memoryview) -> None:
        extents, size = extents_of(_kinds(self._items))
        if body.nbytes != size:
            raise ValueError(
                f"expected {len(self._items)} values in {size} bytes, got {body.nbytes}"
            )
        for item, extent in zip(self._items, extents, strict=True):
            decode_floats_into(item.values, body[extent], item.wire)


def _kinds(items: Sequence[Item]) -> Kinds:
    return [(item.values.shape, item.wire) for item in items]
