"""Ranks that die, ranks that never arrive, and resources that must be released."""

from __future__ import annotations

import functools
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fastdist
import numpy as np
import pytest
from contract_errors import Misshapen
from fastdist import Communicator
from fastdist.cluster.address import reserved_ports
from fastdist.errors import FastdistError, PeerFailureError
from fork_server import python
from ranks import ProcessRanks, RankError, ThreadRanks

PREAMBLE = "import os, sys, time, signal, numpy as np, fastdist as fd\n"


def start(rank: int, world_size: int, job: str, code: str, **env: str) -> subprocess.Popen[str]:
    variables = dict(os.environ)
    variables |= {"FASTDIST_JOB": job, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    variables |= {"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size), **env}
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PREAMBLE + code],
        env=variables,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: subprocess.Popen[str], limit_s: float = 30) -> tuple[int, str]:
    try:
        out, err = process.communicate(timeout=limit_s)
    finally:
        process.kill()
    return process.returncode, out + err


@pytest.fixture
def job() -> str:
    return secrets.token_hex(8)


@pytest.fixture(params=[2, 3])
def processes(request: pytest.FixtureRequest) -> Iterator[ProcessRanks]:
    ranks = ProcessRanks(request.param)
    yield ranks
    ranks.close()


# --- ranks that die -----------------------------------------------------------------------------


def die_amid_calls(comm: Communicator, size: int, asleep: bool) -> float:
    """Kill the last rank while the others are in collectives; return the seconds they took."""
    x = np.ones(size, np.float32)
    comm.all_reduce(x)
    if comm.rank == comm.world_size - 1:
        if not asleep:
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
            while True:
                comm.all_reduce(x)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()

    def go_on() -> None:
        while True:
            comm.all_reduce(x)

    with pytest.raises(PeerFailureError) as caught:
        go_on()
    assert caught.value.ranks == (comm.world_size - 1,)
    assert f"rank {comm.world_size - 1} has died" in str(caught.value)
    with pytest.raises(FastdistError, match="cannot be used any more"):
        comm.all_reduce(x)
    return time.monotonic() - start


@pytest.mark.parametrize("size", [2, 2_000_000])
@pytest.mark.parametrize("asleep", [False, True])
def test_killed_rank(processes: ProcessRanks, size: int, asleep: bool) -> None:
    last = processes.size - 1
    with pytest.raises(RankError) as caught:
        processes.run(die_amid_calls, size, asleep)
    assert caught.value.errors == {last: f"exited with {-signal.SIGKILL}"}


def recv_from_dying_rank(comm: Communicator) -> None:
    if comm.rank == 0:
        with pytest.raises(PeerFailureError):
            comm.recv(np.zeros(9), 1)
    if comm.rank == 1:
        time.sleep(0.1)
        os._exit(3)


def die_behind_a_late_rank(comm: Communicator) -> None:
    """Rank 0 waits for rank 1, which comes late, while the last rank dies."""
    comm.barrier()
    if comm.rank == comm.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    if comm.rank == 1:
        time.sleep(4)
        start = time.monotonic()
    with pytest.raises(PeerFailureError) as caught:
        comm.barrier()
    assert time.monotonic() - start < 3.5
    assert caught.value.ranks == (comm.world_size - 1,)


@pytest.mark.slow
def test_a_death_behind_a_late_rank() -> None:
    ranks = ProcessRanks(3)
    try:
        with pytest.raises(RankError) as caught:
            ranks.run(die_behind_a_late_rank)
        assert list(caught.value.errors) == [2], caught.value
    finally:
        ranks.close()


def lose_a_rank_with_calls_in_flight(comm: Communicator) -> None:
    """Each call and each later one names the lost rank."""
    comm.barrier()
    if comm.rank == comm.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    works = [comm.all_reduce(np.ones(9), async_op=True) for _ in range(3)]
    calls: list[Callable[[], Any]] = [works[i].wait for i in (2, 0, 1)]
    for call in (*calls, comm.barrier, lambda: comm.all_reduce(np.ones(3), async_op=True)):
        with pytest.raises(PeerFailureError) as caught:
            call()
        assert caught.value.ranks == (comm.world_size - 1,), str(caught.value)


