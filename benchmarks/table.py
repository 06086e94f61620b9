"""Measures the table of a parameter server in one thread, next to numpy and torch.

    python benchmarks/table.py                         everything: minutes, and 20 GB of memory
    python benchmarks/table.py --hashed-rows 2000000   less memory
    python benchmarks/table.py --only lookup           a section: lookup update fill dense

A request is 4096 distinct random ids; rows are 64 float32. All ways take turns in one run, on the
same requests. Times are the thread's processor time, to reduce the effect of other load; p50 and
the best are over all requests. `lookup` reads rows; `update` reads and updates rows, as a worker's
step does; `fill` fills an empty table; `dense` compares update rules with copies, by the bytes that
each must move.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import fastdist._core as _core
import numpy as np
import numpy.typing as npt
import torch
from fastdist.cli.machine_facts import machine_facts

ROWS, DIM, REQUEST = 1_000_000, 64, 4096
RULES = {"SGD": {"lr": 0.1}, "Adagrad": {"lr": 0.1}, "Adam": {"lr": 0.1}}
TORCH_SPARSE = {
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
    "Adam": torch.optim.SparseAdam,
}

Ids = npt.NDArray[np.int64]
Way = Callable[[Ids], object]


def requests(ids: Ids, count: int, seed: int) -> list[Ids]:
    rng = np.random.default_rng(seed)
    return [ids[rng.choice(ids.size, REQUEST, replace=False, shuffle=False)] for _ in range(count)]


def measure(ways: dict[str, tuple[Way, list[Ids]]], rounds: int) -> dict[str, dict[str, float]]:
    """Returns million rows per second of each way."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    cycles = {name: itertools.cycle(ids) for name, (_, ids) in ways.items()}
    for round_number in range(rounds + 1):
        for name, (way, ids) in ways.items():
            for _ in ids:
                request = next(cycles[name])
                begin = time.thread_time()
                way(request)
                if round_number > 0:
                    times[name].append(time.thread_time() - begin)
    return {
        name: {
            "p50": round(REQUEST / statistics.median(taken) / 1e6, 2),
            "best": round(REQUEST / min(taken) / 1e6, 2),
        }
        for name, taken in times.items()
    }


def table_of(rule: str, rows: int | None, **options: Any) -> _core.RowTable:
    return _core.RowTable(DIM, _core.UpdateRule(rule, **RULES[rule]), rows=rows, **options)


def fill(table: _core.RowTable, ids: Ids) -> float:
    """Returns million rows per second, by pushes of 65,536 rows."""
    gradients = np.zeros((65536, DIM), np.float32)
    begin = time.thread_time()
    for piece in np.split(ids, range(gradients.shape[0], ids.size, gradients.shape[0])):
        table.push(piece, gradients[: piece.size])
    return round(ids.size / (time.thread_time() - begin) / 1e6, 2)


def hashed_ids(count: int) -> Ids:
    return np.random.default_rng(1).integers(-(2**63), 2**63 - 1, count)


def lookup(hashed_rows: int, rounds: int) -> dict[str, Any]:
    everything = np.arange(ROWS)
    values = np.random.default_rng(2).standard_normal((ROWS, DIM), np.float32)
    out = np.empty((REQUEST, DIM), np.float32)
    fixed, hashed, large = table_of("SGD", ROWS), table_of("SGD", None), table_of("SGD", None)
    for table in (fixed, hashed):
        table.assign(everything, values)
    large_ids = hashed_ids(hashed_rows)
    fill(large, large_ids)
    tensor = torch.from_numpy(values)

    def torch_lookup(ids: Ids) -> object:
        return torch.nn.functional.embedding(torch.from_numpy(ids), tensor)

    near = requests(everything, 30, 3)
    ways: dict[str, tuple[Way, list[Ids]]] = {
        "numpy x[ids]": (lambda ids: values[ids], near),
        "numpy take(out=)": (lambda ids: np.take(values, ids, axis=0, out=out, mode="clip"), near),
        "torch embedding": (torch_lookup, near),
        "fixed": (lambda ids: fixed.pull(ids, out), near),
        "hashed": (lambda ids: hashed.pull(ids, out), near),
        f"hashed {hashed_rows}": (lambda ids: large.pull(ids, out), requests(large_ids, 30, 4)),
    }
    fixed.pull(near[0], out)
    assert (out == values[near[0]]).all()
    result = measure(ways, rounds)
    peer = max(result["numpy x[ids]"]["p50"], result["numpy take(out=)"]["p50"])
    return {
        "M rows/s": result,
        "fixed of numpy": round(result["fixed"]["p50"] / peer, 2),
        "large of fixed": round(result[f"hashed {hashed_rows}"]["p50"] / result["fixed"]["p50"], 2),
    }


