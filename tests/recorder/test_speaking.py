"""Jobs that say by themselves why they stand still, or why they have failed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

BEGIN = """
import os, signal, sys, time, numpy as np, fastdist as fd
comm = fd.init()
x = np.ones(4)
comm.all_reduce(x)
"""


def output_of(program: str, tmp_path: Path, ranks: int = 3) -> str:
    """Run a program on some ranks; return what they and the launcher write to stderr."""
    script = tmp_path / "train.py"
    script.write_text(BEGIN + program)
    ran = subprocess.run(
        [sys.executable, "-m", "fastdist", "run", "-n", str(ranks), "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    print(ran.stderr)
    assert ran.returncode != 0
    return ran.stderr


@pytest.mark.slow
def test_a_late_rank_is_named_unasked_and_in_the_errors(tmp_path: Path) -> None:
    err = output_of(
        "if comm.rank == 1:\n    time.sleep(20)\ncomm.all_reduce(x, timeout=9)\n", tmp_path
    )
    named = "rank 1 has not arrived: it is in user code, asleep at train.py:7 in <module>"
    waits = 'ranks 0 and 2 wait for it in all_reduce(float64 × 4, op="sum") at train.py:8'
    unasked = [line for line in err.splitlines() if line.startswith(f"[0] {named}")]
    assert len(unasked) == 1
    assert waits in unasked[0]
    # The launcher ends the other one, perhaps before it has said the same.
    why = [line for line in err.splitlines() if line.startswith(("[0] why: ", "[2] why: "))]
    assert why
    assert all(named in line for line in why)


@pytest.mark.slow
def test_what_a_handler_raises_during_the_explanation_is_raised(tmp_path: Path) -> None:
    """Such as an exception of its own by which a program saves a checkpoint."""
    err = output_of(
        "from fastdist.recorder import speaking\n"
        "def reason(*_):\n"
        "    time.sleep(0.5)\n"
        "    os.kill(os.getpid(), signal.SIGUSR1)\n"
        "    time.sleep(0.5)\n"
        "    return 'a reason'\n"
        "speaking._reason = reason\n"
        "def preempted(*_):\n"
        "    raise ValueError('preempted')\n"
        "signal.signal(signal.SIGUSR1, preempted)\n"
        "if comm.rank == 1:\n"
        "    time.sleep(60)\n"
        "comm.barrier(timeout=0.5)\n",
        tmp_path,
        ranks=2,
    )
    assert err.splitlines()[-1].endswith("ValueError: preempted")


def test_a_killed_rank_is_named_by_the_launcher(tmp_path: Path) -> None:
    err = output_of(
        "if comm.rank == 2:\n"
        "    time.sleep(0.5)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "comm.barrier()\n",
        tmp_path,
    )
    last = err.splitlines()[-1]
    assert last.startswith("fastdist run: rank 2 is dead")
    assert "after all_reduce(float64 × 4" in last


def test_a_peer_that_raised_is_quoted(tmp_path: Path) -> None:
    err = output_of(
        "from fastdist.errors import PeerFailureError\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of the launcher, meanwhile\n"
        "if comm.rank == 0:\n"
        "    raise ValueError('bad batch')\n"
        "try:\n"
        "    comm.barrier()\n"
        "except PeerFailureError as error:\n"
        "    os.write(2, str(error).encode() + b'\\n')\n",
        tmp_path,
        ranks=2,
    )
    assert "why: rank 0 is dead: ValueError: bad batch at train.py:9 in <module>" in err


def test_a_loop_that_ended_earlier_is_told(tmp_path: Path) -> None:
    err = output_of(
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)  # of the launcher, meanwhile\n"
        "for _ in range(3 - comm.rank):\n"
        "    comm.barrier()\n",
        tmp_path,
        ranks=2,
    )
    assert re.search(
        "why: rank 1 (has ended its program|has made 3 calls, the last .*), while rank 0 makes "
        "call .* at train.py:8 in <module>: all ranks must make the same calls; a loop may have",
        err,
    )


@pytest.mark.slow
def test_calls_as_slow_as_usual_are_not_told(tmp_path: Path) -> None:
    err = output_of(
        "for _ in range(2):\n"
        "    if comm.rank == 1:\n"
        "        time.sleep(2)\n"
        "    comm.barrier()\n"
        "sys.exit(3)\n",
        tmp_path,
        ranks=2,
    )
    assert "has not arrived" not in err


@pytest.mark.slow
def test_what_is_said_unasked_interrupts_no_wait_of_c_code(tmp_path: Path) -> None:
    """Python resumes its own waits after a signal; C code returns from them early."""
    err = output_of(
        "if comm.rank == 1:\n"
        "    import ctypes\n"
        "    begin = time.monotonic()\n"
        "    assert ctypes.CDLL(None).poll(None, 0, 4000) == 0\n"
        "    assert ctypes.PyDLL(None).poll(None, 0, 3000) == 0  # with the GIL\n"
        "    assert ctypes.CDLL(None).poll(None, 0, 1000) == 0\n"
        "    assert time.monotonic() - begin >= 8\n"
        "comm.all_reduce(x)\n"
        "if comm.rank == 0:\n    raise KeyError('as far as here')\n",
        tmp_path,
        ranks=2,
    )
    assert "rank 1 has not arrived: it is in user code" in err
    assert "KeyError: 'as far as here'" in err
    assert "AssertionError" not in err


@pytest.mark.slow
def test_the_reason_is_told_though_an_import_takes_long(tmp_path: Path) -> None:
    err = output_of(
        "class Slow:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'fastdist.recorder.speaking': time.sleep(2)\n"
        "sys.meta_path.insert(0, Slow())\n"
        "if comm.rank == 1:\n    time.sleep(20)\n"
        "comm.all_reduce(x, timeout=3)\n",
        tmp_path,
        ranks=2,
    )
    assert "why: rank 1 has not arrived: it is in user code, asleep at train.py:11" in err


def test_an_exit_code_is_told_later(tmp_path: Path) -> None:
    output_of(
        "if comm.rank == 1:\n"
        "    open('pid', 'w').write(str(os.getpid()))\n"
        "    os._exit(3)\n"
        "comm.all_reduce(x)\n",
        tmp_path,
    )
    why = [sys.executable, "-m", "fastdist", "why", (tmp_path / "pid").read_text()]
    said = subprocess.run(why, capture_output=True, text=True, timeout=60).stdout
    assert "ank 1 is dead, ended with exit code 3; it ended after all_reduce(" in said
