"""Measures a parameter server, side by side with torch's rpc and TensorFlow, on one machine.

    python benchmarks/parameter_server.py [--encrypted] [--rpc-over-tcp] [--tensorflow PYTHON]
                                          [--hashed-rows 20000000] [--json]
                                          [--server-in NAMESPACE HERE THERE]

One worker and one server. A request names 4096 new random rows of 64 float32; an update sends
gradients for the same rows. Concurrent requests: a worker pulls the next rows while it pushes, or
pulls rows of four tables with a request for each. The servers take turns of a few requests in one
run. Rows per second are for the median request; p99 is over all requests. Results are checked.
Dense values of 100 MB are pulled into new memory, as with rpc, and into existing memory, as a
worker does in each step. The ratio is to the faster peer.

TensorFlow runs in a Python environment of its own (parameter_server_tensorflow.py), given by
--tensorflow:

    python -m venv tf && tf/bin/pip install tensorflow-cpu==2.21.0

fastdist's requests go over a socket in a private folder, as in a job of `fastdist run` on one
machine; with --encrypted by TCP, as in jobs on several machines. TensorFlow uses TCP
without encryption. rpc moves tensors between processes of one machine through shared memory;
--rpc-over-tcp makes it use TCP, as between machines.

--server-in starts the servers of fastdist and TensorFlow in a network namespace, as on another
machine; rpc is left out. HERE and THERE are the addresses of the worker and the servers:

    ip netns add there && ip link add here type veth peer name eth0 netns there
    ip addr add 10.77.0.1/24 dev here && ip link set here up
    ip -n there addr add 10.77.0.2/24 dev eth0 && ip -n there link set eth0 up
    ip -n there link set lo up
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from fastdist.cli.machine_facts import machine_facts
from fastdist.ps import Client, DenseSpec, Item, RowsSpec, RuleSpec, Server
from fastdist.ps.wire.protocol import Op
from torch.distributed import rpc

BATCH, DIM = 4096, 64
AT_ONCE = 4
DENSE = 25_000_000  # elements: 100 MB
TENSORFLOW_COMES_BY = "python -m venv tf && tf/bin/pip install tensorflow-cpu==2.21.0"
TENSORFLOW_HAS = (
    "lookups",
    "lookups, 4 at once",
    "lookups and updates",
    "dense pull",
    "dense push",
)
SGD = RuleSpec("SGD", {"lr": 0.5})
spawn = multiprocessing.get_context("spawn")


# --- servers, each in a process of its own --------------------------------------------------------


@dataclass(frozen=True)
class Place:
    """Addresses of the worker and the servers, and the servers' network namespace."""

    here: str = "127.0.0.1"
    there: str = "127.0.0.1"
    namespace: str = ""

    def enter(self) -> None:
        """Take this process to the servers' namespace."""
        if self.namespace:
            with open(f"/run/netns/{self.namespace}") as file:
                assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0


def serve(pipe: Any, address: str, place: Place) -> None:
    place.enter()
    with Server(address) as server:
        pipe.send(server.address)
        pipe.recv()


TABLE: dict[str, torch.Tensor] = {}


def make(name: str, shape: tuple[int, ...]) -> None:
    TABLE[name] = torch.zeros(shape)


def lookup(name: str, ids: torch.Tensor) -> torch.Tensor:
    return TABLE[name][ids]


def update(name: str, ids: torch.Tensor, gradients: torch.Tensor) -> None:
    TABLE[name].index_add_(0, ids, gradients, alpha=-0.5)


def pull(name: str) -> torch.Tensor:
    return TABLE[name]


def push(name: str, gradient: torch.Tensor) -> None:
    TABLE[name].add_(gradient, alpha=-0.5)


def join_rpc(name: str, rank: int, port: int, over_tcp: bool) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ways = {"_transports": ["uv"], "_channels": ["basic"]} if over_tcp else {}
    options = rpc.TensorPipeRpcBackendOptions(**ways)
    rpc.init_rpc(name, rank=rank, world_size=2, rpc_backend_options=options)


def serve_rpc(port: int, over_tcp: bool) -> None:
    join_rpc("server", 1, port, over_tcp)
    rpc.shutdown()


