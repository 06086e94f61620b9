"""`fastdist run --workers --ps`: tasks that fail, and come back where they were."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import ROLES, Launcher, finish, task_processes, wait_until

Script = Callable[[str], Path]


class TestTasksThatFail:
    def start(
        self, launcher: Launcher, script: Script, *options: object, others: str = "serve()"
    ) -> "subprocess.Popen[bytes]":
        path = script(ROLES + f"if job == 'chief':\n    wait_for('end')\n    sys.exit(0)\n{others}")
        return launcher.start("--workers", 2, "--ps", 1, *options, path)

    @pytest.mark.parametrize(("job", "index"), [("worker", 1), ("ps", 0), ("evaluator", 0)])
    def test_come_back_at_the_same_address(
        self, launcher: Launcher, script: Script, step: Path, job: str, index: int
    ) -> None:
        # What a task has started goes with it; it would keep the address.
        others = "subprocess.Popen(['sleep', '60'])\nserve()"
        process = self.start(launcher, script, "--evaluator", others=others)
        first = step / f"{job}{index}.0"
        wait_until(lambda: first.exists() and len(task_processes(launcher, job, index)) == 2)
        before = task_processes(launcher, job, index)
        os.kill(min(before), signal.SIGKILL)
        wait_until((step / f"{job}{index}.1").exists)
        wait_until(lambda: len(task_processes(launcher, job, index)) == 2)
        assert not set(before) & set(task_processes(launcher, job, index))
        (step / "end").touch()
        done = finish(process)
        name = job if job == "evaluator" else f"{job} {index}"
        said = f"{name} failed: killed by signal 9 (SIGKILL); restarting it (restart 1 of 3)"
        assert (done.returncode, done.stderr) == (0, f"fastdist run: {said}\n".encode())
        ports = re.findall(rf"\[{name}\] serves at (\d+)".encode(), done.stdout)
        assert len(ports) == 2
        assert len(set(ports)) == 1
        assert launcher.left() == []

    def test_all_that_they_wrote_is_shown(
        self, launcher: Launcher, script: Script, step: Path
    ) -> None:
        others = "if name == 'worker0':\n    print('x\\n' * 20000 + 'last', end='')\n"
        others += "    sys.stdout.flush()\n    sys.exit(3)\nserve()"
        process = self.start(launcher, script, "--max-restarts", 2, others=others)
        assert process.stdout is not None
        shown = [process.stdout.readline() for _ in range(60_003 + 2)]  # worker 1 and ps 0 serve
        (step / "end").touch()
        done = finish(process)
        assert shown.count(b"[worker 0] x\n") == 60_000
        assert shown.count(b"[worker 0] last\n") == 3
        assert done.returncode == 0

    def test_who_fails_while_nobody_reads_is_read_later(
        self, launcher: Launcher, script: Script, step: Path
    ) -> None:
        others = "if name == 'worker0':\n    print('x\\n' * 5000, end='')\n"
        others += "    sys.stdout.flush()\n    sys.exit(3)\nserve()"
        process = self.start(launcher, script, "--max-restarts", 3, others=others)
        assert process.stderr is not None
        said = [process.stderr.readline() for _ in range(4)]  # more than a pipe holds is written
        assert said[-1].startswith(b"fastdist run: warning: worker 0 failed")
        (step / "end").touch()
        done = finish(process)
        assert done.stdout.count(b"[worker 0] x\n") == 20_000
        assert done.returncode == 0

    def test_when_restarts_are_used_up_the_job_goes_on(
        self, launcher: Launcher, script: Script, step: Path
    ) -> None:
        others = "if name == 'worker1':\n    sys.exit(4)\nserve()"
        process = self.start(launcher, script, "--max-restarts", 2, others=others)
        assert process.stderr is not None
        said = [process.stderr.readline().decode() for _ in range(3)]
        assert process.poll() is None
        (step / "end").touch()
        done = finish(process)
        assert (done.returncode, done.stderr) == (0, b"")
        failed = "worker 1 failed: exit code 4"
        assert said == [
            f"fastdist run: {failed}; restarting it (restart 1 of 2)\n",
            f"fastdist run: {failed}; restarting it (restart 2 of 2)\n",
            f"fastdist run: warning: {failed}; all 2 restarts are used up, the job continues "
            "without it\n",
        ]

    def test_no_restarts(self, launcher: Launcher, script: Script, step: Path) -> None:
        others = "if job == 'ps':\n    sys.exit(4)\nserve()"
        process = self.start(launcher, script, "--max-restarts", 0, others=others)
        assert process.stderr is not None
        said = process.stderr.readline()
        (step / "end").touch()
        assert finish(process).returncode == 0
        why = b"--max-restarts is 0, the job continues without it"
        assert said == b"fastdist run: warning: ps 0 failed: exit code 4; " + why + b"\n"

    def test_who_returns_0_is_done(self, launcher: Launcher, script: Script, step: Path) -> None:
        others = (
            "if name == 'worker1':\n    open(f'{step}/done', 'a').write('x')\n    sys.exit(0)\n"
        )
        process = self.start(launcher, script, others=others + "serve()")
        wait_until((step / "done").exists)
        time.sleep(0.5)  # longer than a task that fails waits to be started again
        (step / "end").touch()
        done = finish(process)
        assert (done.returncode, done.stderr) == (0, b"")
        assert (step / "done").read_text() == "x"

    def test_nobody_is_started_again_when_the_job_is_being_stopped(
        self, launcher: Launcher, script: Script, step: Path
    ) -> None:
        process = self.start(launcher, script, others="time.sleep(0.2)\nsys.exit(1)")
        assert process.stderr is not None
        process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        done = finish(process)
        assert done.returncode == 143
        assert done.stderr.endswith(b"fastdist run: stopped by SIGTERM\n")
        assert not (step / "end").exists()

    def test_program_that_cannot_be_started_again(
        self, launcher: Launcher, step: Path, tmp_path: Path
    ) -> None:
        program = tmp_path / "program"
        chief = 'case "$TF_CONFIG" in *\'"chief", "index"\'*) while [ ! -e $STEP/end ]; do '
        chief += "sleep 0.01; done; exit 0;; esac\n"
        worker = 'case "$TF_CONFIG" in *\'"worker", "index"\'*) '
        worker += "while [ ! -e $STEP/fail ]; do sleep 0.01; done; exit 5;; esac\n"
        program.write_text(f"#!/bin/sh\n: > $STEP/ready.$$\n{chief}{worker}sleep 60\n")
        program.chmod(0o755)
        process = launcher.start("--workers", 1, "--ps", 1, program)
        wait_until(lambda: len(list(step.iterdir())) == 3)
        program.rename(tmp_path / "elsewhere")
        (step / "fail").touch()
        assert process.stderr is not None
        said = [process.stderr.readline().decode() for _ in range(2)]
        (step / "end").touch()
        assert finish(process).returncode == 0
        assert said[1] == (
            f"fastdist run: warning: cannot start worker 0: {program}: No such file or directory; "
            "the job continues without worker 0\n"
        )
