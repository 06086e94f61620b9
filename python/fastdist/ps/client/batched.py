"""Pulls and pushes of many dense variables: small ones share one message per server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from fastdist.ps.client.client import Client
from fastdist.ps.client.requests import Pending, Ticket
from fastdist.ps.client.sharded import DensePiece, ShardedVariable
from fastdist.ps.wire.batches import (
    PART_SIZE,
    PUSH_ENTRY,
    SMALL_SIZE,
    STEP_BYTES,
    Kinds,
    pack_values,
    unpack_values,
)
from fastdist.ps.wire.frames import Array
from fastdist.ps.wire.protocol import UNKNOWN_STEP, Op


@dataclass(frozen=True, slots=True)
class Pulled:
    """The value of a variable.

    Attributes:
        value: float32, of the whole shape.
        steps: for each piece, how many pushes the value has seen; pass them to `Push`.
    """

    value: Array
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Push:
    """A gradient for a variable.

    Attributes:
        variable: the variable.
        gradient: the gradient, of the whole shape.
        lr: learning rate; None for the update rule's own, or if the round's commit sets it.
        steps: for each piece, the step of the value that the gradient was computed from; None if
            unknown.
    """

    variable: ShardedVariable
    gradient: Array
    lr: float | None = None
    steps: tuple[int, ...] | None = None


def begin_pulls(
    client: Client, variables: Sequence[ShardedVariable], outs: Sequence[Array | None]
) -> Pending[list[Pulled]]:
    """Request the values of variables, without waiting.

    Args:
        client: this thread's client.
        variables: the variables to pull.
        outs: destinations, see `ShardedVariable.begin_pull`.
    """
    values = [variable.output_array(out) for variable, out in zip(variables, outs, strict=True)]
    steps = [[UNKNOWN_STEP] * len(variable.pieces) for variable in variables]
    tickets: list[list[Ticket]] = []
    large: list[tuple[int, int, list[Ticket]]] = []
    small = _SmallPieces()
    for v, (variable, value) in enumerate(zip(variables, values, strict=True)):
        for p, piece in enumerate(variable.split(value)):
            if piece.values.size <= SMALL_SIZE:
                small.add(v, p, piece)
            else:
                requests = client.begin_pull(piece.server, piece.number, piece.values, piece.wire)
                large.append((v, p, requests))
                tickets.append(requests)
    for server, group in small.groups():
        numbers = np.array([piece.number for _, _, piece in group], np.uint64)
        on_reply = partial(_store_reply, group, steps)
        ticket = client.submit(server, Op.PULL_MANY, int(numbers[0]), [numbers], on_reply=on_reply)
        tickets.append([ticket])

    def finish(replies: list[memoryview]) -> list[Pulled]:
        for v, p, requests in large:
            steps[v][p] = min(ticket.step for ticket in requests)
        return [Pulled(v, tuple(seen)) for v, seen in zip(values, steps, strict=True)]

    return Pending(client.wait, tickets, finish)


def begin_pushes(client: Client, pushes: Sequence[Push], round: int = 0) -> Pending[None]:
    """Send gradients, without waiting. A server applies each message as a whole, or not at all.

    Args:
        client: this thread's client.
        pushes: the gradients. Those of small variables may change once this call has returned.
        round: 0 applies them at once; otherwise they wait for the round's commit.
    """
    tickets: list[list[Ticket]] = []
    small = _SmallPieces()
    for v, push in enumerate(pushes):
        for p, piece in enumerate(push.variable.split(push.variable.to_array(push.gradient))):
            if piece.values.size <= SMALL_SIZE:
                small.add(v, p, piece)
            else:
                step = UNKNOWN_STEP if push.steps is None else push.steps[p]
                tickets.append(push.variable.begin_push_piece(piece, push.lr, round, step))
    for server, group in small.groups():
        entries = np.zeros(len(group), PUSH_ENTRY)
        for i, (v, p, piece) in enumerate(group):
            seen, lr = pushes[v].steps, pushes[v].lr
            entries[i] = (
                piece.number,
                UNKNOWN_STEP if seen is None else seen[p],
                np.nan if lr is None else lr,
            )
        gradients = pack_values((piece.values for _, _, piece in group), _kinds(group))
        frames = [entries.view(np.uint8), gradients]
        number = int(entries["object"][0])
        tickets.append([client.submit(server, Op.PUSH_MANY, number, frames, round=round)])
    return Pending(client.wait, tickets, lambda replies: None)


_Group = list[tuple[int, int, DensePiece]]  # with the numbers of variable and piece


@dataclass(slots=True)
class _SmallPieces:
    """Small pieces by server, divided into groups of the size of one message."""

    _groups: dict[int, list[_Group]] = field(default_factory=dict)
    _sizes: dict[int, int] = field(default_factory=dict)

    def add(self, variable: int, number: int, piece: DensePiece) -> None:
        groups = self._groups.setdefault(piece.server, [[]])
        size = self._sizes.get(piece.server, 0) + piece.values.size
        if size > PART_SIZE:
            groups.append([])
            size = piece.values.size
        self._sizes[piece.server] = size
        groups[-1].append((variable, number, piece))

    def groups(self) -> list[tuple[int, _Group]]:
        return [(server, group) for server, groups in self._groups.items() for group in groups]


def _kinds(group: _Group) -> Kinds:
    return [(piece.values.shape, piece.wire) for _, _, piece in group]


def _store_reply(group: _Group, steps: list[list[int]], reply: memoryview) -> None:
    """Copy the values of a PULL_MANY's reply to their destinations."""
    values = STEP_BYTES * len(group)
    seen = np.frombuffer(reply[:values], np.uint64)
    got = unpack_values(reply[values:], _kinds(group))
    for (v, p, piece), step, value in zip(group, seen, got, strict=True):
        piece.values[...] = value
        steps[v][p] = int(step)
