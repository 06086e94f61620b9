"""Connections between ranks of several machines, and strangers that disturb their making."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fastdist.collectives.rendezvous import connections
from fastdist.collectives.rendezvous.connections import (
    IN,
    OUT,
    STREAM,
    connect_ranks,
    listen_at,
)
from fastdist.errors import CollectiveTimeoutError, PeerFailureError

LOCAL = "127.0.0.1"
KEY = b"the key of the job"
CLOSED = bytes(32)  # begins the messages of a communicator that is closed
Found = list[list["socket.socket | None"]]


class World:
    """The listeners of ranks, which are threads."""

    def __init__(self, machines: Sequence[int]) -> None:
        self.machines = machines
        self.listeners = [listen_at(LOCAL) for _ in machines]
        self.addresses = [each.getsockname() for each in self.listeners]

    def connect(
        self,
        rank: int,
        key: bytes = KEY,
        timeout_s: float = 20.0,
        check: Callable[[], None] = lambda: None,
    ) -> Found:
        """Connect a rank, and keep its listener only meanwhile."""
        with self.listeners[rank] as listener:
            own = listener, rank, self.machines, self.addresses
            return connect_ranks(*own, key, timeout_s, check)

    def call(self, rank: int = 0) -> socket.socket:
        """Connect to a rank as a stranger."""
        connection = socket.create_connection(self.addresses[rank], timeout=20)
        return connection

    def introduce(self, rank: int, purpose: int, key: bytes = KEY) -> socket.socket | None:
        """Connect to rank 0 as another rank; None if it is not welcome."""
        connection = self.call()
        hello = connections._HELLO.pack(connections._MAGIC, rank, purpose, bytes(16))
        with contextlib.suppress(OSError):
            connection.sendall(hello)
            challenge = connection.recv(48, socket.MSG_WAITALL)
            if len(challenge) == 48:
                connection.sendall(proof(key, hello, challenge))
                if connection.recv(1) == connections._WELCOME:
                    return connection
        connection.close()
        return None


def proof(key: bytes, hello: bytes, challenge: bytes) -> bytes:
    """Return what the rank that connects to rank 0 proves."""
    said = struct.pack("<II", connections._CONNECTS, 0) + hello + challenge[:16]
    return connections.hmac.digest(key, said, "sha256")


@contextlib.contextmanager
def world_of(*machines: int) -> Iterator[World]:
    world = World(machines)
    yield world
    for listener in world.listeners:
        listener.close()


def close(found: Found) -> None:
    for connection in (each for own in found for each in own):
        if connection is not None:
            connection.close()


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(functions)) as pool:
        return [each.result(60) for each in [pool.submit(function) for function in functions]]


@pytest.mark.parametrize("machines", [(0, 1), (0, 0, 1), (0, 1, 0, 1), (0, 1, 2, 2, 3)])
def test_every_connection_leads_to_its_rank(machines: tuple[int, ...]) -> None:
    n = len(machines)
    with world_of(*machines) as world:
        found = in_threads(*[lambda rank=rank: world.connect(rank) for rank in range(n)])
    for rank in range(n):
        assert found[rank][rank] == [None] * 3
        for other in set(range(n)) - {rank}:
            assert (found[rank][other][STREAM] is None) == (machines[rank] == machines[other])
            for own, theirs in ((OUT, IN), (IN, OUT), (STREAM, STREAM)):
                if found[rank][other][own] is None:
                    continue
                text = f"{rank} to {other}, {own}".encode()
                found[rank][other][own].sendall(text)
                assert select.select([found[other][rank][theirs]], [], [], 10)[0]
                assert found[other][rank][theirs].recv(100) == text
    for each in found:
        close(each)


def test_a_check_ends_the_rendezvous() -> None:
    def check() -> None:
        if time.monotonic() > begin + 0.3:
            raise PeerFailureError("rank 2 has died", (2,))

    def connect(rank: int, check: Callable[[], None]) -> None:
        with pytest.raises(PeerFailureError) as told:
            world.connect(rank, timeout_s=60, check=check)
        assert told.value.ranks == ((2,) if rank == 0 else (0,))

    begin = time.monotonic()
    with world_of(0, 1, 2) as world:
        in_threads(lambda: connect(0, check), lambda: connect(1, lambda: None))
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("closes", [True, False])
def test_a_rank_that_leaves_before_another_has_come(closes: bool) -> None:
    """It has closed the communicator, which concerns later calls, or it has failed."""
    turns = 0

    def check() -> None:
        nonlocal turns
        turns += 1

    def connect() -> None:
        if closes:
            close(world.connect(0, check=check))
            return
        with pytest.raises(PeerFailureError, match="rank 1 has left while the ranks connected"):
            world.connect(0, check=check)

    def others() -> None:
        first = [world.introduce(1, purpose) for purpose in (OUT, IN, STREAM)]
        if closes:
            assert first[IN] is not None
            first[IN].sendall(CLOSED)
        for each in first:
            assert each is not None
            each.close()
        seen, until_s = turns, time.monotonic() + 20
        while turns < seen + 3 and time.monotonic() < until_s and closes:
            time.sleep(0.01)
        if closes:
            second = [world.introduce(2, purpose) for purpose in (OUT, IN, STREAM)]
            assert None not in second
            close([second])

    with world_of(0, 1, 2) as world:
        in_threads(connect, others)


def test_a_network_that_comes_back() -> None:
    """The first attempts fail as in an outage."""
    errors = [connections.errno.ENETUNREACH] * 2

    class Cut(socket.socket):
        def connect_ex(self, address: Any) -> int:
            return errors.pop() if errors else super().connect_ex(address)

    with world_of(0, 1) as world, pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections.socket, "socket", Cut)
        for found in in_threads(lambda: world.connect(0), lambda: world.connect(1)):
            close(found)
    assert not errors


def test_strangers_do_not_disturb() -> None:
    with world_of(0, 1) as world, contextlib.ExitStack() as strangers:
        for text in (b"", b"GET / HTTP/1.1\r\n\r\n and so on, more than a greeting"):
            strangers.enter_context(world.call()).sendall(text)
        for found in in_threads(lambda: world.connect(0), lambda: world.connect(1)):
            close(found)


def test_more_silent_strangers_than_files() -> None:
    usual = resource.getrlimit(resource.RLIMIT_NOFILE)
    with world_of(0, 1) as world, contextlib.ExitStack() as strangers:
        last = [strangers.enter_context(world.call()) for _ in range(500)][-1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (last.fileno() + 200, usual[1]))
        try:
            for found in in_threads(lambda: world.connect(0), lambda: world.connect(1)):
                close(found)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, usual)


@pytest.mark.slow
def test_silent_strangers_that_come_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest are closed, and a rank that comes late is connected."""
    monkeypatch.setattr(connections, "_MAX_STRANGERS", 5)

    def come() -> tuple[Found, int]:
        begin, strangers = time.monotonic(), []
        while time.monotonic() < begin + 2:
            strangers.append(world.call())
            time.sleep(0.005)
        for each in strangers:
            each.setblocking(False)
        left = sum(not connections._has_ended(each) for each in strangers[:-20])
        close([strangers])
        return world.connect(1), left

    with world_of(0, 1) as world:
        first, (second, left) = in_threads(lambda: world.connect(0), come)
    close(first)
    close(second)
    assert left == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_connection_that_a_forked_child_has_too() -> None:
    """It is lost, and made again, while the child lives."""
    children = []

    def lose_first() -> Found:
        listener = world.listeners[0]
        assert select.select([listener], [], [], 20)[0]
        first = listener.accept()[0]
        if (pid := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
        children.append(pid)
        first.shutdown(socket.SHUT_RDWR)
        first.close()
        return world.connect(0)

    with world_of(0, 1) as world:
        try:
            for found in in_threads(lose_first, lambda: world.connect(1)):
                close(found)
        finally:
            for pid in children:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)


