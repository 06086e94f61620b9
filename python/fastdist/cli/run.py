"""`fastdist run`: starts the ranks of a job on this machine."""

import argparse
import os
import pkgutil
import resource
import secrets
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING

from fastdist.cli.supervisor import Job, StartError, supervise
from fastdist.cluster.launch import JOB_VARIABLE

if TYPE_CHECKING:
    _Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", JOB_VARIABLE)
_PYTHON_SUFFIXES = (".py", ".pyc", ".pyz")
_USAGE_EXIT_CODE = 2
_FILES_PER_RANK = 2
_OTHER_FILES = 24

_TARGET = "{script.py | -m module | program}"
_DESCRIPTION = """\
Starts N ranks on this machine and waits for them. When one fails, the others are ended and its
traceback is shown last. Ctrl-C is passed on to all ranks; a second one kills them.

Every rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT in its
environment, as under torchrun. Rank 0 reads the standard input.
"""
_EPILOG = """\
exit code:
  0 when all ranks return 0; that of the rank that failed first, or 128 and the signal that killed
  it; 128 and the signal that stopped fastdist run; 2 when nothing could be started

examples:
  fastdist run -n 4 train.py --epochs 10
  fastdist run -n 2 -m package.train
  fastdist run --env OMP_NUM_THREADS=4 ./program
"""


class _CommandError(Exception):
    """What the user asked for cannot be started."""


def add_parser(subparsers: "_Subparsers") -> None:
    """Adds `run` to the `fastdist` command."""
    parser = subparsers.add_parser(
        "run",
        help="start the ranks of a job on this machine",
        usage=f"fastdist run [options] {_TARGET} [argument]...",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-n",
        "--ranks",
        metavar="N",
        type=_rank_count,
        default=len(os.sched_getaffinity(0)),
        help="number of ranks (default: this process's cores, %(default)s)",
    )
    parser.add_argument(
        "--env",
        metavar="K=V",
        type=_assignment,
        action="append",
        default=[],
        help="set a variable in every rank's environment; may be repeated",
    )
    parser.add_argument(
        "--no-prefix",
        dest="prefix",
        action="store_false",
        help="do not begin each line of output with the rank that wrote it",
    )
    parser.add_argument(
        "-m", dest="is_module", action="store_true", help="run a module, as `python -m` does"
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="command",
        help="a Python script, a module after -m, or a program; then its arguments",
    )
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    try:
        _check_limits(arguments.ranks)
        environment = _environment(arguments.ranks, dict(arguments.env))
        job = Job(
            command=_command(arguments.command, arguments.is_module, environment),
            environments=[
                environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                for rank in range(arguments.ranks)
            ],
            prefix=arguments.prefix,
            colour=not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb",
        )
        return supervise(job)
    except (_CommandError, StartError) as error:
        sys.stderr.write(f"fastdist run: {error}\n")
        return _USAGE_EXIT_CODE


def _check_limits(ranks: int) -> None:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = ranks * _FILES_PER_RANK + _OTHER_FILES
    if limit != resource.RLIM_INFINITY and needed > limit:
        raise _CommandError(
            f"{ranks} ranks need {needed} open files, the limit is {limit}; see ulimit -n"
        )


def _environment(ranks: int, user: dict[str, str]) -> dict[str, str]:
    """What all ranks have in common; what the user sets counts for more than what is inherited."""
    for variable in _RANK_VARIABLES:
        if variable in user:
            raise _CommandError(f"--env {variable}: fastdist run sets it itself, for each rank")
    # Those of a torchrun around this job would make torch look for torchrun's store.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TORCHELASTIC_")}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())} | user
    environment.setdefault("PYTHONUNBUFFERED", "1")
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return environment | world | {JOB_VARIABLE: secrets.token_hex(16)}


def _free_port() -> int:
    """A port that nothing listens on now. It is only a number for scripts that start a store."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _command(words: Sequence[str], is_module: bool, environment: Mapping[str, str]) -> list[str]:
    """The program that each rank runs, once it is known that it can be found."""
    words = words[1:] if words[:1] == ["--"] else words
    if not words:
        wanted = "a module" if is_module else "a Python script, -m and a module, or a program"
        raise _CommandError(f"nothing to run; expected {wanted}")
    target, *rest = words
    if is_module:
        _check_module(target, environment)
        return [sys.executable, "-m", target, *rest]
    if os.path.isdir(target):
        if not os.path.isfile(os.path.join(target, "__main__.py")):
            raise _CommandError(f"{target} is a directory without a __main__.py")
        return [sys.executable, target, *rest]
    if os.path.exists(target):
        return _file_command(target, rest)
    program = shutil.which(target, path=environment.get("PATH")) if "/" not in target else None
    if program is None:
        raise _CommandError(f"no such file or program: {target!r}")
    return [program, *rest]


def _file_command(target: str, rest: Sequence[str]) -> list[str]:
    if target.endswith(_PYTHON_SUFFIXES):
        if not os.access(target, os.R_OK):
            raise _CommandError(f"no permission to read {target}")
        return [sys.executable, target, *rest]
    if not os.access(target, os.X_OK):
        raise _CommandError(f"{target} is neither a Python script (*.py) nor executable")
    # With a slash, or else the name would be looked up in PATH.
    return [target if "/" in target else f"./{target}", *rest]


def _check_module(name: str, environment: Mapping[str, str]) -> None:
    """Finds out whether `python -m name` would find something, without importing anything."""
    extra = environment.get("PYTHONPATH", "").split(os.pathsep)
    places: Sequence[str] | None = [os.getcwd(), *filter(None, extra), *sys.path]
    sought = ""
    for part in name.split("."):
        if places is None:
            raise _CommandError(f"no module named {name}: {sought} is not a package")
        sought = f"{sought}.{part}" if sought else part
        spec = _find_spec(sought, places) if part else None
        if spec is None:
            raise _CommandError(f"no module named {sought}")
        places = spec.submodule_search_locations
    if places is not None and _find_spec(f"{name}.__main__", places) is None:
        raise _CommandError(f"no module named {name}.__main__: {name} is a package without one")


def _find_spec(name: str, places: Sequence[str]) -> ModuleSpec | None:
    """Looks for a module as import does, except that the package it is in need not be imported."""
    if "." not in name:
        specs = (finder.find_spec(name, places) for finder in sys.meta_path)
        return next((spec for spec in specs if spec is not None), None)
    parts: list[str] = []
    for place in places:
        importer = pkgutil.get_importer(place)
        spec = importer.find_spec(name) if importer is not None else None
        if spec is not None and spec.loader is not None:
            return spec
        if spec is not None:
            parts += spec.submodule_search_locations or []
    namespace = ModuleSpec(name, None, is_package=True)
    namespace.submodule_search_locations = parts
    return namespace if parts else None


def _rank_count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < len(text) <= 6 and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected a number of ranks of at least 1, got {text!r}")
    return int(text)


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return name, value
