"""The machines of a job, which ranks note beside their records after the rendezvous."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine of a job.

    Attributes:
        ip: the address at which its ranks are reached.
        launcher: "ip:port" at which its `fastdist run` answers questions; "" if there is none.
    """

    ranks: tuple[int, ...]
    ip: str
    launcher: str


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines of a job, and a key derived from its secret for questions about records."""

    key: str
    machines: tuple[Machine, ...]

    @classmethod
    def of_job(cls, key: str, machines: Sequence[Machine]) -> Machines:
        """Make the machines of a job; `key` is equal on its ranks, and secret to strangers."""
        own = hmac.new(key.encode(), b"questions about records", hashlib.sha256).hexdigest()
        return cls(own, tuple(machines))
