"""`fastdist keys`: makes keys for a job with tasks on several machines."""

import argparse

from fastdist.cli.command import add_command
from fastdist.processes.terminal import show

_DESCRIPTION = """\
Prints new keys for a job with parameter servers, as one line of JSON.

Keep the keys secret: anyone who has them can connect to the job's servers, and
read and change everything that the servers keep. All tasks of the job need the
same keys, in the variable FASTDIST_PS_KEYS, which holds the JSON or the path
of a file with the JSON. Jobs of `fastdist run` need no keys from this command:
`fastdist run` makes new keys for each job.
"""
_EPILOG = """\
examples:
  (umask 077; fastdist keys > job.keys)      # that only you can read; use scp
  FASTDIST_PS_KEYS=job.keys python train.py  # each task, with its TF_CONFIG
  fastdist serve --keys job.keys --address tcp://10.0.0.5:7000
  fastdist keys |
    kubectl create secret generic job-keys --from-file=job.keys=/dev/stdin
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `keys` to the `fastdist` command."""
    add_command(
        subparsers,
        "keys",
        "keys:run",
        (ImportError,),
        help="make keys for a job with parameter servers",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )


def run(options: argparse.Namespace) -> None:
    """Print new keys."""
    from fastdist.ps import Keys

    show(Keys.make().to_json() + "\n")
