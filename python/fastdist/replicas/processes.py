"""Starts processes of replicas, which end with this process, and reads their output."""

from __future__ import annotations

import ctypes
import os
import re
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_READ_BYTES = 1 << 16
_TAIL_BYTES = 1 << 16
_LAST_LINES = 10
_PR_SET_PDEATHSIG = 1

_TRACEBACK = re.compile(rb"^(?:  \+ Exception Group )?Traceback \(most recent call last\):", re.M)
_CHAINED = (
    b"\n\nDuring handling of the above exception, another exception occurred:\n\n",
    b"\n\nThe above exception was the direct cause of the following exception:\n\n",
)
_PEER_FAILURE = re.compile(rb"^[\w.]*PeerFailureError\b", re.M)


class Child:
    """A started process, and the end of its output."""

    def __init__(self, name: str, popen: subprocess.Popen[bytes], output: int) -> None:
        self.name = name
        self.popen = popen
        self.output = output
        self.tail = bytearray()
        self.ended_at_s: float | None = None

    @property
    def has_ended(self) -> bool:
        """True when the process has exited and all of its output has been read."""
        return self.ended_at_s is not None

    @property
    def is_consequence(self) -> bool:
        """True if its output shows that it failed because another replica had failed."""
        return is_consequence(self.popen.returncode, last_words(bytes(self.tail))[1])

    def describe(self) -> str:
        """Describe the exit code or signal, and the traceback or last lines of the output."""
        code = self.popen.returncode
        how = f"exit code {code}"
        if code is not None and code < 0:
            how = f"killed by signal {signal_name(-code)}"
        name, words = last_words(bytes(self.tail))
        text = words.decode(errors="replace").rstrip()
        return f"{self.name}: {how}" + (f"; its {name}:\n{text}" if text else "; it wrote nothing")


class Children:
    """Starts processes and reads their output in a thread, and ends the processes.

    The kernel kills the processes when the thread ends, which happens when this process ends.

    Args:
        forward: called with the output of the first process; None: its output is not forwarded.
    """

    def __init__(self, forward: Callable[[bytes], None] | None = None) -> None:
        self.children: list[Child] = []
        self.forward_error: Exception | None = None
        self._forward = forward
        self._wake = threading.Condition()
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(
        self,
        names: Sequence[str],
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        **options: Any,
    ) -> None:
        """Start a process for each environment.

        Args:
            names: names of the processes, for messages.
            command: the command of all processes.
            environments: environment variables of each process.
            options: further arguments for `subprocess.Popen`.

        Raises:
            OSError: a process could not be started; the others have been killed.
        """
        started = threading.Event()

        def serve() -> None:
            try:
                self._start(names, command, environments, options)
            except BaseException as error:
                self._failure = error
            finally:
                started.set()
            if self._failure is None:
                self._serve()

        self._thread = threading.Thread(target=serve, name="fastdist replicas", daemon=True)
        self._thread.start()
        started.wait()
        if self._failure is not None:
            self.stop(0.0)
            raise self._failure

    def ended(self) -> list[Child]:
        """Return the processes that have ended, in the order in which they ended."""
        gone = [child for child in self.children if child.has_ended]
        return sorted(gone, key=lambda child: child.ended_at_s or 0.0)

    def wait(self, timeout_s: float | None, until: Callable[[], bool] | None = None) -> bool:
        """Wait until all processes have ended, or until a condition; False on timeout."""
        condition = until or (lambda: len(self.ended()) == len(self.children))
        with self._wake:
            return self._wake.wait_for(condition, timeout_s)

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM to running processes, and SIGKILL after `grace_s`; 0: SIGKILL at once."""
        for number in (signal.SIGTERM, signal.SIGKILL) if grace_s else (signal.SIGKILL,):
            for child in self.children:
                if child.popen.poll() is None:
                    child.popen.send_signal(number)
            if self._failure is None and self.wait(grace_s or 5.0):
                return
        for child in self.children:
            child.popen.wait()

    def _start(
        self,
        names: Sequence[str],
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        options: Mapping[str, Any],
    ) -> None:
        die_with_parent = death_signal_setter()
        for name, environment in zip(names, environments, strict=True):
            output, theirs = os.pipe()
            try:
                popen = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=theirs,
                    stderr=theirs,
                    preexec_fn=die_with_parent,
                    **options,
                )
            except BaseException:
                os.close(output)
                raise
            finally:
                os.close(theirs)
            self.children.append(Child(name, popen, output))

    def _serve(self) -> None:
        with selectors.DefaultSelector() as selector:
            for child in self.children:
                os.set_blocking(child.output, False)
                selector.register(child.output, selectors.EVENT_READ, child)
                ends = os.pidfd_open(child.popen.pid)
                selector.register(ends, selectors.EVENT_READ, None)
            while selector.get_map():
                for key, _ in selector.select():
                    if key.data is not None and self._read(key.data):
                        continue
                    selector.unregister(key.fd)
                    os.close(key.fd)
                self._collect(selector)

    def _collect(self, selector: selectors.BaseSelector) -> None:
        for child in self.children:
            if child.has_ended or child.popen.poll() is None:
                continue
            if child.output in selector.get_map():  # its own children may hold the pipe open
                while self._read(child):
                    pass
                selector.unregister(child.output)
                os.close(child.output)
            with self._wake:
                child.ended_at_s = time.monotonic()
                self._wake.notify_all()

    def _read(self, child: Child) -> bool:
        """Read available output; False at its end, or if nothing is available."""
        try:
            data = os.read(child.output, _READ_BYTES)
        except BlockingIOError:
            return False
        child.tail += data
        del child.tail[:-_TAIL_BYTES]
        if data and self._forward is not None and child is self.children[0]:
            try:
                self._forward(data)
            except Exception as error:  # a closed pipe, say; the processes go on
                self.forward_error, self._forward = error, None
        return bool(data)


def last_words(tail: bytes) -> tuple[str, bytes]:
    """Return ("traceback", the last traceback in an output), or ("last lines", these lines)."""
    starts = [match.start() for match in _TRACEBACK.finditer(tail)]
    if not starts:
        return "last lines", b"".join(tail.splitlines(keepends=True)[-_LAST_LINES:])
    first = len(starts) - 1
    while first > 0 and tail[: starts[first]].endswith(_CHAINED):
        first -= 1
    return "traceback", tail[starts[first] :]


def is_consequence(code: int | None, words: bytes) -> bool:
    """True if exit code and last words show that a process failed because another rank had."""
    return code is not None and code > 0 and _PEER_FAILURE.search(words) is not None


def death_signal_setter() -> Callable[[], None]:
    """Return a function that a child calls before exec, so that it dies with this process."""
    prctl = ctypes.CDLL(None).prctl
    arguments = [ctypes.c_ulong(value) for value in (signal.SIGKILL, 0, 0, 0)]
    parent = os.getpid()

    def die_with_parent() -> None:
        prctl(_PR_SET_PDEATHSIG, *arguments)
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)

    return die_with_parent


def signal_name(number: int) -> str:
    """Format a signal's number and, if it has one, its name: "9 (SIGKILL)"."""
    try:
        return f"{number} ({signal.Signals(number).name})"
    except ValueError:  # a real-time signal
        return str(number)
