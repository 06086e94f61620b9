"""The records that a process makes of its own calls, read back from its file."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any

import fastdist as fd
import numpy as np
import pytest
from fastdist.errors import CollectiveMismatchError
from fastdist.recorder.phases import Phase, phase
from fastdist.recorder.place import RecordPath, record_paths
from fastdist.recorder.ring import Call, Records, read_records

Comm = fd.Communicator


def own_records() -> Records:
    """Read the records of this process."""
    place = next(each for each in record_paths() if each.is_here and each.pid == os.getpid())
    records = read_records(place.path)
    assert records is not None
    return records


def on_ranks(ranks: list[Comm], function: Callable[[Comm], Any]) -> None:
    """Call a function on each rank, in threads."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        list(threads.map(function, ranks))


def calls_of(function: Callable[[Comm], Any], size: int = 2) -> list[list[Call]]:
    """Return the calls that a function makes on each rank, in order."""
    ranks = fd.local_group(size)
    known = {call.number for call in own_records().calls}
    on_ranks(ranks, function)
    new = [call for call in own_records().calls if call.number not in known]
    for rank in ranks:
        rank.close()
    return [[call for call in new if call.member.rank == rank.rank] for rank in ranks]


@pytest.fixture(autouse=True, scope="module")
def recording() -> Iterator[None]:
    """A group, so that this process has a file."""
    ranks = fd.local_group(2)
    yield
    for rank in ranks:
        rank.close()


def test_calls_have_their_kind_number_and_line() -> None:
    def program(comm: Comm) -> None:
        comm.all_reduce(np.ones(3, np.float32), op="max")
        comm.broadcast(np.ones(5, np.int64), root=1)
        comm.barrier()

    for calls in calls_of(program):
        texts = ['all_reduce(float32 × 3, op="max")', "broadcast(int64 × 5, root=1)", "barrier()"]
        assert [str(call.signature) for call in calls] == texts
        assert [call.sequence for call in calls] == [1, 2, 3]
        first = program.__code__.co_firstlineno
        lines = [int(call.site.split(":")[1].split(" ")[0]) for call in calls]
        assert lines == [first + 1, first + 2, first + 3]
        assert all(call.site.endswith(" in program") for call in calls)
        assert all(call.done_s is not None and not call.is_failed for call in calls)


def test_the_same_line_is_named_by_every_way_of_calling() -> None:
    def program(comm: Comm) -> None:
        x = np.ones(2)
        for _ in range(3):
            _ = comm.all_reduce(x), comm.all_reduce(x, async_op=True).wait()

    for calls in calls_of(program):
        assert len({call.site for call in calls}) == 1
        assert len(calls) == 6


def test_lines_of_code_that_is_made_and_dropped_are_not_confused() -> None:
    """More than is remembered; new code takes the addresses of old code."""

    def program(comm: Comm) -> None:
        for i in range(2500):
            names: dict[str, Any] = {"__name__": "made"}
            exec(f"def made{i}(comm): comm.barrier()", names)
            names[f"made{i}"](comm)

    for calls in calls_of(program):
        assert len(calls) > 100
        for call in calls:
            assert call.site in ("", f"<string>:1 in made{call.sequence - 1}")


def test_waits_are_timed() -> None:
    def program(comm: Comm) -> None:
        if comm.rank == 1:
            time.sleep(1)
        comm.all_reduce(np.ones(2))
        if comm.rank == 0:
            time.sleep(1)
            comm.send(np.ones(2), dst=1)
        else:
            comm.recv(np.ones(2), src=0)

    (early, _), (late, received) = calls_of(program)
    assert early.done_s is not None
    assert early.there_s - early.entered_s == pytest.approx(1, abs=0.8)
    assert early.done_s >= early.there_s
    assert late.entered_s - early.entered_s == pytest.approx(1, abs=0.8)
    assert late.done_s is not None
    assert received.done_s is not None
    assert late.done_s - late.entered_s < 0.8
    assert received.done_s - received.entered_s == pytest.approx(1, abs=0.8)


def test_a_call_that_waits_is_seen_by_another_thread() -> None:
    ranks = fd.local_group(2)
    waiting = threading.Thread(target=ranks[0].barrier)
    waiting.start()
    deadline = time.monotonic() + 10.0
    while not (running := [call for call in own_records().calls if call.is_running]):
        assert time.monotonic() < deadline
    assert [call.member.size for call in running] == [2]
    ranks[1].barrier()
    waiting.join()
    assert not any(call.is_running for call in own_records().calls)
    for rank in ranks:
        rank.close()


def test_failed_calls_are_told_from_others() -> None:
    def program(comm: Comm) -> None:
        with pytest.raises(CollectiveMismatchError):
            comm.all_reduce(np.ones(2 + comm.rank))
        comm.all_reduce(np.ones(2))

    for failed, good in calls_of(program):
        assert failed.is_failed
        assert not good.is_failed
        assert failed.sequence + 1 == good.sequence


def test_ring_keeps_the_last_calls() -> None:
    def program(comm: Comm) -> None:
        x = np.ones(1)
        for _ in range(5000):
            comm.all_reduce(x)

    for calls in calls_of(program):
        assert calls[-1].sequence == 5000
        numbers = [call.sequence for call in calls]
        assert numbers == list(range(numbers[0], 5001))


