"""Records of dead processes: the next process keeps some, and removes the others."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastdist.recorder import place, recording
from fastdist.recorder.ring import Identity, identity

RANK = """
import sys
from pathlib import Path
from fastdist.recorder import place, recording
place._folders = lambda: [Path(sys.argv[1])]
recording._start(int(sys.argv[2]), 2, sys.argv[3] * 16)
print("recorded", flush=True)
input()
"""

Start = Callable[[str, int], "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a rank of a job, and wait until it records."""
    tmp_path.chmod(0o700)
    monkeypatch.setattr(place, "_folders", lambda: [tmp_path])
    started = []

    def start_one(job: str, rank: int) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path), str(rank), job],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "recorded\n"
        return process

    yield start_one
    for process in started:
        process.kill()
        process.communicate()


def kill(process: "subprocess.Popen[str]") -> None:
    process.kill()
    process.wait()


def kept() -> list[str]:
    """Return the job and the number of ranks of all records, as in "aab"."""
    found = [identity(each.path) for each in place.record_paths()]
    return sorted(who.job[0] for who in found if who is not None)


def test_the_dead_of_living_jobs_and_the_last_job_are_kept(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = [start("a", 0), start("a", 1), start("b", 0), start("c", 0)]
    for rank in ranks[1:]:
        kill(rank)
    recording._remove_old("d" * 16)
    assert kept() == ["a", "a", "b", "c"]  # b has just been found dead
    monkeypatch.setattr(recording, "_KEPT_S", 0.0)
    recording._remove_old("d" * 16)
    assert kept() == ["a", "a", "c"]
    kill(ranks[0])
    recording._remove_old("d" * 16)
    assert kept() == ["c"]
    assert len(list(tmp_path.iterdir())) <= 3  # with the marks and stacks of c


def test_a_job_that_begins_again_keeps_its_records(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "_KEPT_S", 0.0)
    kill(start("a", 0))
    kill(start("b", 0))
    recording._remove_old("a" * 16)
    assert kept() == ["a", "b"]


def test_the_last_dead_job_is_kept_beside_a_living_one_with_younger_dead(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "_KEPT_S", 0.0)
    kill(start("c", 0))
    start("a", 0)
    kill(start("a", 1))
    recording._remove_old("d" * 16)
    assert kept() == ["a", "a", "c"]


def test_records_that_another_process_removes_meanwhile_are_left_to_it(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def removed(path: Path) -> Identity | None:
        who = identity(path)
        path.unlink()
        return who

    kill(start("a", 0))
    monkeypatch.setattr(recording, "identity", removed)
    recording._remove_old("d" * 16)
    assert kept() == []
