"""Jobs of `fastdist run --min --max`, whose ranks come and go."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import fastdist as fd
import pytest
from fastdist.errors import FastdistError
from launched import Launcher

Script = Callable[[str], Path]

# Adds up the number of ranks, step by step; ends when LAST, a condition, holds.
COUNT = """
import os, signal, sys, time
import numpy as np
import fastdist as fd
from fastdist.errors import PeerFailureError
comm = fd.init(elastic=True)
assert comm.world_size == 1
state = np.zeros(2)  # steps, sum of the numbers of ranks
most = 0
def share():
    comm.broadcast(state, 0)
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def once(name):
    try:
        os.mkdir(os.environ["STEP"] + "/" + name)
    except FileExistsError:
        return False
    return True
while True:
    try:
        before, comm = comm, comm.regroup()
        if comm is not before:
            share()
        {harm}
        state[1] += comm.all_reduce(np.ones(1))[0]
        state[0] += 1
        if comm.rank == 0:
            print("step", int(state[0]), "of", comm.world_size, "sum", int(state[1]), flush=True)
    except PeerFailureError:
        continue
    if {last}:
        break
    time.sleep(0.01)
print("ends", comm.rank, comm.world_size, fd.default_communicator() is comm)
"""


def steps(output: bytes) -> list[tuple[int, int, int]]:
    """The number of the step, the number of ranks and the sum, as rank 0 printed them."""
    found = re.findall(rb"step (\d+) of (\d+) sum (\d+)", output)
    return [(int(step), int(size), int(total)) for step, size, total in found]


def test_the_number_of_ranks_is_kept(launcher: Launcher, script: Script, step: Path) -> None:
    harm = "if comm.rank == 1 and state[0] == 7 and once('killed'): die()"
    harm += "; assert os.environ['OMP_NUM_THREADS'] == '1'"
    done = launcher.run("--keep", 3, script(COUNT.format(harm=harm, last="state[0] >= 20")))
    assert done.returncode == 0, done.stderr.decode()
    assert all(size == 3 and total == 3 * number for number, size, total in steps(done.stdout))
    assert done.stderr.count(b"3 ranks: 3 on ") == 1  # not again after the restart


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--keep 2 -n 3", "--keep 2 is the number of ranks; leave -n out"),
        ("--keep 2 --min 1 --max 2", "leave --min and --max out"),
        ("--keep 2 --workers 1 --ps 1", "leave --workers and --ps out"),
        ("--keep 2 --nnodes 1:2 --node-rank 0 --rdzv a:1", "leave --nnodes MIN:MAX out"),
        ("--keep 2 --nnodes 2 --rdzv a:1", "--nnodes 2 needs --node-rank"),
        ("--keep 2 --rdzv a:1", "--rdzv needs --nnodes"),
        ("--keep 0", "expected a number of ranks from 1 to 999999"),
    ],
)
def test_options_beside_keep(launcher: Launcher, words: str, said: str) -> None:
    done = launcher.run(*words.split(), "true")
    assert done.returncode == 2
    assert said in done.stderr.decode()


class TestRanks:
    def run(
        self, launcher: Launcher, script: Script, *options: object, harm: str = "", last: str
    ) -> tuple[int, bytes, str]:
        path = script(COUNT.format(harm=harm or "pass", last=last))
        done = launcher.run("--min", 2, "--max", 3, *options, path)
        return done.returncode, done.stdout, done.stderr.decode()

    def test_come_and_go(self, launcher: Launcher, script: Script, step: Path) -> None:
        harm = "if state[0] == 5 and comm.rank == 1 and once('killed'): die()"
        # The last step is one after the world was smaller, and is whole again.
        last = "state[0] > 5 and comm.world_size == 3"
        code, output, errors = self.run(launcher, script, harm=harm, last=last)
        assert code == 0, errors
        assert errors.count("fastdist run: process") == 1
        assert "killed by signal 9 (SIGKILL); restarting it (restart 1 of 9)" in errors
        found = steps(output)
        sizes = [size for _, size, _ in found]
        assert sizes[:5] == [3] * 5
        assert sizes[5] in (2, 3)
        assert sizes[-1] == 3
        done = {number: (size, total) for number, size, total in found}
        sums = [done[number][1] - done[number - 1][1] for number in range(2, len(done) + 1)]
        assert sums == [done[number][0] for number in range(2, len(done) + 1)]
        for rank in range(3):
            assert f"ends {rank} 3 True".encode() in output

    def test_fail_with_an_exception(self, launcher: Launcher, script: Script, step: Path) -> None:
        harm = "if state[0] == 2 and comm.rank == 0 and once('failed'): raise ValueError('mine')"
        code, output, errors = self.run(
            launcher, script, harm=harm, last="state[0] > 5 and comm.world_size == 3"
        )
        assert code == 0, errors
        assert errors.count("ValueError: mine") == 1
        assert steps(output)[-1][1] == 3

    def test_too_few_are_left(self, launcher: Launcher, script: Script, step: Path) -> None:
        harm = "if state[0] == 2 and comm.rank == 0: sys.exit(7)"
        code, output, errors = self.run(
            launcher, script, "--max-restarts", 0, harm=harm, last="False"
        )
        assert code == 7
        assert "--max-restarts is 0, the job continues without it" in errors
        assert "--max-restarts is 0, and 1 of at least 2 are left" in errors
        assert steps(output)[-1] == (2, 3, 6)

    def test_all_are_killed(self, launcher: Launcher, script: Script, step: Path) -> None:
        harm = "if state[0] == 2 and once(f'killed{comm.rank}'): die()"
        code, output, errors = self.run(launcher, script, harm=harm, last="state[0] == 4")
        assert code == 0, errors
        assert errors.count("restarting it") in (2, 3)
        assert steps(output)[-1][0] == 4

    @pytest.mark.slow
    def test_leave_with_an_exit_code(self, launcher: Launcher, script: Script, step: Path) -> None:
        ends = ["sys.exit(1)", "sys.exit(75)", "os._exit(3)", "die()"]
        harm = "\n        ".join(
            f"if state[0] == {2 + 2 * i} and comm.rank == 0 and once('{i}'): {end}"
            for i, end in enumerate(ends)
        )
        last = "state[0] > 10 and comm.world_size == 3"
        code, output, errors = self.run(launcher, script, harm=harm, last=last)
        assert code == 0, errors
        assert errors.count("restarting it") == len(ends), errors
        assert steps(output)[-1][1] == 3

    @pytest.mark.slow
    def test_have_children_that_end(self, launcher: Launcher, script: Script, step: Path) -> None:
        harm = "if state[0] == 2 and comm.rank == 0 and os.fork() == 0: sys.exit(0)\n"
        harm += "        if state[0] == 4 and comm.rank == 0 and once('killed'): die()"
        last = "state[0] > 6 and comm.world_size == 3"
        code, output, errors = self.run(launcher, script, harm=harm, last=last)
        assert code == 0, errors
        assert steps(output)[-1][1] == 3


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--min", 2), "--min and --max belong together"),
        (("--max", 2), "--min and --max belong together"),
        (("--min", 3, "--max", 2), "--min must be at most --max, got 3 and 2"),
        (("--min", 1, "--max", 2, "-n", 2), "; -n does not go with them"),
        (("--min", 1, "--max", 2, "--workers", 1, "--ps", 1), "; --workers does not go with them"),
        (
            ("--hosts", "a,b,c", "--min", 1, "--max", 2),
            "--max 2 leaves one of the 3 machines empty",
        ),
        (("--min", 1, "--max", 2, "--node-rank", 0), "; --node-rank does not go with them"),
        (("--nnodes", "1:1", "--workers", 1, "--ps", 1), "--nnodes starts ranks"),
        (("--nnodes", "3:1", "-n", 1), "expected MIN:MAX, with MIN at most MAX, got '3:1'"),
        (("--nnodes", "1:3"), "--nnodes MIN:MAX needs --node-rank"),
        (("--min", 0, "--max", 2), "expected a number of ranks from 1 to 999999, got '0'"),
        (("--min", 1, "--max", 2, "--env", "RANK=1"), "--env RANK: ranks of an elastic job change"),
    ],
)
def test_options(launcher: Launcher, words: tuple[object, ...], said: str) -> None:
    done = launcher.run(*words, "true")
    assert done.returncode == 2
    assert said in done.stderr.decode()


def test_programs_that_are_not_elastic(launcher: Launcher, script: Script) -> None:
    done = launcher.run("--min", 1, "--max", 2, script("import fastdist as fd\nfd.init()"))
    assert done.returncode == 1
    assert b"expected fastdist.init(elastic=True), or start it without these" in done.stderr


def test_launchers_that_are_not_elastic(launcher: Launcher, script: Script) -> None:
    done = launcher.run("-n", 2, script("import fastdist as fd\nfd.init(elastic=True)"))
    assert done.returncode == 1
    assert b"fastdist run started 2 ranks, whose number cannot change" in done.stderr


def test_communicators_that_are_not_elastic() -> None:
    with fd.local_group(1)[0] as comm, pytest.raises(FastdistError, match="is fixed"):
        comm.regroup()


# Process 1 is lost. It is back when process 0 has left, and has not ended yet.
COMES_LATE = """
import json, os, pathlib, time
import fastdist as fd
left = pathlib.Path(os.environ["STEP"], "left")
lost = pathlib.Path(os.environ["STEP"], "lost")
slot = json.loads(os.environ["FASTDIST_ROSTER"])["slot"]
while slot == 1 and lost.exists() and not left.exists():
    time.sleep(0.02)
comm = fd.init(elastic=True).regroup()
print("begins with", comm.world_size, flush=True)
if slot == 1:
    lost.touch()
    os._exit(3)
while comm.world_size == 2:
    comm = comm.regroup()
    time.sleep(0.02)
comm.close()
left.touch()
time.sleep(1.5)
"""


def test_who_comes_as_the_last_rank_leaves_waits_for_its_exit_code(
    launcher: Launcher, script: Script, step: Path
) -> None:
    done = launcher.run("--min", 1, "--max", 2, "--no-prefix", script(COMES_LATE))
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.split(b"\n")[:-1] == [b"begins with 2"] * 2
