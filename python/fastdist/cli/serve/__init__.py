"""`fastdist serve`: a standalone parameter server that jobs connect to and leave."""

from __future__ import annotations

import argparse

from fastdist.cli.command import add_command
from fastdist.errors import ClusterConfigError

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
        "serve.command:run",
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
