"""The program of each rank of each engine; it executes the commands of the bench.

    python -m fastdist.cli.bench.worker DRIVER SOCKET

Exits with 1 after an error, which it sends to the bench, or if the bench has ended.

A call on a GPU enqueues work and returns. Three times are measured separately:

- the time of the work, between two events. The stream is kept busy until all calls of a batch are
  enqueued, so that the GPU never waits for the host between the two events;
- the time of the host, until the call returns, of calls in a row with the stream busy throughout;
- the time of a replay of a graph with the call, between two events.

Before each timed call this rank writes its data, and the streams of all ranks wait for each other.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Client
from time import perf_counter_ns
from typing import Any

import numpy as np

import fastdist._core as _core
from fastdist.cli.bench import verify
from fastdist.cli.bench.cases import COLLECTIVES, GRADIENT_SHAPES, ROOT, Case, buffer_elements
from fastdist.cli.bench.drivers import DRIVERS, Array, Call, Driver, UnsupportedCaseError
from fastdist.cluster.launch import detect_launch

_SPREAD_NS = 10_000_000
# The calls of a batch, with the fills of their arrays, fit into the queue of a device.
_MOST_IN_BATCH = 32
_LEAD_BYTES = 64 << 20
_FIRST_LEAD, _MOST_LEAD = 32, 500  # copies, which also take places in the device's queue

TimesNs = tuple[list[int], list[int]]  # of the work of calls, and until they returned


class Batches:
    """Times calls on one GPU, in batches. Copies keep the stream busy while the host enqueues."""

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        self._lead: Call = gpu.copy_call(_LEAD_BYTES)
        self.copies = _FIRST_LEAD  # of a lead; longer after one that was too short
        self._events = [(gpu.event(), gpu.event()) for _ in range(_MOST_IN_BATCH)]
        self._behind = gpu.event()

    def times_ns(self, prepare: Sequence[Call], call: Call, most: int = _MOST_IN_BATCH) -> TimesNs:
        """Time calls, in batches of at most `most`; a call of `prepare` precedes each call."""
        work_ns: list[int] = []
        host_ns: list[int] = []
        for first in range(0, len(prepare), most):
            batch = list(zip(prepare[first : first + most], self._events, strict=False))
            for _ in range(self.copies):
                self._lead()
            self._behind.record()
            for before, (start, end) in batch:
                before()
                start.record()
                called = perf_counter_ns()
                call()
                host_ns.append(perf_counter_ns() - called)
                end.record()
            if self._behind.query():  # this lead was too short
                self.copies = min(_MOST_LEAD, 2 * self.copies)
            self._gpu.synchronize()
            work_ns += [int(start.elapsed_time(end) * 1e6) for _, (start, end) in batch]
        return work_ns, host_ns


def times_ns(prepare: Sequence[Call], call: Call, most: int = 1) -> TimesNs:
    """Time calls on the host; a call of `prepare` precedes each call."""
    times = []
    for before in prepare:
        before()
        began = perf_counter_ns()
        call()
        times.append(perf_counter_ns() - began)
    return times, []


class Worker:
    """Executes the commands of the bench, one method per command. Every rank must call each."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._batches = None if driver.gpu is None else Batches(driver.gpu)
        self._times_ns = times_ns if self._batches is None else self._batches.times_ns
        self._copy: Call | None = None

    def bind(self, cores: Sequence[int]) -> None:
        """Bind this rank's thread to one core, but not the threads of the engine."""
        os.sched_setaffinity(0, {cores[self._driver.rank]})

    def prepare(self, case: Case) -> tuple[str, str]:
        """Make the arrays of a case in place of the last one's, and call once.

        Returns why the engine does not support it, and why the call is not captured in a graph.
        """
        self._call: Any = None
        self._replay: Call | None = None
        self._passes: list[Array] = []
        self._gets: list[Array] = []
        driver, gpu = self._driver, self._driver.gpu
        if self._batches is not None:
            self._batches.copies = _FIRST_LEAD  # a stall in one case is not that of the next
        try:
            self._case, self._library = case, driver.arrays(case.array)
            if case.model:
                shapes = [GRADIENT_SHAPES[case.model], []]
            else:
                rank, world_size = driver.rank, driver.world_size
                elements = buffer_elements(case.collective, case.count, rank, world_size)
                shapes = [[(count,)] if count else [] for count in elements]
            make, dtype = self._library.make, case.dtype
            self._passes, self._gets = ([make(shape, dtype) for shape in each] for each in shapes)
            passes = self._passes if case.model else next(iter(self._passes), None)
            self._call = driver.bind(case, passes, next(iter(self._gets), None))
            self._fill(1)
            self._call()  # engines connect in the first call, which cannot be captured
            if gpu is None:
                return "", ""
            gpu.synchronize()
            try:
                self._replay = gpu.capture(self._call)
                return "", ""
            except Exception as error:
                return "", f"not captured: {type(error).__name__}: {error}"
            finally:
                gpu.synchronize()
        except UnsupportedCaseError as error:
            return str(error), ""
        except Exception as error:
            return f"{type(error).__name__}: {error}", ""

    def drop_graph(self) -> None:
        """Measure no replays of this case, as another rank has no graph."""
        self._replay = None

    def _fill(self, value: float) -> None:
        """Set every element of the passed arrays, and wait for the other ranks.

        The data is left in this rank's cache, as by a computation.
        """
        for array in self._passes:
            self._library.fill(array, value)
        self._driver.barrier()

    def time(self, iterations: int) -> dict[str, list[int]]:
        """Time calls, and replays of a graph; return ns by kind of time.

        The kinds are "times" of calls, on a GPU of the enqueued work; "host", until each call
        returns, and "graph", of replays, on a GPU; and "wall", of the whole loop.
        """
        self._last_iteration = iterations - 1
        rank, world_size, redop = self._driver.rank, self._driver.world_size, self._case.redop
        values = (verify.fill_value(rank, i, world_size, redop) for i in range(iterations))
        prepare = [partial(self._fill, value) for value in values]
        # A message wakes ranks on the core of its sender. If they waited for each other there, the
        # calls would show the scheduler's time slices and not the speed of the engine: each keeps
        # its core busy until the scheduler has given each rank a core of its own.
        end = perf_counter_ns() + _SPREAD_NS
        while perf_counter_ns() < end:
            pass
        self._driver.barrier()
        most = max(1, _MOST_IN_BATCH // max(1, len(self._passes)))
        times_ns: dict[str, list[int]] = {"host": [], "graph": []}
        if self._driver.gpu is not None:
            self._driver.gpu.synchronize()
        began = perf_counter_ns()
        if self._driver.gpu is not None:
            in_a_row = [(lambda: None) if i % most else prepare[i] for i in range(iterations)]
            _, times_ns["host"] = self._times_ns(in_a_row, self._call, most)
        if self._replay is not None:
            times_ns["graph"], _ = self._times_ns(prepare, self._replay, most)
        # Last, so that the results of these calls are checked.
        times_ns["times"], _ = self._times_ns(prepare, self._call, most)
        return times_ns | {"wall": [perf_counter_ns() - began]}

    def check(self) -> int:
        """Count wrong elements of the last timed call, of one more, and of a replay.

        The data of the additional calls differs per element.
        """
        case, rank, world_size = self._case, self._driver.rank, self._driver.world_size
        if case.collective == "barrier":
            return 0
        wrong = self._differing(
            verify.filled_inputs(world_size, self._last_iteration, case.dtype, case.redop)
        )
        inputs = verify.patterned_inputs(world_size, case.dtype, case.redop)
        for call in filter(None, (self._call, self._replay)):
            verify.write_input(self._library, self._passes, inputs, rank)
            for array in self._gets:
                # No right result has 101, so that elements that are not written count as wrong.
                self._library.fill(array, 101)
            self._driver.barrier()
            call()
            wrong += self._differing(inputs)
        return wrong

    def _differing(self, inputs: verify.Inputs) -> int:
        collective, rank = self._case.collective, self._driver.rank
        if collective == "reduce" and rank != ROOT:
            return 0  # only the root has a result
        results = self._gets if COLLECTIVES[collective].gets else self._passes
        return verify.count_wrong(self._library, results, collective, rank, inputs)

    def copy(self, nbytes: int, iterations: int) -> list[int]:
        """Time copies of a buffer on all ranks at the same time, for the floor."""
        gpu = self._driver.gpu
        if self._copy is None and gpu is None:
            self._copy = partial(_core.stream_copy, np.zeros(nbytes // 8), np.ones(nbytes // 8))
        self._copy = self._copy or gpu.copy_call(nbytes)  # every message asks for the same size
        return self._times_ns([self._driver.barrier] * iterations, self._copy)[0]


def main() -> int:
    """Run one rank until the command `quit`; return an exit code."""
    _, kind, path = sys.argv
    channel = Client(path, "AF_UNIX")
    try:
        launch = detect_launch()
        channel.send(0 if launch is None else launch.rank)
        driver = DRIVERS[kind]()
        worker = Worker(driver)
        channel.send(("", driver.version))
        # While it waits it takes no processor time from the engine that is measured.
        while (message := channel.recv())[0] != "quit":
            command, given = message
            channel.send(("", getattr(worker, command)(**given)))
        if driver.gpu is not None:
            driver.gpu.synchronize()
        del worker  # NCCL does not end before the graphs with its calls
        driver.leave()
    except (EOFError, ConnectionError):
        os._exit(1)  # leaving the engine could wait for ranks that have ended
    except BaseException:
        channel.send((traceback.format_exc(), None))
        os._exit(1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
