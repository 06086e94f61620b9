"""Output of all commands: on a terminal of 80 columns, and on a full disk."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import subprocess
import sys
import termios
from pathlib import Path
from struct import pack

import pytest
from fastdist.processes.terminal import broken
from paths import ROOT
from synthetic_records import write_records

# The command with the records in one folder, of no other jobs.
COMMAND = """
import sys
from pathlib import Path
from fastdist.recorder import place
folder = Path(sys.argv.pop(1))
place._folders = lambda: [folder]
from fastdist.cli.main import console
console()
"""
# Many calls of the command, in a process that ends well.
CALLS = """
import sys
from fastdist.cli.main import main
for line in sys.argv[1].splitlines():
    try:
        main(line.split())
    except SystemExit:
        pass
"""
MESSAGES = """\
--help
run --help
serve --help
bench --help
bench all_reduce --help
bench report --help
bench compare --help
doctor --help
ps --help
why --help
trace --help
benhc
bench all_redcue
run
run --nnodes 2 -n 2 --node-rank 1 --rdzv 127.0.0.1:1 --max-restarts 2 x.py
serve --address tcp://10.0.0.5:7000
bench compare a.json a.json
trace a.json
"""
REPORT = ROOT / "benchmarks" / "results" / "report-2026-11-26-xeon.json"


@pytest.fixture
def records(tmp_path: Path) -> Path:
    """A folder with the records of a job with a long name."""
    made = tmp_path / "records"
    made.mkdir(mode=0o700)
    for rank in range(5):
        write_records(made, rank, 5, program=b"/home/me/" + b"long/" * 30 + b"train.py")
    return made


def on_terminal(*words: object, columns: int = 80) -> list[str]:
    """Return the lines that a Python program writes to a terminal, without colours."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, pack("HHHH", 24, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    process = subprocess.Popen(
        [sys.executable, *map(str, words)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment | {"TERM": "xterm"},
    )
    os.close(theirs)
    output = b""
    try:
        while data := os.read(ours, 4096):
            output += data
    except OSError:  # how Linux reports that nobody has the terminal open any more
        pass
    os.close(ours)
    process.wait(60)
    assert b"Traceback" not in output
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output.decode())
    return re.split(r"[\r\n]+", plain)


def test_help_and_messages_fit_the_terminal() -> None:
    lines = on_terminal("-c", CALLS, MESSAGES)
    assert [line for line in lines if len(line) > 80] == []
    assert len(lines) > 250


@pytest.mark.parametrize(
    "words",
    [
        "ps",
        "why --plot -",
        "doctor",
        f"bench compare {os.path.relpath(REPORT)} {os.path.relpath(REPORT)}",
        pytest.param("bench all_reduce --ranks 2 --sizes 8 --iters 20", marks=pytest.mark.slow),
        "run true -n 2",
        "run -n 1 sh -c 'kill -9 $$'",
    ],
)
def test_output_fits_the_terminal(records: Path, words: str) -> None:
    lines = on_terminal("-c", COMMAND, records, *shlex.split(words))
    assert [line for line in lines if len(line) > 80] == []
    assert len(lines) > 2
    if words == "ps":
        assert re.fullmatch(r"01234567 .* \d+ … +/home/me/long.*…", lines[1]), lines


def test_other_files_get_whole_lines(records: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, records, "ps"], capture_output=True, text=True, timeout=60
    )
    assert max(map(len, done.stdout.splitlines())) > 200
    assert "…" not in done.stdout.replace(" …  /home", "")  # after four processes


def test_lines_are_broken_between_words() -> None:
    assert broken("# one two three", 10) == ["# one two", "#   three"]
    assert broken("  a  b", 3, indent="") == ["  a", "b"]
    assert broken("/a/path/longer/than/that", 10) == ["/a/path/longer/than/that"]
    assert broken("one two three", None) == ["one two three"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "buffered"),
    [
        ("ps", True),
        ("ps", False),
        ("why", True),
        ("doctor", True),
        ("--version", True),
        ("run --help", False),
        (f"bench compare {REPORT} {REPORT}", True),
        pytest.param("bench barrier --ranks 2 --iters 20", True, marks=pytest.mark.slow),
        pytest.param("bench barrier --ranks 2 --iters 20 --json -", True, marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_is_told_in_a_sentence(records: Path, words: str, buffered: bool) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    environment |= {} if buffered else {"PYTHONUNBUFFERED": "1"}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, records, *words.split()],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            timeout=60,
        )
    assert done.returncode == 2
    table = re.compile(r"^(#.*|    .*)?\n", re.MULTILINE)  # of `--json -`
    command = "fastdist" if words == "--version" else f"fastdist {words.split()[0]}"
    sentence = f"{command}: cannot write to stdout: No space left on device\n"
    assert table.sub("", done.stderr).replace("bench compare:", "bench:") == sentence


def test_a_reader_that_has_seen_enough_is_no_error(records: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as gone:
        done = subprocess.run(
            [sys.executable, "-c", COMMAND, records, "doctor"],
            stdout=gone,
            stderr=subprocess.PIPE,
            timeout=60,
        )
    assert (done.returncode, done.stderr) == (0, b"")