def torch_update(rule: str, gradients: npt.NDArray[np.float32]) -> Way:
    module = torch.nn.Embedding(ROWS, DIM, sparse=True)
    optimizer = TORCH_SPARSE[rule](module.parameters(), **RULES[rule])
    tensor = torch.from_numpy(gradients)

    def step(ids: Ids) -> None:
        optimizer.zero_grad()
        module(torch.from_numpy(ids)).backward(tensor)
        optimizer.step()

    return step


def table_update(table: _core.RowTable, gradients: npt.NDArray[np.float32]) -> Way:
    out = np.empty_like(gradients)

    def step(ids: Ids) -> None:
        table.pull(ids, out)
        table.push(ids, gradients)

    return step


def update(rule: str, hashed_rows: int, rounds: int) -> dict[str, Any]:
    gradients = np.random.default_rng(5).standard_normal((REQUEST, DIM), np.float32)
    near = requests(np.arange(ROWS), 20, 6)
    large_ids = hashed_ids(hashed_rows)
    large = table_of(rule, None)
    filled = fill(large, large_ids)
    ways: dict[str, tuple[Way, list[Ids]]] = {
        "torch": (torch_update(rule, gradients), near),
        "fixed": (table_update(table_of(rule, ROWS), gradients), near),
        f"hashed {hashed_rows}": (table_update(large, gradients), requests(large_ids, 20, 7)),
    }
    result = measure(ways, rounds)
    slots = len(large.slots)
    return {
        "rule": rule,
        "M rows/s": result,
        "fixed of torch": round(result["fixed"]["p50"] / result["torch"]["p50"], 2),
        "large of fixed": round(result[f"hashed {hashed_rows}"]["p50"] / result["fixed"]["p50"], 2),
        "filled, M rows/s": filled,
        "memory of rows and slots": round(large.nbytes / (len(large) * DIM * 4 * (1 + slots)), 3),
    }


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def fill_from_empty(hashed_rows: int) -> dict[str, Any]:
    """Fills a table with half as many rows; Adagrad's slots make it as large."""
    ids = hashed_ids(hashed_rows // 2)
    rates, before = {}, 0
    table = None
    for initializer in (("constant", 0.0, 0.0), ("normal", 0.0, 1.0), ("uniform", -0.05, 0.05)):
        table = None  # frees the memory of the previous table
        before = resident_bytes()
        table = table_of("Adagrad", None, initializer=initializer)
        rates[initializer[0]] = fill(table, ids)
        after = resident_bytes()
    needed = ids.size * DIM * 4 * 2
    return {
        "rows": ids.size,
        "filled, M rows/s": rates,
        "resident of rows and slots": round((after - before) / needed, 3),
        "nbytes of rows and slots": round(table.nbytes / needed, 3),
    }


def dense(rounds: int) -> dict[str, Any]:
    """Measures steps on 100 MB; bytes of values and slots count twice, of gradients once."""
    count = 25_000_000
    gradient = np.random.default_rng(8).standard_normal(count, np.float32)
    out = np.empty_like(gradient)
    variables = {
        rule: _core.DenseVariable(gradient, _core.UpdateRule(rule, **given))
        for rule, given in [*RULES.items(), ("AdamW", {}), ("RMSprop", {})]
    }
    moves = {"SGD": 3, "Adagrad": 5, "Adam": 7, "AdamW": 7, "RMSprop": 5}
    ways: dict[str, tuple[Callable[[], object], int]] = {
        "copy": (lambda: np.copyto(out, gradient), 2),
        "pull": (lambda: variables["SGD"].pull(0, out), 2),
    }

    def push(variable: _core.DenseVariable) -> None:
        variable.push(0, gradient)

    for rule, variable in variables.items():
        ways[rule] = (functools.partial(push, variable), moves[rule])
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, (way, _) in ways.items():
            begin = time.thread_time()
            way()
            times[name].append(time.thread_time() - begin)
    speed = {
        name: moved * 4 * count / statistics.median(times[name]) / 1e9
        for name, (_, moved) in ways.items()
    }
    return {
        "GB/s": {name: round(value, 1) for name, value in speed.items()},
        "of copy": {name: round(value / speed["copy"], 2) for name, value in speed.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hashed-rows", type=int, default=20_000_000)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", nargs="*", default=["lookup", "update", "fill", "dense"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(json.dumps(machine_facts()), flush=True)
    if "lookup" in options.only:
        print(json.dumps(lookup(options.hashed_rows, options.rounds)), flush=True)
    if "update" in options.only:
        for rule in RULES:
            # Adam's slots are twice as large, so that the memory is the same.
            rows = options.hashed_rows // (2 if rule == "Adam" else 1)
            print(json.dumps(update(rule, rows, options.rounds)), flush=True)
    if "fill" in options.only:
        print(json.dumps(fill_from_empty(options.hashed_rows)), flush=True)
    if "dense" in options.only:
        print(json.dumps(dense(2 * options.rounds)), flush=True)


if __name__ == "__main__":
    main()
