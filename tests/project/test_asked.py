"""The programs of examples/asked show what they say, and their peers do not."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from example_jobs import LIMIT_S, ROOT, Start

ASKED = ROOT / "examples" / "asked"
PROGRAMS = sorted(path.name for path in ASKED.glob("*.py"))
# The options with which a program does the same without fastdist; its check must fail then.
PEERS = {
    "01_uneven_batches.py": "gloo",
    "04_which_rank_hangs.py": "gloo",
    "05_mismatch.py": "gloo",
    "06_no_orphans.py": "torchrun",
    "07_no_network_on_one_machine.py": "gloo",
    "08_shared_memory.py": "gloo",
    "10_no_timeout_needed.py": "gloo",
    "12_notebook.py": "spawn",
    "16_same_bits.py": "gloo",
}


def run(name: str, *options: str) -> None:
    """Run a program as its docstring says."""
    for needed in ("torch", "torchmetrics", "sklearn", "keras", "cryptography", "cloudpickle"):
        pytest.importorskip(needed)
    text = ast.get_docstring(ast.parse((ASKED / name).read_text(encoding="utf-8"))) or ""
    (command,) = re.findall(r"Start it\s+by `([^`]+)`", text)
    words = [word for word in shlex.split(command) if "=" not in word]
    assert words[-1] == f"examples/asked/{name}"
    job = Start(is_forked=True, epochs=0)
    if words[:3] == ["fastdist", "run", "-n"]:
        job.ranks(words[-1], *options, count=int(words[3]))
    elif "--min" in words:
        start([sys.executable, "-m", *words])
    elif words[0] == "fastdist":
        assert words[2::2] == ["--workers", "--ps", words[-1]]
        job.roles(int(words[3]), int(words[5]), words[-1])
    elif "<" in words:
        with (ROOT / words[-1]).open() as program:
            start([sys.executable, "-", *options], stdin=program)
    else:
        start([sys.executable, words[-1], *options])


def start(command: list[str], **redirected: object) -> None:
    pipes = {"capture_output": True, "text": True, "timeout": LIMIT_S, "cwd": ROOT}
    done = subprocess.run(command, **pipes, **redirected)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_shows_what_it_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Strategies start no replicas in a test.
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    run(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_its_peer_does_not(name: str) -> None:
    with pytest.raises(AssertionError):
        run(name, PEERS[name])


def test_the_table_has_every_program() -> None:
    table = (ASKED / "README.md").read_text(encoding="utf-8")
    linked = re.findall(r"\]\((\d\d_\w+\.py)\)", table)
    assert linked == PROGRAMS
    assert [name for name in PEERS if not Path(ASKED / name).exists()] == []
