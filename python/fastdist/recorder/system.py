"""Reads what the kernel knows about a process, without asking the process."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fastdist.processes.cgroups import cgroups, read_text
from fastdist.processes.proc import stat

STACK_SIGNAL = signal.SIGRTMAX - 7
"""The signal that asks a recorded process for its stack."""

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MOST_THREADS = 64
_FROZEN = "F"  # no letter of the kernel's
_STOPPED = {
    "T": "a signal (SIGSTOP)",
    "t": "a debugger",
    _FROZEN: "a frozen container (docker pause, or the freezer of control groups)",
}
_ENDED = "ZX"
_FUTEX_CALL = 202 if os.uname().machine == "x86_64" else 98
# System calls whose first argument is a file, by their numbers on x86-64 and on others.
_FILE_CALLS = frozenset(
    (0, 1, 17, 18, 19, 20, 72, 73, 74, 75, 76, 77)
    if os.uname().machine == "x86_64"
    else (25, 32, 46, 47, 63, 64, 65, 66, 67, 68, 82, 83)
)


@dataclass(frozen=True, slots=True)
class Thread:
    """A thread, as the kernel sees it.

    Attributes:
        state: a letter of /proc/PID/stat: R runs, S sleeps, D waits for a device, T is stopped.
        waits_in: the kernel function in which the thread sleeps; empty if it runs or if unknown.
        file: the file that it reads or writes at this moment; empty if none.
        futex: the address on which it waits for another thread; 0 if none.
        switches: the number of times it has gone to sleep.
    """

    tid: int
    state: str
    waits_in: str
    file: str
    futex: int
    cpu_s: float
    switches: int


@dataclass(frozen=True, slots=True)
class Connection:
    """A TCP connection of a process."""

    remote: str
    unsent_bytes: int
    retransmissions: int

    def __str__(self) -> str:
        again = f"{self.unsent_bytes:,} bytes were sent {self.retransmissions} times again"
        return f"{self.remote}: {again}"


@dataclass(frozen=True, slots=True)
class Process:
    """A process, as the kernel sees it.

    Attributes:
        state: the state of its main thread, or F if its container is frozen; "" if it is gone.
        status: a zombie's exit status, as `os.waitpid` gives it; None if it runs or is gone.
        page_faults: pages that were read from the disk.
        memory_stall: the share of the last 10 s in which all tasks waited for memory, from 0 to 1.
    """

    pid: int
    state: str
    at_s: float
    status: int | None = None
    cpu_s: float = 0.0
    page_faults: int = 0
    swapped_bytes: int = 0
    uses_gpu: bool = False
    threads: tuple[Thread, ...] = ()
    memory_stall: float = 0.0
    connections: tuple[Connection, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_dead(self) -> bool:
        """True if the process is gone, or a zombie."""
        return not self.state or self.state in _ENDED

    @property
    def stopped_by(self) -> str:
        """The words for what has stopped the process; "" if nothing has."""
        return _STOPPED.get(self.state, "")

    @property
    def main(self) -> Thread | None:
        """The main thread; None if it could not be seen."""
        return self.threads[0] if self.threads else None


def look_at(pid: int, started: int) -> Process:
    """Look at the process that began `started` ticks after boot, not a later one of this id."""
    now_s = time.monotonic()
    try:
        fields = stat(pid)
    except (OSError, IndexError):
        return Process(pid, "", now_s)
    if int(fields[19]) != started:
        return Process(pid, "", now_s)
    state = fields[0]
    if state in _ENDED:
        return Process(pid, state, now_s, status=int(fields[49]) or None)
    look = _Look(pid)
    return Process(
        pid,
        _FROZEN if look.is_frozen() else state,
        now_s,
        cpu_s=_cpu_s(fields),
        page_faults=int(fields[9]),
        swapped_bytes=look.number("status", "VmSwap") * 1024,
        uses_gpu=any(file.startswith("/dev/nvidia") for file in look.files.values()),
        threads=tuple(look.threads()),
        memory_stall=look.memory_stall(),
        connections=tuple(look.connections()),
        notes=tuple(look.notes),
    )


def start_of(pid: int) -> int | None:
    """Return the start of a running process, in clock ticks since boot; None if it has ended."""
    with contextlib.suppress(OSError, IndexError):
        fields = stat(pid)
        return None if fields[0] in _ENDED else int(fields[19])
    return None


def state_of(pid: int) -> str:
    """Return the letter for the state of a process, as ps shows it; X if there is none."""
    with contextlib.suppress(OSError, IndexError):
        return stat(pid)[0]
    return "X"


def out_of_memory_kills() -> int:
    """Count the processes of this one's cgroup that the kernel has killed for lack of memory."""
    for folder in cgroups(read_text(Path("/proc/self/cgroup")), "memory"):
        for file in (folder / "memory.events", folder / "memory.oom_control"):
            found = re.search(r"^oom_kill (\d+)", read_text(file), re.MULTILINE)
            if found:
                return int(found[1])
    return 0


