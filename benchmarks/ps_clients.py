"""Measures many clients on two parameter servers: fairness, and growth of memory.

    python benchmarks/ps_clients.py [--clients 64] [--seconds 600] [--json]

Each client pulls 256 rows of 64 float32 and pushes gradients for them, over TCP on one machine, in
a loop; eight clients share a process. The share of the slowest client is its number of requests
divided by the mean over all clients, after two seconds. The memory of a server's process at the end
is compared with its memory after a tenth of the time, when every row exists.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import threading
import time
from typing import Any

import numpy as np
from fastdist.cli.machine_facts import machine_facts
from fastdist.ps import Client, RowsSpec, RuleSpec, Server
from fastdist.ps.client.partition import FixedShards, RoundRobin
from fastdist.ps.client.sharded import ShardedRows

SERVERS, THREADS, BATCH, DIM, ROWS = 2, 8, 256, 64, 100_000
SPEC = RowsSpec("rows", DIM, RuleSpec("Adagrad", {"lr": 0.1}))
spawn = multiprocessing.get_context("spawn")


def serve(pipe: Any) -> None:
    with Server() as server:
        pipe.send(server.address)
        while pipe.recv() is not None:
            pipe.send((resident_bytes(), server.stats()["requests"]))


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def work(addresses: list[str], seed: int, counts: Any, first: int, stop: Any) -> None:
    threads = [
        threading.Thread(target=ask, args=(addresses, seed + i, counts, first + i, stop))
        for i in range(min(THREADS, len(counts) - first))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def ask(addresses: list[str], seed: int, counts: Any, index: int, stop: Any) -> None:
    rng = np.random.default_rng(seed)
    gradients = np.ones((BATCH, DIM), np.float32)
    with Client(addresses, timeout_s=120) as client:
        pieces = RoundRobin(SERVERS, FixedShards(SERVERS)).place((SERVERS, DIM), 4)
        table = ShardedRows(client, SPEC, pieces)
        while not stop.is_set():
            ids = rng.integers(0, ROWS, BATCH)
            table.pull(ids)
            client.wait_all(client.begin_change(table.change(ids, gradients)))
            counts[index] += 1


def measure(clients: int, seconds: float) -> dict[str, Any]:
    pipes, servers = [], []
    for _ in range(SERVERS):
        ours, theirs = spawn.Pipe()
        servers.append(spawn.Process(target=serve, args=(theirs,), daemon=True))
        servers[-1].start()
        pipes.append(ours)
    addresses = [pipe.recv() for pipe in pipes]
    counts, stop = spawn.RawArray("q", clients), spawn.Event()
    workers = [
        spawn.Process(target=work, args=(addresses, first, counts, first, stop))
        for first in range(0, clients, THREADS)
    ]
    for worker in workers:
        worker.start()
    while min(counts) < 3:
        time.sleep(0.1)
    time.sleep(2)
    begin, before = time.monotonic(), np.array(counts)
    time.sleep(seconds / 10)
    memory = [ask_server(pipe)[0] for pipe in pipes]
    time.sleep(seconds * 9 / 10)
    done = np.array(counts) - before
    took = time.monotonic() - begin
    grown = [ask_server(pipe)[0] - was for pipe, was in zip(pipes, memory, strict=True)]
    stop.set()
    for worker in workers:
        worker.join()
    for pipe in pipes:
        pipe.send(None)
    return {
        "clients": clients,
        "seconds": round(took, 1),
        "lookups with updates per second": round(done.sum() / took),
        "rows per second": round(done.sum() * BATCH / took),
        "slowest of mean": round(done.min() / done.mean(), 3),
        "fastest of mean": round(done.max() / done.mean(), 3),
        "server MiB": [round(m / 2**20) for m in memory],
        "grown by MiB": [round(g / 2**20, 1) for g in grown],
    }


def ask_server(pipe: Any) -> tuple[int, int]:
    pipe.send("stats")
    answer: tuple[int, int] = pipe.recv()
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    result = measure(options.clients, options.seconds)
    if options.json:
        print(json.dumps({"machine": machine_facts(), **result}, indent=1))
        return
    for name, value in result.items():
        print(f"{name:<34}{value}")


if __name__ == "__main__":
    main()
