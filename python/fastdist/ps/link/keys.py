"""The secret by which the tasks of a job recognize each other."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fastdist._config import KEYS_VARIABLE, settings
from fastdist.cluster.private_files import read_private

_BYTES = 32


@dataclass(frozen=True, slots=True)
class Keys:
    """The secret of one job: 64 hexadecimal digits.

    Anyone who has it may connect; all traffic is encrypted with keys derived from it.

    Examples:
        >>> from fastdist import ps
        >>> keys = ps.Keys.make()
        >>> ps.Keys.from_json(keys.to_json()) == keys
        True
    """

    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        if len(bytes.fromhex(self.secret)) != _BYTES:
            raise ValueError(f"a secret of {len(self.secret)} digits, expected {2 * _BYTES}")

    @classmethod
    def make(cls) -> Keys:
        """Generate a new random secret."""
        return cls(secrets.token_hex(_BYTES))

    def to_json(self) -> str:
        """Return the keys as JSON. The text is a secret."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Keys:
        """Parse the result of `to_json`.

        Raises:
            ValueError: the text is anything else.
        """
        try:
            return cls(**json.loads(text))
        except (TypeError, ValueError):
            raise ValueError(
                'not the keys of a job: expected {"secret": "64 hexadecimal digits"}'
            ) from None


def job_keys() -> Keys | None:
    """Return the keys that FASTDIST_PS_KEYS holds, as JSON or as a file's path; None if unset.

    Raises ValueError if the setting or the file holds no keys, OSError if the file cannot be read.
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
    """Read a file that `fastdist keys` has written; raise ValueError if it holds no keys."""
    try:
        return Keys.from_json(read_private(path).decode())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
