"""Every setting that is read from the environment.

| variable | meaning | default |
|---|---|---|
| FASTDIST_TIMEOUT_S | seconds a collective waits for a rank before it raises | 600 |
| FASTDIST_RENDEZVOUS_TIMEOUT_S | seconds `fd.init()` waits for all ranks | 120 |
| FASTDIST_PS_KEYS | keys of the parameter servers: their JSON, or a file of it | none |
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

KEYS_VARIABLE = "FASTDIST_PS_KEYS"


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings, read once by `settings`. Times in seconds."""

    timeout_s: float = 600.0
    rendezvous_timeout_s: float = 120.0
    ps_keys: str | None = field(default=None, repr=False)


def settings(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings.

    Raises:
        ValueError: a variable holds something that is not a positive number.
    """
    defaults = Settings()
    return Settings(
        timeout_s=_seconds(environ, "FASTDIST_TIMEOUT_S", defaults.timeout_s),
        rendezvous_timeout_s=_seconds(
            environ, "FASTDIST_RENDEZVOUS_TIMEOUT_S", defaults.rendezvous_timeout_s
        ),
        ps_keys=environ.get(KEYS_VARIABLE) or None,
    )


def _seconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf):
        raise ValueError(f"{name} must be a positive number of seconds, got {text!r}")
    return value