def test_phases_end() -> None:
    ranks = fd.local_group(2)
    with phase(Phase.BACKWARD):
        assert own_records().phase is Phase.BACKWARD
    assert own_records().phase is Phase.USER
    for rank in ranks:
        rank.close()


def test_phases_of_two_threads_do_not_stay() -> None:
    first, second = phase(Phase.DATA), phase(Phase.DATA)
    with phase(Phase.FORWARD):
        first.__enter__()
        second.__enter__()  # as if in another thread
        first.__exit__(None, None, None)
        second.__exit__(None, None, None)
        assert own_records().phase is Phase.FORWARD


def test_a_forked_child_writes_nothing_into_its_parents_records() -> None:
    fd.local_group(2)
    before = own_records()
    child = os.fork()
    if child == 0:
        with phase(Phase.SAVING):
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert own_records().phase is before.phase


@pytest.mark.parametrize("folder", ["a file", "others may read it"])
def test_jobs_run_where_nothing_can_be_recorded(folder: str, tmp_path: Path) -> None:
    name = f"fastdist-{os.getuid()}"
    if folder == "a file":
        (tmp_path / name).write_text("")
    else:
        (tmp_path / name).mkdir(mode=0o755)
    program = (
        "import fastdist.recorder.place as place, pathlib, logging\n"
        f"place._folders = lambda: [pathlib.Path({str(tmp_path / name)!r})]\n"
        "logging.basicConfig(level=logging.INFO)\n"
        "import fastdist as fd\n"
        "print([comm.rank for comm in fd.local_group(2)])\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "[0, 1]\n"
    assert "calls are not recorded" in ran.stderr


def run(
    program: str, folder: Path, *words: object, out: IO[str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program; its last argument is a folder for records."""
    begin = (
        "import sys; from pathlib import Path; from fastdist.recorder import place\n"
        "place._folders = lambda: [Path(sys.argv[-1])]\n"
    )
    folder.mkdir(mode=0o700)
    script = folder.with_suffix(".py")
    script.write_text(begin + program)
    return subprocess.run(
        [sys.executable, *map(str, words), script, folder],
        stdout=out or subprocess.PIPE,
        stderr=out or subprocess.PIPE,
        text=True,
        timeout=60,
    )


def test_a_second_init_is_another_job(tmp_path: Path) -> None:
    program = (
        "import fastdist as fd\n"
        "from fastdist.recorder.ring import identity\n"
        "def job():\n"
        "    found = [identity(each.path) for each in place.record_paths()]\n"
        "    return {who.job for who in found}, sorted(who.rank for who in found)\n"
        "comm = fd.init()\n"
        "comm.barrier()\n"
        "first = job()\n"
        "comm.barrier()\n"
        "rank = 1 - comm.rank\n"
        "comm.close()\n"
        "comm = fd.init(rank=rank, world_size=2, address='127.0.0.1:1')\n"
        "comm.barrier()\n"
        "second = job()\n"
        "assert first[1] == second[1] == [0, 1]\n"
        "assert len(first[0]) == len(second[0]) == 1\n"
        "assert first[0] != second[0]\n"
        "comm.barrier()\n"
    )
    ran = run(program, tmp_path / "records", "-m", "fastdist", "run", "-n", 2)
    assert ran.returncode == 0, ran.stderr


def test_processes_of_multiprocessing_leave_no_records(tmp_path: Path) -> None:
    program = (
        "import multiprocessing, fastdist as fd\n"
        "def main(rank, fails):\n"
        "    comm = fd.init(rank=rank, world_size=2, address=f'127.0.0.1:{1 + fails}')\n"
        "    comm.barrier()\n"
        "    if fails:\n"
        "        raise ValueError('a bad batch')\n"
        "for fails in (False, True):\n"
        "    context = multiprocessing.get_context('fork')\n"
        "    ranks = [context.Process(target=main, args=(rank, fails)) for rank in range(2)]\n"
        "    for each in ranks: each.start()\n"
        "    for each in ranks: each.join()\n"
        "    print(sorted(each.suffix for each in Path(sys.argv[-1]).iterdir()))\n"
    )
    ran = run(program, tmp_path / "records")
    kept = sorted([".asks", ".calls", ".ending", ".stacks"] * 2)
    assert ran.stdout.splitlines() == ["[]", str(kept)], ran.stderr


def test_the_lock_ends_with_the_process_not_with_its_children(tmp_path: Path) -> None:
    """So it can be told of processes whose ids mean nothing here."""
    program = (
        "import os, signal, time, warnings, fastdist as fd\n"
        "ranks = fd.local_group(2)\n"
        "warnings.simplefilter('ignore')\n"  # of a fork beside threads
        "child = os.fork()\n"
        "if child == 0:\n"
        "    time.sleep(60)\n"
        "(found,) = place.record_paths()\n"
        "print(child, found.is_locked, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with (tmp_path / "out").open("w+") as out:  # the child keeps it open
        ran = run(program, tmp_path / "records", out=out)
        out.seek(0)
        child, was_locked = out.read().split()
    os.kill(int(child), 0)  # it runs
    try:
        (path,) = (tmp_path / "records").glob("*.calls")
        assert (ran.returncode, was_locked) == (-signal.SIGKILL, "True")
        assert not RecordPath(path, 0, 0).is_locked
    finally:
        os.kill(int(child), signal.SIGKILL)
