"""Reads the records of one process, in the format of csrc/core/recorder.h."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import fastdist._core as _core
from fastdist._version import __version__
from fastdist.recorder.phases import Phase
from fastdist.recorder.signatures import REQUESTS, Signature

SERVER = "parameter server"
"""The beginning of the names of those tasks; the number follows."""

_FORMAT = 2
_CALLS, _COMMUNICATORS, _SITES = 4096, 256, 512

_HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("format", "<u4"),
        ("pid", "<i4"),
        ("started", "<u8"),
        ("ticks", "<u8"),
        ("monotonic_ns", "<u8"),
        ("realtime_ns", "<u8"),
        ("rank", "<i4"),
        ("world_size", "<i4"),
        ("clock", "<u8"),
        ("calls", "<u8"),
        ("phase", "<u8"),
        ("phase_since", "<u8"),
        ("communicators", "<u4"),
        ("sites", "<u4"),
        ("version", "S32"),
        ("job", "S64"),
        ("host", "S64"),
        ("program", "S256"),
        ("phases", "<u8"),
        ("task", "S32"),
    ]
)
_COMMUNICATOR = np.dtype(
    [
        ("rank", "<i4"),
        ("size", "<i4"),
        ("key", "<u8"),
        ("is_open", "<u4"),
        ("engine", "S12"),
    ]
)
_CALL = np.dtype(
    [
        ("number", "<u8"),
        ("entered", "<u8"),
        ("there", "<u8"),
        ("done", "<u8"),
        ("signature", "<u8"),
        ("count", "<u8"),
        ("sequence", "<u8"),
        ("communicator", "<u2"),
        ("site", "<u2"),
        ("unused", "u1"),
        ("outcome", "u1"),
        ("padding", "<u2"),
    ]
)
_SITE = np.dtype("S256")
_COMMUNICATORS_AT = 4096
_SITES_AT = _COMMUNICATORS_AT + _COMMUNICATORS * _COMMUNICATOR.itemsize
_CALLS_AT = _SITES_AT + _SITES * _SITE.itemsize
_CALLS_END = _CALLS_AT + _CALLS * _CALL.itemsize
_PHASES = 8192
_BYTES = _CALLS_END + _PHASES * 8

_KEPT = 256  # number of last calls that become `Call` objects
FIRST_REPORT_S = 5.0  # that a wait lasts before its reason is logged

_P99_TIMES = 5


class UnreadableError(Exception):
    """This version cannot read a file as records; the message says why."""


@dataclass(frozen=True, slots=True)
class Member:
    """A communicator of a process.

    Attributes:
        key: a number that is the same on all of its ranks, and on no others.
        engine: "host", "net", …
    """

    key: int
    rank: int
    size: int
    engine: str


@dataclass(frozen=True, slots=True)
class Call:
    """A call. Times are in seconds of this machine's monotonic clock.

    Attributes:
        number: the call's number in its process.
        sequence: the call's number, from 1, in its communicator; in its lane for a send or receive.
        there_s: the time when all ranks had announced the call; that of its beginning if unknown.
    """

    number: int
    sequence: int
    member: Member
    signature: Signature
    site: str
    entered_s: float
    there_s: float
    done_s: float | None
    is_failed: bool

    @property
    def is_running(self) -> bool:
        """True if the call has not ended."""
        return self.done_s is None

    @property
    def end_s(self) -> float:
        """The time of its end; that of its beginning if it still runs."""
        return self.entered_s if self.done_s is None else self.done_s

    @property
    def place(self) -> tuple[int, int]:
        """The communicator, and the number in it: equal for the calls of all ranks."""
        return self.member.key, self.sequence

    @property
    def is_collective(self) -> bool:
        """True if all ranks of the communicator make the call."""
        return not self.signature.is_pairwise and self.signature.op not in REQUESTS

    def later(self, by_s: float) -> Call:
        """Return the call on another clock."""
        return replace(
            self,
            entered_s=self.entered_s + by_s,
            there_s=self.there_s + by_s,
            done_s=None if self.done_s is None else self.done_s + by_s,
        )


@dataclass(frozen=True, slots=True)
class Usual:
    """The time within which nearly all of some calls ended."""

    calls: int
    p99_s: float


@dataclass(frozen=True, slots=True)
class Records:
    """The records of a process. Times are in seconds of this machine's monotonic clock.

    Attributes:
        started: the start of the process, in clock ticks since boot, as in /proc/PID/stat.
        task: "worker 1" of a job with parameter servers, whose tasks are its ranks; "" otherwise.
        calls: the last 256 calls, and those that have not ended, by the time when they began.
        usual: the usual duration of recorded calls that have ended, by site.
    """

    pid: int
    started: int
    began_s: float
    rank: int
    world_size: int
    job: str
    host: str
    program: str
    task: str
    phase: Phase
    phase_since_s: float
    members: tuple[Member, ...]
    calls: tuple[Call, ...]
    usual: dict[str, Usual]

    def unusual_s(self, call: Call, least_calls: int = 1) -> float | None:
        """Return the duration that is unusual for a call's line; None after fewer calls."""
        usual = self.usual.get(call.site)
        return None if usual is None or usual.calls < least_calls else _P99_TIMES * usual.p99_s

    def later(self, by_s: float) -> Records:
        """Return the records on another clock."""
        return replace(
            self,
            began_s=self.began_s + by_s,
            phase_since_s=self.phase_since_s + by_s,
            calls=tuple(call.later(by_s) for call in self.calls),
        )


