"""The keys by which servers and clients of a job know each other (ZeroMQ's CURVE)."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

import zmq


@dataclass(frozen=True, slots=True)
class Keys:
    """Of one job: who has them may connect, and everything is encrypted. Texts of 40 characters."""

    server_public: str
    server_secret: str = field(repr=False)
    client_public: str
    client_secret: str = field(repr=False)

    @classmethod
    def make(cls) -> Keys:
        """Keys that nobody else has."""
        (server_public, server_secret), (client_public, client_secret) = (
            [key.decode() for key in zmq.curve_keypair()] for _ in range(2)
        )
        return cls(server_public, server_secret, client_public, client_secret)

    def to_json(self) -> str:
        """For a process that is to have them; a secret."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Keys:
        """What `to_json` gave.

        Raises:
            ValueError: something else.
        """
        try:
            keys = cls(**json.loads(text))
            if all(len(key) == 40 for key in asdict(keys).values()):
                return keys
        except (TypeError, json.JSONDecodeError):
            pass
        raise ValueError("not the keys of a job: expected JSON of four keys of 40 characters")
