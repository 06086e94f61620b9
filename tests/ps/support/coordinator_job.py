"""A coordinator's job without servers and torch: workers start in a fraction of a second."""

import contextlib
import os
import pickle
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import fastdist as fd
from fastdist.cluster.address import reserve_port
from fastdist.ps.coordinator.messages import HELLO, TO_COORDINATOR, TO_WORKER, Kind, pack, unpack
from fastdist.ps.coordinator.per_worker import set_worker_index
from fastdist.ps.coordinator.shipping import Definitions
from fastdist.ps.coordinator.worker import CallContext, Worker
from fork_server import python
from launched import wait_until
from ps_cluster import end_all
from raw_link import RawClient, RawServer

_contexts: list[CallContext] = []
_reconnections: list[str] = []


def step(weight: float = 1.0) -> float:
    """In a function of a group: take a step with the others; return the sum of weights, or 0."""
    totals = [0.0]
    _contexts[-1].commit(weight, totals.append)
    return totals[-1]


def count_reconnections() -> int:
    """Return how often a coordinator has connected to this worker again."""
    return len(_reconnections)


class PlainHost:
    """Runs functions without a strategy."""

    def begin_job(self, index: int, seed: int) -> None:
        set_worker_index(index)

    def reconnect(self) -> None:
        _reconnections.append("by the same job")

    def apply_state_update(self, state_update: bytes) -> None:
        pass

    def run(self, call: Callable[[], Any], context: CallContext) -> Any:
        _contexts[:] = [context]
        return call()

    def state_update(self) -> bytes:
        return b""


def serve(address: str) -> None:
    Worker(address, PlainHost()).serve()


class PlainJob:
    """A job for a coordinator that records the coordinator's calls.

    Attributes:
        asked: "before", "reports" with the reports, "after" and "end", in the order of the calls.
    """

    has_servers = True
    synchronous = False
    max_staleness = None

    def __init__(self, addresses: Sequence[str]) -> None:
        self.worker_addresses = tuple(addresses)
        self.definitions = Definitions()
        self.asked: list[str] = []

    def require_chief(self, call: str) -> None:
        pass

    def before_calls(self) -> bytes:
        self.asked.append("before")
        return b""

    def apply_reports(self, reports: Sequence[bytes]) -> None:
        self.asked += ["reports", *(pickle.loads(report) for report in reports)]

    def after_calls(self) -> None:
        self.asked.append("after")

    def end_job(self) -> None:
        self.asked.append("end")


class PlainCluster:
    """Workers that serve until they are killed, or until a coordinator ends the job."""

    def __init__(self, workers: int) -> None:
        held = [reserve_port() for _ in range(workers)]
        self._ports = [holder for holder, _ in held]
        self.addresses = [f"tcp://127.0.0.1:{port}" for _, port in held]
        self.tasks: dict[int, subprocess.Popen[bytes]] = {}
        for index in range(workers):
            self.start(index)

    def start(self, index: int) -> None:
        """Start or restart a worker."""
        code = f"import coordinator_job; coordinator_job.serve({self.addresses[index]!r})"
        self.tasks[index] = python("-c", code)

    def kill(self, index: int) -> None:
        """Kill a worker with SIGKILL."""
        self.tasks[index].send_signal(signal.SIGKILL)
        self.tasks[index].wait(10)

    def coordinator(self, job: PlainJob | None = None, **options: Any) -> Any:
        """Create a coordinator, and wait for all its workers."""
        job = job or PlainJob(self.addresses)
        coordinator = fd.ClusterCoordinator(job, **options)
        wait_until(lambda: len(coordinator.workers) == len(job.worker_addresses))
        return coordinator

    def close(self) -> None:
        """End all workers."""
        end_all(self.tasks.values(), self._ports)


class Impostor:
    """Has the secret of a job and sends arbitrary messages, as a worker or as a coordinator.

    Attributes:
        address: where it listens as a worker.
    """

    def __init__(self, worker: str = "") -> None:
        self._client = RawClient(worker) if worker else None
        self._server = None if worker else RawServer()
        self._peer = 0
        self.address = self._server.address if self._server else ""

    def send(self, *frames: bytes) -> None:
        if self._client:
            self._client.send(*frames)
        elif self._server:
            self._server.send(self._peer, *frames)

    def receive(self) -> tuple[Kind, int, Sequence[bytes]]:
        """Return kind, number and further frames of the next message."""
        if self._client:
            return unpack(self._client.receive(20), TO_COORDINATOR)
        assert self._server
        self._peer, frames = self._server.receive(20)
        return unpack([bytes(frame) for frame in frames], TO_WORKER)

    def receive_until(self, kind: Kind) -> tuple[int, Sequence[bytes]]:
        """Return number and further frames of the next message of a kind."""
        while True:
            received, number, frames = self.receive()
            if received is kind:
                return number, frames

    def be_ready(self) -> None:
        """Answer the HELLO as a worker does."""
        self.receive_until(Kind.HELLO)
        self.send(pack(Kind.READY))

    def take_over(self, began: int, index: int = 0, job: bytes | None = None) -> None:
        """Become the coordinator of a worker."""
        self.send(pack(Kind.HELLO), job or os.urandom(16), HELLO.pack(began, 0, index))
        self.receive_until(Kind.READY)

    def close(self) -> None:
        for end in (self._client, self._server):
            if end:
                end.close()


@contextlib.contextmanager
def impostor(worker: str = "") -> Iterator[Impostor]:
    made = Impostor(worker)
    try:
        yield made
    finally:
        made.close()