@dataclass(frozen=True, slots=True)
class Identity:
    """The process and job of a file of records, of any version of fastdist."""

    pid: int
    started: int
    rank: int
    job: str


def identity(path: Path) -> Identity | None:
    """Read the process and job of a file of records; None if the file lacks them."""
    try:
        with path.open("rb") as file:
            data = file.read(_HEADER.itemsize)
    except OSError:
        return None
    if len(data) < _HEADER.itemsize or data[:8] != b"fastdist":
        return None
    header = np.frombuffer(data, _HEADER, 1)[0]
    started, rank = int(header["started"]), int(header["rank"])
    return Identity(int(header["pid"]), started, rank, _text(header["job"]))


def read_records(path: Path) -> Records | None:
    """Read the records of a process; None if they are gone, or if it is just beginning them."""
    try:
        with path.open("rb", buffering=0) as file:
            data = file.read(_BYTES)
            # Calls whose number has changed since the first read were being written.
            file.seek(_CALLS_AT)
            again = file.read(_CALLS_END - _CALLS_AT)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnreadableError(f"{path}: {error.strerror}") from error
    if not data[:8].strip(b"\0"):  # the magic word is written last
        return None
    contents = Snapshot(path, data, again)
    header, calls = contents.header, contents.calls
    kept = calls[(calls["done"] == 0) | (np.arange(len(calls)) >= len(calls) - _KEPT)]
    return Records(
        pid=int(header["pid"]),
        started=int(header["started"]),
        began_s=int(header["monotonic_ns"]) / 1e9,
        rank=int(header["rank"]),
        world_size=int(header["world_size"]),
        job=contents.text("job"),
        host=contents.text("host"),
        program=contents.text("program"),
        task=contents.text("task"),
        phase=_phase(int(header["phase"])),
        phase_since_s=contents.seconds(header["phase_since"]),
        members=contents.members,
        calls=tuple(map(contents.call, kept)),
        usual=contents.usual(),
    )


