"""The roster of an elastic job, in which its launcher keeps who takes part.

A rank that wants the next world asks to join, and how far it has come. When all ranks of the
present world have asked, the roster makes a world of all that wait: the one that has come furthest
first, and the ranks of a machine in a row. Ranks that have not asked are told to. A rank leaves
when its process ends, or its machine is silent. Once one of a world has left or asked, the others
have as long as ranks wait for each other; then they are killed. So is, soon, one that others report
as late.

A job may keep its number of ranks (--keep): each machine has as many processes as there are ranks,
most of which are spare (`spare.py`). If ranks are missing, the roster starts spares where they have
most cores for themselves.

A message is a line of JSON with one key.

| from a rank | meaning |
|---|---|
| spare: [SLOT, CORES] | is no rank yet, on a machine with so many cores |
| join: [PROGRESS, SECONDS, SLOT] | wants the next world; has taken so many steps, waits so long |
| late: [RANK, ...] | ranks of its world that have not come; []: all that have not asked |
| gather: VALUE | its contribution to a gathering of all ranks of its world |
| finished: true | the job has done its work; nobody joins any more |

| from the roster | meaning |
|---|---|
| start: true | a spare becomes a rank |
| anew: true | a rank of this world has ended, or others wait for the next one |
| place: [WORLD, RANK, SIZE] | its rank in a new world |
| gathered: [VALUE, ...] | what all ranks have contributed, by rank |
| ended: true | there is nothing left to do |
"""

from __future__ import annotations

import json
import math
import os
import selectors
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from fastdist.cluster.crew import LAST_CALL_S, Crew, Door, Spare, note
from fastdist.cluster.launch import ROSTER_VARIABLE
from fastdist.cluster.rank_door import MOST_BYTES, RankDoor

if TYPE_CHECKING:
    from fastdist.link.listener import Listener

_PAUSE_S = 0.1
_LATE_S = 5.0  # that a rank has left which others have waited for in vain
_OUTCOME_S = 1.0  # that launchers take to tell that a rank has ended well
_GATHERING_S = 30.0  # that a gathering may take, if ranks wait so long
SILENT_S = 4.0
"""Seconds after which a machine that says nothing is lost."""


@dataclass(frozen=True, slots=True)
class RosterPlace:
    """The socket and slot by which a process joins an elastic job."""

    name: str  # of the abstract Unix socket of a `RankDoor`
    slot: int  # the process's number among those of the launcher; it chooses the GPU
    machine: int = 0

    def environment(self) -> dict[str, str]:
        """Return the variable that tells a process its place."""
        return {ROSTER_VARIABLE: json.dumps(asdict(self))}


def roster_place(environ: Mapping[str, str] = os.environ) -> RosterPlace | None:
    """Return this process's place; None if its job is not elastic."""
    text = environ.get(ROSTER_VARIABLE)
    return None if text is None else RosterPlace(**json.loads(text))


@dataclass(slots=True, eq=False)
class _Member:
    """A process that has asked for a world."""

    door: Door
    number: int
    world: int = 0  # of which it is a rank; 0 before the first
    rank: int = 0
    progress: int | None = None  # its number of commits, while it waits for the next world
    slot: int = -1  # on its machine
    is_told: bool = False  # to ask for the next world
    ends_s: float | None = None  # when it is killed, unless it asks for the next world before
    # Its contribution to a gathering that is not complete, in a list; else empty.
    gathering: list[Any] = field(default_factory=list)

    def send(self, **message: Any) -> None:
        self.door.send(self.number, message)


@dataclass(slots=True, eq=False)
class _Branch:
    """The launcher of another machine, which reaches the ranks there (`branch.py`)."""

    listener: Listener
    connection: int
    heard_s: float = field(default_factory=time.monotonic)

    def send(self, number: int, message: dict[str, Any]) -> None:
        self.say("tell", number, message)

    def kill(self, number: int) -> None:
        self.say("kill", number)

    def say(self, *message: Any) -> None:
        self.listener.send(self.connection, json.dumps(message).encode())


