"""Two servers, and clients that push and count; a test kills and stops them.

Does not import torch, so that client processes start quickly.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from functools import partial
from typing import Any

import numpy as np
from fastdist.errors import UnavailableError
from fastdist.ps import Client, DenseSpec, RowsSpec, RuleSpec
from fastdist.ps.client.partition import FixedShards, RoundRobin
from launched import wait_until
from sharded_things import ShardedRows, ShardedVariable
from unreliable import Unreliable

ADD = RuleSpec("SGD", {"lr": 1.0})
CLIENTS, MOST = 3, 4000  # at a time, and ever
LARGE = (1 << 20) + 6  # in two pieces, one of which travels in parts
SERVE = (
    "import sys; from fastdist.ps import Server; "
    "print(Server(sys.argv[1]).address, flush=True); sys.stdin.read()"
)
spawn = multiprocessing.get_context("spawn")


class Things:
    """The objects that a client pushes to: its own row and variable, and a large shared one."""

    def __init__(self, client: Client, number: int) -> None:
        placement = RoundRobin(2, FixedShards(2))
        self.client, self.number = client, number

        def dense(name: str, shape: tuple[int, ...]) -> ShardedVariable:
            pieces = placement.place(shape, 4)
            return ShardedVariable(client, DenseSpec(name, shape, ADD), pieces, np.zeros(shape))

        self.rows = ShardedRows(client, RowsSpec("rows", 4, ADD), placement.place((2, 4), 4))
        self.large = dense("large", (LARGE,))
        self.all = [dense(f"small {i}", (3,)) for i in range(2 * CLIENTS)]
        self.small = self.all[number % len(self.all)]

    def push(self, with_large: bool) -> None:
        items = self.rows.change([self.number], -np.ones((1, 4), np.float32))
        items += self.small.change(-np.ones(3, np.float32))
        if with_large:
            items += self.large.change(-np.ones(LARGE, np.float32))
        self.client.wait_all(self.client.begin_change(items))

    def row(self, number: int) -> int:
        return whole(self.rows.pull([number]))

    @property
    def sharded(self) -> list[Any]:
        return [self.rows, self.large, *self.all]


def whole(values: np.ndarray) -> int:
    """Return the count that all elements hold."""
    assert (values == values.flat[0]).all()
    return int(values.flat[0])


def push_on(
    addresses: list[str], number: int, begun: Any, acked: Any, is_out: Any, go: Any
) -> None:
    """Push until killed, while `go` is even; after losing a server, wait until `go` changes."""
    while True:
        is_out[number] = 1
        while go.value % 2:
            time.sleep(0.01)
        is_out[number] = 0
        turn = go.value
        if turn % 2:  # it has changed since: whoever changed it may have seen us out
            continue
        try:
            with Client(addresses, retry_s=0.3, timeout_s=60) as client:
                things = Things(client, number)
                while go.value == turn:
                    begun[number] += 1
                    things.push(with_large=number % CLIENTS == 0)
                    acked[number] += 1
        except UnavailableError:
            is_out[number] = 1
            while go.value == turn:
                time.sleep(0.01)


class Job:
    """Two servers, and clients that push to them."""

    def __init__(self) -> None:
        self.servers = [self._serve("tcp://127.0.0.1:*") for _ in range(2)]
        self.addresses = [address for _, address in self.servers]
        # Connections of clients break from time to time, and they repeat requests.
        self.ways = [
            Unreliable(address, (5_000, 50_000_000), (2_000, 20_000)) for address in self.addresses
        ]
        self.begun, self.acked, self.is_out = (spawn.RawArray("q", MOST) for _ in range(3))
        self.go = spawn.RawValue("q", 0)
        self.clients: dict[int, Any] = {}
        self.made = 0
        for _ in range(CLIENTS):
            self.start_client()

    def _serve(self, address: str) -> tuple[subprocess.Popen[str], str]:
        pipe = subprocess.PIPE
        command = [sys.executable, "-c", SERVE, address]
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert process.stdout is not None
        return process, process.stdout.readline().strip()

    def start_client(self) -> None:
        shared = (self.begun, self.acked, self.is_out, self.go)
        process = spawn.Process(
            target=push_on, args=([way.address for way in self.ways], self.made, *shared)
        )
        process.start()
        self.clients[self.made] = process
        self.made += 1

    def kill_client(self, number: int) -> None:
        process = self.clients.pop(number)
        process.kill()
        process.join()

    def pause_server(self, server: int, for_s: float) -> None:
        process, _ = self.servers[server]
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(for_s)
        os.kill(process.pid, signal.SIGCONT)

    def kill_server(self, server: int) -> None:
        process, _ = self.servers[server]
        process.kill()
        process.communicate()

    def start_server(self, server: int) -> None:
        self.servers[server] = self._serve(self.addresses[server])

    def disturb(self, for_s: float, rng: random.Random) -> None:
        """Stop servers for some seconds, and kill and replace clients."""
        end = time.monotonic() + for_s
        rounds = 0
        wait_until(lambda: all(self.acked[number] for number in self.clients))
        while rounds < 2 or time.monotonic() < end:
            rounds += 1
            self.pause_server(rng.randrange(2), rng.choice((0.7, 1.5)))
            victim = rng.choice(list(self.clients))
            wait_until(partial(self.acked.__getitem__, victim))
            self.kill_client(victim)
            self.start_client()

    def hold(self) -> None:
        """Make clients finish their pushes, and wait."""
        self.go.value += self.go.value % 2 == 0
        wait_until(lambda: all(self.is_out[n] for n in self.clients))

    def go_on(self) -> None:
        self.go.value += 1

    def close(self) -> None:
        for client in self.clients.values():
            client.kill()
        for process, _ in self.servers:
            process.kill()
            process.communicate()
        for way in self.ways:
            way.close()
