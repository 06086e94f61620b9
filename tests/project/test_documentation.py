"""Every code block of the pages and docstrings runs, and prints what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sybil")
from documented import ROOT, Program, all_programs, programs_of_page

PROGRAMS = all_programs()


def parameter(program: Program) -> object:
    marks = [pytest.mark.slow]
    if program.skipped is not None:
        # With its name: pytest's summary has the reasons alone.
        marks.append(pytest.mark.skip(reason=f"{program.name}: {program.skipped}"))
    return pytest.param(program, id=program.name, marks=marks)


@pytest.mark.parametrize("program", [parameter(program) for program in PROGRAMS])
def test_it_runs(program: Program, tmp_path: Path) -> None:
    for needed in ("torch", "keras", "cryptography", "sklearn"):
        pytest.importorskip(needed)
    program.run(tmp_path)


def test_all_blocks_are_python() -> None:
    for program in PROGRAMS:
        for block in program.blocks:
            compile(block.code, program.name, "exec")


PAGE = """\
<!-- code: python
x = 1
-->

```python
import fastdist
print(x)
```

`fastdist run -n 2 a.py` prints

```
[0] 2
[1] 1
```

## Another section

```python
print(x + 1)
```

<!-- skip: next "needs the moon" -->

```sh
fly
```

```sh
pip install fly
```
"""


def test_blocks_become_programs(tmp_path: Path) -> None:
    program, moon, install = programs_of_page(ROOT / "page.md", PAGE)
    codes = ["x = 1\n", "import fastdist\nprint(x)\n", "print(x + 1)\n"]
    assert [block.code for block in program.blocks] == codes
    assert program.blocks[1].prints == "[0] 2\n[1] 1\n"
    assert (program.name, program.command) == ("page.md:1", "fastdist run -n 2 a.py")
    assert (moon.name, moon.skipped) == ("page.md:25", "needs the moon")
    assert install.skipped == "installs packages"
    with pytest.raises(AssertionError, match=r"printed:\n\[0\] 1\n\[1\] 1"):
        program.run(tmp_path)
