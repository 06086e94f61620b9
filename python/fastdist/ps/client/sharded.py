"""Variables and tables whose rows are on several servers, which are used concurrently."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

import fastdist._core as _core
from fastdist.ps.client.client import Client
from fastdist.ps.client.items import Item, Ticket
from fastdist.ps.client.partition import Piece
from fastdist.ps.wire.protocol import Array, Op, to_ids
from fastdist.ps.wire.snapshot import Part
from fastdist.ps.wire.specs import DenseSpec, RowsSpec


@dataclass(frozen=True, slots=True)
class Lookup:
    """A variable or rows, which are here once all items have been read; see `pull_together`."""

    items: list[Item]  # what to read
    values: Array  # where it is put
    places: Array | None = None  # of each id's row in `values`; None: they are in order

    @property
    def value(self) -> Array:
        """The variable's value, or the rows in the order of their ids; float32."""
        return self.values if self.places is None else self.values.take(self.places, 0)


class ShardedVariable:
    """A dense variable, cut along its first axis.

    The spec and the initial value are those of the whole; the value is None if the variable exists
    already. Servers know pieces by the variable's name and the first row.
    """

    def __init__(
        self, client: Client, spec: DenseSpec, pieces: Sequence[Piece], initial: Any = None
    ) -> None:
        self.spec = spec
        self.pieces = tuple(pieces)
        self.parts: list[tuple[int, int, Part]] = []  # server, number and part of each piece
        self._client = client
        self._wire = spec.wire_format()
        self._shape = spec.shape or (1,)  # a scalar is one row
        rows = None if initial is None else self._to_array(initial).reshape(self._shape)
        for piece in self.pieces:
            own = None if rows is None else rows[piece.begin : piece.end]
            number = client.create(piece.server, self._piece_spec(piece), own)
            self.parts.append((piece.server, number, Part(spec.name, piece.begin, piece.end)))

    def lookup(self, out: Array | None = None) -> Lookup:
        """Return what to read for the value, into `out`, if given: float32, of the whole shape."""
        shape = self.spec.shape
        value = np.empty(shape, np.float32) if out is None else out
        if value.shape != shape or value.dtype != np.float32 or not value.flags.c_contiguous:
            raise ValueError(
                f"{self.spec.name!r}: out must be contiguous float32 of shape {shape}, "
                f"got {value.dtype} of shape {value.shape}"
            )
        return Lookup(self._split(value), value)

    def change(self, gradient: Any, lr: float | None = None) -> list[Item]:
        """Return what to send for a gradient of the whole shape.

        `lr` None is the update rule's own, or set by the round's commit.
        """
        # Whole if it may be refused, so that no part of it is applied.
        return self._split(self._to_array(gradient), lr, is_whole=self.spec.refuse_nonfinite)

    def assignment(self, value: Any) -> list[Item]:
        """Return what to send by `begin_assign` for a value of the whole shape."""
        return self._split(self._to_array(value))

    def _to_array(self, values: Any) -> Array:
        """Convert a value or gradient to contiguous float32, without a copy where possible."""
        array = np.ascontiguousarray(values, np.float32)
        if array.shape != self.spec.shape and not (self.spec.shape == () and array.size == 1):
            raise ValueError(f"{self.spec.name!r} has shape {self.spec.shape}, got {array.shape}")
        return array

    def _split(
        self, values: Array, lr: float | None = None, *, is_whole: bool = False
    ) -> list[Item]:
        """Return the pieces of a value, as views; cut for messages, unless they stay whole."""
        rows = values.reshape(self._shape)
        items = [
            Item(server, number, rows[part.begin : part.end], None, self._wire, lr)
            for server, number, part in self.parts
        ]
        return items if is_whole else [part for item in items for part in item.cut()]

    def _piece_spec(self, piece: Piece) -> DenseSpec:
        if len(self.pieces) == 1:
            return self.spec
        shape = (piece.end - piece.begin, *self.spec.shape[1:])
        return dataclasses.replace(self.spec, name=f"{self.spec.name}[{piece.begin}:]", shape=shape)


