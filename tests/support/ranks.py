"""Runs a function on every rank of a world: ranks as threads, or as processes that live on."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any

import fastdist
from fastdist import Communicator
from fork_server import python


class RankError(AssertionError):
    """A function failed on some ranks; the message holds their tracebacks."""

    def __init__(self, errors: dict[int, BaseException | str]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"rank {r}: {e}" for r, e in sorted(errors.items())))


def run_in_threads(
    makers: Sequence[Callable[[], Communicator]],
    function: Callable[..., Any],
    args: tuple[Any, ...],
    limit_s: float,
) -> list[Any]:
    """Run a function of each rank's communicator in a thread that makes the communicator."""
    results: list[Any] = [None] * len(makers)
    errors: dict[int, BaseException | str] = {}
    communicators: list[Communicator] = []

    def body(rank: int, make: Callable[[], Communicator]) -> None:
        try:
            comm = make()
            communicators.append(comm)
            try:
                results[rank] = function(comm, *args)
            except BaseException:
                comm.close()
                raise
        except BaseException:
            errors[rank] = traceback.format_exc()

    threads = [
        threading.Thread(target=body, args=numbered, daemon=True) for numbered in enumerate(makers)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        errors[-1] = f"still running after {limit_s} s"
    if errors:
        raise RankError(errors)
    for communicator in communicators:
        communicator.close()
    return results


class ThreadRanks:
    """Ranks as threads of this process, fresh for every call."""

    def __init__(self, size: int) -> None:
        self.size = size

    def run(self, function: Callable[..., Any], *args: Any, limit_s: float = 150) -> list[Any]:
        makers = [lambda c=c: c for c in fastdist.local_group(self.size)]
        return run_in_threads(makers, function, args, limit_s)

    def close(self) -> None:
        pass


class ProcessRanks:
    """Ranks as processes that serve one call after another."""

    _end_s = 2.0

    def __init__(self, size: int) -> None:
        self.size = size
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[Connection] = []

    def start(self) -> None:
        job = secrets.token_hex(8)
        for rank in range(self.size):
            ours, theirs = Pipe()
            env = dict(os.environ)
            env |= {"FASTDIST_JOB": job, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            env |= {"WORLD_SIZE": str(self.size), "LOCAL_WORLD_SIZE": str(self.size)}
            self._start_one(ours, theirs, env)

    def _start_one(
        self, ours: Connection, theirs: Connection, env: dict[str, str], netns: str = ""
    ) -> None:
        fd = theirs.fileno()
        process = python(__file__, str(fd), env=env, pass_fds=[fd], netns=netns)
        theirs.close()
        self._processes.append(process)
        self._pipes.append(ours)

    def run(self, function: Callable[..., Any], *args: Any, limit_s: float = 150) -> list[Any]:
        if not self._processes:
            self.start()
        for pipe in self._pipes:
            pipe.send((function, args))
        deadline = time.monotonic() + limit_s
        results: list[Any] = []
        errors: dict[int, BaseException | str] = {}
        for rank, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    errors[rank] = f"no answer after {limit_s} s"
                    continue
                failed, value = pipe.recv()
            except (EOFError, ConnectionResetError):
                errors[rank] = f"exited with {self._processes[rank].wait()}"
                continue
            if failed:
                errors[rank] = value
            results.append(value)
        if errors:
            self.close()
            raise RankError(errors)
        return results

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            try:
                process.wait(self._end_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        self._pipes.clear()

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]


def serve(pipe: Connection, comm: Communicator) -> None:
    """Call the functions that `ProcessRanks.run` sends; end the process with the pipe."""
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            comm.close()
            os._exit(0)  # the interpreter's own end takes 0.3 s in a process that knows torch
        try:
            answer = (False, function(comm, *args))
        except BaseException:
            answer = (True, traceback.format_exc())
        pipe.send(answer)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])), fastdist.init())
