"""Processes that run beside this program, which a thread watches."""

from __future__ import annotations

import os
import selectors
import signal
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from fastdist.processes.output import Receiver
from fastdist.processes.process import Process, StartError, start

_KILLED_END_S = 5.0
_PAUSE_S = 0.05


class Children:
    """Starts processes and reads their output in a thread, and ends the processes.

    The kernel kills the processes when the thread ends, which happens when this process ends.
    `receive` takes the output of the first process; that of others is not shown.
    """

    def __init__(self, receive: Receiver = lambda _: None) -> None:
        self.processes: list[Process] = []
        self.ended: list[Process] = []  # whose output has been read, in the order of their ends
        self._receive = receive
        self._changed = threading.Condition()

    def start(
        self,
        names: Sequence[str],
        command: Sequence[str],
        environments: Sequence[Mapping[str, str]],
        **options: Any,
    ) -> None:
        """Start a process for each environment; see `fastdist.processes.process.start`.

        Raises:
            StartError: a process could not be started; the others have been killed.
        """
        # The kernel drops exit codes where a parent has set that SIGCHLD is ignored.
        if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            except ValueError:
                reason = "SIGCHLD is ignored, and only the main thread can change that"
                raise StartError(names[0], command[0], reason) from None
        started: Future[None] = Future()

        def serve() -> None:
            try:
                for name, environment in zip(names, environments, strict=True):
                    receive = (lambda _: None) if self.processes else self._receive
                    child = start(name, command, environment, [receive], **options)
                    self.processes.append(child)
            except BaseException as error:
                for child in self.processes:
                    child.popen.kill()
                    child.reap()
                self.processes.clear()
                started.set_exception(error)
                return
            started.set_result(None)
            self._serve()

        threading.Thread(target=serve, name="fastdist processes", daemon=True).start()
        started.result()

    def wait(self, timeout_s: float | None, *, until_failure: bool = False) -> bool:
        """Wait until all processes have ended, or until one has failed; False on timeout."""

        def is_over() -> bool:
            has_failed = until_failure and any(child.status for child in self.ended)
            return has_failed or len(self.ended) == len(self.processes)

        with self._changed:
            return self._changed.wait_for(is_over, timeout_s)

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM to running processes, and SIGKILL after `grace_s`."""
        for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _KILLED_END_S)):
            for child in self.processes:
                if child.status is None:
                    child.popen.send_signal(number)
            if self.wait(wait_s):
                break
        for child in self.processes:
            child.reap()

    def _serve(self) -> None:
        with selectors.PollSelector() as selector:
            running = {child: _descriptor(child.popen.pid) for child in self.processes}
            for child, end in running.items():
                child.streams[0].watch(selector)
                if end is not None:
                    selector.register(end, selectors.EVENT_READ, lambda: None)
            while running:
                for key, _ in selector.select(_PAUSE_S if None in running.values() else None):
                    key.data()
                for child in [child for child in running if child.popen.poll() is not None]:
                    end = running.pop(child)
                    if end is not None:
                        selector.unregister(end)
                        os.close(end)
                    child.streams[0].finish()
                    with self._changed:
                        child.poll()
                        self.ended.append(child)
                        self._changed.notify_all()


def _descriptor(pid: int) -> int | None:
    """Return a descriptor that becomes readable at the end of a process; None if there is none.

    Kernels before Linux 5.3, gVisor and some containers have none.
    """
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None
