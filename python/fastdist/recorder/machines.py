"""The machines of a job, which ranks note beside their records once they have met."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastdist.recorder.encoding import decode, encode


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine of a job.

    Attributes:
        ranks: its ranks.
        ip: the address at which they are reached.
        launcher: "ip:port" at which its `fastdist run` answers questions; "" if nobody does.
    """

    ranks: tuple[int, ...]
    ip: str
    launcher: str


@dataclass(frozen=True, slots=True)
class Machines:
    """The machines of a job, and the key by which they trust each other's questions.

    Attributes:
        key: derived from the job's secret; for questions about its records only.
    """

    key: str
    machines: tuple[Machine, ...]

    @classmethod
    def of_job(cls, key: str, machines: Sequence[Machine]) -> Machines:
        """Make the machines of a job; `key` is equal on its ranks, and secret to strangers."""
        own = hmac.new(key.encode(), b"questions about records", hashlib.sha256).hexdigest()
        return cls(own, tuple(machines))

    def without(self, ranks: Sequence[int]) -> list[Machine]:
        """Return the machines that have none of some ranks."""
        return [machine for machine in self.machines if not set(machine.ranks) & set(ranks)]

    def write(self, path: Path) -> None:
        """Write to a file in a folder that only this user can read."""
        path.write_text(encode(self), "utf-8")


def read_machines(path: Path) -> Machines | None:
    """Read the output of `Machines.write`; None if it is not there."""
    try:
        return decode(Machines, path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