def is_in_interpreter(pid: int, address: int) -> bool:
    """Return True if an address is one of Python's own variables, such as the GIL."""
    name, end = "", 0
    for line in read_text(Path(f"/proc/{pid}/maps")).splitlines():
        words = line.split(maxsplit=5)
        first, last = (int(part, 16) for part in words[0].split("-"))
        path = words[5] if len(words) > 5 else ""
        # Zero-initialized variables follow those in the file, in a mapping without a name.
        name = path or (name if first == end else "")
        end = last
        if first <= address < last:
            return "python" in name.rpartition("/")[2]
    return False


def catches(pid: int, signal: int) -> bool:
    """Return True if a process has a handler for a signal."""
    mask = _Look(pid).value("status", "SigCgt")
    return bool(mask) and bool(int(mask, 16) >> (signal - 1) & 1)


class _Look:
    """Reads the files of a process's folder in /proc, and notes which it may not read."""

    def __init__(self, pid: int) -> None:
        self.folder = Path(f"/proc/{pid}")
        self.notes: list[str] = []

    def text(self, name: str) -> str:
        try:
            return (self.folder / name).read_text("utf-8", "replace")
        except ProcessLookupError:
            pass  # it has just ended
        except OSError as error:
            self._note(name, error)
        return ""

    def value(self, name: str, key: str) -> str:
        found = re.search(rf"^{key}:\s*(\S+)", self.text(name), re.MULTILINE)
        return found[1] if found else ""

    def number(self, name: str, key: str) -> int:
        return int(self.value(name, key) or 0)

    @functools.cached_property
    def cgroup(self) -> str:
        return self.text("cgroup")

    @functools.cached_property
    def files(self) -> dict[int, str]:
        """The open files by their descriptors."""
        files = {}
        try:
            for name in os.listdir(self.folder / "fd"):
                with contextlib.suppress(FileNotFoundError):  # it was just closed
                    files[int(name)] = os.readlink(self.folder / "fd" / name)
        except OSError as error:
            self._note("fd", error)
        return files

    def threads(self) -> Iterator[Thread]:
        """Yield the threads, the main thread first."""
        try:
            tids = sorted(map(int, os.listdir(self.folder / "task")))
            tids.sort(key=lambda tid: str(tid) != self.folder.name)  # the main thread is first
        except OSError as error:
            self._note("task", error)
            return
        if len(tids) > _MOST_THREADS:
            self.notes.append(f"{len(tids) - _MOST_THREADS} of {len(tids)} threads")
        for tid in tids[:_MOST_THREADS]:
            with contextlib.suppress(OSError, IndexError):  # it has ended
                yield self._thread(tid)

    def _thread(self, tid: int) -> Thread:
        task = f"task/{tid}"
        fields = stat(f"{self.folder.name}/{task}")
        waits_in = self.text(f"{task}/wchan").strip()
        return Thread(
            tid,
            fields[0],
            "" if waits_in == "0" else waits_in,
            *self._argument(self.text(f"{task}/syscall")),
            _cpu_s(fields),
            self.number(f"{task}/status", "voluntary_ctxt_switches"),
        )

    def _argument(self, system_call: str) -> tuple[str, int]:
        """Return the file and the futex that a system call concerns."""
        words = system_call.split()
        if len(words) < 2 or not words[0].isdecimal():
            return "", 0
        number, argument = int(words[0]), int(words[1], 16)
        if number in _FILE_CALLS:
            return self.files.get(argument, ""), 0
        return "", argument if number == _FUTEX_CALL else 0

    def is_frozen(self) -> bool:
        """Return True if the freezer of control groups holds the process."""
        for folder in cgroups(self.cgroup, "freezer"):
            is_frozen = "frozen 1" in read_text(folder / "cgroup.events")
            if is_frozen or read_text(folder / "freezer.state").strip() == "FROZEN":
                return True
        return False

    def memory_stall(self) -> float:
        files = [folder / "memory.pressure" for folder in cgroups(self.cgroup, "memory")]
        for file in [*files, Path("/proc/pressure/memory")]:
            found = re.search(r"^full avg10=([\d.]+)", read_text(file), re.MULTILINE)
            if found:
                return float(found[1]) / 100
        return 0.0

    def connections(self) -> Iterator[Connection]:
        """Yield the TCP connections with unsent bytes or retransmissions."""
        own = {name[8:-1] for name in self.files.values() if name.startswith("socket:[")}
        if not own:
            return
        for name in ("net/tcp", "net/tcp6"):
            for line in self.text(name).splitlines()[1:]:
                words = line.split()
                if words[9] not in own or words[3] == "0A":  # 0A: it listens
                    continue
                unsent, retransmissions = int(words[4].split(":")[0], 16), int(words[6], 16)
                if unsent or retransmissions:
                    yield Connection(_address(words[2]), unsent, retransmissions)

    def _note(self, name: str, error: OSError) -> None:
        self.notes.append(f"{self.folder}/{name}: {error.strerror}")


def _cpu_s(fields: list[str]) -> float:
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _address(text: str) -> str:
    """Decode an address of /proc/net/tcp, such as 0100007F:1F90."""
    host, port = text.split(":")
    words = [bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8)]
    if len(words) == 1:
        return ".".join(map(str, words[0])) + f":{int(port, 16)}"
    return f"[{b''.join(words).hex(':', 2)}]:{int(port, 16)}"
