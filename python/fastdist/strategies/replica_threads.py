"""One long-lived thread for each replica of a process, and the points where all of them meet."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from fastdist.errors import FastdistError

_LATE_S = 1.0


class ReplicaThreads:
    """Runs a function for each replica at once, each time in the same threads.

    Args:
        devices: where each replica computes. Replicas on the CPU share its cores.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._queues: list[queue.SimpleQueue[Callable[[], None] | None]] = []
        cores = torch.get_num_threads()
        started = threading.Barrier(len(devices) + 1)
        for replica, device in enumerate(devices):
            jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
            self._queues.append(jobs)
            threading.Thread(
                target=_serve,
                args=(jobs, device, max(1, cores // len(devices)), started),
                name=f"fastdist replica {replica}",
                daemon=True,
            ).start()
        started.wait()
        torch.set_num_threads(cores)  # what a thread sets for itself is what new threads begin with

    def run(
        self,
        body: Callable[[int, Meeting], Any],
        on_failure: Callable[[int, Meeting], None],
        on_late: Callable[[int], None],
    ) -> list[Any]:
        """Call `body(replica, meeting)` in every thread and return what the calls return.

        Args:
            body: what to run.
            on_failure: called at once, in its thread, when the body of a replica has raised.
            on_late: called with replicas whose body has returned, where others take a second more.

        Raises:
            BaseException: what the first replica to fail has raised, when all have ended.
        """
        count = len(self._queues)
        meeting = Meeting(count)
        results: list[Any] = [None] * count

        def job(replica: int) -> None:
            try:
                results[replica] = body(replica, meeting)
            except BaseException as error:
                meeting.leave(replica, error)
                on_failure(replica, meeting)
            else:
                meeting.leave(replica, None)

        for replica, jobs in enumerate(self._queues):
            jobs.put(partial(job, replica))
        meeting.serve(on_late)
        if meeting.failures:
            replica, error = meeting.failures[0]
            if hasattr(error, "add_note"):  # Python 3.11
                error.add_note(f"raised in replica {replica} of {count}")
            raise error
        return results

    def close(self) -> None:
        """End the threads, when they have done what they do."""
        for jobs in self._queues:
            jobs.put(None)


class Meeting:
    """Where the replicas of one run meet for merge calls, and where the caller waits for them."""

    def __init__(self, count: int) -> None:
        self.failures: list[tuple[int, BaseException]] = []
        self._count = count
        self._condition = threading.Condition()
        self._arrived: dict[int, Any] = {}
        self._left: set[int] = set()
        self._answers: dict[int, Any] | None = None
        self._error: BaseException | None = None
        self._merge: Callable[[Sequence[Any]], Sequence[Any]] | None = None

    def merge(
        self, replica: int, argument: Any, merge: Callable[[Sequence[Any]], Sequence[Any]]
    ) -> Any:
        """Wait for all replicas; the caller's thread gives each its part of `merge(arguments)`.

        Raises:
            FastdistError: a replica has ended and will never come.
            BaseException: what `merge` raised.
        """
        with self._condition:
            self._require_all(replica)
            self._merge = merge
            self._arrived[replica] = argument
            self._condition.notify_all()
            self._condition.wait_for(lambda: replica not in self._arrived or bool(self._left))
            if replica in self._arrived:
                del self._arrived[replica]
                self._require_all(replica)
            if self._error is not None:
                raise self._error
            assert self._answers is not None
            return self._answers[replica]

    def leave(self, replica: int, error: BaseException | None) -> None:
        """Note that a replica has ended."""
        with self._condition:
            self._left.add(replica)
            if error is not None:
                self.failures.append((replica, error))
            if self._arrived or error is not None or len(self._left) == self._count:
                self._condition.notify_all()

    def others_end(self, timeout_s: float) -> bool:
        """Wait for all replicas to end by themselves; False if some have not in this time."""
        with self._condition:
            return self._condition.wait_for(lambda: len(self._left) == self._count, timeout_s)

    def serve(self, on_late: Callable[[int], None]) -> None:
        """Answer merge calls in this thread until all replicas have ended."""
        told: set[int] = set()
        while True:
            with self._condition:
                while not self._condition.wait_for(self._is_due, _LATE_S):
                    for replica in self._left - told if not self.failures else ():
                        on_late(replica)
                    told |= self._left
                if len(self._left) == self._count:
                    return
                arguments = [self._arrived[i] for i in range(self._count)]
                merge = self._merge
            assert merge is not None
            answers: Sequence[Any] = ()
            failure = None
            try:
                answers = merge(arguments)
            except BaseException as error:
                failure = error
            with self._condition:
                self._error = failure
                self._answers = dict(enumerate(answers))
                self._arrived.clear()
                self._condition.notify_all()

    def _is_due(self) -> bool:
        return len(self._left) == self._count or len(self._arrived) == self._count

    def _require_all(self, replica: int) -> None:
        if self._left:
            gone = sorted(self._left)
            raise FastdistError(
                f"merge_call: replica {replica} waits for all {self._count} replicas, but "
                f"{gone} ended without calling it",
                tuple(gone),
            )


def _serve(
    jobs: queue.SimpleQueue[Callable[[], None] | None],
    device: torch.device,
    cores: int,
    started: threading.Barrier,
) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(cores)
    started.wait()
    while (job := jobs.get()) is not None:
        job()
        del job  # nothing of a run outlives it
