"""Two machines, simulated by connected network namespaces, and ranks on them."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Pipe

import pytest
from fastdist.cluster.ports import reserve_port
from ranks import ProcessRanks

MACHINES = ((0, 1), (2, 3))
WORLD = 4
ports = itertools.count(29600)  # of the namespaces; ports of this machine are from `free_port`
_held: list[socket.socket] = []


@dataclass(frozen=True)
class Network:
    """Two network namespaces and their addresses."""

    names: tuple[str, str]
    addresses: tuple[str, str]

    def command(self, machine: int, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.names[machine], *command]

    def set_cable(self, state: str, machine: int = 0) -> None:
        """Cut the cable at a machine ("down"), or connect it again ("up")."""
        name = self.names[machine]
        _ip("netns", "exec", name, "ip", "link", "set", name, state)


def free_port() -> int:
    """A port of this machine that no other test gets."""
    holder, port = reserve_port()
    _held.append(holder)
    return port


def _ip(*args: str) -> None:
    done = subprocess.run(["ip", *args], capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        raise OSError(f"ip {' '.join(args)}: {done.stderr.strip()}")


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """Two namespaces; conftest.py marks the tests that use them slow."""
    if shutil.which("ip") is None:
        pytest.skip("needs ip (iproute2) to make network namespaces")
    tag = secrets.token_hex(2)
    names = (f"fd{tag}a", f"fd{tag}b")
    addresses = ("10.213.7.1", "10.213.7.2")
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
            _ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
            for name, address in zip(names, addresses, strict=True):
                _ip("link", "set", name, "netns", name)
                for args in (
                    ("addr", "add", f"{address}/24", "dev", name),
                    ("link", "set", name, "up"),
                    ("link", "set", "lo", "up"),
                ):
                    _ip("netns", "exec", name, "ip", *args)
        except OSError as error:
            pytest.skip(f"network namespaces cannot be made here: {error}")
        yield Network(names, addresses)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=20)


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
