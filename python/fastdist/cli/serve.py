"""`fastdist serve`: a standalone parameter server that jobs connect to and leave."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from fastdist.cli.command import UsageError, add_command
from fastdist.errors import ClusterConfigError

if TYPE_CHECKING:
    from fastdist.ps import Server

_INTERVAL_S = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_DESCRIPTION = """\
Keeps variables and tables for jobs with parameter servers until Ctrl-C or
SIGTERM, and then drops them. Prints its address. A job uses the server if its
TF_CONFIG lists the address under "ps". The server serves one job at a time;
each job starts with an empty server.
"""
_EPILOG = """\
At an address, a server lets in all who have its secret: FASTDIST_SECRET, the
content of the file FASTDIST_SECRET_FILE, or else a file that fastdist makes in
your configuration folder. Without one, only your own programs on this machine
reach it, by fastdist.ps.Client.

exit code:
  0 if a signal ended the server; 2 if the server could not start

examples:
  fastdist serve
  fastdist serve --address tcp://10.0.0.5:7000
  fastdist serve --json | jq --unbuffered .requests
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `serve` to the `fastdist` command."""
    parser = add_command(
        subparsers,
        "serve",
        "serve:run",
        (ImportError, ClusterConfigError),
        help="run a standalone parameter server",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--address",
        metavar="A",
        type=_address,
        help="where to listen: tcp://IP:PORT, or IP:PORT as in TF_CONFIG; * is a free port "
        "(default: a socket that only this user can open)",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print the contents and the activity as a line of JSON every second",
    )


def _address(text: str) -> str:
    address = text if "://" in text else f"tcp://{text}"
    host, _, port = address.partition("://")[2].rpartition(":")
    is_port = port == "*" or (port.isascii() and port.isdigit() and int(port[:6]) <= 65535)
    if not address.startswith("tcp://") or not host or not is_port:
        raise argparse.ArgumentTypeError(f"expected tcp://IP:PORT, got {text!r}")
    return address


class _Stopped(BaseException):
    """A signal has arrived."""


def run(options: argparse.Namespace) -> None:
    """Serve until a signal arrives."""
    from fastdist.ps import Server

    try:
        made = Server(options.address)
    except OSError as error:
        raise UsageError(f"cannot listen at {error.strerror}") from None
    with made as server, suppress(_Stopped), _signals_raise():
        _show(server, options.json)


def _show(server: Server, as_json: bool) -> NoReturn:
    is_read = _write(_json_line(server) if as_json else f"address: {server.address}")
    while True:
        time.sleep(_INTERVAL_S)
        if server.failure is not None:
            raise server.failure
        if as_json and is_read:
            is_read = _write(_json_line(server))


def _json_line(server: Server) -> str:
    return json.dumps({"time": time.time(), "address": server.address, **server.stats()})


def _write(line: str) -> bool:
    """Write a line; return False, and say so, if it can no longer be written."""
    # Not via sys.stdout, which would block on its unwritten buffer when the process exits.
    data = memoryview(f"{line}\n".encode())
    try:
        while data:
            data = data[os.write(1, data) :]
    except OSError as error:
        sys.stderr.write(
            f"fastdist serve: cannot write to stdout: {error.strerror}; continues without\n"
        )
        return False
    return True


@contextmanager
def _signals_raise() -> Iterator[None]:
    """Raise `_Stopped` on the first signal; a second one kills the process."""
    # SIGHUP is ignored under nohup.
    numbers = [number for number in _SIGNALS if signal.getsignal(number) != signal.SIG_IGN]

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        del number, frame
        for each in numbers:
            signal.signal(each, signal.SIG_DFL)
        raise _Stopped

    old = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
