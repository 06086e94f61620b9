"""The code blocks of documentation, collected into programs that run as the pages say.

CONTRIBUTING.md has the rules for whoever writes a page.
"""

from __future__ import annotations

import doctest
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import SkipTest

from fork_server import python
from paths import ROOT
from sybil import Document, Example, Region
from sybil.document import PythonDocStringDocument
from sybil.parsers.markdown import SkipParser
from sybil.parsers.markdown.lexers import DirectiveInHTMLCommentLexer, RawFencedCodeBlockLexer

LIMIT_S = 150
NOT_RUN = {"toml", "yaml", "json", "html", "mermaid", "console", "dot"}  # languages

_HEADING = re.compile(r"^#+ ", re.MULTILINE)
_BEGINS_PROGRAM = re.compile(r"^(?:import|from) fastdist\b", re.MULTILINE)
_SCRIPT = re.compile(r"(?:^|\s)((?!examples/|benchmarks/)[\w/]+\.py)\b")
_COMMAND_IN_TEXT = re.compile(
    r"`((?:[A-Z_]+=\S+ )*(?:fastdist run|torchrun|mpiexec|python) [^`]*\w\.py[^`]*)`"
)
_INSTALLS = re.compile(r"\bpip install\b")
_OUTPUT = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
_MARK = "<end of the block>"  # printed after each
# Threads of Gloo sometimes drop tensors while the interpreter is ending, in torch 2.13.
_ABORTED = "terminate called without an active exception"
_WARN = "import warnings; warnings.resetwarnings()\n"  # which are errors in forks


@dataclass
class Block:
    """A piece of a program.

    Attributes:
        prints: what the page says that it prints; None where the page does not.
    """

    code: str
    prints: str | None = None


@dataclass
class Program:
    """Blocks that one process runs, or each rank of a job.

    Attributes:
        name: the page and the line where the first block begins.
        command: of the shell; without one, Python runs the program, in a fork.
        skipped: why it does not run.
    """

    name: str
    blocks: list[Block] = field(default_factory=list)
    command: str | None = None
    skipped: str | None = None

    def run(self, folder: Path) -> None:
        """Run in an empty folder; raise AssertionError for a failure or another output."""
        for linked in ("examples", "benchmarks"):
            (folder / linked).symlink_to(ROOT / linked)
        named = _SCRIPT.search(self.command or "program.py")
        script = folder / (named[1] if named else "unused.py")
        script.parent.mkdir(exist_ok=True)
        code = f"print({_MARK!r}, flush=True)\n".join(b.code for b in self.blocks)
        script.write_text(code if self.command else _WARN + code)
        # Strategies refuse to start replicas in a test of pytest.
        env = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        env["PATH"] = f"{_commands(folder)}:{env['PATH']}"
        pipes: dict[str, Any] = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "cwd": folder,
        }
        for _ in range(3):
            returncode, printed, errors = self._execute(script, env, pipes)
            if not ('"gloo"' in code and _ABORTED in errors):
                break
        assert returncode == 0, f"{self.name} failed:\n{printed}\n{errors}"
        for block, text in zip(self.blocks, _by_block(printed, len(self.blocks)), strict=True):
            if block.prints is not None:
                _compare(block.prints, text, f"{self.name}\n{errors}")

    def _execute(
        self, script: Path, env: dict[str, str], pipes: dict[str, Any]
    ) -> tuple[int, str, str]:
        """Run the command or the script; return its exit code and what it has written."""
        if self.command is None:  # of many
            process = python(str(script), env=env, **pipes)
        else:
            command = ["bash", "-euc", self.command]
            process = subprocess.Popen(command, env=env, start_new_session=True, **pipes)
        try:
            printed, errors = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            if self.command is None:
                process.kill()
            else:
                os.killpg(process.pid, signal.SIGKILL)
            raise AssertionError(f"{self.name} took more than {LIMIT_S} s") from None
        return process.returncode, printed, errors


def _commands(folder: Path) -> Path:
    """A folder with the commands that pages use, of this Python and this package."""
    made = folder / ".commands"
    made.mkdir()
    for name, start in (("python", ""), ("fastdist", " -m fastdist")):
        (made / name).write_text(f'#!/bin/sh\nexec {sys.executable}{start} "$@"\n')
        (made / name).chmod(0o755)
    return made


def _by_block(printed: str, blocks: int) -> list[str]:
    """Split the output by block; a launcher's ranks pass from block to block by themselves."""
    texts = [""] * blocks
    reached: dict[str, int] = {}
    for line in printed.splitlines(keepends=True):
        rank = re.match(r"\[[^]]+\] |", line)[0]  # type: ignore[index]
        if line.removeprefix(rank) == f"{_MARK}\n":
            reached[rank] = reached.get(rank, 0) + 1
        else:
            texts[reached.get(rank, 0)] += line
    return texts


def _compare(expected: str, printed: str, what: str) -> None:
    if re.match(r"\[\d", expected):  # ranks print in any order
        expected, printed = ("".join(sorted(t.splitlines(True))) for t in (expected, printed))
    matches = doctest.OutputChecker().check_output(expected, printed, _OUTPUT)
    assert matches, f"{what}\nexpected:\n{expected}\nprinted:\n{printed}"


