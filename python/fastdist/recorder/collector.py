"""Follows the records of running processes, which keep only the last calls."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np

from fastdist.processes.proc import ancestors
from fastdist.recorder.phases import Phase
from fastdist.recorder.place import changes_s, record_paths
from fastdist.recorder.ring import Call, Snapshot, UnreadableError
from fastdist.recorder.system import state_of
from fastdist.recorder.timeline import RankTimeline, Span, traced

_PERIOD_S = 0.2
_DISCOVERY_S = 0.02  # short jobs remove their records soon
_SETTLED_S = 0.1
_MOST_WORK = 0.05  # of a core


class Collector:
    """Reads the records of the processes that descend from this one, until it is stopped.

    It maps their files, so that it can read the files of processes that have ended.
    """

    def __init__(self) -> None:
        self._followers: dict[Path, _Follower | None] = {}
        self._changes_s: list[float] | None = None  # of the folders whose records are known
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def stop(self) -> list[RankTimeline]:
        """Stop, and return what the processes did, by rank. Times are in seconds since 1970."""
        self._stop.set()
        self._thread.join()
        followers = [each for each in self._followers.values() if each is not None]
        return sorted((each.finish() for each in followers), key=lambda each: each.rank)

    def _follow(self) -> None:
        read_at_s = 0.0
        while not self._stop.wait(_DISCOVERY_S):
            self._discover()
            if time.monotonic() >= read_at_s:
                before_s = time.thread_time()
                self._read()
                pause_s = (time.thread_time() - before_s) / _MOST_WORK
                read_at_s = time.monotonic() + max(_PERIOD_S, pause_s)
        self._read()

    def _read(self) -> None:
        for follower in self._followers.values():
            if follower is not None:
                follower.read()

    def _discover(self) -> None:
        changes = changes_s()
        if changes == self._changes_s:
            return
        # A folder's time of change is not exact: another change may have the same.
        is_known = time.time() - max(changes, default=0.0) > _SETTLED_S
        for found in record_paths():
            if found.path in self._followers or not found.is_here:
                continue
            is_own = _descends_from_this(found.pid)
            try:
                self._followers[found.path] = _Follower(found.path) if is_own else None
            except (OSError, ValueError, UnreadableError):  # perhaps it is just being made
                is_known = False
        self._changes_s = changes if is_known else None


def _descends_from_this(pid: int) -> bool:
    try:
        return os.getpid() in ancestors(pid)
    except (OSError, IndexError):  # it has ended
        return False


class _Follower:
    """Reads what one process records."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._mapping = np.memmap(path, np.uint8, mode="r")
        header = Snapshot.of_mapping(path, self._mapping).header
        self._epoch_s = (int(header["realtime_ns"]) - int(header["monotonic_ns"])) / 1e9
        self.timeline = RankTimeline(int(header["rank"]), "")
        # Numbers of the calls in the file that were read. Greater ones may end before smaller ones.
        self._known = np.empty(0, np.uint64)
        self._running: list[Call] = []
        self._phases = 0
        self._read_s = 0.0  # when the process was last seen alive
        self._phase: tuple[float, Phase] | None = None  # the one that has not ended

    def read(self) -> None:
        """Add what is new since the last time."""
        file = Snapshot.of_mapping(self._path, self._mapping)
        header = file.header
        self.timeline.label = f"rank {header['rank']} ({file.text('host')}, {header['pid']})"
        has_ended = file.calls["done"] > 0
        ended = file.calls[has_ended]
        new = ended[~np.isin(ended["number"], self._known)]
        self._known = ended["number"]
        self.timeline.calls += [traced(file.call(each), self._epoch_s) for each in new]
        self._running = [traced(file.call(each), self._epoch_s) for each in file.calls[~has_ended]]
        if state_of(int(header["pid"])) not in "ZX":
            self._read_s = time.monotonic()
        for begin in file.phases(self._phases):
            self._end_phase(begin[0])
            self._phase = begin
        self._phases = int(header["phases"])

    def _end_phase(self, end_s: float) -> None:
        if self._phase is not None:
            begin_s, phase = self._phase
            span = Span(phase.name.lower(), begin_s + self._epoch_s, end_s + self._epoch_s)
            self.timeline.spans.append(span)

    def finish(self) -> RankTimeline:
        """Return everything that was read; call it once."""
        if self._read_s:
            self._end_phase(self._read_s)
        calls = self.timeline.calls
        calls += self._running  # when the process died
        calls.sort(key=lambda each: each.entered_s)
        made = Counter(call.member.key for call in calls if call.is_collective)
        last = {call.member.key: call.sequence for call in calls if call.is_collective}
        self.timeline.lost_calls = sum(last[each] - made[each] for each in made)
        return self.timeline
