"""Python's stacks of other processes.

A process answers by a thread, unless C code holds the GIL. Then py-spy tells where it is installed,
or a signal, which brings the stack of the main thread alone. A signal ends a wait of C code early:
if the user has not asked, none is sent to a main thread that waits.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from fastdist.recorder.encoding import read
from fastdist.recorder.frames import Frame, Stack
from fastdist.recorder.place import RecordPath
from fastdist.recorder.system import STACK_SIGNAL, catches, state_of

_LARGE_BYTES = 1 << 20
_MOST_FRAMES = 300  # of a thread that are told
_MOST_PY_SPIES = 2 * (os.cpu_count() or 1)  # more at the same time would not end in time
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


def stacks_of(
    places: Mapping[int, RecordPath], may_signal: bool, timeout_s: float = 0.5
) -> tuple[dict[int, list[Stack]], dict[int, str]]:
    """Return the stacks of running processes, and the reason for each process without stacks.

    `may_signal`: send signals to main threads that wait, too.
    """
    end_s = time.monotonic() + timeout_s
    found = _by_asking(places, time.monotonic() + timeout_s / 2)
    found |= _by_py_spy(places.keys() - found.keys(), end_s)
    rest = {pid: place.beside("stacks") for pid, place in places.items() if pid not in found}
    signalled, missing = _by_signal(rest, may_signal, max(end_s, time.monotonic() + timeout_s / 2))
    return found | signalled, missing


@dataclass(frozen=True, slots=True)
class AnsweredStacks:
    """The stacks of a process's threads, at a time in seconds since boot."""

    at_s: float
    stacks: tuple[Stack, ...]


def answered_stacks() -> AnsweredStacks:
    """Return the stacks of this process's threads, without the thread that asks."""
    main, own = threading.main_thread().ident, threading.get_ident()
    return AnsweredStacks(
        time.clock_gettime(time.CLOCK_BOOTTIME),
        tuple(
            Stack(_frames(frame), is_main=thread == main)
            for thread, frame in sys._current_frames().items()
            if thread != own
        ),
    )


def _frames(frame: FrameType) -> tuple[Frame, ...]:
    walk = itertools.islice(traceback.walk_stack(frame), _MOST_FRAMES)
    return tuple(
        Frame(each.f_code.co_filename, line or 0, each.f_code.co_name) for each, line in walk
    )


def _by_asking(places: Mapping[int, RecordPath], end_s: float) -> dict[int, list[Stack]]:
    since_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    asked = {pid: place for pid, place in places.items() if _ask(place.beside("asks"))}
    found: dict[int, list[Stack]] = {}
    while asked.keys() - found.keys() and time.monotonic() < end_s:
        time.sleep(0.005)
        for pid in asked.keys() - found.keys():
            answer = read(AnsweredStacks, asked[pid].beside("answer"))
            if answer is not None and answer.at_s >= since_s:
                found[pid] = list(answer.stacks)
    return found


def _ask(pipe: Path) -> bool:
    """Return True if a process listens and was asked."""
    with contextlib.suppress(OSError):
        fd = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        with open(fd, "wb", buffering=0) as file:
            return file.write(b"?") == 1
    return False


def _by_py_spy(pids: Collection[int], end_s: float) -> dict[int, list[Stack]]:
    program = _py_spy()
    if program is None or len(pids) > _MOST_PY_SPIES:
        return {}
    started = {
        pid: subprocess.Popen(
            [program, "dump", "--json", "--nonblocking", "--pid", str(pid)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            stdin=subprocess.DEVNULL,
        )
        for pid in pids
    }
    found = {}
    for pid, process in started.items():
        try:
            output, _ = process.communicate(timeout=max(end_s - time.monotonic(), 0.01))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            continue
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found[pid] = _parse_py_spy(pid, json.loads(output))
    # py-spy finds no frames in an interpreter that it does not know, such as a free-threaded one.
    return {pid: stacks for pid, stacks in found.items() if any(each.frames for each in stacks)}


def _py_spy() -> str | None:
    return shutil.which("py-spy") or shutil.which("py-spy", path=Path(sys.executable).parent)


def _parse_py_spy(pid: int, dumped: Sequence[Mapping[str, Any]]) -> list[Stack]:
    stacks = []
    for thread in dumped:
        frames = tuple(
            # The name "hold" of "step.<locals>.hold", as faulthandler and records have it.
            Frame(each["filename"], int(each["line"]), each["name"].rpartition("<locals>.")[2])
            for each in thread["frames"]
        )
        is_main = thread.get("os_thread_id") == pid or thread.get("thread_name") == "MainThread"
        stacks.append(Stack(frames, is_main))
    return stacks


def _by_signal(
    files: Mapping[int, Path], may_signal: bool, end_s: float
) -> tuple[dict[int, list[Stack]], dict[int, str]]:
    asked: dict[int, tuple[Path, int]] = {}
    missing: dict[int, str] = {}
    for pid, path in files.items():
        try:
            asked[pid] = path, _signal(pid, path, may_signal)
        except OSError as error:
            missing[pid] = error.strerror or str(error)
    found: dict[int, list[Stack]] = {}
    sizes: dict[int, int] = {}
    while asked.keys() - found.keys() and time.monotonic() < end_s:
        time.sleep(0.02)
        for pid, (path, before) in asked.items():
            text = _read_from(path, before)
            if text and sizes.get(pid) == len(text):  # it has written all
                found[pid] = [parse_faulthandler(text)]
            sizes[pid] = len(text)
    late = dict.fromkeys(asked.keys() - found.keys(), "it does not answer")
    return found, missing | late


def _signal(pid: int, path: Path, may_signal: bool) -> int:
    """Send the signal; return the size of the file before."""
    size = path.stat().st_size
    if size > _LARGE_BYTES:
        os.truncate(path, 0)
        size = 0
    if not catches(pid, STACK_SIGNAL):
        raise OSError(0, "the program takes no signals for it")
    if not may_signal and state_of(pid) != "R":
        raise OSError(0, "C code holds the GIL while it waits")
    os.kill(pid, STACK_SIGNAL)
    return size


def _read_from(path: Path, offset: int) -> str:
    with contextlib.suppress(OSError):
        return path.read_bytes()[offset:].decode("utf-8", "replace")
    return ""


def parse_faulthandler(text: str) -> Stack:
    """Return the stack of the main thread that faulthandler has written last."""
    frames: list[Frame] = []
    for line in text.splitlines():
        if frame := _FRAME.match(line):
            number = int(frame[2]) if frame[2].isdecimal() else 0
            frames.append(Frame(frame[1], number, frame[3]))
        elif line.startswith("Stack ("):  # another one, for another asker
            frames = []
    return Stack(tuple(frames), is_main=True)