def test_all_calls_name_the_lost_rank(processes: ProcessRanks) -> None:
    with pytest.raises(RankError) as caught:
        processes.run(lose_a_rank_with_calls_in_flight)
    assert list(caught.value.errors) == [processes.size - 1], caught.value


def test_killed_sender(processes: ProcessRanks) -> None:
    with pytest.raises(RankError) as caught:
        processes.run(recv_from_dying_rank)
    assert caught.value.errors == {1: "exited with 3"}


def test_rank_that_raises(job: str) -> None:
    code = """
comm = fd.init()
if comm.rank == 1: raise ValueError("mine")
try: comm.barrier()
except fd.errors.PeerFailureError as e: print("peer failed", e.ranks); sys.exit(7)
"""
    ranks = [start(r, 2, job, code) for r in range(2)]
    assert finish(ranks[0]) == (7, "peer failed (1,)\n")
    code, output = finish(ranks[1])
    assert code == 1
    assert "ValueError: mine" in output


@pytest.mark.slow
def test_rank_that_ends_normally_after_its_last_call_is_no_failure(job: str) -> None:
    code = """
comm = fd.init()
x = np.ones(3_000_000, np.float32)
for _ in range(20): comm.all_reduce(x)
print("done")
"""
    for _ in range(3):
        ranks = [start(r, 3, job, code) for r in range(3)]
        assert [finish(rank) for rank in ranks] == [(0, "done\n")] * 3


def shared_memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("Shmem:"):
            return int(line.split()[1]) << 10
    raise AssertionError("no Shmem in /proc/meminfo")


def shared_bytes_of(pid: int) -> int:
    """Return how much shared memory a process has touched."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("RssShmem:")[2].split()[0]) << 10


def test_memory_is_gone_after_kill(job: str) -> None:
    code = """
comm = fd.init()
x = comm.empty((256 << 20,), "uint8"); x[:] = 1
comm.barrier()
print("ready", flush=True)
time.sleep(60)
"""
    before = shared_memory_bytes()
    ranks = [start(r, 2, job, code) for r in range(2)]
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "ready\n"
    assert sum(shared_bytes_of(rank.pid) for rank in ranks) > 400 << 20
    for rank in ranks:
        rank.kill()
        rank.communicate()
    deadline = time.monotonic() + 60  # tests beside this one have some, too
    while shared_memory_bytes() - before > 80 << 20:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ctrl_c_amid_a_call(job: str) -> None:
    code = """
comm = fd.init()
print("ready", flush=True)
try: comm.barrier()
except KeyboardInterrupt: print("interrupted"); sys.exit(5)
"""
    other = """
comm = fd.init()
time.sleep(3)
try: comm.barrier(); comm.barrier()  # rank 0 had arrived at the first
except fd.errors.PeerFailureError as e: print(e)
"""
    ranks = [start(0, 2, job, code), start(1, 2, job, other)]
    assert ranks[0].stdout is not None
    ranks[0].stdout.readline()
    time.sleep(0.5)
    ranks[0].send_signal(signal.SIGINT)
    assert finish(ranks[0]) == (5, "interrupted\n")
    returncode, output = finish(ranks[1])
    assert returncode == 0
    assert "rank 0 was interrupted" in output


@pytest.mark.slow
@pytest.mark.parametrize("interrupts", [False, True], ids=["timeout", "Ctrl-C"])
def test_a_rank_that_is_stopped_while_it_uses_an_array_in_place(job: str, interrupts: bool) -> None:
    """The other rank's limits hold, and memory that is still used is not given out again."""
    code = """
comm = fd.init(timeout=1.5)
x = comm.empty(1 << 28, "uint8")
x[:] = 1
comm.barrier(timeout=30)
print("r", flush=True)
begin = time.monotonic()
try:
    while True:
        begin = time.monotonic()
        comm.all_reduce(x, "max")
except (fd.errors.FastdistError, KeyboardInterrupt) as error:
    print(type(error).__name__, time.monotonic() - begin)
"""
    for wait_s in (0.3, 0.35, 0.4):
        ranks = [start(rank, 2, job + str(wait_s), code) for rank in range(2)]
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "r\n"
        time.sleep(wait_s)
        ranks[1].send_signal(signal.SIGSTOP)
        if interrupts:
            ranks[0].send_signal(signal.SIGINT)
        returncode, output = finish(ranks[0])
        ranks[1].send_signal(signal.SIGCONT)
        name, waited_s = output.split()
        assert (returncode, name) == (
            0,
            "KeyboardInterrupt" if interrupts else "CollectiveTimeoutError",
        )
        assert float(waited_s) < 5
        assert finish(ranks[1])[0] == 0


