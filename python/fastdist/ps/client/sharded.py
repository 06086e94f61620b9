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
from fastdist.ps.client.partition import Piece
from fastdist.ps.client.requests import Pending, Ticket
from fastdist.ps.wire.frames import Array, encode_floats, to_floats, to_ids
from fastdist.ps.wire.protocol import UNKNOWN_STEP, Op
from fastdist.ps.wire.snapshot import Part
from fastdist.ps.wire.specs import DenseSpec, RowsSpec


@dataclass(frozen=True, slots=True)
class DensePiece:
    """The piece of a dense variable on one server.

    Attributes:
        server: its number.
        number: the piece's number on that server.
        values: the piece's values, a view of the whole value.
        wire: encoding of the values; None for float32.
    """

    server: int
    number: int
    values: Array
    wire: _core.WireFormat | None


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
            rows = self.to_array(initial).reshape(self.pieces[-1].end, *spec.shape[1:])
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
        return self.begin_pull(out).result()

    def push(self, gradient: Any, lr: float | None = None) -> None:
        """Apply a gradient of the whole shape."""
        self.begin_push(gradient, lr).result()

    def assign(self, value: Any) -> None:
        """Set the value, of the whole shape."""
        self.begin_assign(value).result()

    def begin_pull(self, out: Array | None = None) -> Pending[Array]:
        """Request the value, without waiting.

        Args:
            out: destination, contiguous float32 of the whole shape; None allocates one.
        """
        value = self.output_array(out)
        tickets = [
            self._client.begin_pull(piece.server, piece.number, piece.values, piece.wire)
            for piece in self.split(value)
        ]
        return Pending(self._client.wait, tickets, lambda replies: value)

    def begin_push(
        self,
        gradient: Any,
        lr: float | None = None,
        *,
        round: int = 0,
        step: int | Sequence[int] | None = None,
    ) -> Pending[None]:
        """Send a gradient, without waiting.

        Args:
            gradient: the gradient, of the whole shape.
            lr: learning rate; None for the update rule's own, or if the round's commit sets it.
            round: 0 applies the gradient at once; otherwise it waits for the round's commit.
            step: the step of the value that the gradient was computed from: `Pending.steps` of the
                pull, or one for all pieces; None if unknown.
        """
        steps = _steps(step, len(self.pieces))
        tickets = [
            self.begin_push_piece(piece, lr, round, seen)
            for piece, seen in zip(self.split(self.to_array(gradient)), steps, strict=True)
        ]
        return Pending(self._client.wait, tickets, _no_result)

    def begin_push_piece(
        self, piece: DensePiece, lr: float | None, round: int, step: int
    ) -> list[Ticket]:
        """Send the gradient of one piece."""
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
        """Set the value, without waiting."""
        tickets = [
            self._client.submit(piece.server, Op.ASSIGN, piece.number, [piece.values])
            for piece in self.split(self.to_array(value))
        ]
        return Pending(self._client.wait, [tickets], _no_result)

    def output_array(self, out: Array | None) -> Array:
        """Return `out` after checking it, or a new array."""
        if out is None:
            return np.empty(self.spec.shape, np.float32)
        if out.shape != self.spec.shape or out.dtype != np.float32 or not out.flags.c_contiguous:
            raise ValueError(
                f"{self.spec.name!r}: out must be contiguous float32 of shape {self.spec.shape}, "
                f"got {out.dtype} of shape {out.shape}"
            )
        return out

    def to_array(self, values: Any) -> Array:
        """Convert a value or gradient to contiguous float32, without a copy where possible."""
        array = to_floats(values)
        if array.shape != self.spec.shape and not (self.spec.shape == () and array.size == 1):
            raise ValueError(f"{self.spec.name!r} has shape {self.spec.shape}, got {array.shape}")
        return array

    def split(self, values: Array) -> list[DensePiece]:
        """Return the pieces of a value, as views."""
        rows = values.reshape(self.pieces[-1].end, *self.spec.shape[1:])
        return [
            DensePiece(piece.server, number, self._rows(rows, piece), self._wire)
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
        return self.begin_pull(ids).result()

    def push(self, ids: Any, gradients: Any, lr: float | None = None) -> None:
        """Apply gradients, [ids, dim]; gradients of equal ids are added up."""
        self.begin_push(ids, gradients, lr).result()

    def assign(self, ids: Any, values: Any) -> None:
        """Set rows, [ids, dim]; the last of equal ids wins."""
        self._change(Op.ASSIGN_ROWS, ids, values).result()

    def begin_pull(self, ids: Any) -> Pending[Array]:
        """Request rows, without waiting; see `pull`."""
        with self._naming_table():
            local, counts, places = self._owners.route_distinct(_flat(ids))
        rows = np.empty((local.size, self.spec.dim), np.float32)
        tickets = [
            self._client.begin_pull_rows(
                self.pieces[piece].server,
                self._numbers[piece],
                local[part],
                rows[part],
                self._wire,
            )
            for piece, part in enumerate(_slices(counts))
        ]

        def finish(replies: list[memoryview]) -> Array:
            return rows if places is None else rows.take(places, 0)

        return Pending(self._client.wait, tickets, finish)

    def begin_push(
        self,
        ids: Any,
        gradients: Any,
        lr: float | None = None,
        *,
        round: int = 0,
        step: int | Sequence[int] | None = None,
    ) -> Pending[None]:
        """Send gradients, without waiting; `round`, `step` as for `ShardedVariable.begin_push`."""
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
        given, rows = _flat(ids), to_floats(values)
        if rows.size != given.size * self.spec.dim:
            raise ValueError(
                f"{self.spec.name!r}: {given.size} ids need values of shape "
                f"({given.size}, {self.spec.dim}), got {rows.shape}"
            )
        rows = rows.reshape(-1, self.spec.dim)
        steps = steps or _steps(None, len(self.pieces))
        with self._naming_table():
            local, counts, places = self._owners.route(given)
        if places is not None:
            rows = rows.take(places, 0)
        wire = self._wire if op is Op.PUSH_ROWS else None
        # If an effect depends on the number of pushes, all pieces must count this one.
        to_all_pieces = op is Op.PUSH_ROWS and (self.spec.rule.counts_steps or self.spec.max_age)
        tickets = [
            self._send(
                op, piece, [local[part], encode_floats(rows[part], wire)], lr, round, steps[piece]
            )
            for piece, part in enumerate(_slices(counts))
            if to_all_pieces or part.start < part.stop
        ]
        return Pending(self._client.wait, [tickets], _no_result)

    def _send(
        self,
        op: Op,
        piece: int,
        frames: Sequence[Array],
        lr: float | None = None,
        round: int = 0,
        step: int = UNKNOWN_STEP,
    ) -> Ticket:
        server, number = self.pieces[piece].server, self._numbers[piece]
        return self._client.submit(server, op, number, frames, lr, round=round, step=step)

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


def _steps(step: int | Sequence[int] | None, pieces: int) -> Sequence[int]:
    """Return one step for each piece."""
    if step is None or isinstance(step, int):
        return [UNKNOWN_STEP if step is None else step] * pieces
    if len(step) != pieces:
        raise ValueError(f"step has {len(step)} numbers, there are {pieces} pieces")
    return step


def _no_result(replies: list[memoryview]) -> None:
    """The result of a change."""


def _flat(ids: Any) -> Array:
    return to_ids(ids).reshape(-1)


def _slices(counts: Sequence[int]) -> Iterator[slice]:
    begin = 0
    for count in counts:
        yield slice(begin, begin + count)
        begin += count
