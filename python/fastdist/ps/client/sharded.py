"""Variables and tables whose rows are on several servers; all of them are asked at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import fastdist._core as _core
from fastdist.ps.client.client import Client
from fastdist.ps.client.partition import Piece
from fastdist.ps.client.requests import Pending
from fastdist.ps.client.ticket import Ticket
from fastdist.ps.wire.frames import Array, encoded, fill, floats_frame, ids_frame
from fastdist.ps.wire.protocol import UNKNOWN_STEP, Op
from fastdist.ps.wire.snapshot import Part
from fastdist.ps.wire.specs import DenseSpec, RowsSpec


@dataclass(frozen=True, slots=True)
class DensePiece:
    """What one server keeps of a dense variable.

    Attributes:
        server: that keeps it.
        number: of it there.
        values: of the piece, a view of those of the whole.
        wire: how they travel; None for float32.
    """

    server: int
    number: int
    values: Array
    wire: _core.WireFormat | None


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
        self._wire = spec.wire_format()
        rows = None
        if initial is not None:
            rows = self.whole(initial).reshape(self.pieces[-1].end, *spec.shape[1:])
        self._numbers = [
            client.create(
                piece.server,
                self._part_of(piece),
                None if rows is None else self._rows(rows, piece),
            )
            for piece in self.pieces
        ]

    def parts(self) -> list[tuple[int, int, Part]]:
        """For a checkpoint: each piece's server, its number there, and what it is."""
        name = self.spec.name
        return [
            (piece.server, number, Part(name, piece.begin, piece.end))
            for piece, number in zip(self.pieces, self._numbers, strict=True)
        ]

    def pull(self, out: Array | None = None) -> Array:
        """The value: float32, of the whole shape."""
        return self.begin_pull(out).result()

    def push(self, gradient: Any, lr: float | None = None) -> None:
        """Apply a gradient of the whole shape."""
        self.begin_push(gradient, lr).result()

    def assign(self, value: Any) -> None:
        """Set the value, of the whole shape."""
        self.begin_assign(value).result()

    def begin_pull(self, out: Array | None = None) -> Pending[Array]:
        """As `pull`, without waiting.

        Args:
            out: float32, contiguous, of the whole shape: where the value is to be.
        """
        value = self.room(out)
        tickets = [
            self._client.begin_pull(piece.server, piece.number, piece.values, piece.wire)
            for piece in self.cut(value)
        ]
        return Pending(self._client, tickets, lambda replies: value)

    def begin_push(
        self,
        gradient: Any,
        lr: float | None = None,
        *,
        round: int = 0,
        step: int | Sequence[int] | None = None,
    ) -> Pending[None]:
        """As `push`, without waiting.

        Args:
            gradient: of the whole shape.
            lr: learning rate; None for the update rule's own, or where a round's commit says it.
            round: 0: apply it at once; otherwise keep it until the round is committed.
            step: of the value that it was computed from: `Pending.steps` of the pull, or one for
                all pieces; None: unknown.
        """
        steps = _steps(step, len(self.pieces))
        tickets = [
            self.begin_push_piece(piece, lr, round, seen)
            for piece, seen in zip(self.cut(self.whole(gradient)), steps, strict=True)
        ]
        return Pending(self._client, tickets, _nothing)

    def begin_push_piece(
        self, piece: DensePiece, lr: float | None, round: int, step: int
    ) -> list[Ticket]:
        """Send one piece's gradient."""
        return self._client.begin_push(
            piece.server,
            piece.number,
            piece.values,
            lr,
            round=round,
            step=step,
            wire=piece.wire,
            in_parts=not self.spec.refuse_nonfinite,
        )

    def begin_assign(self, value: Any) -> Pending[None]:
        """As `assign`, without waiting."""
        tickets = [
            self._client.submit(piece.server, Op.ASSIGN, piece.number, [piece.values])
            for piece in self.cut(self.whole(value))
        ]
        return Pending(self._client, [tickets], _nothing)

    def room(self, out: Array | None) -> Array:
        """Where a value is to be: `out`, or new memory."""
        if out is None:
            return np.empty(self.spec.shape, np.float32)
        if out.shape != self.spec.shape or out.dtype != np.float32 or not out.flags.c_contiguous:
            raise ValueError(
                f"{self.spec.name!r}: out must be contiguous float32 of shape {self.spec.shape}, "
                f"got {out.dtype} of shape {out.shape}"
            )
        return out

    def whole(self, values: Any) -> Array:
        """A value or gradient as contiguous float32; a copy unless it is that."""
        array = floats_frame(values)
        if array.shape != self.spec.shape and not (self.spec.shape == () and array.size == 1):
            raise ValueError(f"{self.spec.name!r} has shape {self.spec.shape}, got {array.shape}")
        return array

    def cut(self, values: Array) -> list[DensePiece]:
        """The pieces of a value: views of it."""
        rows = values.reshape(self.pieces[-1].end, *self.spec.shape[1:])
        return [
            DensePiece(piece.server, number, self._rows(rows, piece), self._wire)
            for piece, number in zip(self.pieces, self._numbers, strict=True)
        ]

    def _part_of(self, piece: Piece) -> DenseSpec:
        if len(self.pieces) == 1:
            return self.spec
        shape = (piece.end - piece.begin, *self.spec.shape[1:])
        return dataclasses.replace(self.spec, name=f"{self.spec.name}[{piece.begin}:]", shape=shape)

    @staticmethod
    def _rows(values: Array, piece: Piece) -> Array:
        return values[piece.begin : piece.end]


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
        self._wire = spec.wire_format()
        if spec.rows is None:
            self._owners = _core.Owners(len(self.pieces))
        else:
            begins = [piece.begin for piece in self.pieces]
            self._owners = _core.Owners(len(self.pieces), begins, spec.rows)
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
        return self.begin_pull(ids).result()

    def push(self, ids: Any, gradients: Any, lr: float | None = None) -> None:
        """Apply gradients, [ids, dim]; those of equal ids are added up."""
        self.begin_push(ids, gradients, lr).result()

    def assign(self, ids: Any, values: Any) -> None:
        """Set rows, [ids, dim]; of equal ids the last counts."""
        self._change(Op.ASSIGN_ROWS, ids, values).result()

    def begin_pull(self, ids: Any) -> Pending[Array]:
        """As `pull`, without waiting."""
        with self._named():
            local, counts, places = self._owners.route_distinct(_flat(ids))
        rows = np.empty((local.size, self.spec.dim), np.float32)
        tickets: list[list[Ticket]] = []
        for piece, part in enumerate(_slices(counts)):
            frames = [local[part]]
            asked = part.start < part.stop
            tickets.append(
                [self._send(Op.PULL_ROWS, piece, frames, take=self._into(rows[part]))]
                if asked
                else []
            )

        def finish(replies: list[memoryview]) -> Array:
            return rows if places is None else rows.take(places, 0)

        return Pending(self._client, tickets, finish)

    def begin_push(
        self,
        ids: Any,
        gradients: Any,
        lr: float | None = None,
        *,
        round: int = 0,
        step: int | Sequence[int] | None = None,
    ) -> Pending[None]:
        """As `push`, without waiting; `round` and `step` as of `ShardedVariable.begin_push`."""
        steps = _steps(step, len(self.pieces))
        return self._change(Op.PUSH_ROWS, ids, gradients, lr, round, steps)

    def _change(
        self,
        op: Op,
        ids: Any,
        values: Any,
        lr: float | None = None,
        round: int = 0,
        steps: Sequence[int] | None = None,
    ) -> Pending[None]:
        given, rows = _flat(ids), floats_frame(values)
        if rows.size != given.size * self.spec.dim:
            raise ValueError(
                f"{self.spec.name!r}: {given.size} ids need values of shape "
                f"({given.size}, {self.spec.dim}), got {rows.shape}"
            )
        rows = rows.reshape(-1, self.spec.dim)
        steps = steps or _steps(None, len(self.pieces))
        with self._named():
            local, counts, places = self._owners.route(given)
        if places is not None:
            rows = rows.take(places, 0)
        wire = self._wire if op is Op.PUSH_ROWS else None
        # Where pushes are counted, all pieces count them.
        for_all = op is Op.PUSH_ROWS and (self.spec.rule.counts_steps or self.spec.max_age)
        tickets = [
            self._send(op, piece, [local[part], encoded(rows[part], wire)], lr, round, steps[piece])
            for piece, part in enumerate(_slices(counts))
            if for_all or part.start < part.stop
        ]
        return Pending(self._client, [tickets], _nothing)

    def _send(
        self,
        op: Op,
        piece: int,
        frames: Sequence[Array],
        lr: float | None = None,
        round: int = 0,
        step: int = UNKNOWN_STEP,
        take: Callable[[memoryview], None] | None = None,
    ) -> Ticket:
        server, number = self.pieces[piece].server, self._numbers[piece]
        return self._client.submit(
            server, op, number, frames, lr, round=round, step=step, take=take
        )

    def _into(self, rows: Array) -> Callable[[memoryview], None]:
        return partial(fill, rows, wire=self._wire)

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Have errors name the table."""
        try:
            yield
        except IndexError as error:
            raise IndexError(f"{self.spec.name!r}: {error}") from None

    def _part_of(self, number: int) -> RowsSpec:
        if len(self.pieces) == 1:
            return self.spec
        piece, name = self.pieces[number], self.spec.name
        if self.spec.rows is None:
            name = f"{name}[{number} of {len(self.pieces)}]"
            most = self.spec.max_rows and -(-self.spec.max_rows // len(self.pieces))
            return dataclasses.replace(self.spec, name=name, max_rows=most)
        rows = piece.end - piece.begin
        return dataclasses.replace(self.spec, name=f"{name}[{piece.begin}:]", rows=rows)


def _steps(step: int | Sequence[int] | None, pieces: int) -> Sequence[int]:
    """One for each piece."""
    if step is None or isinstance(step, int):
        return [UNKNOWN_STEP if step is None else step] * pieces
    if len(step) != pieces:
        raise ValueError(f"step has {len(step)} numbers, there are {pieces} pieces")
    return step


def _nothing(replies: list[memoryview]) -> None:
    """The result of what changes something."""


def _flat(ids: Any) -> Array:
    return ids_frame(ids).reshape(-1)


def _slices(counts: Sequence[int]) -> Iterator[slice]:
    begin = 0
    for count in counts:
        yield slice(begin, begin + count)
        begin += count
