"""The processes of an elastic job that are ranks or may become some, in a job with --keep."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, Protocol

LAST_CALL_S = 30.0
"""Seconds that the first ranks wait for those that are missing."""


def note(text: str) -> None:
    """Write a line of the launcher to stderr, after "fastdist run: "."""
    from fastdist.processes.terminal import note  # ranks, which import this module, need it not

    note(f"fastdist run: {text}")


class Door(Protocol):
    """Reaches ranks: those of this machine by a `RankDoor`, others by their machine's branch."""

    def send(self, number: int, message: dict[str, Any]) -> None:
        """Send a rank a message."""

    def kill(self, number: int) -> None:
        """Kill a rank."""


@dataclass(frozen=True, slots=True)
class Spare:
    """A process that waits to become a rank."""

    door: Door  # of its machine
    number: int  # at the door
    slot: int  # on its machine
    cores: int  # of its machine


class Crew:
    """Starts spares so that a job keeps its number of ranks.

    The first ranks wait for all `machines` with spares, or half a minute; 0: there are no spares.
    """

    def __init__(self, ranks: int, machines: int) -> None:
        self._ranks = ranks
        self._machines = machines
        self._spares: list[Spare] = []
        self._cores: dict[Door, int] = {}
        self._started: set[tuple[Door, int]] = set()  # doors and slots of ranks
        self._has_begun = False
        self._told = ""
        # When the first ranks start without machines that are missing.
        self.waits_until_s: float | None = None

    def add(self, spare: Spare) -> None:
        """Add a spare, which may be a rank that has ended and was started again."""
        self._started.discard((spare.door, spare.slot))
        self._spares.append(spare)
        self._cores[spare.door] = spare.cores

    def lose(self, door: Door, number: int, slot: int) -> None:
        """Lose a process: a spare, or a rank that has joined."""
        self._spares = [s for s in self._spares if (s.door, s.number) != (door, number)]
        self._started.discard((door, slot))

    def lose_machine(self, door: Door | None) -> None:
        """Lose all processes of a machine."""
        self._spares = [spare for spare in self._spares if spare.door is not door]
        self._started = {(where, slot) for where, slot in self._started if where is not door}

    def fill(self, has_finished: bool) -> None:
        """Start spares for the ranks that are missing, or end all after the job has finished."""
        if has_finished:
            for spare in self._spares:
                spare.door.send(spare.number, {"ended": True})
            self._spares.clear()
        elif len(self._started) < self._ranks and self._spares and self._is_ready():
            while len(self._started) < self._ranks and self._spares:
                self._start_one()
            self._tell()

    def _is_ready(self) -> bool:
        if self._has_begun:
            return True
        now_s = time.monotonic()
        self.waits_until_s = self.waits_until_s or now_s + LAST_CALL_S
        # Each machine has a spare for each rank.
        if len(self._spares) < self._machines * self._ranks and now_s < self.waits_until_s:
            return False
        self.waits_until_s, self._has_begun = None, True
        return True

    def _start_one(self) -> None:
        """Start a spare where a rank has most cores for itself."""
        ranks = Counter(door for door, _ in self._started)
        spare = min(self._spares, key=lambda s: ((ranks[s.door] + 1) / s.cores, s.slot))
        self._spares.remove(spare)
        self._started.add((spare.door, spare.slot))
        spare.door.send(spare.number, {"start": True})

    def _tell(self) -> None:
        """Say how many ranks each machine has, if it is news."""
        ranks = Counter(door for door, _ in self._started)
        cores = sum(self._cores[door] for door in ranks)
        places = [f"{count} on {self._cores[door]} cores" for door, count in ranks.items()]
        said = f"{len(self._started)} ranks: {', '.join(places)}"
        if cores < len(self._started):
            said += "; with a core for each they would be faster"
        if said != self._told:
            self._told = said
            note(said)
