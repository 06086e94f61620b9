"""The `fastdist` command without a subcommand."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from fastdist.cli.main import main, make_parser


def test_the_command_alone_prints_its_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fastdist"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: fastdist ")
    for command in ("run", "serve", "bench", "doctor"):
        assert f"\n    {command} " in done.stdout


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["benhc"])
    assert caught.value.code == 2
    assert "invalid choice: 'benhc'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            "hello.py --epochs 3",
            "hello.py is no command; .*\n  fastdist run -n 2 hello.py --epochs",
        ),
        ("-n 4 hello.py", "\n  fastdist run -n 4 hello.py\n"),
        ("-m package.train", "\n  fastdist run -n 2 -m package.train\n"),
        ("python hello.py", "\n  fastdist run -n 2 hello.py\n"),
        ("python_hello.py", "\n  fastdist run -n 2 python_hello.py\n"),
    ],
)
def test_a_program_without_run_gets_a_hint(
    words: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(words.split())
    assert caught.value.code == 2
    assert re.search(expected, capsys.readouterr().err)


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("be", "bench"),
        ("bench all_r", "all_reduce"),
        ("run --nno", "--nnodes"),
        ("run -n 2 tr", "train.py"),
        ("doctor --js", "--json"),
    ],
)
def test_shells_complete_the_command_line(typed: str, expected: str, tmp_path: Path) -> None:
    shtab = pytest.importorskip("shtab")
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    (tmp_path / "train.py").touch()
    (tmp_path / "completion").write_text(shtab.complete(make_parser(), shell="bash"))
    script = (
        f"source completion; COMP_WORDS=(fastdist {typed}); COMP_CWORD={len(typed.split())}\n"
        '_shtab_fastdist; printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [expected]