class Blocks:
    """A parser for sybil, whose evaluation puts a document's blocks into programs."""

    def __init__(self, name: str, first_line: int = 1) -> None:
        self.programs: list[Program] = []
        self._name, self._first_line = name, first_line
        self._current: Program | None = None  # of Python, which goes on
        self._said: Program | None = None  # whose command or output may follow in this section
        self._end = 0  # of the last block
        self._after_hidden = False
        self._shell = ""  # hidden commands that the next shell block begins with

    def __call__(self, document: Document) -> Iterator[Region]:
        """Find the blocks."""
        fence = re.compile(r"(?P<language>\w*)[^\n]*\n")
        for lexer in (
            RawFencedCodeBlockLexer(fence, {"language": "language", "source": "source"}),
            DirectiveInHTMLCommentLexer(
                "code", r"\w+", {"arguments": "language", "source": "source"}
            ),
        ):
            for region in lexer(document):
                region.evaluator = self._add
                yield region

    def skip(self, example: Example, reason: str) -> None:
        """Leave a block out, and what follows it."""
        self._current = self._said = None
        self.programs.append(Program(self._place(example), skipped=reason))

    def _place(self, example: Example) -> str:
        return f"{self._name}:{self._first_line + example.line - 1}"

    def _add(self, example: Example) -> None:
        language = example.region.lexemes["language"]
        source = textwrap.dedent(str(example.region.lexemes["source"])).strip("\n") + "\n"
        text = example.document.text
        hidden = text.startswith("<!--", example.start)
        if _HEADING.search(text, self._end, example.start):
            self._said = None
        self._end = example.end
        if language == "python":
            self._add_python(example, source)
        elif language == "diff":
            self._add_diff(example, source)
        elif language == "sh" and hidden:
            self._shell += source
        elif language == "sh":
            self._add_shell(example, source)
        elif language in ("", "text"):
            if self._said is not None:
                self._said.blocks[-1].prints = source
        else:
            known = language in NOT_RUN
            assert known, f"{self._place(example)}: no one knows how to run {language!r}"
        if language in ("python", "diff"):
            self._after_hidden = hidden
            self._find_command(text, example.end)

    def _add_python(self, example: Example, source: str) -> None:
        begins = _BEGINS_PROGRAM.search(source) and not self._after_hidden
        if self._current is None or begins:
            self._begin(example)
        assert self._current is not None
        self._current.blocks.append(Block(source))
        self._said = self._current

    def _add_diff(self, example: Example, source: str) -> None:
        """Take the program before the change and the one after it."""
        shared = self.programs.pop().blocks if self._after_hidden else []
        for kept in "-+":
            lines = [line for line in source.splitlines(True) if line[0] in f"{kept} \n"]
            code = Block("".join(line if line == "\n" else line[1:] for line in lines))
            on_ranks = kept == "-" and "torch.distributed" in code.code
            self._begin(example, kept, "fastdist run -n 2 before.py" if on_ranks else None)
            self.programs[-1].blocks = [*(Block(block.code) for block in shared), code]
        self._said = self._current

    def _add_shell(self, example: Example, source: str) -> None:
        said, self._shell, hidden = self._said, "", self._shell
        if _INSTALLS.search(source):
            self.skip(example, "installs packages")
        elif said is not None and said.command is None and _SCRIPT.search(source):
            said.command = hidden + source
        else:
            self._said = Program(self._place(example), [Block("")], hidden + source)
            self.programs.append(self._said)

    def _begin(self, example: Example, kind: str = "", command: str | None = None) -> None:
        self._current = Program(self._place(example) + kind, command=command)
        self.programs.append(self._current)

    def _find_command(self, text: str, begin: int) -> None:
        """Take the command that the text up to the next block or heading names."""
        end = re.compile(r"^(?:#+ |[ \t]*```|<!-- code)", re.MULTILINE).search(text, begin)
        command = _COMMAND_IN_TEXT.search(text, begin, end.start() if end else len(text))
        if command and self._said is not None and self._said.command is None:
            self._said.command = command[1]


def programs_of_page(path: Path, text: str, first_line: int = 1) -> list[Program]:
    """The programs of a page, or of a docstring with code blocks."""
    name = str(path.relative_to(ROOT))
    blocks = Blocks(name, first_line)
    document = Document(text, str(path))
    document.namespace["gpu"] = Path("/dev/nvidia0").exists()
    for parser in (blocks, SkipParser()):
        for region in parser(document):
            document.add(region)
    for example in document.examples():
        try:
            example.evaluate()
        except SkipTest as skipped:
            blocks.skip(example, str(skipped))
    return blocks.programs


def programs_of_module(path: Path) -> list[Program]:
    """The programs of a module's docstrings: examples with `>>>`, and code blocks."""
    source = path.read_text(encoding="utf-8")
    programs = []
    for start, _, text in PythonDocStringDocument.extract_docstrings(source):
        first_line = source.count("\n", 0, start) + 1
        if ">>>" in text:
            name = f"{path.relative_to(ROOT)}:{first_line}"
            code = f"import doctest\ntext = {text!r}\n" + DOCTEST.format(name=name, flags=_OUTPUT)
            programs.append(Program(name, [Block(code)]))
        elif "```" in text:
            programs += programs_of_page(path, text, first_line)
    return programs


DOCTEST = """\
test = doctest.DocTestParser().get_doctest(text, {{}}, {name!r}, {name!r}, 0)
assert doctest.DocTestRunner(optionflags={flags}).run(test).failed == 0
"""


def all_programs() -> list[Program]:
    """The programs of README.md, docs/, the examples' pages and the package's docstrings."""
    folders = [(ROOT / name).rglob("*.md") for name in ("docs", "examples")]
    pages = chain([ROOT / "README.md"], *folders)
    of_pages = [programs_of_page(page, page.read_text(encoding="utf-8")) for page in sorted(pages)]
    modules = sorted((ROOT / "python" / "fastdist").rglob("*.py"))
    return [*chain(*of_pages, *map(programs_of_module, modules))]
