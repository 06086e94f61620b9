"""A job with servers, for tests of checkpoints."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from fastdist.checkpoints import files
from fastdist.ps import Client, DenseSpec, RowsSpec, RuleSpec, Server
from fastdist.ps.client.partition import FixedShards, RoundRobin
from sharded_things import ShardedRows, ShardedVariable

ADAM = RuleSpec("Adam", {"lr": 0.1})
SHAPES: list[tuple[int, ...]] = [(10, 3), (), (7,), (4, 2, 2)]


def index_of(directory: Path) -> dict[str, Any]:
    """Return what a checkpoint's index says of the servers' files."""
    others: dict[str, Any] = files.read_index(directory / "servers").others
    return others


def rewrite_index(directory: Path, others: Any) -> None:
    """Replace what a checkpoint's index says of the servers' files."""
    path = directory / "servers" / files.INDEX
    content = {**json.loads(path.read_text())["content"], "others": others}
    path.write_text(json.dumps({"checksum": files._checksum_of(content), "content": content}))


def names_in(directory: Path) -> set[str]:
    """Return the paths of all files below a directory."""
    return {str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file()}


class Job:
    """Servers, a client, and sharded variables and tables."""

    def __init__(self, stack: ExitStack, servers: int, shards: int) -> None:
        addresses = [stack.enter_context(Server()).address for _ in range(servers)]
        self.client = stack.enter_context(Client(addresses, timeout_s=20))
        placement = RoundRobin(servers, FixedShards(shards))
        self.dense = [
            ShardedVariable(
                self.client,
                DenseSpec(f"w{i}", shape, ADAM),
                placement.place(shape, 4),
                np.zeros(shape, np.float32),
            )
            for i, shape in enumerate(SHAPES)
        ]
        self.fixed = ShardedRows(
            self.client, RowsSpec("fixed", 2, ADAM, rows=50), placement.place((50, 2), 4)
        )
        self.hashed = ShardedRows(
            self.client, RowsSpec("hashed", 2, ADAM), placement.place((shards, 2), 4)
        )
        self.things = [*self.dense, self.fixed, self.hashed]

    def train(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        for variable in self.dense:
            variable.push(rng.standard_normal(variable.spec.shape))
        self.fixed.push(np.arange(50), rng.standard_normal((50, 2)))
        self.hashed.push(IDS, rng.standard_normal((IDS.size, 2)))

    def values(self) -> list[Any]:
        rows = [self.fixed.pull(np.arange(50)), self.hashed.pull(IDS)]
        return [*(variable.pull() for variable in self.dense), *rows]


IDS = np.random.default_rng(8).integers(-(2**63), 2**63 - 1, 200)


def require_same(one: list[Any], other: list[Any]) -> None:
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)
