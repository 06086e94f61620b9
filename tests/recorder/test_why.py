"""`fastdist why` and `fastdist ps`: jobs that are found, refusals, tables and pictures."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fastdist.cli.main import main
from fastdist.cluster.launch import rank_variables
from fastdist.recorder import observation, place, stacks
from fastdist.recorder.diagnosis import diagnose
from fastdist.recorder.endings import note_end
from fastdist.recorder.frames import Stack
from fastdist.recorder.jobs import NoSuchJobError, find_job, jobs_here
from fastdist.recorder.occupation import Kind
from fastdist.recorder.place import RecordPath
from fastdist.recorder.stacks import parse_faulthandler
from fastdist.recorder.words import names, seconds, short
from synthetic_records import write_records


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for records, of no other job."""
    made = tmp_path / "records"
    made.mkdir(mode=0o700)
    monkeypatch.setattr(place, "_folders", lambda: [made])
    monkeypatch.setattr(observation, "INTERVAL_S", 0.01)
    monkeypatch.setattr(observation, "stacks_of", lambda *_: ({}, {}))
    return made


NO_JOB_YET = "a job is listed once its ranks have called fastdist.init\n"


def test_without_jobs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why"]) == 2
    assert "no job of this user" in capsys.readouterr().err
    assert main(["ps"]) == 0
    assert capsys.readouterr() == ("no jobs\n", NO_JOB_YET)


