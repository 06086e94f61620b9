"""Finds the program of a job without starting or importing it."""

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from typing import Any

from fastdist.cli.command import UsageError

_PYTHON_SUFFIXES = (".py", ".pyc", ".pyz")


def find_program(
    words: Sequence[str], is_module: bool, environment: Mapping[str, str]
) -> list[str]:
    """Return the command that each process of a job runs: PATH and PYTHONPATH are used.

    The first word is a script, a program or, as after `python -m`, a module.
    """
    words = words[1:] if words[:1] == ["--"] else words
    if not words:
        wanted = "a module" if is_module else "a Python script, -m and a module, or a program"
        raise UsageError(f"nothing to run; expected {wanted}")
    target, *rest = words
    if is_module:
        _check_module(target, environment)
        return [sys.executable, "-m", target, *rest]
    if os.path.isdir(target):
        if not os.path.isfile(os.path.join(target, "__main__.py")):
            raise UsageError(f"{target} is a directory without a __main__.py")
        return [sys.executable, target, *rest]
    if os.path.exists(target):
        return _file_command(target, rest)
    program = shutil.which(target, path=environment.get("PATH")) if "/" not in target else None
    if program is None:
        raise UsageError(f"no such file or program: {target!r}")
    return [program, *rest]


def _file_command(target: str, rest: Sequence[str]) -> list[str]:
    if target.endswith(_PYTHON_SUFFIXES):
        if not os.access(target, os.R_OK):
            raise UsageError(f"no permission to read {target}")
        return [sys.executable, target, *rest]
    if not os.access(target, os.X_OK):
        raise UsageError(f"{target} is neither a Python script (*.py) nor executable")
    # Without a slash, the name would be looked up in PATH.
    return [target if "/" in target else f"./{target}", *rest]


def _check_module(name: str, environment: Mapping[str, str]) -> None:
    """Raise UsageError if `python -m name` would fail to find the module; import nothing."""
    extra = environment.get("PYTHONPATH", "").split(os.pathsep)
    places: Sequence[str] | None = [os.getcwd(), *filter(None, extra), *sys.path]
    finders: Sequence[Any] = sys.meta_path
    sought = ""
    for part in name.split("."):
        if places is None:
            raise UsageError(f"no module named {name}: {sought} is not a package")
        sought = f"{sought}.{part}" if sought else part
        specs = (finder.find_spec(part, places) for finder in finders) if part else ()
        spec = next(filter(None, specs), None)
        if spec is None:
            raise UsageError(f"no module named {sought}")
        # By its last part: of its whole name, a namespace package would look for its parent.
        places, finders = spec.submodule_search_locations, [PathFinder]
    if places is not None and PathFinder.find_spec("__main__", places) is None:
        raise UsageError(f"no module named {name}.__main__: {name} is a package without one")
