"""Runs the ranks of one engine as processes, and ends all of them."""

from __future__ import annotations

import contextlib
import os
import re
import select
import selectors
import signal
import socket
import struct
import subprocess
import time
from pathlib import Path
from typing import NoReturn

from fastdist.cli.bench.channel import Channel, ChannelClosedError, Message
from fastdist.cli.bench.peers import Engine
from fastdist.cluster.launch import JOB_VARIABLE
from fastdist.errors import FastdistError

# Set by a launcher around the bench; the ranks' own launchers set them again.
_LAUNCH_VARIABLES = frozenset(
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", JOB_VARIABLE)
)
_QUIT_S = 10.0
_LAST_WORDS_S = 1.0
_TERMINATE_S = 2.0
_LOG_LINES = 25
_PREFIX = re.compile(r"^\[ *\S+\] ")  # of each line that ranks of fastdist run print
_EXCEPTION = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception)\b")


class EngineError(FastdistError):
    """An engine failed.

    The message has the engine and the reason in its first line, then the rank and its output.

    Attributes:
        engine: name of the engine.
        reason: one line.
    """

    def __init__(self, message: str, engine: str, reason: str) -> None:
        super().__init__(message)
        self.engine = engine
        self.reason = reason


class EngineProcesses:
    """The processes of one engine's ranks, and the channel to each rank."""

    def __init__(self, engine: Engine, ranks: int, socket_path: Path) -> None:
        self.engine = engine
        self.version = ""
        self._ranks = ranks
        self._socket_path = socket_path
        self._log = socket_path.with_name(f"{engine.name}.log")
        self._launched: list[subprocess.Popen[bytes]] = []
        self._channels: dict[int, Channel] = {}
        self._pids: list[int] = []

    def launch(self) -> None:
        """Starts the engine's processes; they connect to the socket."""
        engine = self.engine
        arguments = ["--engine", engine.name, "--driver", engine.driver]
        command = [*engine.command, *arguments, "--socket", str(self._socket_path)]
        with self._log.open("wb") as log:
            for environment in self._environments():
                try:
                    process = subprocess.Popen(
                        command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env=environment,
                        start_new_session=True,  # Ctrl-C is for the bench, which ends them
                    )
                except OSError as error:
                    self._fail(f"cannot run {command[0]}: {error.strerror}")
                self._launched.append(process)

    def _environments(self) -> list[dict[str, str]]:
        inherited = {
            name: value for name, value in os.environ.items() if name not in _LAUNCH_VARIABLES
        }
        environment = {**inherited, **self.engine.environment}
        if not self.engine.per_rank:
            return [environment]
        environment["WORLD_SIZE"] = str(self._ranks)
        return [{**environment, "RANK": str(rank)} for rank in range(self._ranks)]

    @property
    def connected(self) -> bool:
        """True if every rank has a channel."""
        return len(self._channels) == self._ranks

    def adopt(self, rank: int, connection: socket.socket, channel: Channel) -> None:
        """Takes over the channel of a connected rank."""
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, _, _ = struct.unpack("3i", credentials)
        self._pids.append(pid)
        if rank in self._channels or not 0 <= rank < self._ranks:
            self._fail(f"expected ranks 0 to {self._ranks - 1} once each, got another rank {rank}")
        self._channels[rank] = channel

    def command(self, message: Message, timeout_s: float) -> list[Message]:
        """Sends a message to every rank; returns the replies in the order of ranks.

        Raises:
            EngineError: A rank failed, ended, or has not answered in time.
        """
        for rank, channel in self._channels.items():
            try:
                channel.send(message)
            except ChannelClosedError:
                self._fail_rank(rank, "has ended")
        return self.replies(timeout_s)

    def replies(self, timeout_s: float) -> list[Message]:
        """Waits for one message from every rank.

        Raises:
            EngineError: A rank failed, ended, or has not answered in time.
        """
        received: dict[int, Message] = {}
        deadline = time.monotonic() + timeout_s
        with selectors.DefaultSelector() as selector:
            for rank, channel in self._channels.items():
                selector.register(channel, selectors.EVENT_READ, rank)
                self._take(rank, channel, received)
            while len(received) < self._ranks:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    missing = sorted(set(self._channels) - set(received))
                    self._fail_rank(missing[0], f"has not answered within {timeout_s:.0f} s")
                for key, _ in selector.select(left_s):
                    rank = int(key.data)
                    channel = self._channels[rank]
                    try:
                        channel.read()
                    except ChannelClosedError:
                        self._fail_rank(rank, "has ended")
                    self._take(rank, channel, received)
        return [received[rank] for rank in range(self._ranks)]

    def _take(self, rank: int, channel: Channel, received: dict[int, Message]) -> None:
        message = channel.take()
        if message is None:
            return
        if "error" in message:
            self._fail(f"rank {rank} raised", str(message["error"]))
        received[rank] = message

    def _fail_rank(self, rank: int, what: str) -> NoReturn:
        _wait_all(self._launched, _LAST_WORDS_S)  # launchers print the reason when they end
        self._fail(f"rank {rank} {what}", self._output())

    def fail_late(self, timeout_s: float) -> NoReturn:
        """Raises EngineError because ranks have not connected in time."""
        self._fail(
            f"{len(self._channels)} of {self._ranks} ranks started within {timeout_s:.0f} s",
            self._output(),
        )

    def _fail(self, what: str, output: str = "") -> NoReturn:
        name = self.engine.name
        reason = reason_in(output) or what
        lines = [f"{name} {'failed' if self.version else 'failed to start'}: {reason}"]
        if reason != what:
            lines.append(f"{what}:")
        lines += output.splitlines()[-_LOG_LINES:]
        raise EngineError("\n".join(lines), name, reason)

    def require_alive(self) -> None:
        """Raises EngineError if a process has ended before its ranks have connected."""
        for index, process in enumerate(self._launched):
            status = process.poll()
            if status is not None:
                self._raise_sent_error()
                who = f"rank {index}" if self.engine.per_rank else self.engine.command[0]
                what = (
                    f"{who} ended with status {status} before all {self._ranks} ranks had started"
                )
                self._fail(what, self._output())

    def _raise_sent_error(self) -> None:
        """Raises EngineError if a rank has sent an error."""
        for rank, channel in self._channels.items():
            with contextlib.suppress(ChannelClosedError):
                while select.select([channel], [], [], 0)[0]:
                    channel.read()
            self._take(rank, channel, {})

    def _output(self) -> str:
        """Returns the output of the engine's processes."""
        return self._log.read_text(errors="replace").strip() if self._log.exists() else ""

    def close(self) -> None:
        """Lets the ranks leave the engine; kills ranks that do not end."""
        try:
            for channel in self._channels.values():
                channel.send({"command": "quit"})
        except ChannelClosedError:
            pass  # they are killed below
        _wait_all(self._launched, _QUIT_S)
        self.kill()

    def kill(self) -> None:
        """Ends the remaining processes at once."""
        for process in self._launched:
            if process.poll() is None:
                process.terminate()
        for channel in self._channels.values():
            channel.close()
        _wait_all(self._launched, _TERMINATE_S)
        for pid in self._pids:
            if _runs_worker(pid, self._socket_path):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self._launched:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._channels.clear()
        self._pids.clear()
        self._launched.clear()


def reason_in(output: str) -> str:
    """Returns the line of a failed program's output with the reason; empty without output.

    The last line that names an exception, else the first line with a word in it.
    """
    lines = [_PREFIX.sub("", line).strip() for line in output.splitlines()]
    exceptions = [line for line in lines if _EXCEPTION.match(line)]
    if exceptions:
        return exceptions[-1]
    return next((line for line in lines if re.search(r"\w", line)), "")


def _runs_worker(pid: int, socket_path: Path) -> bool:
    """Returns True if the process is a rank of this run and its number was not reused."""
    try:
        return str(socket_path).encode() in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _wait_all(processes: list[subprocess.Popen[bytes]], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return
