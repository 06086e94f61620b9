"""Variables and tables whose rows are on several servers, which are used concurrently."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

import fastdist._core as _core
from fastdist.ps.client.client import Client
from fastdist.ps.client.items import Item
from fastdist.ps.client.partition import Piece
from fastdist.ps.client.requests import Pending, no_result
from fastdist.ps.wire.frames import Array, to_floats, to_ids
from fastdist.ps.wire.protocol import UNKNOWN_STEP, Op
from fastdist.ps.wire.snapshot import Part
from fastdist.ps.wire.specs import DenseSpec, RowsSpec


@dataclass(frozen=True, slots=True)
class Pulled:
    """The value of a variable, or rows of a table.

    Attributes:
        value: float32; of the whole shape of a variable, or a row for each id.
        steps: for each piece, how many pushes the values have seen; for the push of their gradient.
            `UNKNOWN_STEP` for a table's pieces without ids.
    """

    value: Array
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Lookup:
    """A variable or rows to be pulled; see `begin_pulls`.

    Attributes:
        items: for each piece, what to read there.
        values: where it is put.
        places: for each id, the place of its row in `values`; None: they are in order.
    """

    items: list[list[Item]]
    values: Array
    places: Array | None = None

    def result(self) -> Pulled:
        """Return the values, once all items have been read."""
        values = self.values if self.places is None else self.values.take(self.places, 0)
        steps = (min((item.step for item in items), default=UNKNOWN_STEP) for items in self.items)
        return Pulled(values, tuple(steps))


class ShardedVariable:
    """A dense variable, cut along its first axis.

    Args:
        client: this thread's client.
        spec: the spec of the whole; servers know pieces by the variable's name and the first row.
        pieces: servers and rows.
        initial: float32, of the whole shape; None if the variable exists already.
    """

    def __init__(
        self, client: Client, spec: DenseSpec, pieces: Sequence[Piece], initial: Any = None
    ) -> None:
        self.spec = spec
        self.pieces = tuple(pieces)
        self._client = client
        self._wire = spec.wire_format()
        rows = None
        if initial is not None:
            rows = self._to_array(initial).reshape(self.pieces[-1].end, *spec.shape[1:])
        self._numbers = [
            client.create(
                piece.server,
                self._piece_spec(piece),
                None if rows is None else self._rows(rows, piece),
            )
            for piece in self.pieces
        ]

    def parts(self) -> list[tuple[int, int, Part]]:
        """Return the server, number and part of each piece, for checkpoints and commits."""
        name = self.spec.name
        return [
            (piece.server, number, Part(name, piece.begin, piece.end))
            for piece, number in zip(self.pieces, self._numbers, strict=True)
        ]

    def pull(self, out: Array | None = None) -> Array:
        """Return the value: float32, of the whole shape."""
        (pulled,) = begin_pulls(self._client, [self.lookup(out)]).result()
        return pulled.value

    def push(self, gradient: Any, lr: float | None = None) -> None:
        """Apply a gradient of the whole shape."""
        begin_changes(self._client, self.change(gradient, lr)).result()

    def assign(self, value: Any) -> None:
        """Set the value, of the whole shape."""
        self.begin_assign(value).result()

    def lookup(self, out: Array | None = None) -> Lookup:
        """Return what to read for the value.

        Args:
            out: destination, contiguous float32 of the whole shape; None allocates one.
        """
        value = self._output(out)
        return Lookup([item.cut() for item in self._split(value)], value)

    def change(
        self, gradient: Any, lr: float | None = None, step: int | Sequence[int] | None = None
    ) -> list[Item]:
        """Return what to send for a gradient.

        Args:
            gradient: the gradient, of the whole shape.
            lr: learning rate; None for the update rule's own, or if the round's commit sets it.
            step: the step of the value that the gradient was computed from: `Pulled.steps`, or one
                for all pieces; None if unknown.
        """
        items = self._split(self._to_array(gradient))
        for item, seen in zip(items, _steps(step, len(items)), strict=True):
            item.step, item.lr = seen, lr
        if self.spec.refuse_nonfinite:  # whole, so that no part of a gradient is applied
            return items
        return [part for item in items for part in item.cut()]

    def begin_assign(self, value: Any) -> Pending[None]:
        """Set the value, without waiting."""
        items = self._split(self._to_array(value))
        return _begin_assign(self._client, [part for item in items for part in item.cut()])

    def _output(self, out: Array | None) -> Array:
        """Return `out` after checking it, or a new array."""
        if out is None:
            return np.empty(self.spec.shape, np.float32)
        if out.shape != self.spec.shape or out.dtype != np.float32 or not out.flags.c_contiguous:
            raise ValueError(
                f"{self.spec.name!r}: out must be contiguous float32 of shape {self.spec.shape}, "
                f"got {out.dtype} of shape {out.shape}"
            )
        return out

    def _to_array(self, values: Any) -> Array:
        """Convert a value or gradient to contiguous float32, without a copy where possible."""
        array = to_floats(values)
        if array.shape != self.spec.shape and not (self.spec.shape == () and array.size == 1):
            raise ValueError(f"{self.spec.name!r} has shape {self.spec.shape}, got {array.shape}")
        return array

    def _split(self, values: Array) -> list[Item]:
        """Return the pieces of a value, as views."""
        rows = values.reshape(self.pieces[-1].end, *self.spec.shape[1:])
        return [
            Item(piece.server, number, self._rows(rows, piece), wire=self._wire)
            for piece, number in zip(self.pieces, self._numbers, strict=True)
        ]

    def _piece_spec(self, piece: Piece) -> DenseSpec:
        if len(self.pieces) == 1:
            return self.spec
        shape = (piece.end - piece.begin, *self.spec.shape[1:])
        return dataclasses.replace(self.spec, name=f"{self.spec.name}[{piece.begin}:]", shape=shape)

    @staticmethod
    def _rows(values: Array, piece: Piece) -> Array:
        return values[piece.begin : piece.end]


class ShardedRows:
    """A table of rows on several servers: by ranges of ids, or by their hash if ids have no limit.

    Args:
        client: this thread's client.
        spec: the spec of the whole.
        pieces: servers and rows; a table without a limit of rows uses only the servers.

    Attributes:
        client: this thread's client.
    """

    def __init__(self, client: Client, spec: RowsSpec, pieces: Sequence[Piece]) -> None:
        self.spec = spec
        self.pieces = tuple(pieces)
        self.client = client
        self._wire = spec.wire_format()
        if spec.rows is None:
            self._owners = _core.Owners(len(self.pieces))
        else:
            begins = [piece.begin for piece in self.pieces]
            self._owners = _core.Owners(len(self.pieces), begins, spec.rows)
        self._numbers = [
            client.create(piece.server, self._piece_spec(i)) for i, piece in enumerate(self.pieces)
        ]

    def parts(self) -> list[tuple[int, int, Part]]:
        """Return the server, number and part of each piece, for checkpoints and commits."""
        name, owners = self.spec.name, len(self.pieces)
        parts = []
        for i, (piece, number) in enumerate(zip(self.pieces, self._numbers, strict=True)):
            part = Part(name, piece.begin, piece.end)
            if self.spec.rows is None:
                part = Part(name, 0, -1, i, owners)
            parts.append((piece.server, number, part))
        return parts

    def pull(self, ids: Any) -> Array:
        """Return rows, float32 [ids, dim], in the order of the ids; repeated ids are sent once.

        Raises:
            IndexError: an id is beyond the table.
        """
        (pulled,) = begin_pulls(self.client, [self.lookup(ids)]).result()
        return pulled.value

    def push(self, ids: Any, gradients: Any, lr: float | None = None) -> None:
        """Apply gradients, [ids, dim]; gradients of equal ids are added up."""
        begin_changes(self.client, self.change(ids, gradients, lr)).result()

    def assign(self, ids: Any, values: Any) -> None:
        """Set rows, [ids, dim]; the last of equal ids wins."""
        items = [item for item in self._divide(ids, values) if item.values.size]
        _begin_assign(self.client, items).result()

    def change(
        self,
        ids: Any,
        gradients: Any,
        lr: float | None = None,
        step: int | Sequence[int] | None = None,
    ) -> list[Item]:
        """Return what to send for gradients; `lr`, `step` as for `ShardedVariable.change`."""
        # If an effect depends on the number of pushes, all pieces must count this one.
        to_all_pieces = self.spec.rule.counts_steps or self.spec.max_age
        items = self._divide(ids, gradients)
        for item, seen in zip(items, _steps(step, len(items)), strict=True):
            item.step, item.lr, item.wire = seen, lr, self._wire
        return [item for item in items if to_all_pieces or item.values.size]

    def lookup(self, ids: Any) -> Lookup:
        """Return what to read for ids; repeated ids are read once.

        Raises:
            IndexError: an id is beyond the table.
        """
        with self._naming_table():
            local, counts, places = self._owners.route_distinct(_flat(ids))
        rows = np.empty((local.size, self.spec.dim), np.float32)
        items = [
            self._item(piece, local[part], rows[part]).cut()
            for piece, part in enumerate(_slices(counts))
        ]
        return Lookup(items, rows, places)

    def _divide(self, ids: Any, values: Any) -> list[Item]:
        """Return the rows of each piece."""
        given, rows = _flat(ids), to_floats(values)
        if rows.size != given.size * self.spec.dim:
            raise ValueError(
                f"{self.spec.name!r}: {given.size} ids need values of shape "
                f"({given.size}, {self.spec.dim}), got {rows.shape}"
            )
        rows = rows.reshape(-1, self.spec.dim)
        with self._naming_table():
            local, counts, places = self._owners.route(given)
        if places is not None:
            rows = rows.take(places, 0)
        return [
            self._item(piece, local[part], rows[part]) for piece, part in enumerate(_slices(counts))
        ]

    def _item(self, piece: int, ids: Array, rows: Array) -> Item:
        return Item(self.pieces[piece].server, self._numbers[piece], rows, ids, self._wire)

    @contextmanager
    def _naming_table(self) -> Iterator[None]:
        """Add the table's name to errors."""
        try:
            yield
        except IndexError as error:
            raise IndexError(f"{self.spec.name!r}: {error}") from None

    def _piece_spec(self, number: int) -> RowsSpec:
        if len(self.pieces) == 1:
            return self.spec
        piece, name = self.pieces[number], self.spec.name
        if self.spec.rows is None:
            name = f"{name}[{number} of {len(self.pieces)}]"
            most = self.spec.max_rows and -(-self.spec.max_rows // len(self.pieces))
            return dataclasses.replace(self.spec, name=name, max_rows=most)
        return dataclasses.replace(
            self.spec,
            name=f"{name}[{piece.begin}:]",
            rows=piece.end - piece.begin,
            first_id=piece.begin,
        )


def begin_pulls(
    client: Client, lookups: Sequence[Lookup], changes: Sequence[Item] = ()
) -> Pending[list[Pulled]]:
    """Request values of variables and rows of tables, without waiting.

    Args:
        client: this thread's client.
        lookups: of variables and tables of this client.
        changes: gradients to apply before; see `begin_changes`.
    """
    items = [item for lookup in lookups for items in lookup.items for item in items]
    tickets = client.begin_change(changes, then_read=items)
    return Pending(client.wait, tickets, lambda replies: [lookup.result() for lookup in lookups])


def begin_changes(client: Client, items: Sequence[Item], round: int = 0) -> Pending[None]:
    """Send gradients, without waiting; see `Client.begin_change`.

    Args:
        client: this thread's client.
        items: what `change` of variables and tables of this client returned.
        round: 0 applies the gradients at once; otherwise they wait for the round's commit.
    """
    return Pending(client.wait, client.begin_change(items, round), no_result)


def _begin_assign(client: Client, items: Sequence[Item]) -> Pending[None]:
    for item in items:
        item.wire = None
    return Pending(client.wait, client.begin_change(items, op=Op.ASSIGN), no_result)


def _steps(step: int | Sequence[int] | None, pieces: int) -> Sequence[int]:
    """Return one step for each piece."""
    if step is None or isinstance(step, int):
        return [UNKNOWN_STEP if step is None else step] * pieces
    if len(step) != pieces:
        raise ValueError(f"step has {len(step)} numbers, there are {pieces} pieces")
    return step


def _flat(ids: Any) -> Array:
    return to_ids(ids).reshape(-1)


def _slices(counts: Sequence[int]) -> Iterator[slice]:
    begin = 0
    for count in counts:
        yield slice(begin, begin + count)
        begin += count
