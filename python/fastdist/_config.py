"""The settings that are read from environment variables.

| variable | meaning | default |
|---|---|---|
| FASTDIST_TIMEOUT_S | seconds that a collective waits for other ranks | 600 |
| FASTDIST_RENDEZVOUS_TIMEOUT_S | seconds that `fd.init()` waits for all ranks | 120 |
| FASTDIST_PS_FOLDER | folder of the sockets of a job with parameter servers on one machine | none |
| FASTDIST_SECRET | secret that the processes of a job on several machines share | see below |
| FASTDIST_SECRET_FILE | path of a file with that secret | see below |
| FASTDIST_INSECURE | 1: jobs on several machines need no secret | 0 |
| FASTDIST_REPLACE | gloo: programs that ask torch for Gloo get fastdist | nothing |
| FASTDIST_RECORD | file for digests of training (`fastdist run --record`) | none |
| FASTDIST_RECORD_EVERY | steps between two of its records | 100 |
| FASTDIST_RECORD_RUN | name of the run; another run's file is written anew | none |
| GLOO_SOCKET_IFNAME | network interface by which other machines reach this one | by the route |

Without a secret, processes take that in `fastdist/secret` of the user's configuration folder.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

VARIABLE_PREFIX = "FASTDIST_"
"""The beginning of the names of all settings."""

FOLDER_VARIABLE = "FASTDIST_PS_FOLDER"
REPLACE_VARIABLE = "FASTDIST_REPLACE"
REPLACEABLE = ("gloo",)
RECORD_VARIABLES = ("FASTDIST_RECORD", "FASTDIST_RECORD_EVERY", "FASTDIST_RECORD_RUN")
SECRET_VARIABLE = "FASTDIST_SECRET"
SECRET_VARIABLES = (SECRET_VARIABLE, "FASTDIST_SECRET_FILE", "FASTDIST_INSECURE")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings. Times are in seconds."""

    timeout_s: float
    rendezvous_timeout_s: float
    ps_folder: str | None
    secret: str | None = field(repr=False)
    secret_file: str | None
    insecure: bool
    interface: str | None
    config_folder: str


def settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings."""
    insecure = environ.get("FASTDIST_INSECURE", "0")
    if insecure not in ("0", "1"):
        raise ValueError(f"FASTDIST_INSECURE must be 0 or 1, got {insecure!r}")
    return Settings(
        timeout_s=_seconds(environ, "FASTDIST_TIMEOUT_S", 600.0),
        rendezvous_timeout_s=_seconds(environ, "FASTDIST_RENDEZVOUS_TIMEOUT_S", 120.0),
        ps_folder=environ.get(FOLDER_VARIABLE) or None,
        secret=environ.get(SECRET_VARIABLE) or None,
        secret_file=environ.get("FASTDIST_SECRET_FILE") or None,
        interface=environ.get("GLOO_SOCKET_IFNAME") or None,
        insecure=insecure == "1",
        config_folder=os.path.expanduser(environ.get("XDG_CONFIG_HOME") or "~/.config"),
    )


@dataclass(frozen=True, slots=True)
class Recording:
    """A record of digests of training.

    Attributes:
        every: steps between two records.
        run: a name of the run; the file of another run is written anew.
    """

    path: str
    every: int
    run: str


def recording(environ: Mapping[str, str] = os.environ) -> Recording | None:
    """Return what to record; None for nothing."""
    file, every, run = RECORD_VARIABLES
    text = environ.get(every, "100")
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ValueError(f"{every} must be a positive integer, got {text!r}")
    path = environ.get(file)
    return Recording(path, int(text), environ.get(run, "")) if path else None


def replaced_backend(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the backend of torch.distributed whose place fastdist takes."""
    name = environ.get(REPLACE_VARIABLE) or None
    if name is not None and name not in REPLACEABLE:
        raise ValueError(f"{REPLACE_VARIABLE} must be {' or '.join(REPLACEABLE)}, got {name!r}")
    return name


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1e9:
        raise ValueError(f"{name} must be a positive number of seconds, at most 1e9, got {text!r}")
    return value
