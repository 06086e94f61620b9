"""`fastdist run`: how a job ends, by itself, by a signal, or before it has begun."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from launched import Launcher, finish, read_lines, wait_until

# A rank that says when it can be signalled, with a process of its own that ignores what it can.
STUBBORN = """
import os, signal, subprocess, sys, time
if os.environ["RANK"] in sys.argv[1:]:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
child = subprocess.Popen(["sh", "-c", "trap '' INT TERM; echo ready; sleep 60; sleep 60"])
time.sleep(60)
"""


class TestHowAJobEnds:
    def test_success_says_nothing(self, launcher: Launcher) -> None:
        done = launcher.run("-n", 3, "true")
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")

    def test_sigchld_that_the_parent_has_blocked(self, launcher: Launcher) -> None:
        """Programs that use sigwait start others with their mask."""
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        try:
            process = launcher.start("-n", 2, "true")
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        assert finish(process).returncode == 0

    def test_exit_code_of_the_first_to_fail(self, launcher: Launcher) -> None:
        done = launcher.run("-n", 3, "sh", "-c", "[ $RANK = 1 ] && exit 3; sleep 60")
        assert done.returncode == 3
        message = b"rank 1 of 3 failed first: exit code 3; it wrote nothing to stderr\n"
        assert done.stderr == b"fastdist run: " + message

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
    def test_killed_rank(self, launcher: Launcher, number: signal.Signals) -> None:
        code = f"[ $RANK = 0 ] && {{ echo bye >&2; kill -{int(number)} $$; }}; sleep 60"
        done = launcher.run("-n", 2, "sh", "-c", code)
        assert done.returncode == 128 + number
        assert done.stderr.decode().splitlines() == [
            "[0] bye",
            f"fastdist run: rank 0 of 2 failed first: killed by signal {int(number)} "
            f"({number.name}); its last lines:",
            "bye",
        ]

    def test_traceback_comes_last(self, launcher: Launcher, script: Callable[[str], Path]) -> None:
        path = script(
            "import os, sys, time\n"
            "print('Traceback (most recent call last):\\n  handled', file=sys.stderr)\n"
            "if os.environ['RANK'] != '1':\n"
            "    try:\n        time.sleep(60)\n"
            "    finally:\n        print('noise', file=sys.stderr)\n"
            "try:\n    1 / 0\n"
            "except ZeroDivisionError as error:\n    raise KeyError('gone') from error\n"
        )
        done = launcher.run("-n", 3, path)
        before, _, last = done.stderr.decode().partition("fastdist run: ")
        assert done.returncode == 1
        assert "[1] KeyError: 'gone'\n" in before
        lines = last.splitlines()
        assert lines[0] == "rank 1 of 3 failed first: exit code 1; its traceback:"
        assert lines[1] == "Traceback (most recent call last):"
        assert "ZeroDivisionError: division by zero" in lines
        assert lines[-1] == "KeyError: 'gone'"
        assert "handled" not in last

    def test_cause_is_reported_rather_than_consequence(
        self, launcher: Launcher, script: Callable[[str], Path]
    ) -> None:
        # As when the peers of a rank notice that it closes before it has ended.
        path = script(
            "import os, time\n"
            "class PeerFailureError(RuntimeError): pass\n"
            "begun = __file__ + '.begun'\n"
            "if os.environ['RANK'] == '2':\n"
            "    open(begun, 'w').close()\n"
            "    time.sleep(0.4)\n    raise ValueError('cause')\n"
            "if os.environ['RANK'] == '0':\n"
            "    while not os.path.exists(begun): time.sleep(0.01)\n"
            "    raise PeerFailureError('rank 2')\n"
            "time.sleep(60)\n"
        )
        done = launcher.run("-n", 3, path)
        assert b"rank 2 of 3 failed first: exit code 1" in done.stderr
        assert done.stderr.endswith(b"\nValueError: cause\n")

    def test_rank_that_ends_early_is_named(
        self, launcher: Launcher, script: Callable[[str], Path]
    ) -> None:
        path = script(
            "import os, time\n"
            "class PeerFailureError(RuntimeError): pass\n"
            "if os.environ['RANK'] == '0':\n    os._exit(0)\n"
            "time.sleep(2)\n"
            "raise PeerFailureError('rank 0')\n"
        )
        done = launcher.run("-n", 2, path)
        assert b"1 of 2 failed first, after rank 0 had ended with exit code 0: exit" in done.stderr

    def test_consequence_without_a_cause_ends_the_job(
        self, launcher: Launcher, script: Callable[[str], Path]
    ) -> None:
        path = script(
            "import os, time\n"
            "class PeerFailureError(RuntimeError): pass\n"
            "if os.environ['RANK'] == '1':\n"
            "    raise PeerFailureError('rank 0')\n"
            "time.sleep(60)\n"
        )
        done = launcher.run("-n", 2, path, short_times=True)
        assert done.returncode == 1
        assert b"rank 1 of 2 failed first" in done.stderr

    def test_ranks_that_do_not_end_are_killed_after_the_grace(
        self, launcher: Launcher, script: Callable[[str], Path]
    ) -> None:
        path = script(STUBBORN)
        process = launcher.start("-n", 2, path, 0, 1, short_times=True)
        read_lines(process, 2)
        victim = next(p for p in launcher.left() if is_rank(p, 1))
        os.kill(victim, signal.SIGKILL)
        done = finish(process)
        assert done.returncode == 137
        assert launcher.left() == []

    def test_what_ranks_leave_behind_is_ended(self, launcher: Launcher) -> None:
        begin_s = time.monotonic()
        words = ("sh", "-c", "sleep 60 & echo started")
        done = launcher.run("-n", 2, "--grace-s", 60, *words)
        assert done.returncode == 0
        assert time.monotonic() - begin_s < 30
        assert launcher.left() == []

    @pytest.mark.slow
    def test_a_guardian_that_is_killed(self, launcher: Launcher) -> None:
        """The job goes on without it."""
        process = launcher.start("-n", 2, "sh", "-c", "echo ready; sleep 3; exit 3")
        read_lines(process, 2)
        (guardian,) = (
            pid
            for pid in launcher.left()
            if b"guardian.py" in Path(f"/proc/{pid}/cmdline").read_bytes()
        )
        os.kill(guardian, signal.SIGKILL)
        done = finish(process)
        assert done.returncode == 3
        assert b"Traceback" not in done.stderr

    @pytest.mark.slow
    @pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
    def test_closed_standard_files(self, launcher: Launcher, closed: str) -> None:
        words = f"{sys.executable} -m fastdist run -n 2 sh -c 'echo out; echo err >&2; exit 3'"
        done = subprocess.run(
            ["sh", "-c", f"{words} {closed}"], env=launcher.environ, capture_output=True, timeout=60
        )
        assert done.returncode == 3
        assert b"Traceback" not in done.stdout + done.stderr
        assert (b"out" in done.stdout) == (closed == "2>&-")
        assert (b"err" in done.stderr) == (closed == ">&-")

    def test_daemon_that_keeps_the_output_open(self, launcher: Launcher, tmp_path: Path) -> None:
        begun = tmp_path / "begun"
        code = f"setsid sh -c 'echo started; : > {begun}; exec sleep 60' & "
        code += f"while [ ! -e {begun} ]; do sleep 0.01; done"
        done = launcher.run("-n", 1, "sh", "-c", code)
        assert done.stdout == b"[0] started\n"
        (daemon,) = launcher.left()
        os.kill(daemon, signal.SIGKILL)
        wait_until(lambda: launcher.left() == [])

    def test_all_output_of_an_ended_rank_is_shown(self, launcher: Launcher) -> None:
        done = launcher.run("-n", 2, "sh", "-c", "seq 5000; exit 4")
        assert done.returncode == 4
        ranks = {line[:3] for line in done.stdout.splitlines() if line.endswith(b"] 5000")}
        assert ranks


class TestSignals:
    @pytest.mark.parametrize(
        ("number", "exit_code"),
        [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    )
    def test_are_passed_on(
        self, launcher: Launcher, number: signal.Signals, exit_code: int
    ) -> None:
        code = f"trap 'echo got; exit 0' {int(number)}; echo ready; while :; do sleep 0.02; done"
        process = launcher.start("-n", 2, "sh", "-c", code)
        read_lines(process, 2)
        process.send_signal(number)
        done = finish(process)
        assert done.returncode == exit_code
        assert sorted(done.stdout.splitlines()) == [b"[0] got", b"[1] got"]
        assert done.stderr.endswith(f"fastdist run: stopped by {number.name}\n".encode())
        assert launcher.left() == []

    def test_grace_then_kill(self, launcher: Launcher, script: Callable[[str], Path]) -> None:
        process = launcher.start("-n", 2, script(STUBBORN), 1, short_times=True)
        read_lines(process, 2)
        process.send_signal(signal.SIGINT)
        assert finish(process).returncode == 130
        assert launcher.left() == []

    def test_second_ctrl_c_kills_at_once(
        self, launcher: Launcher, script: Callable[[str], Path]
    ) -> None:
        process = launcher.start("-n", 2, "--grace-s", 60, script(STUBBORN), 0, 1)
        read_lines(process, 2)
        process.send_signal(signal.SIGINT)
        time.sleep(1)
        assert process.poll() is None
        begin_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert finish(process).returncode == 130
        assert time.monotonic() - begin_s < 30
        assert launcher.left() == []

    def test_killed_launcher_takes_its_ranks_along(self, launcher: Launcher) -> None:
        words = ("sh", "-c", "sh -c 'echo ready; sleep 60; true'; true")
        process = launcher.start("-n", 3, *words)
        read_lines(process, 3)
        wait_until(lambda: len(launcher.left()) == 2 + 3 * 3)  # with the guardian
        process.kill()
        process.wait()
        wait_until(lambda: launcher.left() == [])
        finish(process)


def is_rank(pid: int, rank: int) -> bool:
    environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
    parent_environ = Path(f"/proc/{parent}/environ").read_bytes().split(b"\0")
    return b"RANK=%d" % rank in environ and not any(e.startswith(b"RANK=") for e in parent_environ)


class TestBadInput:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["-n", "0", "true"], "expected a number of ranks from 1 to 999999, got '0'"),
            (["-n", "-1", "true"], "expected a number of ranks from 1 to 999999, got '-1'"),
            (["-n", "two", "true"], "expected a number of ranks from 1 to 999999, got 'two'"),
            (["-n", "1.5", "true"], "got '1.5'"),
            (["-n", "", "true"], "got ''"),
            (["-n", "9" * 5000, "true"], "expected a number of ranks"),
            ([], "nothing to run; expected a Python script"),
            (["-m"], "nothing to run; expected a module"),
            (["no_such_script.py"], "no such file or program: 'no_such_script.py'"),
            (["./no/such"], "no such file or program: './no/such'"),
            (["no-such-program"], "no such file or program: 'no-such-program'"),
            ([""], "no such file or program: ''"),
            (["/etc/passwd"], "cannot start rank 0: /etc/passwd: Permission denied"),
            (["--env", "A", "true"], "expected NAME=VALUE, got 'A'"),
            (["--env", "=b", "true"], "expected NAME=VALUE, got '=b'"),
            (["--env", "RANK=1", "true"], "--env RANK: fastdist run sets it itself"),
            (["--no-such-option", "true"], "unrecognized arguments: --no-such-option"),
        ],
    )
    def test_is_named(
        self, capfd: pytest.CaptureFixture[str], words: list[str], message: str
    ) -> None:
        from fastdist.cli.main import main

        with pytest.raises(SystemExit) as caught:  # argparse exits by itself
            sys.exit(main(["run", *words]))
        stdout, stderr = capfd.readouterr()
        assert (caught.value.code, stdout) == (2, "")
        assert message in stderr
        assert "fastdist" in stderr

    def test_a_module_that_does_not_exist(self, launcher: Launcher) -> None:
        done = launcher.run("-n", 2, "-m", "no_such_module")
        assert done.returncode == 1
        assert done.stderr.endswith(b": No module named no_such_module\n")

    def test_program_that_cannot_be_started(self, launcher: Launcher, tmp_path: Path) -> None:
        program = tmp_path / "program"
        program.write_text("#!/no/such/interpreter\n")
        program.chmod(0o755)
        done = launcher.run("-n", 2, program)
        assert done.returncode == 2
        reason = f"cannot start rank 0: {program}: No such file or directory\n"
        assert done.stderr.decode() == f"fastdist run: {reason}"

    @pytest.mark.parametrize(
        ("options", "beginning", "end"),
        [
            (["-n", "64"], "cannot start rank ", ": Too many open files"),
            # The roster of an elastic job would wait for ever for what it cannot accept.
            (
                ["--min", "1", "--max", "6"],
                "6 ranks need 48 open files, the limit is 32",
                "ulimit -n",
            ),
        ],
    )
    def test_too_many_ranks_for_the_limits(
        self, launcher: Launcher, options: list[str], beginning: str, end: str
    ) -> None:
        limited = 'ulimit -n 32; exec "$@"'
        command = [sys.executable, "-m", "fastdist", "run", *options, "sleep", "60"]
        done = subprocess.run(
            ["sh", "-c", limited, "sh", *command],
            env=launcher.environ,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2
        assert done.stderr.startswith(f"fastdist run: {beginning}")
        assert done.stderr.endswith(f"{end}\n")
        assert launcher.left() == []
