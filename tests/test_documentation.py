"""Every code block of the pages and docstrings runs, and prints what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sybil")
from documented import Program, all_programs

PROGRAMS = all_programs()


def parameter(program: Program) -> object:
    marks = [pytest.mark.slow]
    if program.skipped is not None:
        # With its name: pytest's summary has the reasons alone.
        marks.append(pytest.mark.skip(reason=f"{program.name}: {program.skipped}"))
    return pytest.param(program, id=program.name, marks=marks)


@pytest.mark.parametrize("program", [parameter(program) for program in PROGRAMS])
def test_it_runs(program: Program, tmp_path: Path) -> None:
    for needed in ("torch", "keras", "zmq", "sklearn"):
        pytest.importorskip(needed)
    program.run(tmp_path)


def test_all_blocks_are_python() -> None:
    for program in PROGRAMS:
        for block in program.blocks:
            compile(block.code, program.name, "exec")
