"""`fastdist run`: what ranks are given, what becomes of their output, and how a job ends."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fastdist._version import __version__
from fastdist.cli import run as run_module
from fastdist.cli.output import Sink, Stream

# Times that the launcher waits, shortened for tests of what happens after them.
SHORT_TIMES = """
import sys
from fastdist.cli import supervisor
supervisor._GRACE_S = 0.5
supervisor._CAUSE_WAIT_S = 0.1
from fastdist.cli.main import main
sys.exit(main())
"""
# A rank that says when it can be signalled, with a process of its own that ignores what it can.
STUBBORN = """
import os, signal, subprocess, sys, time
if os.environ["RANK"] in sys.argv[1:]:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
child = subprocess.Popen(["sh", "-c", "trap '' INT TERM; echo ready; sleep 60; sleep 60"])
time.sleep(60)
"""


class Launcher:
    """Starts `fastdist run` so that everything that a job started can be found again."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.environ = {
            k: v
            for k, v in os.environ.items()
            if k not in ("NO_COLOR", "OMP_NUM_THREADS", "PYTHONUNBUFFERED", "FASTDIST_JOB")
        } | {"TEST_MARK": self.mark, "TERM": "xterm"}

    def start(
        self, *words: object, short_times: bool = False, **options: object
    ) -> "subprocess.Popen[bytes]":
        program = ["-c", SHORT_TIMES] if short_times else ["-m", "fastdist"]
        command = [sys.executable, *program, "run", *map(str, words)]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, env=self.environ, **(pipes | options))  # type: ignore[call-overload,no-any-return]

    def run(
        self, *words: object, input: bytes = b"", short_times: bool = False
    ) -> "subprocess.CompletedProcess[bytes]":
        process = self.start(*words, short_times=short_times, stdin=subprocess.PIPE)
        return finish(process, input)

    def left(self) -> list[int]:
        """Processes that carry this launcher's mark, other than zombies, which have none."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                environ = (entry / "environ").read_bytes() if entry.name.isdigit() else b""
            except OSError:
                continue
            if f"TEST_MARK={self.mark}".encode() in environ.split(b"\0"):
                found.append(int(entry.name))
        return found


def finish(
    process: "subprocess.Popen[bytes]", input: bytes = b""
) -> "subprocess.CompletedProcess[bytes]":
    stdout, stderr = process.communicate(input or None, timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.01)


def read_lines(process: "subprocess.Popen[bytes]", count: int) -> list[bytes]:
    assert process.stdout is not None
    return [process.stdout.readline() for _ in range(count)]


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    left = launcher.left()
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(text)
        return path

    return write


class TestWhatRanksAreGiven:
    SHOW = "import json, os; print(json.dumps(dict(os.environ)))"

    def environments(self, launcher: Launcher, *options: str) -> list[dict[str, str]]:
        done = launcher.run(*options, "--no-prefix", sys.executable, "-c", self.SHOW)
        assert done.returncode == 0, done.stderr
        shown = [json.loads(line) for line in done.stdout.splitlines()]
        return sorted(shown, key=lambda environ: int(environ["RANK"]))

    def test_environment(self, launcher: Launcher) -> None:
        launcher.environ |= {"RANK": "7", "TORCHELASTIC_RUN_ID": "outer"}
        ranks = self.environments(launcher, "-n", "3", "--env", "A=b=c", "--env", "B=")
        cores = len(os.sched_getaffinity(0))
        for number, environ in enumerate(ranks):
            assert environ["RANK"] == environ["LOCAL_RANK"] == str(number)
            assert environ["WORLD_SIZE"] == environ["LOCAL_WORLD_SIZE"] == "3"
            assert environ["MASTER_ADDR"] == "127.0.0.1"
            assert 0 < int(environ["MASTER_PORT"]) < 65536
            assert environ["PYTHONUNBUFFERED"] == "1"
            assert environ["OMP_NUM_THREADS"] == str(max(1, cores // 3))
            assert (environ["A"], environ["B"]) == ("b=c", "")
            assert "TORCHELASTIC_RUN_ID" not in environ
        assert len({environ["FASTDIST_JOB"] for environ in ranks}) == 1
        assert len({environ["MASTER_PORT"] for environ in ranks}) == 1

    def test_jobs_differ_and_default_to_all_cores(self, launcher: Launcher) -> None:
        jobs = [self.environments(launcher) for _ in range(2)]
        assert [len(ranks) for ranks in jobs] == [len(os.sched_getaffinity(0))] * 2
        assert jobs[0][0]["FASTDIST_JOB"] != jobs[1][0]["FASTDIST_JOB"]

    def test_what_the_user_has_set_stays(self, launcher: Launcher) -> None:
        launcher.environ["OMP_NUM_THREADS"] = "5"
        (environ,) = self.environments(launcher, "-n", "1", "--env", "MASTER_PORT=1234")
        assert (environ["OMP_NUM_THREADS"], environ["MASTER_PORT"]) == ("5", "1234")

    def test_only_rank_0_reads_stdin(self, launcher: Launcher) -> None:
        done = launcher.run("-n", 2, "sh", "-c", "echo got $(cat)", input=b"typed")
        assert sorted(done.stdout.splitlines()) == [b"[0] got typed", b"[1] got"]

    def test_launcher_has_no_socket(self, launcher: Launcher) -> None:
        done = launcher.run("-n", 2, "sh", "-c", "ls -l /proc/$PPID/fd")
        assert done.returncode == 0
        assert b"pipe:" in done.stdout
        assert b"socket:" not in done.stdout

    def test_arguments_reach_a_script_unchanged(
        self, launcher: Launcher, script: Callable[[str], Path]
    ) -> None:
        path = script("import sys; print(sys.argv[1:])")
        words = ["-n", "9", "--", "-m", "--version", "--env", "", "a b", "--no-prefix", "--help"]
        done = launcher.run("-n", 1, path, *words)
        assert done.stdout == f"[0] {words}\n".encode()
        assert launcher.run("-n1", "--", path, *words).stdout == done.stdout

    def test_modules(
        self, launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        package = tmp_path / "pack" / "inner"
        package.mkdir(parents=True)
        (tmp_path / "pack" / "__init__.py").write_text("")
        (package / "__main__.py").write_text("import sys; print(__package__, sys.argv[1:])")
        monkeypatch.chdir(tmp_path)
        for name in ("pack.inner", "pack.inner.__main__"):
            done = launcher.run("-n", 1, "-m", name, "-n", "3")
            assert done.stdout == b"[0] pack.inner ['-n', '3']\n", done.stderr
        monkeypatch.chdir("/")
        done = launcher.run("-n", 1, "--env", f"PYTHONPATH={tmp_path}", "-m", "pack.inner")
        assert done.stdout == b"[0] pack.inner []\n", done.stderr

    def test_directories_and_programs(
        self, launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "__main__.py").write_text("print('directory')")
        (tmp_path / "program").write_text("#!/bin/sh\necho program\n")
        (tmp_path / "program").chmod(0o755)
        assert launcher.run("-n", 1, tmp_path).stdout == b"[0] directory\n"
        assert launcher.run("-n", 1, tmp_path / "program").stdout == b"[0] program\n"
        monkeypatch.chdir(tmp_path)
        assert launcher.run("-n", 1, "program").stdout == b"[0] program\n"


class TestOutput:
    def test_prefixes_are_aligned(self, launcher: Launcher) -> None:
        done = launcher.run("-n", 11, "sh", "-c", "echo out; echo err >&2")
        for lines, word in ((done.stdout, b"out"), (done.stderr, b"err")):
            assert sorted(lines.splitlines(), key=lambda line: int(line[1:3])) == [
                b"[%2d] %s" % (rank, word) for rank in range(11)
            ]

    def test_last_line_without_newline_and_empty_lines(self, launcher: Launcher) -> None:
        done = launcher.run("-n", 2, "sh", "-c", r"printf 'a\n\nlast'")
        lines = done.stdout.splitlines(keepends=True)
        for rank in (b"[0] ", b"[1] "):
            expected = [rank + b"a\n", rank + b"\n", rank + b"last\n"]
            assert [line for line in lines if line.startswith(rank)] == expected

    def test_any_bytes_pass_through(
        self, launcher: Launcher, script: Callable[[str], Path]
    ) -> None:
        path = script(
            "import os; os.write(1, b'\\xff\\xfe\\0\\r' + bytes(range(256)) + b'\\xc3'); "
            "os.write(2, b'\\x80\\n')"
        )
        done = launcher.run("-n", 1, path)
        every_byte = bytes(range(256)).replace(b"\n", b"\n[0] ")
        assert done.stdout == b"[0] \xff\xfe\0\r" + every_byte + b"\xc3\n"
        assert done.stderr == b"[0] \x80\n"

    def test_without_prefix_one_rank_writes_the_same_bytes(self, launcher: Launcher) -> None:
        done = launcher.run("-n", 1, "--no-prefix", "sh", "-c", r"printf 'a\nb'")
        assert done.stdout == b"a\nb"
        done = launcher.run("-n", 2, "--no-prefix", "sh", "-c", r"printf b")
        assert done.stdout == b"b\nb\n"

    def test_lines_stay_whole(self, launcher: Launcher, script: Callable[[str], Path]) -> None:
        path = script(
            "import os\nrank = os.environ['RANK']\nfor i in range(300):\n"
            "    for piece in (rank * 100, rank * 3000, '\\n'):\n"
            "        os.write(1 + i % 2, piece.encode())"
        )
        done = finish(launcher.start("-n", 4, path, stderr=subprocess.STDOUT))
        lines = done.stdout.splitlines()
        assert len(lines) == 1200
        assert {bytes(line) for line in lines} == {
            b"[%d] " % rank + b"%d" % rank * 3100 for rank in range(4)
        }

    @pytest.mark.parametrize("line", ["'x' * 99 + chr(10)", "'x' * 100"])
    def test_much_output_takes_no_memory(
        self, launcher: Launcher, script: Callable[[str], Path], line: str
    ) -> None:
        path = script(
            "import os, sys\n"
            f"block = ({line}).encode() * 10_000\n"
            "for _ in range(100):\n"
            "    sys.stdout.buffer.write(block)\n"
            "sys.stdout.buffer.flush()\n"
            "sys.stderr.write(open(f'/proc/{os.getppid()}/status').read())\n"
        )
        process = launcher.start("-n", 1, path)
        assert process.stdout is not None
        received_bytes, lines = 0, 0
        while block := process.stdout.read(1 << 20):
            received_bytes, lines = received_bytes + len(block), lines + block.count(b"\n")
        done = finish(process)
        assert done.returncode == 0
        newline_added = "chr(10)" not in line
        assert received_bytes == 100_000_000 + lines * len("[0] ") + newline_added
        peak = re.search(rb"VmHWM:\s+(\d+) kB", done.stderr)
        assert peak is not None
        assert int(peak[1]) < 100_000

    def test_reader_that_stops_reading(self, launcher: Launcher) -> None:
        process = launcher.start("-n", 2, "yes", short_times=True)
        assert process.stdout is not None
        process.stdout.read(1)
        time.sleep(0.2)  # pipes are full by now
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 143
        finish(process)

    def test_reader_that_goes_away(self, launcher: Launcher) -> None:
        process = launcher.start("-n", 2, "yes")
        assert process.stdout is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.wait(10) == 128 + signal.SIGPIPE
        assert process.stderr is not None
        assert process.stderr.read() == b""
        process.stderr.close()


class TestTerminal:
    def start(self, launcher: Launcher, *words: object) -> tuple["subprocess.Popen[bytes]", int]:
        ours, theirs = pty.openpty()
        process = launcher.start(*words, stdout=theirs, stderr=theirs)
        os.close(theirs)
        return process, ours

    def read(self, fd: int, until: bytes | None = None) -> bytes:
        received = b""
        try:
            while until is None or not received.endswith(until):
                assert select.select([fd], [], [], 20)[0], received
                received += os.read(fd, 4096)
        except OSError:  # the other end is closed
            os.close(fd)
        return received

    @pytest.mark.parametrize("no_color", ["", "1"])
    def test_colour(self, launcher: Launcher, no_color: str) -> None:
        launcher.environ["NO_COLOR"] = no_color
        process, fd = self.start(launcher, "-n", 2, "echo", "hello")
        shown = sorted(self.read(fd).split(b"\r\n"))
        assert process.wait(10) == 0
        if no_color:
            assert shown == [b"", b"[0] hello", b"[1] hello"]
        else:
            assert shown == [b"", b"\x1b[33m[1]\x1b[0m hello", b"\x1b[36m[0]\x1b[0m hello"]

    def test_prompt_is_shown_and_not_written_into(self, launcher: Launcher, tmp_path: Path) -> None:
        launcher.environ |= {"NO_COLOR": "1", "STEP": str(tmp_path)}
        wait = "wait_for() { while [ ! -e $STEP/$1 ]; do sleep 0.01; done; }; "
        code = "if [ $RANK = 0 ]; then printf 'name? '; wait_for 2; echo me; fi; "
        code += "if [ $RANK = 1 ]; then wait_for 1; echo b; fi"
        process, fd = self.start(launcher, "-n", 2, "sh", "-c", wait + code)
        assert self.read(fd, b"? ") == b"[0] name? "
        (tmp_path / "1").touch()
        assert self.read(fd, b"b\r\n") == b"\r\n[1] b\r\n"
        (tmp_path / "2").touch()
        assert self.read(fd) == b"[0] me\r\n"
        assert process.wait(10) == 0


class TestHowAJobEnds:
    def test_success_says_nothing(self, launcher: Launcher) -> None:
        done = launcher.run("-n", 3, "true")
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")

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
            f"({number.name}); its last lines on stderr:",
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
            "if os.environ['RANK'] == '2':\n"
            "    time.sleep(0.4)\n    raise ValueError('cause')\n"
            "if os.environ['RANK'] == '0':\n"
            "    raise PeerFailureError('rank 2')\n"
            "time.sleep(60)\n"
        )
        done = launcher.run("-n", 3, path)
        assert b"rank 2 of 3 failed first: exit code 1" in done.stderr
        assert done.stderr.endswith(b"\nValueError: cause\n")

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
        done = launcher.run("-n", 2, "sh", "-c", "sleep 60 & echo started")
        assert done.returncode == 0
        assert time.monotonic() - begin_s < 4
        assert launcher.left() == []

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
        process = launcher.start("-n", 2, script(STUBBORN), 0, 1)
        read_lines(process, 2)
        process.send_signal(signal.SIGINT)
        time.sleep(0.4)
        assert process.poll() is None
        begin_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert finish(process).returncode == 130
        assert time.monotonic() - begin_s < 4  # the grace is 5 s
        assert launcher.left() == []

    def test_killed_launcher_takes_its_ranks_along(self, launcher: Launcher) -> None:
        process = launcher.start("-n", 3, "sh", "-c", "echo ready; exec sleep 60")
        read_lines(process, 3)
        assert len(launcher.left()) == 4
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
            (["-n", "0", "true"], "expected a number of ranks of at least 1, got '0'"),
            (["-n", "-1", "true"], "expected a number of ranks of at least 1, got '-1'"),
            (["-n", "two", "true"], "expected a number of ranks of at least 1, got 'two'"),
            (["-n", "1.5", "true"], "got '1.5'"),
            (["-n", "", "true"], "got ''"),
            (["-n", "9" * 5000, "true"], "expected a number of ranks"),
            ([], "nothing to run; expected a Python script"),
            (["-m"], "nothing to run; expected a module"),
            (["no_such_script.py"], "no such file or program: 'no_such_script.py'"),
            (["./no/such"], "no such file or program: './no/such'"),
            (["no-such-program"], "no such file or program: 'no-such-program'"),
            ([""], "no such file or program: ''"),
            (["-m", "no_such_module"], "no module named no_such_module"),
            (["-m", "json.no_such"], "no module named json.no_such"),
            (["-m", "json"], "no module named json.__main__: json is a package without one"),
            (["-m", "textwrap.py"], "no module named textwrap.py: textwrap is not a package"),
            (["-m", ".json"], "no module named"),
            (["-m", ""], "no module named"),
            (["/usr"], "/usr is a directory without a __main__.py"),
            (["/etc/passwd"], "/etc/passwd is neither a Python script (*.py) nor executable"),
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

    def test_script_without_permission(
        self, monkeypatch: pytest.MonkeyPatch, script: Callable[[str], Path]
    ) -> None:
        path = script("")
        path.chmod(0)
        monkeypatch.setattr(os, "access", lambda *_: False)  # as for a user other than root
        with pytest.raises(run_module._CommandError, match="no permission to read"):
            run_module._command([str(path)], False, {})

    def test_program_that_cannot_be_started(self, launcher: Launcher, tmp_path: Path) -> None:
        program = tmp_path / "program"
        program.write_text("#!/no/such/interpreter\n")
        program.chmod(0o755)
        done = launcher.run("-n", 2, program)
        assert done.returncode == 2
        reason = f"cannot start rank 0: {program}: No such file or directory\n"
        assert done.stderr.decode() == f"fastdist run: {reason}"

    def test_too_many_ranks_for_the_limits(self, launcher: Launcher) -> None:
        limited = 'ulimit -n 32; exec "$@"'
        command = [sys.executable, "-m", "fastdist", "run", "-n", "64", "sleep", "60"]
        done = subprocess.run(
            ["sh", "-c", limited, "sh", *command], env=launcher.environ, capture_output=True
        )
        assert done.returncode == 2
        message = b"64 ranks need 152 open files, the limit is 32; see ulimit -n\n"
        assert done.stderr == b"fastdist run: " + message
        assert launcher.left() == []


def test_version() -> None:
    shown = subprocess.run([sys.executable, "-m", "fastdist", "--version"], capture_output=True)
    assert shown.stdout.decode() == f"fastdist {__version__}\n"


def test_sink_and_stream_cut_only_lines_beyond_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with path.open("wb") as file:
        sink = Sink(file.fileno())
        read, write = os.pipe()
        stream = Stream(read, sink, b"[0] ", adds_last_newline=True)
        for _ in range(40):
            os.write(write, b"x" * (1 << 15))
            assert stream.read()
        sink.put(None, b"[1] ", b"other\n")
        os.write(write, b"y\n")
        os.close(write)
        while stream.is_open:
            stream.read()
        os.close(read)
    first, other, rest = path.read_bytes().splitlines()
    assert first.startswith(b"[0] x")
    assert other == b"[1] other"
    assert rest.startswith(b"[0] x")
    assert rest.endswith(b"xy")
    assert len(first) + len(rest) == 40 * (1 << 15) + len("[0] [0] y")
