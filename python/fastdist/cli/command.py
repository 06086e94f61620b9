"""Adds commands to the command line, and runs the one that was given."""

from __future__ import annotations

import argparse
import importlib.util
import math
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from fastdist.processes.terminal import OutputError, fitted, note, show

_USAGE_EXIT_CODE = 2


class UsageError(Exception):
    """The options of a command are wrong, or exceed what this machine has."""


class CommandParser(argparse.ArgumentParser):
    """A parser whose messages fit the terminal, and that fails if help cannot be written."""

    def error(self, message: str) -> NoReturn:
        """Print the usage and the message, and exit."""
        self.print_usage(sys.stderr)
        self.exit(_USAGE_EXIT_CODE, fitted(f"{self.prog}: error: {message}\n", sys.stderr))

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is not sys.stdout:
            return super()._print_message(message, file)
        try:
            show(message)
        except OutputError as error:
            self.exit(_USAGE_EXIT_CODE, f"{self.prog}: {error}\n")


def add_command(
    subparsers: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    handler: str,
    errors: tuple[type[Exception], ...] = (),
    title: str = "",
    **parser_options: Any,
) -> argparse.ArgumentParser:
    """Add a command.

    Args:
        handler: "module:function" below fastdist.cli, which is imported when the command runs. It
            takes the parsed arguments and returns the exit code, or None for 0.
        errors: exceptions of the handler that end the command as a `UsageError` does.
        title: beginning of the message of such an error; "" for the whole command.
        parser_options: options of the command's parser.
    """
    parser = subparsers.add_parser(
        name,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        **parser_options,
    )
    parser.set_defaults(
        handler=f"fastdist.cli.{handler}", errors=errors, title=title or parser.prog
    )
    return parser


def run_command(arguments: argparse.Namespace) -> int:
    """Run the command of `arguments`; return its exit code."""
    try:
        exit_code: int | None = pkgutil.resolve_name(arguments.handler)(arguments)
    except (UsageError, OutputError, *arguments.errors) as error:
        note(f"{arguments.title}: {error}")
        return _USAGE_EXIT_CODE
    return exit_code or 0


def count(what: str, least: int = 1) -> Callable[[str], int]:
    """Return the type of an option that takes a number of something."""

    def parse(text: str) -> int:
        if text.isascii() and text.isdigit() and len(text) <= 6 and int(text) >= least:
            return int(text)
        raise argparse.ArgumentTypeError(
            f"expected a number of {what} from {least} to 999999, got {text!r}"
        )

    return parse


def seconds(text: str) -> float:
    """Parse the value of an option that takes seconds."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if 0 <= value < math.inf:
        return value
    raise argparse.ArgumentTypeError(f"expected a number of seconds, got {text!r}")


def check_plot(path: Path) -> None:
    """Check that matplotlib can write such a file."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib: pip install matplotlib")
    from matplotlib.backend_bases import FigureCanvasBase

    types = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lstrip(".").lower() not in types:
        raise ValueError(f"--plot {path}: expected a file type out of {', '.join(types)}")
