"""Rounds: gradients of several clients that servers apply together, as one push."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from fastdist.ps.client.client import Client
from fastdist.ps.client.requests import Pending
from fastdist.ps.client.sharded import ShardedRows, ShardedVariable
from fastdist.ps.wire.protocol import Op


def commit_round(
    client: Client,
    round: int,
    things: Sequence[tuple[ShardedVariable | ShardedRows, float | None]],
    *,
    weight: float = 1.0,
) -> Pending[bool]:
    """Apply the sum of all clients' pushes of a round to each variable and table, as one push.

    Waits until servers have this client's pushes. Other clients must have waited for theirs, and
    one client commits for all.

    Args:
        client: the client that commits.
        round: its number, not 0; the job must not use it again.
        things: variables and tables with learning rates; None for the update rule's own. Those
            without pushes stay as they are.
        weight: divisor of the sum.

    Returns:
        True if the round is now applied on all servers; False if it was discarded.
    """
    by_server: dict[int, list[tuple[int, float | None]]] = {}
    for thing, lr in things:
        for server, number, _ in thing.parts():
            by_server.setdefault(server, []).append((number, lr))
    for server in by_server:
        client.wait_for_round(server, round)
    tickets = []
    for server, objects in by_server.items():
        body = json.dumps({"weight": weight, "objects": objects}).encode()
        tickets.append(client.submit(server, Op.COMMIT, 0, [body], round=round))
    return Pending(
        client.wait, tickets, lambda replies: {_state(r) for r in replies} <= {"applied"}
    )


def discard_rounds(client: Client, servers: Iterable[int], rounds: Sequence[int]) -> None:
    """Drop the pushes of rounds, including later ones; applied rounds stay applied."""
    body = json.dumps(list(rounds)).encode()
    tickets = [client.submit(server, Op.DISCARD, 0, [body]) for server in servers]
    for ticket in tickets:
        client.wait(ticket)


def _state(reply: memoryview) -> str:
    return str(json.loads(bytes(reply))["state"])