# --- ranks that do not meet ---------------------------------------------------------------------

MEET = """
try: comm = fd.init(); comm.barrier(); print("met")
except fd.errors.ClusterConfigError as e: print("refused:", e)
"""
SOON = {"FASTDIST_RENDEZVOUS_TIMEOUT_S": "1"}


def test_ctrl_c_for_all_ranks_ends_all_of_them(job: str) -> None:
    """Ranks that report another interrupted rank are interrupted while they make the error."""
    code = "comm = fd.init()\nx = np.ones(1000)\nprint('r', flush=True)\n"
    code += "if comm.rank == 0: time.sleep(60)\nwhile True: comm.all_reduce(x)"
    ranks = [start(rank, 4, job, code) for rank in range(4)]
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "r\n"
    for number in (signal.SIGSTOP, signal.SIGINT, signal.SIGCONT):  # for all at the same time
        for rank in ranks:
            rank.send_signal(number)
    assert [finish(rank)[0] for rank in ranks] == [-signal.SIGINT] * 4


def test_an_error_where_no_frame_can_be_made(job: str) -> None:
    code = """
comm = fd.local_group(1)[0]
comm.close()
def call():
    try:
        call()
    except RecursionError:
        comm.barrier()
try:
    call()
except (RecursionError, fd.errors.FastdistError):
    print("fine")
"""
    assert finish(start(0, 1, job, code)) == (0, "fine\n")


def test_a_collective_in_a_signal_handler(job: str) -> None:
    code = """
comm = fd.init()
def on_signal(*_):
    try:
        comm.all_reduce(np.ones(4))
    except fd.errors.FastdistError as error:
        print(str(error).split(" while ")[0], flush=True)
signal.signal(signal.SIGUSR1, on_signal)
print("r", flush=True)
if comm.rank == 1:
    sys.stdin.readline()
comm.barrier()
"""
    environ = os.environ | {"FASTDIST_JOB": job, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + code],
            env=environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "r\n"
    time.sleep(1)
    ranks[0].send_signal(signal.SIGUSR1)
    assert ranks[0].stdout is not None
    assert ranks[0].stdout.readline() == "a signal handler called a collective\n"
    for rank in reversed(ranks):
        rank.communicate("go\n", timeout=20)
    assert [rank.returncode for rank in ranks] == [0, 0]


def test_a_thread_that_cannot_start(job: str) -> None:
    code = """
import resource
comm = fd.local_group(1)[0]
soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
os.setuid(12345) if os.getuid() == 0 else None
resource.setrlimit(resource.RLIMIT_NPROC, (1, hard))
try:
    comm.all_reduce(np.ones(3), async_op=True)
except OSError as error:
    print(error, flush=True)
comm.all_reduce(np.ones(3))
os._exit(0)
"""
    assert (
        "cannot start the thread that runs asynchronous calls" in finish(start(0, 1, job, code))[1]
    )


def test_a_dropped_communicator_finishes_its_calls() -> None:
    def body(comm: Communicator) -> None:
        works = [comm.split(0).all_reduce(np.ones(100_000), async_op=True) for _ in range(5)]
        assert [work.wait()[0] for work in works] == [2.0] * 5

    ranks = ThreadRanks(2)
    ranks.run(body)
    ranks.close()


