"""Gradients of several clients that are applied together, as one push."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from fastdist.ps.client import Client
from fastdist.ps.pending import Pending
from fastdist.ps.protocol import Op
from fastdist.ps.sharded import ShardedRows, ShardedVariable


def commit_round(
    client: Client,
    round: int,
    things: Sequence[tuple[ShardedVariable | ShardedRows, float | None]],
    *,
    of: int = 1,
    weight: float = 1.0,
) -> Pending[bool]:
    """Say that this client has pushed all it has for a round; waits until servers have that.

    When so many clients have said so, each thing is changed by the sum of the gradients of all,
    divided by the sum of their weights: one push. All clients must name the same things.

    Args:
        client: that has pushed.
        round: its number, not 0; never used again by the job.
        things: what is to be changed, and learning rates; None for the update rule's own. Those
            that nobody has pushed to stay as they are.
        of: clients that commit.
        weight: of this client's gradients.

    Returns:
        Whether it is applied now, on all servers; False: other clients are to commit yet, or it
        has been discarded.
    """
    by_server: dict[int, list[tuple[int, float | None]]] = {}
    for thing, lr in things:
        for server, number, _ in thing.parts():
            by_server.setdefault(server, []).append((number, lr))
    for server in by_server:
        client.settle(server, round)
    tickets = []
    for server, objects in by_server.items():
        about = json.dumps({"of": of, "weight": weight, "objects": objects}).encode()
        tickets.append(client.submit(server, Op.COMMIT, 0, [about], round=round))
    return Pending(client, [tickets], lambda replies: {_state(r) for r in replies} <= {"applied"})


def round_state(client: Client, servers: Iterable[int], round: int) -> tuple[str, ...]:
    """What has become of a round on each server: "open", "applied" or "discarded".

    A server has forgotten rounds that ended thousands of rounds ago, and calls them open.

    Raises:
        UnavailableError: a server is gone, or has been started again since this client created
            something there.
    """
    tickets = [
        client.submit(server, Op.ROUND_STATE, client.numbers_made[server], round=round)
        for server in servers
    ]
    return tuple(_state(client.wait(ticket)) for ticket in tickets)


def discard_rounds(client: Client, servers: Iterable[int], rounds: Sequence[int]) -> None:
    """Drop what was pushed for rounds, and what is still to come; applied ones stay applied."""
    body = json.dumps(list(rounds)).encode()
    tickets = [client.submit(server, Op.DISCARD, 0, [body]) for server in servers]
    for ticket in tickets:
        client.wait(ticket)


def _state(reply: memoryview) -> str:
    return str(json.loads(bytes(reply))["state"])