def test_ranks_of_other_jobs_are_refused() -> None:
    def connect(rank: int, error: type[Exception], words: str) -> None:
        with pytest.raises(error, match=words):
            world.connect(rank, f"key {rank}".encode(), timeout_s=1)

    with world_of(0, 1) as world:
        in_threads(
            lambda: connect(0, CollectiveTimeoutError, "could not connect in time to rank 1"),
            lambda: connect(1, PeerFailureError, "found another program than rank 0 of its job"),
        )


def test_strangers_cannot_take_a_rank() -> None:
    def attack() -> Found:
        for purpose in (OUT, IN, STREAM):
            assert world.introduce(1, purpose, b"another key") is None
            hello = connections._HELLO.pack(connections._MAGIC, 1, purpose, bytes(16))
            with world.call() as once, world.call() as again:
                for each in (once, again):
                    each.sendall(hello)
                first, second = (each.recv(48, socket.MSG_WAITALL) for each in (once, again))
                assert first[:16] != second[:16]
                again.sendall(proof(KEY, hello, first))  # the answer to another challenge
                assert again.recv(1) == b""
                once.sendall(first[16:])  # rank 0's own proof
                assert once.recv(1) == b""
        for rank in (0, 2, 1 << 31, (1 << 32) - 1):
            assert world.introduce(rank, STREAM) is None
        for purpose in (3, 1 << 31, (1 << 32) - 1):
            assert world.introduce(1, purpose) is None
        return world.connect(1)

    with world_of(0, 1) as world:
        for found in in_threads(lambda: world.connect(0), attack):
            close(found)


def test_damaged_greetings() -> None:
    """Half of the strangers know the key, but never say that they are rank 1."""
    source = random.Random(1)

    def changed(message: bytes) -> bytes:
        damaged = bytearray(message)
        for _ in range(source.randrange(4)):
            damaged[source.randrange(len(damaged))] ^= 1 << source.randrange(8)
        if source.random() < 0.1:
            del damaged[source.randrange(len(damaged)) :]
        if source.random() < 0.1:
            damaged += bytes(source.randrange(2000))
        return bytes(damaged)

    def attack() -> Found:
        silent = []
        for _ in range(500):
            stranger = world.call()
            stranger.settimeout(0.2)
            good = connections._HELLO.pack(connections._MAGIC, 1, source.randrange(4), bytes(16))
            hello = changed(good)
            with contextlib.suppress(OSError):
                stranger.sendall(hello)
                if len(hello) == len(good):
                    challenge = stranger.recv(48, socket.MSG_WAITALL)
                    is_rank = connections._HELLO.unpack(hello)[1] == 1
                    key = b"another key" if is_rank or source.random() < 0.5 else KEY
                    if len(challenge) == 48:
                        stranger.sendall(changed(proof(key, hello, challenge)))
            if source.random() < 0.25:
                silent.append(stranger)
            else:
                stranger.close()
        close([silent])
        return world.connect(1)

    with world_of(0, 1) as world:
        for found in in_threads(lambda: world.connect(0), attack):
            close(found)


def test_an_address_that_is_not_this_machines() -> None:
    with pytest.raises(OSError, match="cannot listen at"):
        listen_at("203.0.113.7")
