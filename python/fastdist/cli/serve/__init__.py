"""`fastdist serve`: a standalone parameter server that jobs connect to and leave."""

from __future__ import annotations

import argparse
import math

_DESCRIPTION = """\
Keeps variables and tables for jobs with parameter servers until Ctrl-C or SIGTERM, and then drops
them. On a terminal it shows a page with its contents and activity, otherwise it prints lines. A
job uses the server if its TF_CONFIG lists the address under "ps". The server serves one job at a
time; each job starts with an empty server.
"""
_EPILOG = """\
A server without keys can be reached only by fastdist.ps.Client of the same user on this machine:
ParameterServerStrategy always uses keys.

exit code:
  0 if a signal ended the server; 2 if the server could not start

examples:
  fastdist serve
  (umask 077; fastdist keys > job.keys)
  fastdist serve --address tcp://10.0.0.5:7000 --keys job.keys --metrics-port 9100
  fastdist serve --json --interval 60 >> server.jsonl
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `serve` to the `fastdist` command."""
    parser = subparsers.add_parser(
        "serve",
        help="run a standalone parameter server",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--address",
        metavar="A",
        type=_address,
        help="where to listen: tcp://IP:PORT, or IP:PORT as in TF_CONFIG; * is a free port; needs "
        "keys (default: tcp://127.0.0.1:* with keys, else a socket that only this user can open)",
    )
    parser.add_argument(
        "--keys",
        metavar="FILE",
        help="a file that `fastdist keys` has written (default: the keys in FASTDIST_PS_KEYS)",
    )
    parser.add_argument(
        "--metrics-port",
        metavar="P",
        type=_host_and_port,
        help="serve metrics for Prometheus on this port of 127.0.0.1, or on IP:PORT; 0 is a free "
        "port",
    )
    parser.add_argument(
        "--interval",
        metavar="S",
        type=_seconds,
        help="seconds between lines (default: 10), or between updates of the page (default: 1)",
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
