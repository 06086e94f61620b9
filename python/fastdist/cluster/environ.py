"""Reads counts, indexes and addresses from a launcher's environment variables."""

import re
from collections.abc import Mapping

from fastdist.cluster.address import join_address
from fastdist.errors import ClusterConfigError

Environ = Mapping[str, str]

# int() alone would also take "1_0", other alphabets' digits, and any length.
_COUNT = re.compile(r"\s*[0-9]{1,10}\s*")


def index_of_size(environ: Environ, variable: str, size_variable: str) -> tuple[int, int]:
    """Read a rank and the number of ranks."""
    count(environ, variable)  # reported first if both are malformed
    size = count(environ, size_variable, least=1)
    return index(environ, variable, size, f"{size_variable}={environ[size_variable]!r}"), size


def index(environ: Environ, variable: str, size: int, reason: str) -> int:
    """Read an index below `size`; `reason`, such as "WORLD_SIZE='4'", explains the size."""
    value = count(environ, variable)
    if value >= size:
        raise ClusterConfigError(
            f"{variable}={environ[variable]!r}; expected an integer from 0 to {size - 1}, "
            f"as {reason}"
        )
    return value


def count(environ: Environ, variable: str, *, least: int = 0) -> int:
    """Read an integer of at least `least`."""
    text = environ.get(variable)
    if text is None:
        raise ClusterConfigError(f"{variable} is not set; expected an integer of at least {least}")
    if _COUNT.fullmatch(text) is None or int(text) < least:
        raise ClusterConfigError(f"{variable}={text!r}; expected an integer of at least {least}")
    return int(text)


def first_set(environ: Environ, *variables: str) -> str:
    """Return the first variable that is set; the last variable if none is set."""
    return next((variable for variable in variables if variable in environ), variables[-1])


def master_address(environ: Environ) -> str | None:
    """Return the address of rank 0 from MASTER_ADDR and MASTER_PORT; None if one is not set."""
    host, port = environ.get("MASTER_ADDR", "").strip(), environ.get("MASTER_PORT", "").strip()
    return join_master(host, port) if host and port else None


def join_master(host: str, port: str) -> str:
    """Return the address of rank 0; raise ClusterConfigError if it is invalid."""
    try:
        return join_address(host, port)
    except ValueError as error:
        raise ClusterConfigError(f"MASTER_ADDR={host!r}, MASTER_PORT={port!r}: {error}") from None


def require_rank_of_world_size(environ: Environ) -> None:
    """Raise ClusterConfigError if WORLD_SIZE is set without RANK: the job is incomplete."""
    if environ.get("WORLD_SIZE", "1") != "1":
        raise ClusterConfigError(
            f"WORLD_SIZE={environ['WORLD_SIZE']!r} is set but RANK is not; "
            "expected both, or neither for a world of one"
        )