class ShardedRows:
    """A table of rows on several servers: by ranges of ids, or by their hash if ids have no limit.

    The spec is that of the whole. A table without a limit of rows uses only the pieces' servers.
    """

    def __init__(self, client: Client, spec: RowsSpec, pieces: Sequence[Piece]) -> None:
        self.spec = spec
        self.pieces = tuple(pieces)
        self.client = client
        self._wire = spec.wire_format()
        begins = [] if spec.rows is None else [piece.begin for piece in self.pieces]
        self._owners = _core.Owners(len(self.pieces), begins, spec.rows or 0)
        self.parts: list[tuple[int, int, Part]] = []  # as of a `ShardedVariable`
        for i, piece in enumerate(self.pieces):
            number = client.create(piece.server, self._piece_spec(i))
            part = Part(spec.name, piece.begin, piece.end)
            if spec.rows is None:
                part = Part(spec.name, 0, -1, i, len(self.pieces))
            self.parts.append((piece.server, number, part))

    def pull(self, ids: Any) -> Array:
        """Return rows, float32 [ids, dim], in the order of the ids."""
        (pulled,) = pull_together(self.client, [self.lookup(ids)])
        return pulled.value

    def assign(self, ids: Any, values: Any) -> None:
        """Set rows, [ids, dim]; the last of equal ids wins."""
        items = [item for item in self._divide(ids, values) if item.values.size]
        self.client.wait_all(begin_assign(self.client, items))

    def change(self, ids: Any, gradients: Any, lr: float | None = None) -> list[Item]:
        """Return what to send for gradients; `lr` as for `ShardedVariable.change`."""
        # If an effect depends on the number of pushes, all pieces must count this one.
        to_all_pieces = self.spec.rule.counts_steps or self.spec.max_age
        items = self._divide(ids, gradients, lr)
        return [item for item in items if to_all_pieces or item.values.size]

    def lookup(self, ids: Any) -> Lookup:
        """Return what to read for ids."""
        local, counts, places = self._route(ids)
        rows = np.empty((local.size, self.spec.dim), np.float32)
        if places is not None:
            to, places = places, np.empty_like(places)
            places[to] = np.arange(places.size)
        items = [part for item in self._items(local, counts, rows) for part in item.cut()]
        return Lookup(items, rows, places)

    def _divide(self, ids: Any, values: Any, lr: float | None = None) -> list[Item]:
        rows = np.ascontiguousarray(values, np.float32)
        local, counts, places = self._route(ids)
        if rows.size != local.size * self.spec.dim:
            raise ValueError(
                f"{self.spec.name!r}: {local.size} ids need values of shape "
                f"({local.size}, {self.spec.dim}), got {rows.shape}"
            )
        rows = rows.reshape(-1, self.spec.dim)
        return self._items(local, counts, rows if places is None else rows.take(places, 0), lr)

    def _items(
        self, ids: Array, counts: Sequence[int], rows: Array, lr: float | None = None
    ) -> list[Item]:
        """Return the rows of each piece, as views."""
        return [
            Item(server, number, rows[end - n : end], ids[end - n : end], self._wire, lr)
            for (server, number, _), n, end in zip(
                self.parts, counts, accumulate(counts), strict=True
            )
        ]

    def _route(self, ids: Any) -> tuple[Array, list[int], Array | None]:
        """Return ids by piece, their number for each piece, and the place of each given id."""
        try:
            return self._owners.route(to_ids(ids).reshape(-1))
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


Sharded = ShardedVariable | ShardedRows


def pull_together(client: Client, lookups: Sequence[Lookup]) -> Sequence[Lookup]:
    """Read variables and rows, requested together, and return them."""
    client.wait_all(client.begin_read(items_of(lookups)))
    return lookups


def items_of(lookups: Sequence[Lookup]) -> list[Item]:
    """Return all that lookups read."""
    return [item for lookup in lookups for item in lookup.items]


def commit_round(
    client: Client,
    round: int,
    things: Sequence[tuple[Sharded, float | None]],
    *,
    weight: float = 1.0,
) -> bool:
    """Apply the sum of all clients' pushes of a round, over `weight`, to each thing, as one push.

    All clients must have waited for their pushes, and one client commits for all. A job uses the
    number of a round, which is not 0, once. A learning rate of None is the update rule's own.
    Returns False if the round was discarded.
    """
    by_server: dict[int, list[tuple[int, float | None]]] = {}
    for thing, lr in things:
        for server, number, _ in thing.parts:
            by_server.setdefault(server, []).append((number, lr))
    tickets = []
    for server, objects in by_server.items():
        body = json.dumps({"weight": weight, "objects": objects}).encode()
        tickets.append(client.submit(server, Op.COMMIT, 0, [body], round=round))
    replies = client.wait_all(tickets)
    return all(json.loads(bytes(reply))["state"] == "applied" for reply in replies)


def discard_rounds(client: Client, servers: Iterable[int], rounds: Sequence[int]) -> None:
    """Drop the pushes of rounds, including later ones; applied rounds stay applied."""
    body = json.dumps(list(rounds)).encode()
    client.wait_all([client.submit(server, Op.DISCARD, 0, [body]) for server in servers])


def begin_assign(client: Client, items: Sequence[Item]) -> list[Ticket]:
    """Set values, which travel as float32, without waiting."""
    for item in items:
        item.wire = None
    return client.begin_change(items, op=Op.ASSIGN)
