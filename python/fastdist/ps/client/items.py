"""Items, which clients read and change, many in one message; and requests that have been sent."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import fastdist._core as _core
from fastdist.link.connections import Connection
from fastdist.ps.wire.protocol import (
    IDS,
    PART_SIZE,
    SMALL_SIZE,
    Array,
    Entry,
    Header,
    Kinds,
    Op,
    extents_of,
    pack_names,
)


@dataclass(slots=True)
class Item:
    """Elements of a dense variable on one server, or rows of a table there.

    Attributes:
        server: its number.
        number: the object's number on that server.
        values: contiguous float32: where to put what is read, or the gradient.
        ids: the rows, contiguous 64-bit integers; None for a dense variable.
        wire: encoding of the values; None for float32.
        lr: learning rate of a gradient; None for the update rule's own.
        begin: the first of the elements of a dense variable.
    """

    server: int
    number: int
    values: Array
    ids: Array | None = None
    wire: _core.WireFormat | None = None
    lr: float | None = None
    begin: int = 0

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
        if item.ids is None and (item.values.size > SMALL_SIZE or item.begin > 0):
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
    entries = []
    for item in items:
        lr = math.nan if item.lr is None else item.lr
        size, begin = (item.values.size, item.begin) if item.ids is None else (item.ids.size, IDS)
        entries.append(Entry(item.number, lr, size, begin))
    return pack_names(entries, [item.ids.data for item in items if item.ids is not None])


def values_of(items: Sequence[Item]) -> Array:
    """Return the frame of the items' values; a single value is not copied."""
    if len(items) == 1 and items[0].wire is None:
        return items[0].values
    extents, size = extents_of(_kinds(items))
    frame = np.zeros(size, np.uint8)
    for item, extent in zip(items, extents, strict=True):
        if item.wire is None:
            frame[extent].view(np.float32)[...] = item.values.reshape(-1)
        else:
            item.wire.encode(item.values, frame[extent])
    return frame


def memory_of(items: Sequence[Item], nbytes: int) -> list[memoryview] | None:
    """Return where a reply of so many bytes can be received as it is; None if nowhere."""
    if any(item.wire is not None for item in items):
        return None
    places = [item.values.reshape(-1).view(np.uint8).data for item in items]
    return places if sum(place.nbytes for place in places) == nbytes else None


def fill(items: Sequence[Item], reply: memoryview) -> None:
    """Store a reply in the items' values; raise ValueError if its size is wrong."""
    extents, size = extents_of(_kinds(items))
    if reply.nbytes != size:
        raise ValueError(f"expected {len(items)} values in {size} bytes, got {reply.nbytes}")
    data = np.frombuffer(reply, np.uint8)
    for item, extent in zip(items, extents, strict=True):
        if item.wire is None:
            item.values.reshape(-1).view(np.uint8)[...] = data[extent]
        else:
            item.wire.decode(data[extent], item.values)


def _kinds(items: Sequence[Item]) -> Kinds:
    return [(item.values.shape, item.wire) for item in items]


@dataclass(slots=True)
class Ticket:
    """A request in flight, to be passed to `Client.wait` or `wait_all`.

    The memory that `frames` refers to must not change until the ticket has been waited for: the
    request may be sent again.

    Attributes:
        timeout_s: seconds for which the server may stay silent.
        began: the time of the first send, on the monotonic clock.
        resend_at: the time to send the request again; infinity: when a new connection is made.
        destination: the items that take the values of the reply; None: `wait` returns it.
        arrives_at: the connection over which the reply is being received there.
        sendings: the number of times it was sent.
        asked_anew: True if it waits for one more connection.
        was_busy: True if the server was too busy to reply; it has made the request's changes.
    """

    server: int
    op: Op
    header: Header
    frames: Sequence[Any]
    nbytes: int
    timeout_s: float
    began: float
    destination: Sequence[Item] | None = None
    resend_at: float = math.inf
    reply: memoryview | None = None  # unless it goes to the destination
    error: Exception | None = None
    is_done: bool = False
    asked_anew: bool = False
    was_busy: bool = False
    sendings: int = 0
    arrives_at: Connection | None = None

    def abandon(self) -> None:
        """Leave the memory for the reply alone from now on."""
        self.destination = None
        if self.arrives_at is not None and not self.is_done:
            self.arrives_at.lose()  # what is left of the reply would go there
