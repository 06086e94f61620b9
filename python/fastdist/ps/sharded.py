"""Variables and tables whose rows are on several servers; all of them are asked at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastdist.ps.client import Client, Ticket
from fastdist.ps.frames import Array, floats_frame, floats_in, ids_frame
from fastdist.ps.partition import Piece
from fastdist.ps.protocol import Op
from fastdist.ps.snapshot import Part
from fastdist.ps.specs import DenseSpec, RowsSpec
from fastdist.ps.spread import owner_of


class ShardedVariable:
    """A dense variable, cut along its first axis.

    Args:
        client: of this thread.
        spec: of the whole; servers know pieces by its name and their first row.
        pieces: where its rows are.
        initial: float32, of the whole shape; None: it exists already.
    """

    def __init__(
        self, client: Client, spec: DenseSpec, pieces: Sequence[Piece], initial: Any = None
    ) -> None:
        self.spec = spec
        self.pieces = tuple(pieces)
        self._client = client
        value = None if initial is None else self._whole(initial)
        self._numbers = [
            client.create(piece.server, self._part_of(piece), self._rows(value, piece))
            for piece in self.pieces
        ]

    def parts(self) -> list[tuple[int, int, Part]]:
        """For a checkpoint: each piece's server, its number there, and what it is."""
        name = self.spec.name
        return [
            (piece.server, number, Part(name, piece.begin, piece.end))
            for piece, number in zip(self.pieces, self._numbers, strict=True)
        ]

    def pull(self) -> Array:
        """The value: float32, of the whole shape."""
        out = np.empty((self._length, *self.spec.shape[1:]), np.float32)
        for ticket, piece in zip(self._each(Op.PULL), self.pieces, strict=True):
            part = out[piece.begin : piece.end]
            part[...] = floats_in(self._client.wait(ticket), part.shape)
        return out.reshape(self.spec.shape)

    def push(self, gradient: Any, lr: float | None = None) -> None:
        """Apply a gradient of the whole shape."""
        for ticket in self._each(Op.PUSH, self._whole(gradient), lr):
            self._client.wait(ticket)

    def assign(self, value: Any) -> None:
        """Set the value, of the whole shape."""
        for ticket in self._each(Op.ASSIGN, self._whole(value)):
            self._client.wait(ticket)

    @property
    def _length(self) -> int:
        return self.pieces[-1].end

    def _whole(self, values: Any) -> Array:
        array = floats_frame(values)
        if array.shape != self.spec.shape and not (self.spec.shape == () and array.size == 1):
            raise ValueError(f"{self.spec.name!r} has shape {self.spec.shape}, got {array.shape}")
        return array.reshape(self._length, *self.spec.shape[1:])

    def _part_of(self, piece: Piece) -> DenseSpec:
        if len(self.pieces) == 1:
            return self.spec
        shape = (piece.end - piece.begin, *self.spec.shape[1:])
        return dataclasses.replace(self.spec, name=f"{self.spec.name}[{piece.begin}:]", shape=shape)

    def _rows(self, values: Array | None, piece: Piece) -> Array | None:
        return None if values is None else values[piece.begin : piece.end]

    def _each(self, op: Op, values: Array | None = None, lr: float | None = None) -> list[Ticket]:
        tickets = []
        for piece, number in zip(self.pieces, self._numbers, strict=True):
            part = self._rows(values, piece)
            frames = [] if part is None else [part]
            tickets.append(self._client.submit(piece.server, op, number, frames, lr))
        return tickets


