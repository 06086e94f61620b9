"""Jobs with parameter servers that stand still, and what `fastdist why` says of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastdist.recorder import observation, place, servers
from fastdist.recorder.diagnosis import Diagnosis, diagnose
from fastdist.recorder.jobs import Job, jobs_here
from fastdist.recorder.occupation import Kind
from fastdist.recorder.signatures import REQUESTS, Signature
from launched import Launcher, wait_until
from stalled import RUN
from synthetic_records import write_records

pytest.importorskip("cryptography")
PROGRAM = Path(__file__).parent / "stalled_task.py"
TASKS = ["chief", "worker 0", "worker 1", "parameter server 0", "parameter server 1"]


def test_requests_have_their_names() -> None:
    from fastdist.ps.wire.protocol import Op

    assert tuple(op.name for op in Op) == REQUESTS
    packed = 64 + Op.READ | 3 << 24
    assert str(Signature(packed, 5000)) == "READ(5,000 bytes, server=3)"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    """A job that goes on."""
    folder = tmp_path / "records"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(place, "_folders", lambda: [folder])
    launcher = Launcher()
    words = (folder, "run", "--workers", 2, "--ps", 2, "--max-restarts", 0, PROGRAM, folder)
    with (tmp_path / "out").open("wb") as out:
        run = subprocess.Popen(
            [sys.executable, "-c", RUN, *map(str, words)],
            env=launcher.environ,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
        )
    try:
        end_s = time.monotonic() + 150
        while not is_ready(jobs_here()[0]):
            assert time.monotonic() < end_s, (tmp_path / "out").read_text()
            time.sleep(0.05)
        yield jobs_here()[0][0]
    finally:
        launcher.kill()
        run.wait()


def is_ready(jobs: list[Job]) -> bool:
    if not jobs or [each.records.task for each in jobs[0].ranks] != TASKS:
        return False
    calls = jobs[0].ranks[0].records.calls
    return len(calls) > 100


def until(kind: Kind, timeout_s: float = 30.0) -> Diagnosis:
    end_s = time.monotonic() + timeout_s
    while (found := diagnose(jobs_here()[0][0])).kind is not kind:
        assert time.monotonic() < end_s, found.sentence
    return found


@pytest.mark.slow
def test_a_server_that_is_stopped_and_then_killed(job: Job, tmp_path: Path) -> None:
    wait_until(lambda: diagnose(job).sentence == "slow, not stuck: parameter servers answer")
    os.kill(job.ranks[3].records.pid, signal.SIGSTOP)
    time.sleep(1)
    found = until(Kind.STOPPED)
    assert found.ranks == (3,)
    said = "parameter server 0 is stopped by a signal (SIGSTOP); chief waits for its "
    assert found.sentence.startswith(said + "reply to STATS at stalled_task.py:19 in read, for ")
    wait_until(lambda: said in (tmp_path / "out").read_text())  # the chief logs it unasked
    os.kill(job.ranks[3].records.pid, signal.SIGKILL)
    found = until(Kind.DEAD)
    assert found.ranks == (3,)
    assert found.sentence.startswith("parameter server 0 is dead")


def test_a_server_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chief waits for server 0; both are this process."""
    monkeypatch.setattr(place, "_folders", lambda: [tmp_path])
    monkeypatch.setattr(observation, "stacks_of", lambda *_: ({}, {}))
    monkeypatch.setattr(servers, "_OVERDUE_S", 0.0)
    tmp_path.chmod(0o700)
    write_records(tmp_path, 0, 3, running=True, signature=64 + 2, task=b"chief")
    write_records(tmp_path, 2, 3, range(0), task=b"parameter server 0")
    monkeypatch.setattr(observation.ObservedRank, "cpu_share", 0.0)
    found = diagnose(jobs_here()[0][0], 0.01)
    assert (found.kind, found.ranks) == (Kind.UNKNOWN, (2,))
    assert found.sentence.startswith(
        "parameter server 0 does not answer, though it runs; chief waits for its reply to READ at "
        "train.py:12 in step, for "
    )
    monkeypatch.setattr(observation.ObservedRank, "cpu_share", 1.5)
    found = diagnose(jobs_here()[0][0], 0.01)
    assert (found.kind, found.ranks) == (Kind.SLOW, (2,))
    assert found.sentence.startswith("parameter server 0 is busy: it computes on 1.5 cores; chief")


def test_a_server_that_cannot_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "_folders", lambda: [tmp_path])
    monkeypatch.setattr(observation, "stacks_of", lambda *_: ({}, {}))
    tmp_path.chmod(0o700)
    for worker in range(2):
        task = b"worker %d" % worker
        write_records(tmp_path, 1 + worker, 3, running=True, signature=64 + 3, task=task)
    found = diagnose(jobs_here()[0][0], 0.01)
    assert found.kind is Kind.SLOW
    said = "slow, not stuck: worker 0 and worker 1 wait for parameter server 0's reply to CHANGE at"
    assert found.sentence.startswith(said)
    monkeypatch.setattr(servers, "_OVERDUE_S", 0.0)
    found = diagnose(jobs_here()[0][0], 0.01)
    assert found.kind is Kind.UNKNOWN
    assert found.sentence.startswith("parameter server 0 cannot be seen from here; worker 0 and")