@contextmanager
def fastdist_server(*, is_encrypted: bool, place: Place) -> Iterator[Client]:
    ours, theirs = spawn.Pipe()
    with TemporaryDirectory() as folder:
        address = f"tcp://{place.there}:*" if is_encrypted else f"ipc://{folder}/server"
        process = spawn.Process(target=serve, args=(theirs, address, place))
        process.start()
        with Client([ours.recv()], timeout_s=120, retry_s=60) as client:
            yield client
        ours.send(None)
        process.join()


@contextmanager
def rpc_server(over_tcp: bool) -> Iterator[None]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = spawn.Process(target=serve_rpc, args=(port, over_tcp))
    process.start()
    join_rpc("worker", 0, port, over_tcp)
    yield
    rpc.shutdown()
    process.join()


class TensorFlow:
    """The same requests in a process with TensorFlow.

    Args:
        python: path of its Python.
        rows: rows of the table.
        place: where its server is.
    """

    def __init__(self, python: str, rows: int, place: Place) -> None:
        script = Path(__file__).with_name("parameter_server_tensorflow.py")
        self._process = subprocess.Popen(
            [python, script, str(rows), str(DENSE), place.here, place.there, place.namespace],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.version = self._answer()

    def measure(self, what: str, requests: int) -> list[float]:
        """Returns the seconds of each request."""
        assert self._process.stdin is not None
        print(json.dumps([what, requests]), file=self._process.stdin, flush=True)
        times: list[float] = self._answer()
        return times

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"TensorFlow's process has ended with code {self._process.wait()}")
        return json.loads(line)


# --- measurements --------------------------------------------------------------------------------


class Work:
    """Requests of one kind to all servers, on data made before each request.

    Args:
        name: name of the kind.
        ways: function of each server that makes one request.
        data: returns the arguments of a request.
        amount: rows or bytes per request.
    """

    def __init__(
        self,
        name: str,
        ways: dict[str, Callable[..., Any]],
        data: Callable[[], Any],
        amount: int = BATCH,
    ) -> None:
        self.name, self.data, self.amount = name, data, amount
        self.ways: dict[str, Callable[[int], list[float]]] = {
            way: partial(self._times, call) for way, call in ways.items()
        }
        self.times: dict[str, list[float]] = {}

    def _times(self, call: Callable[..., Any], requests: int) -> list[float]:
        times = []
        for _ in range(requests):
            arguments = self.data()
            begin = time.perf_counter()
            call(*arguments)
            times.append(time.perf_counter() - begin)
        return times

    def measure(self, rounds: int, requests: int) -> None:
        for number, (way, ask) in itertools.product(range(rounds), self.ways.items()):
            times = ask(requests)
            if number:  # the first round warms up
                self.times.setdefault(way, []).extend(times)

    def row(self) -> dict[str, Any]:
        row: dict[str, Any] = {"what": self.name}
        for way, times in self.times.items():
            p50, p99 = np.percentile(times, [50, 99])
            row[way] = {
                "per_s": round(self.amount / p50),
                "p50_ms": round(p50 * 1e3, 3),
                "p99_ms": round(p99 * 1e3, 3),
            }
        peers = [row[way]["per_s"] for way in self.times if way != "fastdist"]
        if peers:
            row["ratio"] = round(row["fastdist"]["per_s"] / max(peers), 2)
        return row


def pull_rows(client: Client, table: int, ids: Any) -> Any:
    rows = np.empty((ids.size, DIM), np.float32)
    client.wait_all(client.begin_read([Item(0, table, rows, ids)]))
    return rows


def push_rows(client: Client, table: int, ids: Any, gradients: Any) -> None:
    client.wait_all(client.begin_change([Item(0, table, gradients, ids)]))


def pull_dense(client: Client, number: int) -> Any:
    value = np.empty(DENSE, np.float32)
    client.wait_all(client.begin_read(Item(0, number, value).cut()))
    return value


def push_dense(client: Client, number: int, gradient: Any) -> None:
    client.wait_all(client.begin_change(Item(0, number, gradient).cut()))