@pytest.mark.slow
def test_missing_rank(job: str) -> None:
    ranks = [start(r, 3, job, MEET, FASTDIST_RENDEZVOUS_TIMEOUT_S="4") for r in (0, 2)]
    for rank in ranks:
        returncode, output = finish(rank)
        assert returncode == 0
        assert "ranks [1] of 3 did not arrive within 4 s" in output


def test_missing_first_rank(job: str) -> None:
    returncode, output = finish(start(1, 2, job, MEET, **SOON))
    assert returncode == 0
    assert "rank 1 of 2 did not find rank 0 within 1 s" in output


def test_more_elements_than_can_be_counted() -> None:
    with pytest.raises(ValueError, match="more elements than memory can hold"):
        fastdist.local_group(1)[0].all_reduce(Misshapen(1 << 40, 1 << 40))


def test_wrong_count(job: str) -> None:
    ranks = [start(0, 2, job, MEET), start(1, 3, job, MEET)]
    for rank in ranks:
        _, output = finish(rank)
        assert "ranks disagree on the number of ranks: rank 0 expects 2, rank 1 expects 3" in output


def test_rank_twice(job: str) -> None:
    ranks = [start(r, 3, job, MEET) for r in (0, 1, 1)]
    outputs = [finish(rank)[1] for rank in ranks]
    assert all("refused" in output for output in outputs)
    assert "rank 1 of 3 arrived twice" in outputs[0]


def test_first_rank_twice(job: str) -> None:
    first = start(0, 2, job, MEET)
    wait_for_listener(first)
    _, output = finish(start(0, 2, job, MEET))
    assert "two processes were given RANK 0, or an earlier run" in output
    assert finish(start(1, 2, job, MEET))[1] == "met\n"
    assert finish(first)[1] == "met\n"


def test_stranger_at_the_socket_is_ignored(job: str) -> None:
    first = start(0, 2, job, MEET)
    address = wait_for_listener(first)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(address)
        stranger.sendall(b"GET / HTTP/1.0\r\n\r\n" + bytes(100))
        assert finish(start(1, 2, job, MEET))[1] == "met\n"
    assert finish(first)[1] == "met\n"


def test_a_first_rank_that_has_stopped(job: str) -> None:
    first = start(0, 2, job, MEET)
    wait_for_listener(first)
    first.send_signal(signal.SIGSTOP)
    try:
        _, output = finish(start(1, 2, job, MEET, **SOON))
    finally:
        first.kill()
        first.communicate()
    assert "did not find rank 0 within 1 s: the process that listens on its socket does" in output


