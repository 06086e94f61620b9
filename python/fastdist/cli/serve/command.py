"""Runs a parameter server and shows its activity until a signal ends it."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from tempfile import TemporaryDirectory
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from fastdist.cli.serve.lines import shown_lines
from fastdist.cli.serve.metrics import served_metrics
from fastdist.cli.serve.page import shown_page
from fastdist.cli.serve.reading import Reading

if TYPE_CHECKING:
    from fastdist.ps import Keys, Server

_USAGE_EXIT_CODE = 2
_LINE_INTERVAL_S = 10.0
_PAGE_INTERVAL_S = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _StartError(Exception):
    """The server cannot start with the user's options."""


class _Stopped(BaseException):
    """A signal has arrived."""


def serve(
    address: str | None,
    *,
    key_file: str | None,
    metrics: tuple[str, int] | None,
    interval_s: float | None,
    as_json: bool,
) -> int:
    """Serve until a signal arrives.

    Args:
        address: where to listen, as ZeroMQ names it; None: any port of this machine, and without
            keys a socket that only this user can open.
        key_file: a file of keys; None uses the setting's keys, if any.
        metrics: IP address and port for Prometheus.
        interval_s: seconds between readings; None: 10 for lines, 1 for the page.
        as_json: print lines of JSON.

    Returns:
        The exit code: 0, or 2 if the server could not start.
    """
    try:
        with (
            _opened_server(address, key_file) as server,
            _metrics(server, metrics) as url,
            suppress(_Stopped),
            _signals_raise(),
        ):
            about = {"address": server.address} | ({} if url is None else {"metrics": url})
            is_page = sys.stdout.isatty() and not as_json
            with shown_page(about) if is_page else shown_lines(about, as_json=as_json) as show:
                default_s = _PAGE_INTERVAL_S if is_page else _LINE_INTERVAL_S
                _show_readings(server, show, default_s if interval_s is None else interval_s)
    except (_StartError, ImportError) as error:
        sys.stderr.write(f"fastdist serve: {error}\n")
        return _USAGE_EXIT_CODE
    return 0


def _show_readings(server: Server, show: Callable[[Reading], None], interval_s: float) -> NoReturn:
    reading = None
    while True:
        reading = Reading.after(reading, server.stats())
        show(reading)
        time.sleep(interval_s)
        if server.failure is not None:
            raise server.failure


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
def _metrics(server: Server, place: tuple[str, int] | None) -> Iterator[str | None]:
    if place is None:
        yield None
        return
    with ExitStack() as stack:
        try:
            url = stack.enter_context(served_metrics(server.stats, *place))
        except OSError as error:
            host, port = place
            raise _StartError(f"cannot serve metrics at {host}:{port}: {error.strerror}") from None
        yield url


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