def rows_work(client: Client, rows: int, rng: np.random.Generator) -> list[Work]:
    """Lookups, and lookups with updates, of a fixed table on both servers."""
    table = client.create(0, RowsSpec("rows", DIM, SGD, rows=rows))
    rpc.rpc_sync("server", make, ("rows", (rows, DIM)))

    def data() -> tuple[Any, Any]:
        ids = rng.integers(0, rows, BATCH)
        return ids, rng.standard_normal((BATCH, DIM), np.float32)

    def ours(ids: Any, gradients: Any) -> None:
        pull_rows(client, table, ids)
        push_rows(client, table, ids, gradients)

    def theirs(ids: Any, gradients: Any) -> None:
        rpc.rpc_sync("server", lookup, ("rows", torch.from_numpy(ids)))
        sent = (torch.from_numpy(ids), torch.from_numpy(gradients))
        rpc.rpc_sync("server", update, ("rows", *sent))

    def ours_at_once(ids: Any, gradients: Any) -> None:
        tickets = client.begin_read([Item(0, table, np.empty((BATCH, DIM), np.float32), ids)])
        tickets += client.begin_change([Item(0, table, gradients, ids)])
        for ticket in tickets:
            client.wait(ticket)

    def theirs_at_once(ids: Any, gradients: Any) -> None:
        pull = rpc.rpc_async("server", lookup, ("rows", torch.from_numpy(ids)))
        sent = (torch.from_numpy(ids), torch.from_numpy(gradients))
        push = rpc.rpc_async("server", update, ("rows", *sent))
        pull.wait()
        push.wait()

    def four() -> tuple[Any]:
        return (rng.integers(0, rows, (AT_ONCE, BATCH)),)

    def our_four(ids: Any) -> None:
        rows = np.empty((AT_ONCE, BATCH, DIM), np.float32)
        items = [Item(0, table, *each) for each in zip(rows, ids, strict=True)]
        for tickets in [client.begin_read([item]) for item in items]:
            client.wait(tickets[0])

    def their_four(ids: Any) -> None:
        sent = [("rows", torch.from_numpy(part)) for part in ids]
        for future in [rpc.rpc_async("server", lookup, one) for one in sent]:
            future.wait()

    ids, gradients = data()
    for call in (ours, theirs):
        call(ids, gradients)
    got = pull_rows(client, table, ids)
    wanted = rpc.rpc_sync("server", lookup, ("rows", torch.from_numpy(ids))).numpy()
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
    ways = {
        "fastdist": lambda ids, _: pull_rows(client, table, ids),
        "rpc": lambda ids, _: rpc.rpc_sync("server", lookup, ("rows", torch.from_numpy(ids))),
    }
    return [
        Work("lookups", ways, data),
        Work(
            f"lookups, {AT_ONCE} at once",
            {"fastdist": our_four, "rpc": their_four},
            four,
            AT_ONCE * BATCH,
        ),
        Work("lookups and updates", {"fastdist": ours, "rpc": theirs}, data),
        Work("both at once", {"fastdist": ours_at_once, "rpc": theirs_at_once}, data),
    ]


def hashed_work(client: Client, rows: int, rng: np.random.Generator) -> list[Work]:
    """The same requests for a table of 64-bit ids, which the peers lack."""
    table = client.create(0, RowsSpec("hashed", DIM, SGD))
    known = rng.integers(-(2**63), 2**63 - 1, rows)
    ones = np.ones((16384, DIM), np.float32)
    begin = time.perf_counter()
    parts = np.split(known, range(16384, rows, 16384))
    items = [Item(0, table, ones[: part.size], part) for part in parts]
    tickets = [ticket for item in items for ticket in client.begin_change([item], op=Op.ASSIGN)]
    for ticket in tickets:
        client.wait(ticket)
    filled_s = time.perf_counter() - begin
    print(f"filled {rows} rows at {rows / filled_s / 1e6:.2f} M rows/s", file=sys.stderr)
    some = known[rng.integers(0, rows, BATCH)]
    assert (pull_rows(client, table, some) == 1).all()

    def data() -> tuple[Any, Any]:
        ids = known[rng.integers(0, rows, BATCH)]
        return ids, rng.standard_normal((BATCH, DIM), np.float32)

    def both(ids: Any, gradients: Any) -> None:
        pull_rows(client, table, ids)
        push_rows(client, table, ids, gradients)

    pulls = {"fastdist": lambda ids, _: pull_rows(client, table, ids)}
    return [
        Work("hashed lookups", pulls, data),
        Work("hashed lookups and updates", {"fastdist": both}, data),
    ]


