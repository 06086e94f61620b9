"""The occupation that a rank is taken to have, by what the kernel, its stack and its phase tell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fastdist.recorder.frames import Frame, Stack
from fastdist.recorder.observation import ObservedRank
from fastdist.recorder.occupation import Kind, occupation_of
from fastdist.recorder.phases import Phase
from fastdist.recorder.place import RecordPath
from fastdist.recorder.ring import read_records
from fastdist.recorder.system import Connection, Process, Thread
from synthetic_records import write_records

IDLE = Thread(1, "S", "futex_do_wait", "", 0, 1.0, 10)


@pytest.fixture
def rank(tmp_path: Path) -> ObservedRank:
    """A rank whose main thread waits for a lock."""
    path = write_records(tmp_path)
    records = read_records(path)
    assert records is not None
    now = Process(1, "S", 10.5, threads=(IDLE,))
    return ObservedRank(
        RecordPath(path, 0, 1), records, records, now, replace(now, at_s=10.0), None
    )


def seen(rank: ObservedRank, thread: Thread = IDLE, **process: object) -> ObservedRank:
    assert rank.process is not None
    return replace(rank, process=replace(rank.process, threads=(thread,), **process))  # type: ignore[arg-type]


def test_a_lock(rank: ObservedRank) -> None:
    assert occupation_of(rank).kind is Kind.THREADS


def test_a_training_loop_in_a_thread(rank: ObservedRank) -> None:
    call = rank.last_call
    assert call is not None
    place, _, function = call.site.partition(" in ")
    loop = Stack((Frame("time.py", 1, "sleep"), Frame(place.split(":")[0], 12, function)), False)
    main = Stack((Frame("/a/train.py", 40, "<module>"),), is_main=True)
    found = replace(rank, stacks=(main, loop))
    assert found.stack is loop
    assert occupation_of(found).one == ("has not arrived: it is in user code, waiting in a thread")
    assert replace(rank, stacks=(replace(loop, is_main=True), main)).stack.is_main  # type: ignore[union-attr]


def test_lines_of_installed_packages_are_the_last_choice() -> None:
    load = Frame("/v/lib/python3.11/site-packages/numpy/lib/_npyio_impl.py", 454, "load")
    step = Frame("/a/train.py", 12, "step")
    torch = Frame("/v/lib/python3.11/site-packages/torch/nn/modules/module.py", 9, "forward")
    assert Stack((load, torch, step), is_main=True).user_line == "/a/train.py:12 in step"
    assert Stack((torch, load), is_main=True).user_line == str(load)


@pytest.mark.parametrize(
    "waits_in",
    ["io_schedule", "folio_wait_bit_common", "rpc_wait_bit_killable", "request_wait_answer"],
)
def test_the_file_system(rank: ObservedRank, waits_in: str) -> None:
    assert occupation_of(seen(rank, replace(IDLE, waits_in=waits_in))).kind is Kind.FILES


def test_a_file(rank: ObservedRank) -> None:
    found = occupation_of(seen(rank, replace(IDLE, waits_in="pipe_read", file="/data/pipe")))
    assert (found.kind, found.one) == (Kind.FILES, "waits for the file /data/pipe")


def test_swapping(rank: ObservedRank) -> None:
    found = occupation_of(seen(rank, page_faults=500, swapped_bytes=3 << 30))
    assert found.kind is Kind.MEMORY
    assert "3,072 MiB are swapped out, 1,000 pages/s are read back" in found.one


def test_pressure_of_memory(rank: ObservedRank) -> None:
    assert occupation_of(seen(rank, memory_stall=0.6, page_faults=5)).kind is Kind.MEMORY
    assert occupation_of(seen(rank, memory_stall=0.6)).kind is not Kind.MEMORY


def test_a_lossy_link(rank: ObservedRank, tmp_path: Path) -> None:
    records = read_records(write_records(tmp_path, running=True, engine=b"net"))
    assert records is not None
    connection = Connection("10.0.0.2:5", 4096, 7)
    found = occupation_of(replace(seen(rank, connections=(connection,)), records=records))
    assert found.kind is Kind.LINK
    assert "no answers from 10.0.0.2:5: 4,096 bytes were sent 7 times again" in found.one


def test_a_gpu(rank: ObservedRank) -> None:
    frames = (Frame("/x/site-packages/torch/cuda/__init__.py", 1, "synchronize"),)
    waits = replace(seen(rank, uses_gpu=True), stacks=(Stack(frames, is_main=True),))
    assert occupation_of(waits).kind is Kind.GPU
    assert occupation_of(replace(waits, stacks=())).kind is not Kind.GPU


def test_data(rank: ObservedRank) -> None:
    assert occupation_of(replace(rank, records=replace(rank.records, phase=Phase.DATA))).kind is (
        Kind.DATA
    )


def test_user_code(rank: ObservedRank) -> None:
    busy = replace(IDLE, state="R", waits_in="", cpu_s=1.5)
    found = occupation_of(seen(rank, busy, cpu_s=0.5))
    assert (found.kind, found.one) == (
        Kind.USER,
        "has not arrived: it is in user code, computing on 1.0 cores",
    )
    asleep = replace(IDLE, waits_in="hrtimer_nanosleep")
    assert occupation_of(seen(rank, asleep)).one.endswith("in user code, asleep")
    backward = replace(rank.records, phase=Phase.BACKWARD)
    found = occupation_of(replace(seen(rank, asleep), records=backward))
    assert found.one.endswith("in backward, asleep")


def test_a_sleeper_that_a_question_has_woken(rank: ObservedRank) -> None:
    asleep = replace(IDLE, waits_in="hrtimer_nanosleep")
    woken = replace(asleep, state="R", waits_in="")
    earlier = replace(seen(rank, asleep), earlier=replace(seen(rank, asleep).process, at_s=10.0))
    assert occupation_of(seen(earlier, woken)).one.endswith("asleep")
    computes = seen(earlier, replace(woken, cpu_s=asleep.cpu_s + 0.2), cpu_s=0.2)
    assert occupation_of(computes).one.endswith("running")
