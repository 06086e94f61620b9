"""`fastdist serve`: a parameter server of its own, that jobs come to and leave."""

from __future__ import annotations

import argparse
import math

_DESCRIPTION = """\
Keeps variables and tables for jobs with parameter servers until Ctrl-C or SIGTERM ends it; then all
that it kept is gone. On a terminal it shows a page of what it keeps and does, else a line now and
then. A job uses it where its TF_CONFIG names the address as one of "ps": one job at a time, each of
which begins with nothing.
"""
_EPILOG = """\
A server without keys can be reached from this machine only, and only by fastdist.ps.Client:
ParameterServerStrategy always has keys.

exit code:
  0 when it was ended by a signal; 2 when it could not be started

examples:
  fastdist serve --address tcp://127.0.0.1:7000
  (umask 077; fastdist keys > job.keys)
  fastdist serve --address tcp://10.0.0.5:7000 --keys job.keys --metrics-port 9100
  fastdist serve --json --interval 60 >> server.jsonl
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `serve` to the `fastdist` command."""
    parser = subparsers.add_parser(
        "serve",
        help="run a parameter server of its own",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--address",
        metavar="A",
        type=_address,
        default="tcp://127.0.0.1:*",
        help="where to listen: tcp://IP:PORT, or IP:PORT as in TF_CONFIG; * is a free port "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--keys",
        metavar="FILE",
        help="keys that `fastdist keys` has made (default: those of FASTDIST_PS_KEYS)",
    )
    parser.add_argument(
        "--metrics-port",
        metavar="P",
        type=_host_and_port,
        help="serve metrics for Prometheus at this port of 127.0.0.1, or at IP:PORT; 0 is a free "
        "port",
    )
    parser.add_argument(
        "--interval",
        metavar="S",
        type=_seconds,
        help="seconds between lines (default: 10), or between two states of the page (default: 1)",
    )
    parser.add_argument("--json", action="store_true", help="write lines of JSON")
    parser.set_defaults(handler=_serve)


def _serve(options: argparse.Namespace) -> int:
    from fastdist.cli.serve.command import serve  # numpy: only when it runs

    return serve(
        options.address,
        key_file=options.keys,
        metrics=options.metrics_port,
        interval_s=options.interval,
        as_json=options.json,
    )


def _address(text: str) -> str:
    address = text if "://" in text else f"tcp://{text}"
    host, _, port = address.partition("://")[2].rpartition(":")
    is_port = port == "*" or (port.isascii() and port.isdigit() and int(port[:6]) <= 65535)
    if not address.startswith("tcp://") or not host or not is_port:
        raise argparse.ArgumentTypeError(f"expected tcp://IP:PORT, got {text!r}")
    return address


def _host_and_port(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port[:6]) <= 65535):
        raise argparse.ArgumentTypeError(f"expected a port or IP:PORT, got {text!r}")
    return host.strip("[]") or "127.0.0.1", int(port)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.05 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"expected seconds from 0.05 to 86400, got {text!r}")
    return value
