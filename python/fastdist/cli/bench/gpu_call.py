"""The timed loops around one engine's call of one case on one rank's GPU.

A call on a GPU enqueues work and returns. Three times are measured separately:

- the time of the work, between two events. The stream is kept busy until all calls of a batch are
  enqueued, so that the GPU never waits for the host between the two events;
- the time of the host, until the call returns, with the stream busy throughout;
- the time of a replay of a graph with the call, between two events.

Before each timed call this rank writes its data, and the streams of all ranks wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from time import perf_counter_ns

from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.driver import Call, Driver
from fastdist.cli.bench.gpu import Gpu
from fastdist.cli.bench.measured_call import BoundCase, Times

# The calls of a batch, with the fills of their arrays, fit into the queue of a device.
_MOST_IN_BATCH = 32
_LEAD_BYTES = 64 << 20
_FIRST_LEAD_NS = 1_000_000
_MOST_LEAD_NS = 50_000_000
_MOST_LEAD_COPIES = 500  # copies also take places in the device's queue


class Lead:
    """Copies that keep a GPU's stream busy while the host enqueues the calls of a batch."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self._copy = gpu.copy_call(_LEAD_BYTES)
        start, end = gpu.event(), gpu.event()
        self._copy()
        gpu.record(start)
        for _ in range(4):
            self._copy()
        gpu.record(end)
        gpu.synchronize()
        self._copy_ns = max(1, gpu.elapsed_ns(start, end) // 4)

    def enqueue(self, least_ns: int) -> None:
        """Keep the stream busy for at least `least_ns`, with a limited number of copies."""
        for _ in range(min(_MOST_LEAD_COPIES, -(-least_ns // self._copy_ns))):
            self._copy()


class Batches:
    """Times calls on one GPU, in batches."""

    def __init__(self, lead: Lead, most: int) -> None:
        self._gpu = gpu = lead.gpu
        self._most = most
        self._lead = lead
        self._lead_ns = _FIRST_LEAD_NS
        self._events = [(gpu.event(), gpu.event()) for _ in range(most)]
        self._behind = gpu.event()

    def work_ns(self, prepare: Sequence[Call], call: Call) -> list[int]:
        """Return the time of each call's work in ns; a call of `prepare` precedes each call."""
        times_ns: list[int] = []
        gpu = self._gpu
        for first in range(0, len(prepare), self._most):
            batch = prepare[first : first + self._most]
            with self._batch():
                for before, (start, end) in zip(batch, self._events, strict=False):
                    before()
                    gpu.record(start)
                    call()
                    gpu.record(end)
            times_ns += [gpu.elapsed_ns(start, end) for start, end in self._events[: len(batch)]]
        return times_ns

    def host_ns(self, prepare: Call, call: Call, number: int) -> list[int]:
        """Return the time until each call returns in ns; `prepare` precedes each batch."""
        times_ns: list[int] = []
        while len(times_ns) < number:
            with self._batch():
                prepare()
                for _ in range(min(self._most, number - len(times_ns))):
                    called = perf_counter_ns()
                    call()
                    times_ns.append(perf_counter_ns() - called)
        return times_ns

    @contextmanager
    def _batch(self) -> Iterator[None]:
        """Keep the stream busy while calls are enqueued inside; then wait for them.

        The next lead is longer if this lead was too short.
        """
        began = perf_counter_ns()
        self._lead.enqueue(self._lead_ns)
        self._gpu.record(self._behind)
        yield
        took_ns = perf_counter_ns() - began
        if self._gpu.is_over(self._behind):
            self._lead_ns = min(_MOST_LEAD_NS, 2 * max(self._lead_ns, took_ns))
        self._gpu.synchronize()


class GpuCall(BoundCase):
    """Times calls that enqueue work on a GPU."""

    def __init__(self, driver: Driver, lead: Lead, case: Case, variant: str, graph: bool) -> None:
        super().__init__(driver, case, variant)
        self._gpu = gpu = lead.gpu
        self._batches = Batches(lead, max(1, _MOST_IN_BATCH // max(1, len(self._passes))))
        self._fill(1)
        self._barrier()
        self._call()  # engines connect in the first call, which cannot be captured
        gpu.synchronize()
        if graph:
            try:
                self._replay = gpu.capture(self._call)
            except Exception as error:
                self.no_graph = f"not captured: {type(error).__name__}: {error}"
            gpu.synchronize()

    def time(self, iterations: int, graph: bool = False) -> Times:
        values = self._fill_values(iterations)

        def fill_and_synchronize(value: int) -> None:
            self._fill(value)
            self._barrier()

        self._barrier()
        self._gpu.synchronize()
        began = perf_counter_ns()
        prepared = [partial(fill_and_synchronize, value) for value in values]
        host_ns = self._batches.host_ns(partial(fill_and_synchronize, 1), self._call, iterations)
        graph_ns: list[int] = []
        if graph and self._replay is not None:
            graph_ns = self._batches.work_ns(prepared, self._replay)
        # Last, so that the results of these calls are checked.
        times_ns = self._batches.work_ns(prepared, self._call)
        return Times(times_ns, perf_counter_ns() - began, host_ns, graph_ns)
