"""The part of a machine in an elastic job whose roster another machine keeps.

Its ranks talk to the door here, as if the roster were behind it; a thread passes their messages on.
It answers for its ranks: the roster hears from it once a second, or gives its ranks up. Here they
are killed when the roster is silent, since the others go on without them; the launcher starts them
again, and they join as new ones. A message is a JSON list.

| to the roster | meaning |
|---|---|
| beat | this machine lives |
| said, NUMBER, KEY, VALUE | a message of a rank |
| left, NUMBER, HAS_ENDED | a rank has left; if its process lives, once more at its end |
| finished | the job has done its work |
| failed | the program has failed here before there was a world |

| from the roster | meaning |
|---|---|
| beat, HAS_BEGUN | it lives; whether there was a world |
| tell, NUMBER, MESSAGE | a message for a rank |
| kill, NUMBER | a rank that keeps others waiting |
| finished | the job has done its work |
| closed | the roster's launcher ends |
"""

from __future__ import annotations

import json
import selectors
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from fastdist._config import settings
from fastdist.cluster.crew import note
from fastdist.cluster.rank_door import RankDoor
from fastdist.cluster.roster import SILENT_S
from fastdist.link.connections import Connections
from fastdist.link.secret import job_secret

_BEAT_S = 1.0
_POLL_S = 0.1
_REFUSED_S = 5.0  # that the launcher may refuse this machine
_TELL_S = 10.0  # to reach the launcher with a last word


