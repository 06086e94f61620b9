"""`fastdist run`: what ranks are given, and what becomes of their output."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fastdist._version import __version__
from fastdist.processes.output import Lines, Sink
from launched import Launcher, finish


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

    @pytest.mark.parametrize(
        "words",
        [["-n3"], ["--ranks", "3"], ["--nproc-per-node", "3"], ["--nproc_per_node=3"]],
    )
    def test_names_of_the_number_of_ranks(self, launcher: Launcher, words: list[str]) -> None:
        environments = self.environments(launcher, *words)
        assert [environ["RANK"] for environ in environments] == ["0", "1", "2"]

    def test_a_share_of_the_ranks(self, launcher: Launcher) -> None:
        place = "--nnodes 3 --node-rank 1 --rdzv 10.0.0.1:2950 -n 2"
        environments = self.environments(launcher, *place.split())
        assert [environ["RANK"] for environ in environments] == ["2", "3"]
        assert [environ["LOCAL_RANK"] for environ in environments] == ["0", "1"]
        for environ in environments:
            assert (environ["WORLD_SIZE"], environ["LOCAL_WORLD_SIZE"]) == ("6", "2")
            assert (environ["MASTER_ADDR"], environ["MASTER_PORT"]) == ("10.0.0.1", "2950")
        failing = ["sh", "-c", "[ $RANK = 3 ] && exit 4; sleep 60"]
        done = launcher.run(*place.split(), *failing)
        assert done.returncode == 4
        assert b"rank 3 of 6 failed first: exit code 4" in done.stderr

    def test_what_the_user_has_set_stays(self, launcher: Launcher) -> None:
        launcher.environ["OMP_NUM_THREADS"] = "5"
        (environ,) = self.environments(launcher, "-n", "1", "--env", "MASTER_PORT=1234")
        assert (environ["OMP_NUM_THREADS"], environ["MASTER_PORT"]) == ("5", "1234")

    def test_only_rank_0_reads_stdin(self, launcher: Launcher) -> None:
        done = launcher.run("-n", 2, "sh", "-c", "echo got $(cat)", input=b"typed")
        assert sorted(done.stdout.splitlines()) == [b"[0] got typed", b"[1] got"]

    def test_launcher_has_no_socket(self, launcher: Launcher) -> None:
        done = launcher.run("-n", 2, "sh", "-c", "ls -l /proc/$PPID/fd; true")
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

    def test_options_of_this_command_after_the_program(self, launcher: Launcher) -> None:
        done = launcher.run("true", "-n", 4)
        assert done.returncode == 0
        assert b"-n 4 goes to true; options of fastdist run come first: fastdist run -n 4 true" in (
            done.stderr
        )
        for words in (("-n", 1, "true", "-n", 4), ("--", "true", "-n", 4)):
            assert b"come first" not in launcher.run(*words).stderr

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

    def test_prompt_is_shown_and_not_written_into(self, launcher: Launcher, tmp_path: Path) -> None:
        launcher.environ |= {"STEP": str(tmp_path)}
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

    def test_progress_that_is_written_over_keeps_its_prefix(self, launcher: Launcher) -> None:
        code = r"printf '1%%\r2%%\r'; sleep 0.3; printf '3%%\r'; sleep 0.3; printf '4%%\n'"
        process, fd = self.start(launcher, "-n", 1, "sh", "-c", code)
        assert self.read(fd) == b"[0] 1%\r[0] 2%\r[0] 3%\r[0] 4%\r\n"
        assert process.wait(10) == 0


def test_version() -> None:
    shown = subprocess.run([sys.executable, "-m", "fastdist", "--version"], capture_output=True)
    assert shown.stdout.decode() == f"fastdist {__version__}\n"


def test_lines_are_cut_only_beyond_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with path.open("wb") as file:
        sink = Sink(file.fileno())
        lines = Lines(sink, b"[0] ", adds_last_newline=True)
        for _ in range(40):
            lines.put(b"x" * (1 << 15))
        sink.put(None, b"[1] ", b"other\n")
        lines.put(b"y\n")
    first, other, rest = path.read_bytes().splitlines()
    assert first.startswith(b"[0] x")
    assert other == b"[1] other"
    assert rest.startswith(b"[0] x")
    assert rest.endswith(b"xy")
    assert len(first) + len(rest) == 40 * (1 << 15) + len("[0] [0] y")
