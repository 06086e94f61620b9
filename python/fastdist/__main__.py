"""`python -m fastdist`: the same as the `fastdist` command."""

from fastdist.cli.main import console

console()
