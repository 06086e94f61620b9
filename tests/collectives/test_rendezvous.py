"""Ranks of one machine that meet: ranks that leave, strangers, and limits."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from fastdist.collectives.rendezvous import local as rendezvous
from fastdist.errors import ClusterConfigError
from fork_server import python


def exchange(rank: int, size: int, key: str, timeout_s: float = 20) -> int:
    """Exchange memory as a rank; return the number of descriptors."""
    own = os.memfd_create("own")
    fds = [own]
    try:
        fds = rendezvous.exchange_memory(key, rank, size, own, timeout_s)
        return len(fds)
    finally:
        for fd in fds:
            os.close(fd)


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """Call all functions at once; return their results or errors."""
    results: list[Any] = [None] * len(calls)

    def body(i: int) -> None:
        try:
            results[i] = calls[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=body, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    return results


def listener_of(key: str) -> str:
    """Wait for rank 0; return the name of its socket."""
    digest = rendezvous.prefix_of(key)
    deadline = time.monotonic() + 10
    while not (names := rendezvous._names(digest)):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return names[0]


def connect(key: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(listener_of(key))
    return connection


@pytest.fixture
def key() -> str:
    return secrets.token_hex(8)


def test_ranks_meet_again_and_again_with_the_same_key(key: str) -> None:
    """Those that are early find rank 0's last socket, whose meeting is over."""

    def meet(rank: int) -> list[int]:
        return [exchange(rank, 3, key) for _ in range(200)]

    assert in_threads(lambda: meet(0), lambda: meet(1), lambda: meet(2)) == [[3] * 200] * 3


def test_ranks_meet_beside_silent_connections(key: str) -> None:
    with contextlib.ExitStack() as stack:

        def come_late() -> int:
            silent = [stack.enter_context(connect(key)) for _ in range(100)]
            silent[99].send(b"what is this?")
            return exchange(1, 3, key)

        assert (
            in_threads(lambda: exchange(0, 3, key), come_late, lambda: exchange(2, 3, key))
            == [3] * 3
        )


def test_a_rank_that_leaves_is_named_on_all(key: str) -> None:
    def leave() -> None:
        hello = rendezvous._HELLO.pack(b"fastdist", rendezvous._VERSION, 2, 4)
        with connect(key) as connection:
            socket.send_fds(connection, [hello], [0])
            time.sleep(1.5)

    begin = time.monotonic()
    first, second, _ = in_threads(lambda: exchange(0, 4, key), lambda: exchange(1, 4, key), leave)
    assert time.monotonic() - begin < 10
    for error in (first, second):
        assert isinstance(error, ClusterConfigError)
        assert "rank 2 left before all ranks had arrived" in str(error)
        assert error.ranks == (2,)


def test_a_refusal_names_its_ranks_on_all(key: str) -> None:
    results = in_threads(
        lambda: exchange(0, 3, key),
        lambda: exchange(1, 3, key),
        lambda: time.sleep(1.5) or exchange(2, 5, key),
    )
    for error in results:
        assert isinstance(error, ClusterConfigError)
        assert "rank 0 expects 3, rank 2 expects 5" in str(error)
        assert error.ranks == (2,)


@pytest.mark.slow
def test_a_rank_that_never_comes_is_named_though_rank_0_is_late(key: str) -> None:
    def come_late() -> int:
        time.sleep(3)
        return exchange(0, 3, key, 8)

    for error in in_threads(come_late, lambda: exchange(1, 3, key, 8)):
        assert isinstance(error, ClusterConfigError)
        assert "ranks [2] of 3 did not arrive within 8 s" in str(error)
        assert error.ranks == (2,)


def test_a_second_rank_0(key: str) -> None:
    def second() -> int:
        listener_of(key)
        time.sleep(0.5)  # the first has looked for others by then
        with pytest.raises(ClusterConfigError, match="two processes were given RANK 0"):
            exchange(0, 2, key)
        return exchange(1, 2, key)

    assert in_threads(lambda: exchange(0, 2, key), second) == [2, 2]


@pytest.mark.slow
def test_a_rank_that_cannot_open_enough_files(key: str) -> None:
    code = """
import os, resource, sys, fastdist as fd
rank = int(sys.argv[1])
if rank == 5: resource.setrlimit(resource.RLIMIT_NOFILE, (12, 12))
try: comm = fd.init(timeout=20); comm.barrier(); print("fine")
except fd.errors.FastdistError as error: print(type(error).__name__, error.ranks, error)
"""
    environ = os.environ | {"FASTDIST_JOB": key, "WORLD_SIZE": "12", "LOCAL_WORLD_SIZE": "12"}
    ranks = [
        python(
            *("-c", code, str(rank)),
            env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(12)
    ]
    outputs = [rank.communicate(timeout=40)[0] for rank in ranks]
    assert outputs[5].startswith("ClusterConfigError (5,) rendezvous: rank 5 cannot open a file")
    for rank in (0, 1, 11):
        assert "PeerFailureError (5,)" in outputs[rank], outputs[rank]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to start processes of another user")
def test_more_descriptors_than_a_user_may_have_on_their_way(key: str) -> None:
    code = """
import os, resource, sys, fastdist as fd
try: os.setresuid(65534, 65534, 65534)
except OSError: sys.exit("not here")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
comm = fd.init(timeout=20)
comm.barrier()
print("fine")
"""
    environ = os.environ | {"FASTDIST_JOB": key, "WORLD_SIZE": "24", "LOCAL_WORLD_SIZE": "24"}
    ranks = [
        python(
            *("-c", code),
            env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(24)
    ]
    outputs = [rank.communicate(timeout=60) for rank in ranks]
    if any("not here" in output[1] for output in outputs):
        pytest.skip("a process cannot change its user here")
    assert outputs == [("fine\n", "")] * 24


STRANGER = """
import os, resource, socket, sys, time
resource.setrlimit(resource.RLIMIT_NOFILE, (4000, 4000))
table = open("/proc/self/net/unix")
try:
    os.setresuid(65534, 65534, 65534)
except OSError:
    sys.exit("not here")
prefix = chr(0) + sys.argv[1]
listeners = []
for number in range(200):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(prefix + f"{number:016x}")
    listener.listen(0)
    listeners.append(listener)
print("ready", flush=True)
def own():
    table.seek(0)
    names = [line.split()[-1] for line in table if "@" + sys.argv[1] in line]
    return [chr(0) + name[1:] for name in names if not name[-16:].startswith("0000")]
kept = []
while True:
    for name in own():
        try:
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(name)
            kept.append(connection)
        except OSError:
            time.sleep(0.01)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to start a process of another user")
def test_another_user_cannot_disturb(key: str) -> None:
    """Not with sockets of the same name, and not with connections that it keeps."""
    prefix = rendezvous.prefix_of(key)
    command = [sys.executable, "-c", STRANGER, prefix[1:]]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as stranger:
        try:
            assert stranger.stdout is not None
            if stranger.stdout.readline() != b"ready\n":
                assert stranger.wait(10) == 1
                pytest.skip("a process cannot change its user here")

            def come_late() -> int:
                time.sleep(1)
                return exchange(1, 2, key)

            assert in_threads(lambda: exchange(0, 2, key), come_late) == [2, 2]
        finally:
            stranger.kill()
