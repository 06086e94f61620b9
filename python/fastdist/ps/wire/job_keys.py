"""Where the keys of a job come from: the setting FASTDIST_PS_KEYS, or a file."""

from __future__ import annotations

from pathlib import Path

from fastdist._config import KEYS_VARIABLE, settings
from fastdist.ps.wire.keys import Keys


def job_keys() -> Keys | None:
    """The keys that FASTDIST_PS_KEYS gives, as JSON or by the path of a file; None without it.

    Raises:
        ValueError: it gives something else.
        OSError: the file cannot be read.
    """
    setting = settings().ps_keys
    if setting is None:
        return None
    if not setting.lstrip().startswith("{"):
        return read_keys(setting)
    try:
        return Keys.from_json(setting)
    except ValueError as error:
        raise ValueError(f"{KEYS_VARIABLE}: {error}") from None


def read_keys(path: str | Path) -> Keys:
    """The keys in a file that `fastdist keys` has written.

    Raises:
        ValueError: it holds something else.
        OSError: it cannot be read.
    """
    try:
        return Keys.from_json(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
