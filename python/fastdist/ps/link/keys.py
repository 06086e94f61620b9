"""The keys that servers and clients of a job authenticate with (ZeroMQ's CURVE)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fastdist._config import KEYS_VARIABLE, settings

try:
    import zmq
except ImportError:
    raise ImportError("fastdist.ps needs pyzmq: pip install pyzmq", name="zmq") from None


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one job: texts of 40 characters.

    Anyone who has them may connect; all traffic is encrypted with them.

    Examples:
        >>> from fastdist import ps
        >>> keys = ps.Keys.make()
        >>> ps.Keys.from_json(keys.to_json()) == keys
        True
    """

    server_public: str
    server_secret: str = field(repr=False)
    client_public: str
    client_secret: str = field(repr=False)

    @classmethod
    def make(cls) -> Keys:
        """Generate new random keys."""
        (server_public, server_secret), (client_public, client_secret) = (
            [key.decode() for key in zmq.curve_keypair()] for _ in range(2)
        )
        return cls(server_public, server_secret, client_public, client_secret)

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
            keys = cls(**json.loads(text))
            if all(len(key) == 40 for key in asdict(keys).values()):
                return keys
        except (TypeError, json.JSONDecodeError):
            pass
        raise ValueError("not the keys of a job: expected JSON of four keys of 40 characters")


def job_keys() -> Keys | None:
    """Return the keys that FASTDIST_PS_KEYS holds, as JSON or as a file's path; None if unset.

    Raises:
        ValueError: the setting, or the file, does not hold keys.
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
    """Read a file that `fastdist keys` has written.

    Raises:
        ValueError: the file does not hold keys.
        OSError: the file cannot be read.
    """
    try:
        return Keys.from_json(Path(path).read_text())
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
