"""Dense variables that are pulled and pushed at once: small ones in one message for each server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from fastdist.ps.client.client import Client
from fastdist.ps.client.requests import Pending
from fastdist.ps.client.sharded import DensePiece, ShardedVariable
from fastdist.ps.client.ticket import Ticket
from fastdist.ps.wire.batches import PUSHED, SMALL_SIZE, STEP_BYTES, Kinds, joined, values_in
from fastdist.ps.wire.frames import Array
from fastdist.ps.wire.parts import PART_SIZE
from fastdist.ps.wire.protocol import UNKNOWN_STEP, Op


@dataclass(frozen=True, slots=True)
class Pulled:
    """A variable's value.

    Attributes:
        value: float32, of the whole shape.
        steps: of each piece, pushes that it has seen; what `Push` takes.
    """

    value: Array
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Push:
    """A gradient for a variable.

    Attributes:
        variable: that it is for.
        gradient: of the whole shape.
        lr: learning rate; None for the update rule's own, or where a round's commit says it.
        steps: of the value that it was computed from, for each piece; None: unknown.
    """

    variable: ShardedVariable
    gradient: Array
    lr: float | None = None
    steps: tuple[int, ...] | None = None


def begin_pulls(
    client: Client, variables: Sequence[ShardedVariable], outs: Sequence[Array | None]
) -> Pending[list[Pulled]]:
    """Ask for the values of variables, without waiting.

    Args:
        client: of this thread.
        variables: what to pull.
        outs: where values are to be, as for `ShardedVariable.begin_pull`.
    """
    values = [variable.room(out) for variable, out in zip(variables, outs, strict=True)]
    steps = [[UNKNOWN_STEP] * len(variable.pieces) for variable in variables]
    tickets: list[list[Ticket]] = []
    large: list[tuple[int, int, list[Ticket]]] = []
    joint = _Joint()
    for v, (variable, value) in enumerate(zip(variables, values, strict=True)):
        for p, piece in enumerate(variable.cut(value)):
            if piece.values.size <= SMALL_SIZE:
                joint.add(v, p, piece)
            else:
                asked = client.begin_pull(piece.server, piece.number, piece.values, piece.wire)
                large.append((v, p, asked))
                tickets.append(asked)
    for server, group in joint.groups():
        numbers = np.array([piece.number for _, _, piece in group], np.uint64)
        take = partial(_take, group, steps)
        ticket = client.submit(server, Op.PULL_MANY, int(numbers[0]), [numbers], take=take)
        tickets.append([ticket])

    def finish(replies: list[memoryview]) -> list[Pulled]:
        for v, p, asked in large:
            steps[v][p] = min(ticket.step for ticket in asked)
        return [Pulled(v, tuple(seen)) for v, seen in zip(values, steps, strict=True)]

    return Pending(client, tickets, finish)


def begin_pushes(client: Client, pushes: Sequence[Push], round: int = 0) -> Pending[None]:
    """Send gradients, without waiting; those that one message brings are applied all or none.

    Args:
        client: of this thread.
        pushes: what to send. Gradients of small variables may change when this has returned.
        round: 0: apply them at once; otherwise keep them until the round is committed.
    """
    tickets: list[list[Ticket]] = []
    joint = _Joint()
    for v, push in enumerate(pushes):
        for p, piece in enumerate(push.variable.cut(push.variable.whole(push.gradient))):
            if piece.values.size <= SMALL_SIZE:
                joint.add(v, p, piece)
            else:
                step = UNKNOWN_STEP if push.steps is None else push.steps[p]
                tickets.append(push.variable.begin_push_piece(piece, push.lr, round, step))
    for server, group in joint.groups():
        about = np.zeros(len(group), PUSHED)
        for i, (v, p, piece) in enumerate(group):
            seen, lr = pushes[v].steps, pushes[v].lr
            about[i] = (
                piece.number,
                UNKNOWN_STEP if seen is None else seen[p],
                np.nan if lr is None else lr,
            )
        gradients = joined((piece.values for _, _, piece in group), _kinds(group))
        frames = [about.view(np.uint8), gradients]
        number = int(about["object"][0])
        tickets.append([client.submit(server, Op.PUSH_MANY, number, frames, round=round)])
    return Pending(client, tickets, lambda replies: None)


_Group = list[tuple[int, int, DensePiece]]  # numbers of the variable and the piece


@dataclass(slots=True)
class _Joint:
    """Small pieces by server, as many in a group as a message should hold."""

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


def _take(group: _Group, steps: list[list[int]], reply: memoryview) -> None:
    """Copy what a PULL_MANY has brought to where it is wanted."""
    values = STEP_BYTES * len(group)
    seen = np.frombuffer(reply[:values], np.uint64)
    got = values_in(reply[values:], _kinds(group))
    for (v, p, piece), step, value in zip(group, seen, got, strict=True):
        piece.values[...] = value
        steps[v][p] = int(step)
