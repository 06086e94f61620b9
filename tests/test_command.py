"""The `fastdist` command without a subcommand."""

from __future__ import annotations

import subprocess
import sys

import pytest
from fastdist.cli.main import main


def test_the_command_alone_prints_its_help() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fastdist"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: fastdist ")
    for command in ("run", "serve", "keys", "bench", "doctor"):
        assert f"\n    {command} " in done.stdout


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["benhc"])
    assert caught.value.code == 2
    assert "invalid choice: 'benhc'" in capsys.readouterr().err
