"""Gradients of several clients that are applied together, as one push."""

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
    """Have each thing changed by the sum of what all clients have pushed for a round: one push.

    Waits until servers have what this client has pushed. Other clients must have waited for theirs,
    and one client commits for all.

    Args:
        client: that commits.
        round: its number, not 0; never used again by the job.
        things: what is to be changed, and learning rates; None for the update rule's own. Those
            that nobody has pushed to stay as they are.
        weight: what the sum is divided by.

    Returns:
        Whether it is applied now, on all servers; False: it has been discarded.
    """
    by_server: dict[int, list[tuple[int, float | None]]] = {}
    for thing, lr in things:
        for server, number, _ in thing.parts():
            by_server.setdefault(server, []).append((number, lr))
    for server in by_server:
        client.settle(server, round)
    tickets = []
    for server, objects in by_server.items():
        about = json.dumps({"weight": weight, "objects": objects}).encode()
        tickets.append(client.submit(server, Op.COMMIT, 0, [about], round=round))
    return Pending(client, [tickets], lambda replies: {_state(r) for r in replies} <= {"applied"})


def discard_rounds(client: Client, servers: Iterable[int], rounds: Sequence[int]) -> None:
    """Drop what was pushed for rounds, and what is still to come; applied ones stay applied."""
    body = json.dumps(list(rounds)).encode()
    tickets = [client.submit(server, Op.DISCARD, 0, [body]) for server in servers]
    for ticket in tickets:
        client.wait(ticket)


def _state(reply: memoryview) -> str:
    return str(json.loads(bytes(reply))["state"])
