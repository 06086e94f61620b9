"""Processor time of a step's lookups and updates: many tables, next to one table of all their ids.

    python benchmarks/ps_tables.py

Two servers, the client and their threads run in this process, so its processor time includes all
of them. Each step looks up the same number of ids, 64-bit hashes, and sends their gradients: of one
table, of 26 tables in shared messages, and of 26 tables with a message for each. The ways take
turns. Prints one JSON object: milliseconds of processor time per step (median), and the ratios to
one table.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
from fastdist.ps import Client, RowsSpec, RuleSpec, Server
from fastdist.ps.client.partition import RoundRobin
from fastdist.ps.client.sharded import ShardedRows, pull_together

TABLES, DIM = 26, 16
ADAGRAD = RuleSpec("Adagrad", {"lr": 0.1})


def together(client: Client, tables: list[ShardedRows], ids: list[Any]) -> None:
    lookups = [table.lookup(own) for table, own in zip(tables, ids, strict=True)]
    rows = pull_together(client, lookups)
    changes = [t.change(own, got.value) for t, own, got in zip(tables, ids, rows, strict=True)]
    client.wait_all(client.begin_change([item for items in changes for item in items]))


def alone(client: Client, tables: list[ShardedRows], ids: list[Any]) -> None:
    for table, own in zip(tables, ids, strict=True):
        together(client, [table], [own])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ids", type=int, default=26 * 512, help="ids of a step, in all tables")
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    random = np.random.default_rng(0)
    with ExitStack() as stack:
        servers = [stack.enter_context(Server()) for _ in range(2)]
        client = stack.enter_context(Client([server.address for server in servers]))
        pieces = RoundRobin(2).everywhere()
        tables = [
            ShardedRows(client, RowsSpec(f"{i}", DIM, ADAGRAD), pieces) for i in range(TABLES + 1)
        ]
        ways: dict[str, tuple[Callable[..., None], list[ShardedRows]]] = {
            "one table": (together, tables[:1]),
            f"{TABLES} tables": (together, tables[1:]),
            f"{TABLES} tables, each alone": (alone, tables[1:]),
        }
        ms: dict[str, list[float]] = {way: [] for way in ways}
        for step in range(options.steps + 5):
            ids = random.integers(0, 1 << 20, options.ids) * 0x9E3779B97F4A7C
            for way, (run, own) in ways.items():
                begin = time.process_time()
                run(client, own, np.split(ids, len(own)))
                if step >= 5:
                    ms[way].append(1e3 * (time.process_time() - begin))
        total = sum(len(table.pull(ids)) for table in tables[:1])
        assert total == ids.size
    p50 = {way: round(statistics.median(values), 3) for way, values in ms.items()}
    ratios = {way: round(value / p50["one table"], 2) for way, value in p50.items()}
    print(json.dumps({"ms": p50, "of one table": ratios}))


if __name__ == "__main__":
    main()
