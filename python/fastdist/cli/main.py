"""Entry point of the `fastdist` command."""

import argparse
import os
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from fastdist._version import __version__
from fastdist.cli import bench, compare_runs, doctor, ps, run, serve, trace, why
from fastdist.cli.command import CommandParser, run_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `fastdist` command with these arguments, or this process's; return the exit code."""
    parser = make_parser()
    words = sys.argv[1:] if argv is None else argv
    is_python = words[:1] in (["python"], ["python3"])
    if words and (is_python or words[0] in ("-n", "-m") or words[0].endswith(".py")):
        ranks = "" if words[0] == "-n" else "-n 2 "
        parser.error(
            f"{words[0]} is no command; to start a program, write\n"
            f"  fastdist run {ranks}{shlex.join(words[is_python:])}"
        )
    arguments = parser.parse_args(words)
    if "handler" not in arguments:
        parser.print_help()
        return 0
    try:
        return run_command(arguments)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; shtab makes shells' completions of it."""
    parser = CommandParser(
        prog="fastdist",
        description="Distributed training and fast collectives.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"fastdist {__version__}")
    subparsers = parser.add_subparsers(metavar="command")
    for command in (run, serve, bench, doctor, ps, why, trace, compare_runs):
        command.add_parser(subparsers)
    return parser


def console() -> NoReturn:
    """Run the command line, as the installed `fastdist` script."""
    _open_standard_files()
    sys.exit(main())


def _open_standard_files() -> None:
    """Discard output to a closed stdout or stderr; other files would get its number."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