def test_a_process_that_begins_its_records_is_not_shown(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for size in (0, 5000):
        write_records(folder).write_bytes(bytes(size))
        assert main(["ps"]) == 0
        assert capsys.readouterr() == ("no jobs\n", NO_JOB_YET)


GIVEN_UP = """
import os, signal, sys, time, numpy as np, fastdist as fd
comm = fd.init()
for _ in range(10):
    comm.all_reduce(np.zeros(4))
if comm.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP) if sys.argv[1] == "stopped" else time.sleep(60)
comm.all_reduce(np.zeros(4), timeout=1)
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["asleep", "stopped"])
def test_a_living_rank_for_which_others_did_not_wait_longer(tmp_path: Path, what: str) -> None:
    """It is judged by what it does; the rank that gave up has ended."""
    program = tmp_path / "train.py"
    program.write_text(GIVEN_UP)
    ranks = [
        subprocess.Popen(
            [sys.executable, program, what],
            stderr=subprocess.DEVNULL,
            env=os.environ | rank_variables(rank, 2, rank, 2, str(tmp_path)),
        )
        for rank in range(2)
    ]
    try:
        assert ranks[0].wait(60) == 1
        answer = subprocess.run(
            [sys.executable, "-m", "fastdist", "why", str(ranks[1].pid)],
            capture_output=True,
            text=True,
        ).stdout
    finally:
        ranks[1].kill()
        ranks[1].wait()
    words = "stopped by a signal" if what == "stopped" else "asleep at train.py:7"
    assert answer.startswith("Rank 1 ")
    assert words in answer
    assert "rank 0 gave up waiting for it in all_reduce" in answer
    assert "dead" not in answer.partition("\n")[0]


@pytest.mark.parametrize("name", ["arrivals.pdf", "arrivals"])
def test_other_pictures_are_refused(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_records(folder)
    assert main(["why", "--plot", name]) == 2
    assert "expected a file.png or a file.html" in capsys.readouterr().err


def test_other_users_processes_and_those_that_are_no_ranks_are_refused(folder: Path) -> None:
    write_records(folder)
    jobs, _ = jobs_here()
    for name in (str(os.getppid()), "1", "ffff"):
        with pytest.raises(NoSuchJobError, match=f"is named {name}; see fastdist ps"):
            find_job(jobs, name)
    assert find_job(jobs, "0123") is jobs[0]
    assert find_job(jobs, str(os.getpid())) is jobs[0]


def test_ambiguous_ids_are_refused(folder: Path) -> None:
    write_records(folder, rank=0, job=b"abc1")
    write_records(folder, rank=1, job=b"abc2")
    jobs, _ = jobs_here()
    with pytest.raises(NoSuchJobError, match="begins the ids of 2 jobs"):
        find_job(jobs, "abc")


def test_records_of_another_version_are_told(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_records(folder, version=b"0.0.1")
    assert main(["why"]) == 2
    assert "runs fastdist 0.0.1" in capsys.readouterr().err


def test_a_partial_answer_says_what_is_missing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks 1 and 3 are elsewhere; a file is damaged."""
    for rank in (0, 2):
        write_records(folder, rank, 4, running=True, started=1)
    damaged = folder / "1-2-3.calls"
    damaged.write_bytes(b"fastdist")
    with damaged.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # its process lives, in another container
        assert main(["why", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert any("1-2-3.calls" in note for note in found["not_seen"])
    assert any(note.startswith("2 of 4 ranks") for note in found["not_seen"])


def test_the_launcher_tells_which_rank_was_killed(folder: Path) -> None:
    """Rank 1 waited for ranks 0 and 2: one was killed, the other was ended by the launcher."""
    dead = 2**22 + 1  # no process has such a number
    for rank in range(3):
        waits = rank == 1
        sequences = range(1, 4) if waits else range(1, 3)
        write_records(folder, rank, 3, sequences, running=waits, pid=dead + rank)
    found = diagnose(jobs_here()[0][0])
    assert (found.kind, found.ranks) == (Kind.DEAD, (0, 2))
    assert "which of them ended first cannot be told" in found.sentence
    note_end(dead + 2, -signal.SIGSEGV)
    found = diagnose(jobs_here()[0][0])
    assert (found.kind, found.ranks) == (Kind.DEAD, (2,))
    assert found.sentence.startswith("rank 2 is dead, killed by SIGSEGV; it ended after barrier()")


def test_a_folder_that_another_user_has_made_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "taken"
    taken.mkdir(mode=0o777)
    taken.chmod(0o777)
    monkeypatch.setattr(place, "_folders", lambda: [taken])
    assert main(["why"]) == 2
    assert f"{taken} must be a folder of this user's alone" in capsys.readouterr().err
    program = (
        "import sys, pathlib, fastdist as fd; from fastdist.recorder import place\n"
        "place._folders = lambda: [pathlib.Path(sys.argv[1])]\nfd.local_group(2)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, taken], capture_output=True, text=True, timeout=60
    )
    assert done.stderr.count("calls are not recorded, so fastdist why knows nothing of them") == 1


@pytest.mark.slow
def test_the_table_holds_64_ranks(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rank in range(64):
        write_records(folder, rank, 64, sequences=range(1, 40), running=rank != 7)
    assert main(["why"]) == 0
    _, table, *_ = capsys.readouterr().out.split("\n\n")
    lines = table.splitlines()
    assert len(lines) == 65
    assert max(map(len, lines)) < 120


def test_words() -> None:
    assert names([3]) == "rank 3"
    assert names([2, 0, 1]) == "ranks 0, 1 and 2"
    assert names(range(1, 64)) == "ranks 1 to 63"
    assert names([*range(8), 10, *range(12, 20)]) == "ranks 0-7, 10, 12-19"
    assert names([-1]) == "a rank that cannot be seen from here"
    assert short("/home/me/train.py:12 in step") == "train.py:12 in step"
    assert [seconds(s) for s in (0.0042, 0.5, 12.3, 300, 9000)] == [
        *("4 ms", "0.5 s", "12 s", "5 min", "2.5 h"),
    ]


def test_stacks_of_faulthandler_are_read() -> None:
    text = (
        'Stack (most recent call first):\n  File "/a/load.py", line 3 in hold\n'
        "Stack (most recent call first):\n"
        '  File "/usr/lib/python3.11/threading.py", line 327 in wait\n'
        '  File "/a/site-packages/torch/nn/modules/module.py", line 9 in forward\n'
        '  File "/a/train.py", line 12 in step\n'
    )
    stack = parse_faulthandler(text)
    assert (stack.user_line, len(stack.frames)) == ("/a/train.py:12 in step", 3)
    assert stack.is_main


def test_programs_keep_their_signal(tmp_path: Path) -> None:
    code = (
        "import signal, sys; from pathlib import Path\n"
        "from fastdist.recorder.recording import STACK_SIGNAL, write_on_signal\n"
        "signal.signal(STACK_SIGNAL, lambda *_: print('mine'))\n"
        "write_on_signal(Path(sys.argv[1]))\n"
        "signal.raise_signal(STACK_SIGNAL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "stacks"], capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("mine\n", "")
    assert not (tmp_path / "stacks").exists()


def test_ranks_that_take_no_signals_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "_py_spy", lambda: None)
    place = RecordPath(tmp_path / "rank.calls", 0, 0)
    path = place.beside("stacks")
    sleep = shutil.which("sleep")
    assert sleep is not None
    with subprocess.Popen([sleep, "60"]) as process:
        try:
            assert stacks.stacks_of({process.pid: place}, True)[1] == {
                process.pid: "No such file or directory"
            }
            path.touch()
            found: dict[int, list[Stack]]
            found, missing = stacks.stacks_of({process.pid: place}, True)
            assert (found, process.poll()) == ({}, None)
            assert missing == {process.pid: "the program takes no signals for it"}
        finally:
            process.kill()