class Snapshot:
    """The contents of a file of records at one moment; `again`: the bytes of its calls, read later.

    `calls` are those that were not being written, in the file's format, in order of beginning.
    """

    def __init__(self, path: Path, data: bytes, again: bytes) -> None:
        self._data = data
        self.header = header = _header(path, data)
        self._began = int(header["ticks"]), int(header["monotonic_ns"])
        self._ns_per_tick = 1.0
        if not header["clock"]:  # a counter, of unknown speed
            ticks, at_ns = self._began
            self._ns_per_tick = (time.monotonic_ns() - at_ns) / max(_core.ticks() - ticks, 1)
        members = min(int(header["communicators"]), _COMMUNICATORS)
        table = np.frombuffer(data, _COMMUNICATOR, members, _COMMUNICATORS_AT)
        self.members = tuple(
            Member(key, rank, size, _text(engine)) for rank, size, key, _, engine in table.tolist()
        )
        self.calls = _whole_calls(data, again, members)
        sites = np.frombuffer(data, _SITE, min(int(header["sites"]), _SITES), _SITES_AT)
        self._sites = ["", *map(_text, sites)]

    @classmethod
    def of_mapping(cls, path: Path, mapping: npt.NDArray[np.uint8]) -> Snapshot:
        """Copy a file that is mapped into memory."""
        return cls(path, mapping.tobytes(), mapping[_CALLS_AT:_CALLS_END].tobytes())

    def text(self, name: str) -> str:
        """Return a text of the header."""
        return _text(self.header[name])

    def site(self, number: int) -> str:
        """Return a line that has made calls; empty if unknown."""
        return self._sites[number] if number < len(self._sites) else ""

    def seconds(self, ticks: Any) -> float:
        """Convert a time of the file to seconds of the monotonic clock."""
        began, at_ns = self._began
        return (at_ns + (int(ticks) - began) * self._ns_per_tick) / 1e9

    def call(self, each: Any) -> Call:
        """Decode one of `calls`."""
        return Call(
            number=int(each["number"]),
            sequence=int(each["sequence"]),
            member=self.members[int(each["communicator"])],
            signature=Signature(int(each["signature"]), int(each["count"])),
            site=self.site(int(each["site"])),
            entered_s=self.seconds(each["entered"]),
            there_s=self.seconds(each["there"] or each["entered"]),
            done_s=self.seconds(each["done"]) if each["done"] else None,
            is_failed=int(each["outcome"]) == 2,
        )

    def usual(self) -> dict[str, Usual]:
        """Return the usual duration of the calls that have ended, by site."""
        ended = self.calls[self.calls["done"] > 0]
        took_s = (ended["done"] - ended["entered"]) * (self._ns_per_tick / 1e9)
        usual = {}
        for number in np.unique(ended["site"]).tolist():
            own_s = took_s[ended["site"] == number]
            place = math.ceil(0.99 * (len(own_s) - 1))
            p99_s = np.partition(own_s, place)[place]  # a tenth of the time of np.percentile
            usual[self.site(number)] = Usual(len(own_s), float(p99_s))
        return usual

    def phases(self, first: int) -> list[tuple[float, Phase]]:
        """Return when phases began, from the phase with the number `first` on, if it is kept."""
        begun = int(self.header["phases"])
        ring = np.frombuffer(self._data, np.uint64, _PHASES, _CALLS_END)
        words = (int(ring[i % _PHASES]) for i in range(max(first, begun - _PHASES + 1), begun))
        return [(self.seconds(word >> 3), _phase(word & 7)) for word in words]


def _header(path: Path, data: bytes) -> Any:
    if len(data) < _HEADER.itemsize or data[:8] != b"fastdist":
        raise UnreadableError(f"{path.name} holds no records")
    header = np.frombuffer(data, _HEADER, 1)[0]
    version = _text(header["version"])
    if header["format"] != _FORMAT or version != __version__:
        raise UnreadableError(
            f"process {header['pid']} runs fastdist {version} (records of format "
            f"{header['format']}); this is fastdist {__version__}, which reads format {_FORMAT}"
        )
    if len(data) < _BYTES:
        raise UnreadableError(f"{path.name} has {len(data):,} bytes; expected {_BYTES:,}")
    return header


def _whole_calls(data: bytes, again: bytes, members: int) -> npt.NDArray[np.void]:
    """Return the calls that were not being written, by the time when they began."""
    calls = np.frombuffer(data, _CALL, _CALLS, _CALLS_AT)
    later = np.frombuffer(again, _CALL, _CALLS)
    number = calls["number"]
    whole = (number > 0) & (number == later["number"]) & (number % _CALLS == np.arange(_CALLS))
    whole &= calls["communicator"] < members
    order = np.argsort(calls["entered"][whole], kind="stable")
    kept: npt.NDArray[np.void] = calls[whole][order]
    return kept


def _phase(number: int) -> Phase:
    return Phase(number) if number in Phase._value2member_map_ else Phase.USER


def _text(value: Any) -> str:
    return bytes(value).decode("utf-8", "backslashreplace")