class Branch:
    """Connects the ranks of this machine, at most so many, with their job's roster, in a thread.

    There, `on_lost` is called with the reason why there is no roster.
    """

    def __init__(self, address: str, most: int, on_lost: Callable[[str], None]) -> None:
        self._place = address.removeprefix("tcp://")
        self._on_lost = on_lost
        self._connections = Connections([address])
        self._door = RankDoor(most, self._hear_rank, self._lose_rank)
        self._door.selector.register(self._connections, selectors.EVENT_READ, lambda: None)
        self.name = self._door.name
        self._unsaid: list[tuple[int, str, Any]] = []  # by ranks whom the roster has not met
        self._met: set[int] = set()
        self._leaving: set[int] = set()  # ranks that the roster has met, whose processes live
        self._waiting: set[int] = set()  # for a place in a world
        self._spares: dict[int, Any] = {}  # what they have said, in a job that keeps its ranks
        self._is_connected = False
        self._has_begun = self._has_finished = self._has_given_up = self._has_failed = False
        self._is_told = threading.Event()  # that the program has failed
        self._beat_s = 0.0
        self._heard_s = time.monotonic()
        end = partial(self._connections.close, linger_s=1.0)
        self._door.serve(self._wait_s, self._look, end)

    def has_begun(self) -> bool:
        """Return True once there was a world."""
        return self._has_begun

    def finish(self) -> None:
        """Say that the job has done its work; nobody joins any more."""
        self._door.call(self._finish)

    def end(self, has_failed: bool) -> None:
        """Say whether the program has failed here before there was a world; then hear no more."""
        self._has_given_up = True
        if has_failed and not self._has_begun:
            self._door.call(self._fail)
            self._is_told.wait(_TELL_S)

    def close(self) -> None:
        """End the thread, and all connections."""
        self._door.close()

    def _finish(self) -> None:
        self._has_finished = True
        self._say("finished")

    def _fail(self) -> None:
        self._has_failed = True
        self._tell_failure()

    def _wait_s(self) -> float:
        """Return the time until the next beat, or until the next attempt to connect."""
        until_beat_s = max(self._beat_s + _BEAT_S - time.monotonic(), 0.0)
        return until_beat_s if self._is_connected else _POLL_S

    # --- the ranks ------------------------------------------------------------------------------

    def _hear_rank(self, number: int, kind: str, value: Any) -> None:
        if kind == "spare":
            self._spares[number] = value
        elif kind == "finished":
            self._has_finished = True
        elif kind == "join":
            self._waiting.add(number)
        if self._is_connected:
            if kind != "spare":
                self._met.add(number)
            self._say("said", number, kind, value)
        elif kind != "spare":
            self._unsaid.append((number, kind, value))
            self._let_go()

    def _lose_rank(self, number: int, has_ended: bool) -> None:
        self._unsaid = [message for message in self._unsaid if message[0] != number]
        self._waiting.discard(number)
        was_spare = self._spares.pop(number, None) is not None
        has_left = number in self._leaving
        if has_left or number in self._met or (was_spare and self._is_connected):
            self._met.discard(number)
            self._leaving.discard(number) if has_ended else self._leaving.add(number)
            self._say("left", number, has_ended)

    # --- the roster -----------------------------------------------------------------------------

    def _say(self, *message: Any) -> None:
        self._connections[0].send(json.dumps(message).encode())

    def _hear_roster(self) -> None:
        self._connections.poll(0.0)
        for frame, *_ in self._connections[0].receive():
            self._heard_s = time.monotonic()
            kind, *rest = json.loads(bytes(frame))
            if kind == "beat":
                self._has_begun = rest[0]
            elif kind == "tell":
                self._pass_on(*rest)
            elif kind == "kill":
                self._door.kill(*rest)
            elif kind == "finished":
                self._has_finished = True
            elif kind == "closed" and not self._has_finished:
                self._give_up(f"the launcher at {self._place} has ended")
                return
        is_connected = self._connections[0].is_connected
        if is_connected and not self._is_connected:
            self._heard_s = time.monotonic()
            self._is_connected = True
            for number, spare in self._spares.items():
                self._say("said", number, "spare", spare)
            for message in self._unsaid:
                self._met.add(message[0])
                self._say("said", *message)
            self._unsaid.clear()
            self._tell_failure()
        elif self._is_connected and not is_connected:
            self._part()

    def _tell_failure(self) -> None:
        if self._has_failed and self._is_connected:
            self._say("failed")
            self._is_told.set()

    def _pass_on(self, number: int, message: dict[str, Any]) -> None:
        if "start" in message:
            self._spares.pop(number, None)
        if "place" in message:
            self._has_begun = True
            self._waiting.discard(number)
        self._door.send(number, message)

    def _part(self) -> None:
        """Go on without the roster, whose other ranks go on without those of this machine."""
        self._is_connected = False
        if not self._has_finished and not self._has_given_up:
            if self._met:
                note(f"no word from the launcher at {self._place}; the ranks here begin anew")
            for number in self._met:
                self._door.kill(number)
        self._met.clear()
        self._leaving.clear()
        self._let_go()

    def _let_go(self) -> None:
        """Let ranks go that wait for a world of a job that has done its work."""
        if self._has_finished and not self._is_connected:
            for number in self._waiting | self._spares.keys():
                self._door.send(number, {"ended": True})
            self._waiting.clear()

    def _look(self) -> None:
        self._hear_roster()
        now_s = time.monotonic()
        if self._is_connected and now_s >= self._beat_s + _BEAT_S:
            self._beat_s = now_s
            self._say("beat")
        silent_s = now_s - self._heard_s
        if self._is_connected and silent_s > SILENT_S:
            self._connections[0].lose()
            self._part()
        if self._has_finished or self._has_given_up:
            return
        limit_s = settings().rendezvous_timeout_s
        if silent_s > min(limit_s, _REFUSED_S) and self._connections[0].was_refused:
            self._give_up(
                f"the launcher at {self._place} does not let this machine in: does it have the "
                f"same secret? That of this machine is {job_secret().origin}"
            )
        elif silent_s > limit_s:
            self._give_up(
                f"no word from the launcher at {self._place} for {limit_s:g} s: does it run, and "
                "can this machine reach it?"
            )

    def _give_up(self, why: str) -> None:
        if not self._has_given_up:
            self._has_given_up = True
            self._on_lost(why)