def wait_for_listener(process: subprocess.Popen[str]) -> str:
    """The address of a rank 0, once it listens."""
    deadline = time.monotonic() + 20
    while (address := listening_address(process.pid)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return address


def listening_address(pid: int) -> str | None:
    """Find the abstract socket on which a process listens, in the kernel's table."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(fd).removeprefix("socket:[").rstrip("]"))
        except OSError:
            continue
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if len(fields) == 8 and fields[6] in inodes and fields[7].startswith("@fastdist-"):
            return "\0" + fields[7][1:]
    return None


def test_world_size_zero(job: str) -> None:
    _, output = finish(start(0, 0, job, MEET))
    assert "refused" in output
    assert "WORLD_SIZE" in output


@pytest.mark.parametrize("make", [fastdist.init, functools.partial(fastdist.local_group, 1)])
@pytest.mark.parametrize(
    ("timeout", "error"), [("1", TypeError), (float("nan"), ValueError), (0, ValueError)]
)
def test_wrong_timeout(make: Callable[..., Any], timeout: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"timeout must be a positive number.*got {timeout!r}"):
        make(timeout=timeout)


@pytest.mark.parametrize(
    ("size", "error"),
    [(0, ValueError), (2**40, ValueError), (2.5, TypeError), ("2", TypeError), (None, TypeError)],
)
def test_wrong_size_of_a_group(size: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"size must be an integer.*got {size!r}"):
        fastdist.local_group(size)


def test_wrong_source_of_ranks() -> None:
    with pytest.raises(TypeError, match="bootstrap must be an mpi4py communicator, got 'x'"):
        fastdist.init(bootstrap="x")  # type: ignore[arg-type]


NAMED = "comm = fd.init(rank=int(sys.argv[1]), world_size=2, address=sys.argv[2])\n"


def test_ranks_that_a_program_names() -> None:
    pytest.importorskip("torch")  # for the strategies
    with reserved_ports(1) as (port,):
        code = PREAMBLE + NAMED + "print(comm.all_reduce(np.array([comm.rank + 1]))[0], end=' ')\n"
        code += "print(fd.MirroredStrategy().num_replicas_in_sync, end=' ')\n"
        code += "print(fd.MultiWorkerMirroredStrategy().num_replicas_in_sync)"
        ranks = [
            python("-c", code, str(rank), f"localhost:{port}", text=True, stdout=subprocess.PIPE)
            for rank in range(2)
        ]
        assert [rank.communicate(timeout=60)[0] for rank in ranks] == ["3 2 2\n"] * 2


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"rank": 0}, ValueError, "together, got rank=0, world_size=None, address=None"),
        ({"rank": 2}, ValueError, "rank must be an integer from 0 to 1, got 2"),
        ({"rank": "0"}, TypeError, "rank must be an integer from 0 to 1, got '0'"),
        ({"rank": 0, "world_size": 0}, ValueError, "world_size must be at least 1, got 0"),
        ({"rank": 0, "address": "here"}, ValueError, 'address must be "host:port", got .here'),
        ({"rank": 0, "address": 29500}, ValueError, 'address must be "host:port", got 29500'),
        ({"rank": 0, "bootstrap": "x"}, ValueError, "init takes one of .* got several"),
    ],
)
def test_ranks_that_are_named_wrongly(
    given: dict[str, Any], error: type[Exception], message: str
) -> None:
    others = {} if given == {"rank": 0} else {"world_size": 2, "address": "localhost:29500"}
    with pytest.raises(error, match=message):
        fastdist.init(**(others | given))


def test_no_tcp_port_and_nothing_in_the_file_system(job: str, tmp_path: Path) -> None:
    code = """
comm = fd.init(); comm.barrier()
names = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
inodes = {os.readlink(name) for name in names if os.path.lexists(name)}
for table in ("tcp", "tcp6", "udp", "udp6"):
    with open(f"/proc/self/net/{table}") as file: lines = file.read().splitlines()[1:]
    for line in lines:
        assert f"socket:[{line.split()[9]}]" not in inodes
comm.barrier(); print("met")
"""
    env = {"HOME": "/nonexistent", "TMPDIR": "/nonexistent", "XDG_CACHE_HOME": "/nonexistent"}
    ranks = [start(r, 2, job, code, **env) for r in range(2)]
    assert [finish(rank) for rank in ranks] == [(0, "met\n")] * 2


def test_init_twice_and_after_close(job: str) -> None:
    code = """
a = fd.init(); assert fd.init() is a
x = np.ones(2); fd.all_reduce(x); assert (x == 2).all()
a.barrier(); a.close()
try: fd.all_reduce(x); raise SystemExit("no error")
except fd.errors.FastdistError as e: assert "call fastdist.init" in str(e)
b = fd.init(); assert b is not a; b.all_reduce(x); assert (x == 4).all()
print("met")
"""
    ranks = [start(r, 2, job, code) for r in range(2)]
    assert [finish(rank) for rank in ranks] == [(0, "met\n")] * 2


def test_forked_child_leaves_the_parent_alone(job: str) -> None:
    code = """
comm = fd.init()
x = comm.empty(300_000); x[:] = 1
child = os.fork()
if child == 0:
    try: comm.barrier()
    except fd.errors.FastdistError as e: assert "parent process" in str(e)
    del x, comm
    sys.exit(9)  # runs the exit handlers
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
comm.all_reduce(x); assert (x == 2).all(); print("met")
"""
    ranks = [start(r, 2, job, code) for r in range(2)]
    assert [finish(rank) for rank in ranks] == [(0, "met\n")] * 2


def test_forked_child_after_async_calls(job: str) -> None:
    code = """
comm = fd.init()
x = comm.empty(100); x[:] = 1
comm.all_reduce(np.ones(4), async_op=True).wait()
child = os.fork()
if child == 0:
    late = lambda: comm.all_reduce(np.ones(4), async_op=True)
    for call in (late, lambda: comm.empty(5), fd.init):
        try: call(); os._exit(1)
        except fd.errors.FastdistError as e: assert "parent process" in str(e)
    sys.exit(9)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
y = comm.empty(100); y[:] = 2
comm.all_reduce(x); assert (x == 2).all() and (y == 2).all(); print("met")
"""
    ranks = [start(r, 2, job, code) for r in range(2)]
    assert [finish(rank) for rank in ranks] == [(0, "met\n")] * 2


def test_forked_child_does_not_wait_for_calls_of_its_parent(job: str) -> None:
    code = """
import threading
comm = fd.init()
other = comm.split(0)
ended = other.all_reduce(np.ones(4), async_op=True); ended.wait()
if comm.rank == 1:
    other.barrier(); comm.all_reduce(np.ones(4))
else:
    work = comm.all_reduce(np.ones(4), async_op=True)
    waiting = threading.Thread(target=work.wait); waiting.start(); time.sleep(0.1)
    child = os.fork()
    if child == 0:
        ended.wait()
        try: work.wait(); os._exit(1)
        except fd.errors.FastdistError as e: assert "parent process" in str(e)
        del work, waiting
        sys.exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    other.barrier(); waiting.join(); work.wait()
print("met")
"""
    ranks = [start(r, 2, job, code) for r in range(2)]
    assert [finish(rank) for rank in ranks] == [(0, "met\n")] * 2


def test_daemon_thread_in_a_call_at_exit(job: str) -> None:
    code = """
import threading
comm = fd.init()
group = comm.split(0)
def forever():
    while True: group.barrier()
threading.Thread(target=forever, daemon=True).start()
time.sleep(0.3); print("end")
"""
    ranks = [start(r, 2, job, code) for r in range(2)]
    for rank in ranks:
        returncode, output = finish(rank)
        assert returncode == 0, output
        assert "terminate called" not in output


def test_little_address_space(job: str) -> None:
    code = """
import resource
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
comm = fd.init()
x = np.ones(300_000); comm.all_reduce(x); assert (x == 2).all()
try: comm.empty(1 << 32)
except MemoryError as e: assert "bytes left in this rank" in str(e)
print("met")
"""
    ranks = [start(r, 2, job, code) for r in range(2)]
    assert [finish(rank) for rank in ranks] == [(0, "met\n")] * 2


# --- threads ------------------------------------------------------------------------------------


def many_threads(comm: Communicator) -> None:
    """Run several threads per rank, each with its own communicator."""
    groups = [comm.split(0) for _ in range(4)]
    failures: list[BaseException] = []

    def body(group: Communicator, factor: int) -> None:
        try:
            for size in (1, 1000, 100_000) * 10:
                x = np.full(size, factor, np.int64)
                group.all_reduce(x)
                assert (x == factor * comm.world_size).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=body, args=(g, i)) for i, g in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_threads_with_a_communicator_each(processes: ProcessRanks) -> None:
    processes.run(many_threads)


def test_groups_of_threads_leave_nothing_behind() -> None:
    def descriptors_after_groups(number: int) -> int:
        for _ in range(number):
            for communicator in fastdist.local_group(3):
                communicator.close()
        del communicator
        return len(os.listdir("/proc/self/fd"))

    before = descriptors_after_groups(1)  # with the files of the process's first group
    assert descriptors_after_groups(20) <= before
