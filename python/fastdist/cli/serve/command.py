"""Runs a parameter server until a signal ends it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    from fastdist.ps import Keys, Server

_USAGE_EXIT_CODE = 2
_INTERVAL_S = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _StartError(Exception):
    """The server cannot start with the user's options."""


class _Stopped(BaseException):
    """A signal has arrived."""


def serve(address: str | None, *, key_file: str | None, as_json: bool) -> int:
    """Serve until a signal arrives.

    Args:
        address: where to listen, as ZeroMQ names it; None: any port of this machine, and without
            keys a socket that only this user can open.
        key_file: a file of keys; None uses the setting's keys, if any.
        as_json: print a line of JSON every second, instead of the address once.

    Returns:
        The exit code: 0, or 2 if the server could not start.
    """
    try:
        with (
            _opened_server(address, key_file) as server,
            suppress(_Stopped),
            _signals_raise(),
        ):
            _show(server, as_json)
    except (_StartError, ImportError) as error:
        sys.stderr.write(f"fastdist serve: {error}\n")
        return _USAGE_EXIT_CODE
    return 0


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
def _opened_server(address: str | None, key_file: str | None) -> Iterator[Server]:
    keys = _keys(key_file)  # first: raises an ImportError with a hint if pyzmq is missing
    from zmq import ZMQError

    from fastdist.ps import Server

    if keys is None and address is not None:
        raise _StartError(
            f"{address} can be reached by other users, here or on other machines, and needs keys: "
            "pass --keys FILE with a file that `fastdist keys` has written"
        )
    with ExitStack() as stack:
        if keys is None:
            folder = stack.enter_context(TemporaryDirectory(prefix="fastdist-serve-"))  # mode 0700
            address = f"ipc://{folder}/server"
        place = address or "tcp://127.0.0.1:*"
        try:
            server = stack.enter_context(Server(place, keys=keys))
        except ZMQError as error:
            raise _StartError(f"cannot listen at {place}: {error.strerror}") from None
        yield server


def _keys(key_file: str | None) -> Keys | None:
    from fastdist.ps.wire.keys import job_keys, read_keys

    try:
        return job_keys() if key_file is None else read_keys(key_file)
    except OSError as error:
        raise _StartError(f"cannot read the keys in {error.filename}: {error.strerror}") from None
    except ValueError as error:
        raise _StartError(str(error)) from None


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
