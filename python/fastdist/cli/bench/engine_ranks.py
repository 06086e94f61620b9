"""Starts the ranks of one engine, exchanges messages with them, and ends them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn

from fastdist.cli.bench.peers import Engine
from fastdist.cluster.launch import without_rank
from fastdist.errors import FastdistError
from fastdist.link.peer import peer_pid
from fastdist.processes.process import StartError
from fastdist.processes.sessions import Sessions

_START_TIMEOUT_S = 120.0
_POLL_S = 0.2
_QUIT_S = 10.0
_LAST_WORDS_S = 1.0
_TERMINATE_S = 2.0
_LOG_LINES = 25
_PREFIX = re.compile(r"^\[ *\S+\] ")  # of each line that ranks of fastdist run print
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception)\b")


class EngineError(FastdistError):
    """An engine failed.

    The message has the engine and the reason, one line, then the rank and its output.
    """

    def __init__(self, message: str, engine: str, reason: str) -> None:
        super().__init__(message)
        self.engine = engine
        self.reason = reason


class EngineRanks:
    """The ranks of one engine, and the channel to each of them."""

    def __init__(self, engine: Engine, ranks: int, socket_path: Path, timeout_s: float) -> None:
        self.engine = engine
        self.version = ""
        self._ranks = ranks
        self._socket_path = socket_path
        self._log = socket_path.with_suffix(".log")
        self._timeout_s = timeout_s
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._launched = Sessions()
        self._channels: dict[int, Connection[Any, Any]] = {}
        self._workers: list[int] = []  # pidfds: a launcher's ranks need not be in its group

    def launch(self) -> None:
        """Start the engine's launcher; its ranks connect to the socket."""
        self._deadline = time.monotonic() + _START_TIMEOUT_S
        self._listener.bind(str(self._socket_path))
        self._listener.listen(self._ranks)
        engine = self.engine
        command = [*engine.command, engine.driver, str(self._socket_path)]
        environment = {**without_rank(os.environ), **engine.environment}
        with self._log.open("wb") as log:
            output: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT}
            try:
                self._launched.start(engine.name, command, environment, **output)
            except StartError as error:
                self._fail(f"cannot run {engine.command[0]}: {error.reason}")

    def connect(self) -> None:
        """Wait until every rank has connected, and has started the engine."""
        while len(self._channels) < self._ranks:
            # Connections first: a rank that has ended may have sent its error.
            if wait([self._listener], _POLL_S):
                self._accept()
                continue
            (launcher,) = self._launched.processes
            if (status := launcher.poll()) is not None:
                for rank, channel in self._channels.items():
                    with contextlib.suppress(EOFError, OSError):
                        while channel.poll():
                            self._take(rank)  # raises if the rank has sent an error
                when = f"before all {self._ranks} ranks had started"
                self._fail(f"{self.engine.command[0]} ended with status {status} {when}")
            if time.monotonic() > self._deadline:
                started = f"{len(self._channels)} of {self._ranks} ranks started"
                self._fail(f"{started} within {_START_TIMEOUT_S:.0f} s")
        self.version = self._replies(_START_TIMEOUT_S)[0]

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        with contextlib.suppress(ProcessLookupError):  # it has ended
            self._workers.append(os.pidfd_open(peer_pid(connection)))
        channel: Connection[Any, Any] = Connection(connection.detach())
        try:
            rank = channel.recv()
        except (EOFError, OSError):
            return  # its launcher reports the error
        if rank in self._channels or not 0 <= rank < self._ranks:
            expected = f"expected ranks 0 to {self._ranks - 1} once each"
            self._fail(f"{expected}, got another rank {rank}", output="")
        self._channels[rank] = channel

    def command(self, name: str, **arguments: object) -> list[Any]:
        """Call a method of `Worker` on every rank; return the results in the order of ranks."""
        for rank, channel in self._channels.items():
            try:
                channel.send((name, arguments))
            except OSError:
                self._fail_rank(rank, "has ended")
        return self._replies(self._timeout_s)

    def _replies(self, timeout_s: float) -> list[Any]:
        """Wait for one message from every rank."""
        received: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while missing := set(self._channels) - set(received):
            ready = wait(self._channels.values(), deadline - time.monotonic())
            if not ready:
                self._fail_rank(min(missing), f"has not answered within {timeout_s:.0f} s")
            for rank, channel in self._channels.items():
                if channel in ready:
                    try:
                        received[rank] = self._take(rank)
                    except (EOFError, OSError):
                        self._fail_rank(rank, "has ended")
        return [received[rank] for rank in range(self._ranks)]

    def _take(self, rank: int) -> Any:
        error, reply = self._channels[rank].recv()
        if error:
            self._fail(f"rank {rank} raised", error)
        return reply

    def _fail_rank(self, rank: int, what: str) -> NoReturn:
        self._launched.wait(_LAST_WORDS_S)  # launchers print the reason when they end
        self._fail(f"rank {rank} {what}")

    def _fail(self, what: str, output: str | None = None) -> NoReturn:
        """Raise an error with the output of a rank; None: of all processes."""
        if output is None:
            output = self._log.read_text(errors="replace").strip()
        name = self.engine.name
        reason = reason_in(output) or what
        lines = [f"{name} {'failed' if self.version else 'failed to start'}: {reason}"]
        if reason != what:
            lines.append(f"{what}:")
        lines += output.splitlines()[-_LOG_LINES:]
        raise EngineError("\n".join(lines), name, reason)

    def close(self) -> None:
        """Let the ranks leave the engine; `kill` ends ranks that do not."""
        with contextlib.suppress(OSError):
            for channel in self._channels.values():
                channel.send(("quit", {}))
        self._launched.wait(_QUIT_S)

    def kill(self) -> None:
        """End the remaining processes at once."""
        self._launched.signal(signal.SIGTERM)
        for channel in self._channels.values():
            channel.close()
        self._launched.wait(_TERMINATE_S)
        for worker in self._workers:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(worker, signal.SIGKILL)
            os.close(worker)
        self._workers.clear()  # an interrupted start kills again
        self._launched.close()
        self._listener.close()


def reason_in(output: str) -> str:
    """Return the line of a failed program's output with the reason; empty without output.

    The last line that names an exception, else the first line with a word in it.
    """
    lines = [_PREFIX.sub("", line).strip() for line in output.splitlines()]
    exceptions = [line for line in lines if _EXCEPTION.match(line)]
    words = [line for line in lines if re.search(r"\w", line)]
    return next(iter([*exceptions[-1:], *words]), "")
