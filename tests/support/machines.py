"""Machines, simulated by connected network namespaces, and ranks on them."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Pipe

import pytest
from ranks import ProcessRanks

MACHINES = ((0, 1), (2, 3))
WORLD = 4
ports = itertools.count(29600)  # of the namespaces; held_ports has those of this machine


@dataclass(frozen=True)
class Network:
    """Network namespaces and their addresses; each calls its network interface by its own name."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]

    def command(self, machine: int, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.names[machine], *command]

    def set_cable(self, state: str, machine: int = 0) -> None:
        """Cut the cable at a machine ("down"), or connect it again ("up")."""
        name = self.names[machine]
        _ip("-n", name, "link", "set", name, state)

    def slow(self, machine: int, rate: str) -> None:
        """Limit what a machine sends to a rate of tc, such as "8mbit"."""
        shape = ("rate", rate, "burst", "16k", "latency", "50ms")
        self._tc(machine, "qdisc", "add", "root", "tbf", *shape)

    def lose(self, machine: int, share: float) -> None:
        """Lose a random share of the packets that a machine sends."""
        self._tc(machine, "qdisc", "add", "clsact")
        drops = ("egress", "bpf", "da", "bytecode", _at_random(share, _TC_ACT_SHOT))
        self._tc(machine, "filter", "add", *drops)

    def reorder(self, machine: int, share: float, rate: str) -> None:
        """Let a random share of the packets that a machine sends be overtaken by the others."""
        self._tc(machine, "qdisc", "add", "root", "handle", "1:", "htb")
        self._tc(machine, "class", "add", "parent", "1:", "classid", "1:1", "htb", "rate", rate)
        slowly = ("bytecode", _at_random(share, _OWN_CLASS), "classid", "1:1")
        self._tc(machine, "filter", "add", "parent", "1:", "bpf", *slowly)

    def heal(self, machine: int) -> None:
        """Undo `slow`, `lose`, `reorder` and a cut."""
        name = self.names[machine]
        for kind in ("root", "clsact"):
            command = ["tc", "-n", name, "qdisc", "del", "dev", name, kind]
            subprocess.run(command, capture_output=True, timeout=20)
        self.set_cable("up", machine)

    def reset(self, machine: int, other: int) -> None:
        """Reset all TCP connections between two machines."""
        kill = self.command(machine, "ss", "--no-header", "--kill", "dst", self.addresses[other])
        _run(*kill)

    def _tc(self, machine: int, kind: str, verb: str, *args: str) -> None:
        if shutil.which("tc") is None:
            pytest.skip("needs tc (iproute2)")
        name = self.names[machine]
        _run("tc", "-n", name, kind, verb, "dev", name, *args)


_TC_ACT_SHOT = 2
_OWN_CLASS = 0xFFFFFFFF  # the class that the filter names


def _at_random(share: float, verdict: int) -> str:
    """Return a BPF program for tc with this verdict on a random share of packets, and 0 on others.

    Kernels without netem and machines without nft have it.
    """
    load_random, if_at_least, end = f"32 0 0 {0xFFFFF000 + 56}", "53 0 1", "6 0 0"
    threshold = min(int(share * 2**32), 2**32 - 1)
    return f"4,{load_random},{if_at_least} {threshold},{end} 0,{end} {verdict}"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")


def _ip(*args: str) -> None:
    _run("ip", *args)


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Two namespaces on one cable; conftest.py marks the tests that use them slow."""
    yield from _made(2)


@pytest.fixture(scope="module")
def network_of_three() -> Iterator[Network]:
    """Three namespaces on a switch."""
    yield from _made(3)


@pytest.fixture(scope="module")
def network_of_eight() -> Iterator[Network]:
    """Eight namespaces on a switch."""
    yield from _made(8)


def _made(count: int) -> Iterator[Network]:
    if shutil.which("ip") is None:
        pytest.skip("needs ip (iproute2) to make network namespaces")
    tag = secrets.token_hex(2)
    names = tuple(f"fd{tag}{letter}" for letter in "abcdefgh"[:count])
    addresses = tuple(f"10.213.7.{machine + 1}" for machine in range(count))
    switch = f"fd{tag}s"
    spaces = names if count == 2 else (*names, switch)
    try:
        try:
            for name in spaces:
                _ip("netns", "add", name)
            if count == 2:
                _ip("link", "add", names[0], "netns", names[0], "type", "veth",
                    "peer", "name", names[1], "netns", names[1])  # fmt: skip
            else:
                _connect_by_switch(names, switch)
            for name, address in zip(names, addresses, strict=True):
                _ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
                _ip("-n", name, "link", "set", name, "up")
                _ip("-n", name, "link", "set", "lo", "up")
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield Network(names, addresses)
    finally:
        for name in spaces:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


def _connect_by_switch(names: tuple[str, ...], switch: str) -> None:
    _ip("-n", switch, "link", "add", switch, "type", "bridge")
    _ip("-n", switch, "link", "set", switch, "up")
    for name in names:
        _ip("-n", switch, "link", "add", name, "type", "veth", "peer", "name", name, "netns", name)
        _ip("-n", switch, "link", "set", name, "master", switch, "up")


class MachineRanks(ProcessRanks):
    """Ranks as processes on the two machines."""

    def __init__(self, network: Network) -> None:
        super().__init__(WORLD)
        self.network = network

    def start(self) -> None:
        port = str(next(ports))
        for machine, ranks in enumerate(MACHINES):
            for local, rank in enumerate(ranks):
                ours, theirs = Pipe()
                env = dict(os.environ)
                env |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_RANK": str(local)}
                env |= {"LOCAL_WORLD_SIZE": str(len(ranks)), "OMP_NUM_THREADS": "1"}
                env |= {"MASTER_ADDR": self.network.addresses[0], "MASTER_PORT": port}
                env.pop("FASTDIST_JOB", None)
                self._start_one(ours, theirs, env, self.network.names[machine])