class Roster:
    """Makes the worlds of an elastic job, in a thread.

    Args:
        least: number of ranks below which the job waits for more.
        most: number of ranks that are started; the first world waits for all of them, or, once
            there are `least`, for half a minute.
        address: "tcp://host:port" for the launchers of other machines.
        on_failure: is called, in the thread, if the program fails there before there is a world.
        machines: number of machines with spares, in a job that keeps `most` ranks; 0 in others.
    """

    def __init__(
        self,
        least: int,
        most: int,
        address: str | None = None,
        on_failure: Callable[[str], None] | None = None,
        machines: int = 0,
    ) -> None:
        self._crew = Crew(most, machines)
        self._on_failure = on_failure or note
        self._has_noted = False  # what this world waits for
        self._least = least
        self._most = most
        # By door and number, in the order in which they came.
        self._members: dict[tuple[Door, int], _Member] = {}
        self._world = 0
        self._size = 0  # of this world
        self._patience_s = 0.0  # that ranks wait for another
        self._leaving: dict[tuple[Door, int], int] = {}  # with processes that live; their worlds
        self._settled_s = 0.0  # when the launchers have told whether the last rank has ended well
        # When the first world begins without those that are missing.
        self._last_call_s: float | None = None
        self._gathered_s: float | None = None  # when the gathering under way takes too long
        self._has_finished = False
        self._listener: Listener | None = None
        self._branches: dict[int, _Branch] = {}
        if address is not None:
            # It imports numpy, which launchers of one machine need not wait for.
            from fastdist.link.listener import Listener

            self._listener = Listener(
                address, max_frame_bytes=2 * MOST_BYTES, on_drop=self._lose_branch
            )
            self.port = int(self._listener.address.rpartition(":")[2])
        self._door = RankDoor(
            most,
            lambda number, kind, value: self._hear(self._door, number, kind, value),
            lambda number, has_ended: self._leave(self._door, number, has_ended),
        )
        self.name = self._door.name
        if self._listener is not None:
            events = selectors.EVENT_READ
            self._door.selector.register(self._listener, events, self._hear_branches)
        self._door.serve(self._wait_s, self._look, self._end)

    def has_begun(self) -> bool:
        """Return True once there was a world."""
        return self._world > 0

    def finish(self) -> None:
        """Say that the job has done its work; nobody joins any more."""
        self._door.call(self._finish)

    def await_branches(self) -> None:
        """Wait for the ends of the other machines' launchers, whose ranks may need the roster."""
        while self._branches and self._door.thread.is_alive():
            time.sleep(_PAUSE_S)

    def close(self) -> None:
        """End the thread, and all connections."""
        self._door.close()

    def _finish(self) -> None:
        self._has_finished = True
        for member in self._members.values():
            member.ends_s = None
        for branch in list(self._branches.values()):
            branch.say("finished")

    def _end(self) -> None:
        for branch in list(self._branches.values()):
            branch.say("closed")
        if self._listener is not None:
            self._listener.close()

    def _wait_s(self) -> float | None:
        times_s = [member.ends_s for member in self._members.values()]
        times_s += [self._gathered_s, self._last_call_s, self._crew.waits_until_s]
        times_s += [branch.heard_s + SILENT_S for branch in self._branches.values()]
        now_s = time.monotonic()
        if self._settled_s > now_s:
            times_s.append(self._settled_s)
        next_s = min((at_s for at_s in times_s if at_s is not None), default=None)
        return None if next_s is None else max(0.0, next_s - now_s)

    def _look(self) -> None:
        self._lose_silent()
        self._kill_late()
        self._crew.fill(self._has_finished)
        self._form()

    # --- ranks here and elsewhere ---------------------------------------------------------------

    def _hear(self, door: Door, number: int, kind: str, value: Any) -> None:
        if kind == "spare":
            self._crew.add(Spare(door, number, *map(int, value)))
        else:
            self._take(self._member(door, number), kind, value)

    def _member(self, door: Door, number: int) -> _Member:
        return self._members.setdefault((door, number), _Member(door, number))

    def _hear_branches(self) -> None:
        assert self._listener is not None
        while (received := self._listener.receive(0.0)) is not None:
            connection, (frame, *_) = received
            new = _Branch(self._listener, connection)
            branch = self._branches.setdefault(connection, new)
            branch.heard_s = time.monotonic()
            try:
                self._hear_branch(branch, *json.loads(bytes(frame)))
            except Exception:  # whatever no launcher sends
                self._listener.drop(connection)

    def _hear_branch(self, branch: _Branch, kind: str, number: int = 0, *said: Any) -> None:
        if kind == "beat":
            branch.say("beat", self.has_begun())
        elif kind == "said":
            self._hear(branch, number, *said)
        elif kind == "left":
            self._leave(branch, number, *said)
        elif kind == "finished":
            self._finish()
        elif kind == "failed" and not self._world:
            self._on_failure("the program has failed on another machine, before the ranks had met")

    def _lose_silent(self) -> None:
        now_s = time.monotonic()
        for connection, branch in list(self._branches.items()):
            if branch.heard_s + SILENT_S <= now_s:
                assert self._listener is not None
                self._listener.drop(connection)

    def _lose_branch(self, connection: int) -> None:
        """Lose the ranks of a machine that is lost, or whose launcher has ended."""
        branch = self._branches.pop(connection, None)
        self._crew.lose_machine(branch)
        self._leaving = {key: world for key, world in self._leaving.items() if key[0] is not branch}
        for member in [member for member in self._members.values() if member.door is branch]:
            self._lose(member)

    def _take(self, member: _Member, kind: str, value: Any) -> None:
        if kind == "join":
            progress, self._patience_s, member.slot = int(value[0]), float(value[1]), int(value[2])
            member.progress, member.ends_s, member.gathering = progress, None, []
            if 0 < member.world == self._world:
                self._await_ranks()
        elif kind == "late" and 0 < member.world == self._world:
            self._note_late([int(rank) for rank in value])
        elif kind == "gather":
            member.gathering = [value]
            self._gather()
        elif kind == "finished":
            self._finish()

    def _note_late(self, ranks: list[int]) -> None:
        for member in self._ranks():
            if member.progress is None and (not ranks or member.rank in ranks):
                member.ends_s = member.ends_s or time.monotonic() + _LATE_S

    def _kill_late(self) -> None:
        now_s = time.monotonic()
        late = [m for m in self._members.values() if m.ends_s is not None and m.ends_s <= now_s]
        if self._gathered_s is not None and self._gathered_s <= now_s:
            self._gathered_s = None
            late += [member for member in self._ranks() if not member.gathering]
        for member in late:
            member.ends_s = None
            member.door.kill(member.number)

    def _leave(self, door: Door, number: int, has_ended: bool) -> None:
        """Lose a rank, whose process may end later: if it ends well, the job has done its work."""
        world = self._leaving.pop((door, number), None)
        if world is None:
            member = self._member(door, number)
            world = member.world
            self._lose(member)
        if not has_ended:
            self._leaving[door, number] = world
        elif 0 < world == self._world:
            self._settled_s = time.monotonic() + _OUTCOME_S

    def _knows_outcome_s(self) -> float:
        """Return when it is known whether this world has done its work; infinite: not yet.

        It may have, if all of its ranks have left.
        """
        if self._ranks():
            return 0.0
        is_leaving = self._world > 0 and self._world in self._leaving.values()
        return math.inf if is_leaving else self._settled_s

    def _lose(self, member: _Member) -> None:
        del self._members[member.door, member.number]
        self._crew.lose(member.door, member.number, member.slot)
        if member.world == self._world:
            self._await_ranks()

    def _ranks(self) -> list[_Member]:
        """Return those that take part in the present world, by rank."""
        ranks = [member for member in self._members.values() if 0 < member.world == self._world]
        return sorted(ranks, key=lambda member: member.rank)

    def _tell_ranks(self) -> list[_Member]:
        """Tell the ranks that have not asked for the next world to do so; return them."""
        missing = [member for member in self._ranks() if member.progress is None]
        for member in missing:
            if not member.is_told:
                member.is_told = True
                member.send(anew=True)
        return missing

    def _await_ranks(self) -> None:
        """Tell the same, since this world has lost a rank; kill those that do not ask in time."""
        for member in self._tell_ranks():
            if member.ends_s is None and not self._has_finished:
                member.ends_s = time.monotonic() + self._patience_s + _LATE_S

    def _gather(self) -> None:
        ranks = self._ranks()
        patience_s = min(_GATHERING_S, self._patience_s + _LATE_S)
        self._gathered_s = self._gathered_s or time.monotonic() + patience_s
        if len(ranks) == self._size and all(member.gathering for member in ranks):
            self._gathered_s = None
            values = [member.gathering[0] for member in ranks]
            for member in ranks:
                member.gathering = []
                member.send(gathered=values)

    def _form(self) -> None:
        """Make the next world, if all that take part in this one wait for it."""
        waiting = [member for member in self._members.values() if member.progress is not None]
        if self._has_finished:
            for member in [member for member in waiting if not member.world]:
                waiting.remove(member)
                member.progress = None
                member.send(ended=True)
        if not waiting or self._tell_ranks() or time.monotonic() < self._knows_outcome_s():
            return
        if len(waiting) < self._least and not self._has_finished:
            if self._listener is not None and not self._has_noted:
                self._has_noted = True
                note(f"waiting for ranks: {len(waiting)} of at least {self._least} are there")
            return
        if not self._world and len(waiting) < self._most:
            self._last_call_s = self._last_call_s or time.monotonic() + LAST_CALL_S
            if time.monotonic() < self._last_call_s:
                return
            if self._listener is not None:
                note(f"{len(waiting)} of {self._most} ranks begin; others may join them later")
        self._last_call_s = self._gathered_s = None
        self._world += 1
        self._has_noted = False
        self._size = len(waiting)
        waiting.sort(key=lambda member: -(member.progress or 0))  # ties keep arrival order
        doors = [member.door for member in waiting]
        waiting.sort(key=lambda member: doors.index(member.door))  # a machine's ranks in a row
        for rank, member in enumerate(waiting):
            member.world, member.rank = self._world, rank
            member.progress, member.is_told, member.ends_s = None, False, None
            member.send(place=[self._world, rank, self._size])