def dense_work(client: Client, rng: np.random.Generator) -> list[Work]:
    """Pulls and pushes of 100 MB."""
    number = client.create(0, DenseSpec("dense", (DENSE,), SGD), np.zeros(DENSE, np.float32))
    rpc.rpc_sync("server", make, ("dense", (DENSE,)))
    gradient = rng.standard_normal(DENSE, np.float32)

    def data() -> tuple[Any]:
        gradient[: DENSE // 10] += 1
        return (gradient,)

    value = np.zeros(DENSE, np.float32)

    def pull_into(_: Any) -> None:
        for ticket in client.begin_read(Item(0, number, value).cut()):
            client.wait(ticket)

    pulls = {
        "fastdist": lambda _: pull_dense(client, number),
        "rpc": lambda _: rpc.rpc_sync("server", pull, ("dense",)),
    }
    pushes = {
        "fastdist": lambda g: push_dense(client, number, g),
        "rpc": lambda g: rpc.rpc_sync("server", push, ("dense", torch.from_numpy(g))),
    }
    for call in pushes.values():
        call(*data())
    data()
    assert pull_dense(client, number)[-1] == -0.5 * gradient[-1]
    pull_into(None)
    assert value[-1] == -0.5 * gradient[-1]
    return [
        Work("dense pull", pulls, data, 4 * DENSE),
        Work(
            "dense pull, memory used again",
            {"fastdist": pull_into, "rpc": pulls["rpc"]},
            data,
            4 * DENSE,
        ),
        Work("dense push", pushes, data, 4 * DENSE),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--hashed-rows", type=int, default=20_000_000)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--encrypted", action="store_true")
    parser.add_argument("--rpc-over-tcp", action="store_true")
    parser.add_argument("--tensorflow", metavar="PYTHON", help="a Python that has TensorFlow")
    parser.add_argument("--server-in", nargs=3, metavar=("NAMESPACE", "HERE", "THERE"))
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    place = Place()
    if options.server_in:
        if not options.encrypted:
            parser.error("--server-in needs --encrypted: sockets in a folder stay on one machine")
        namespace, here, there = options.server_in
        place = Place(here, there, namespace)
    rng = np.random.default_rng(0)
    rows = []
    tensorflow = None
    if options.tensorflow:
        tensorflow = TensorFlow(options.tensorflow, options.rows, place)
    else:
        print(f"TensorFlow is left out; for --tensorflow: {TENSORFLOW_COMES_BY}", file=sys.stderr)

    def measure(works: list[Work], rounds: int, requests: int) -> None:
        for work in works:
            if tensorflow is not None and work.name in TENSORFLOW_HAS:
                work.ways["TensorFlow"] = partial(tensorflow.measure, work.name)
            if place.namespace:
                work.ways.pop("rpc", None)
            work.measure(rounds, requests)
            rows.append(work.row())

    with (
        fastdist_server(is_encrypted=options.encrypted, place=place) as client,
        rpc_server(options.rpc_over_tcp),
    ):
        measure(rows_work(client, options.rows, rng), options.rounds, 40)
        measure(dense_work(client, rng), options.rounds // 2, 3)
        measure(hashed_work(client, options.hashed_rows, rng), options.rounds, 40)
    if tensorflow is not None:
        tensorflow.close()
    link = "TCP, encrypted" if options.encrypted else "a socket in a private folder"
    link += ", between network namespaces" if place.namespace else ""
    if options.json:
        facts = machine_facts() | {"tensorflow": tensorflow.version if tensorflow else None}
        print(json.dumps({"machine": facts, "fastdist by": link, "rows": rows}, indent=1))
        return
    print(f"fastdist by {link}")
    for row in rows:
        unit = 1e9 if "dense" in row["what"] else 1e6
        name = "GB/s" if "dense" in row["what"] else "M rows/s"
        cells = [
            f"{way} {row[way]['per_s'] / unit:.2f} {name} (p50 {row[way]['p50_ms']} ms, "
            f"p99 {row[way]['p99_ms']} ms)"
            for way in ("fastdist", "rpc", "TensorFlow")
            if way in row
        ]
        ratio = f"  ratio {row['ratio']}" if "ratio" in row else ""
        print(f"{row['what']:<31}" + "  ".join(cells) + ratio)


if __name__ == "__main__":
    main()