class ShardedRows:
    """A table of rows on several servers: ranges of ids, or, without a limit, ids by their hash.

    Args:
        client: of this thread.
        spec: of the whole.
        pieces: where rows are; of a table without a limit only their servers count.
    """

    def __init__(self, client: Client, spec: RowsSpec, pieces: Sequence[Piece]) -> None:
        self.spec = spec
        self.pieces = tuple(pieces)
        self._client = client
        self._begins = np.array([piece.begin for piece in self.pieces], np.int64)
        self._numbers = [
            client.create(piece.server, self._part_of(i)) for i, piece in enumerate(self.pieces)
        ]

    def parts(self) -> list[tuple[int, int, Part]]:
        """For a checkpoint: each piece's server, its number there, and what it is."""
        name, owners = self.spec.name, len(self.pieces)
        parts = []
        for i, (piece, number) in enumerate(zip(self.pieces, self._numbers, strict=True)):
            part = Part(name, piece.begin, piece.end)
            if self.spec.rows is None:
                part = Part(name, 0, -1, i, owners)
            parts.append((piece.server, number, part))
        return parts

    def pull(self, ids: Any) -> Array:
        """Rows, float32 [ids, dim], in the order of the ids; each is fetched once.

        Raises:
            IndexError: an id beyond the table.
        """
        unique, inverse = np.unique(self._checked(ids), return_inverse=True)
        rows = np.empty((unique.size, self.spec.dim), np.float32)
        parts = self._split(unique)
        tickets = [self._send(Op.PULL_ROWS, i, [local]) for i, local, _ in parts]
        for ticket, (_, local, places) in zip(tickets, parts, strict=True):
            rows[places] = floats_in(self._client.wait(ticket), (local.size, self.spec.dim))
        return rows[inverse.reshape(-1)]

    def push(self, ids: Any, gradients: Any, lr: float | None = None) -> None:
        """Apply gradients, [ids, dim]; those of equal ids are added up."""
        self._change(Op.PUSH_ROWS, ids, gradients, lr)

    def assign(self, ids: Any, values: Any) -> None:
        """Set rows, [ids, dim]; of equal ids the last counts."""
        self._change(Op.ASSIGN_ROWS, ids, values, None)

    def _change(self, op: Op, ids: Any, values: Any, lr: float | None) -> None:
        checked, rows = self._checked(ids), floats_frame(values)
        if rows.size != checked.size * self.spec.dim:
            raise ValueError(
                f"{self.spec.name!r}: {checked.size} ids need values of shape "
                f"({checked.size}, {self.spec.dim}), got {rows.shape}"
            )
        rows = rows.reshape(-1, self.spec.dim)
        tickets = [
            self._send(op, i, [local, rows[places]], lr)
            for i, local, places in self._split(checked)
        ]
        for ticket in tickets:
            self._client.wait(ticket)

    def _send(self, op: Op, piece: int, frames: Sequence[Array], lr: float | None = None) -> Ticket:
        server, number = self.pieces[piece].server, self._numbers[piece]
        return self._client.submit(server, op, number, frames, lr)

    def _checked(self, ids: Any) -> Array:
        array = ids_frame(ids).reshape(-1).view(np.int64)
        limit = self.spec.rows
        if limit is not None and array.size and (array.min() < 0 or array.max() >= limit):
            bad = array[(array < 0) | (array >= limit)][0]
            raise IndexError(f"row {bad} of {self.spec.name!r}, which has {limit} rows")
        return array

    def _split(self, ids: Array) -> list[tuple[int, Array, slice | Array]]:
        """For each piece that has any: its number, ids as it knows them, their places among all."""
        if len(self.pieces) == 1:
            return [(0, ids, slice(None))] if ids.size else []
        if self.spec.rows is None:
            owner = owner_of(ids, len(self.pieces))
        else:
            owner = np.searchsorted(self._begins, ids, "right") - 1
        parts: list[tuple[int, Array, slice | Array]] = []
        for i, begin in enumerate(self._begins):
            places = np.flatnonzero(owner == i)
            if places.size:
                local = ids[places] if self.spec.rows is None else ids[places] - begin
                parts.append((i, local, places))
        return parts

    def _part_of(self, number: int) -> RowsSpec:
        if len(self.pieces) == 1:
            return self.spec
        piece, name = self.pieces[number], self.spec.name
        if self.spec.rows is None:
            return dataclasses.replace(self.spec, name=f"{name}[{number} of {len(self.pieces)}]")
        rows = piece.end - piece.begin
        return dataclasses.replace(self.spec, name=f"{name}[{piece.begin}:]", rows=rows)
