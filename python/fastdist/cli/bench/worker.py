"""The program of each rank of each engine; it executes the commands of the bench.

    python -m fastdist.cli.bench.worker DRIVER SOCKET

Exits with 1 after an error, which it sends to the bench, or if the bench has ended.

A call on a GPU enqueues work and returns. Three times are measured separately:

- the time of the work, between two events. The stream is kept busy until all calls of a batch are
  enqueued, so that the GPU never waits for the host between the two events;
- the time of the host, until the call returns, with the stream busy throughout;
- the time of a replay of a graph with the call, between two events.

Before each timed call this rank writes its data, and the streams of all ranks wait for each other.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Client
from time import perf_counter_ns
from typing import Any

import numpy as np

import fastdist._core as _core
from fastdist.cli.bench import verify
from fastdist.cli.bench.cases import COLLECTIVES, ROOT, Case, buffer_elements
from fastdist.cli.bench.drivers import DRIVERS, Array, Call, Driver, UnsupportedCaseError
from fastdist.cli.bench.models import GRADIENT_SHAPES
from fastdist.cluster.launch import detect_launch

_SPREAD_NS = 10_000_000
# The calls of a batch, with the fills of their arrays, fit into the queue of a device.
_MOST_IN_BATCH = 32
_FIRST_LEAD, _MOST_LEAD = 32, 500  # copies, which also take places in the device's queue

LEAD_BYTES = 64 << 20


class Batches:
    """Times calls on one GPU, in batches of at most `most`.

    `lead` enqueues a copy. Copies keep the stream busy while the host enqueues a batch.
    """

    def __init__(self, gpu: Any, lead: Call, most: int) -> None:
        self._gpu = gpu
        self._most = most
        self._lead = lead
        self._copies = _FIRST_LEAD
        self._events = [(gpu.event(), gpu.event()) for _ in range(most)]
        self._behind = gpu.event()

    def work_ns(self, prepare: Sequence[Call], call: Call) -> list[int]:
        """Return the time of each call's work in ns; a call of `prepare` precedes each call."""
        times_ns: list[int] = []
        for first in range(0, len(prepare), self._most):
            batch = list(zip(prepare[first : first + self._most], self._events, strict=False))
            with self._batch():
                for before, (start, end) in batch:
                    before()
                    start.record()
                    call()
                    end.record()
            times_ns += [int(start.elapsed_time(end) * 1e6) for _, (start, end) in batch]
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
        for _ in range(self._copies):
            self._lead()
        self._behind.record()
        yield
        if self._behind.query():
            self._copies = min(_MOST_LEAD, 2 * self._copies)
        self._gpu.synchronize()


def work_ns(prepare: Sequence[Call], call: Call) -> list[int]:
    """Return the time of each call on the host in ns; a call of `prepare` precedes each call."""
    times_ns = []
    for before in prepare:
        before()
        began = perf_counter_ns()
        call()
        times_ns.append(perf_counter_ns() - began)
    return times_ns


class Worker:
    """Executes the commands of the bench, one method per command. Every rank must call each."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        gpu = driver.gpu
        self._lead: Call | None = None if gpu is None else gpu.copy_call(LEAD_BYTES)
        self._batches: Batches | None = None
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
        self._fillers: list[Any] = []
        self._passes: list[Array] = []
        self._gets: list[Array] = []
        try:
            return "", self._prepare(case)
        except UnsupportedCaseError as error:
            return str(error), ""
        except Exception as error:
            return f"{type(error).__name__}: {error}", ""

    def _prepare(self, case: Case) -> str:
        driver, gpu = self._driver, self._driver.gpu
        self._case, self._library = case, driver.arrays(case.array)
        make, dtype = self._library.make, case.dtype
        if case.model:
            shapes = [GRADIENT_SHAPES[case.model], []]
        else:
            elements = buffer_elements(case.collective, case.count, driver.rank, driver.world_size)
            shapes = [[(count,)] if count else [] for count in elements]
        self._passes, self._gets = ([make(shape, dtype) for shape in each] for each in shapes)
        passes = self._passes if case.model else next(iter(self._passes), None)
        self._call = driver.bind(case, passes, next(iter(self._gets), None))
        self._fillers = [self._library.filler(array) for array in self._passes]
        self._fill(1)
        self._call()  # engines connect in the first call, which cannot be captured
        if self._lead is None:
            return ""
        most = _MOST_IN_BATCH // max(1, len(self._passes))
        self._batches = Batches(gpu, self._lead, max(1, most))
        gpu.synchronize()
        try:
            self._replay = gpu.capture(self._call)
        except Exception as error:
            return f"not captured: {type(error).__name__}: {error}"
        finally:
            gpu.synchronize()
        return ""

    def drop_graph(self) -> None:
        """Measure no replays of this case, as another rank has no graph."""
        self._replay = None

    def _fill(self, value: float) -> None:
        """Set every element of the passed arrays, and wait for the other ranks.

        The data is left in this rank's cache, as by a computation.
        """
        for fill in self._fillers:
            fill(value)
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
        times_ns: dict[str, list[int]] = {}
        if self._batches is None:
            _spread_ranks()
            self._driver.barrier()
            began = perf_counter_ns()
            times_ns["times"] = work_ns(prepare, self._call)
        else:
            self._driver.barrier()
            self._driver.gpu.synchronize()
            began = perf_counter_ns()
            times_ns["host"] = self._batches.host_ns(partial(self._fill, 1), self._call, iterations)
            if self._replay is not None:
                times_ns["graph"] = self._batches.work_ns(prepare, self._replay)
            # Last, so that the results of these calls are checked.
            times_ns["times"] = self._batches.work_ns(prepare, self._call)
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
                self._library.filler(array)(101)
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
        gpu, barriers = self._driver.gpu, [self._driver.barrier] * iterations
        copy_call = _copy_call if gpu is None else gpu.copy_call
        self._copy = self._copy or copy_call(nbytes)  # every message asks for the same size
        if self._lead is None:
            return work_ns(barriers, self._copy)
        return Batches(gpu, self._lead, iterations).work_ns(barriers, self._copy)


def _copy_call(nbytes: int) -> Call:
    return partial(_core.stream_copy, np.zeros(nbytes // 8), np.ones(nbytes // 8))


def _spread_ranks() -> None:
    """Keep this rank's core busy until the scheduler has given each rank a core of its own.

    A message wakes ranks on the core of its sender. If they waited for each other there, the calls
    would show the scheduler's time slices and not the speed of the engine.
    """
    end = perf_counter_ns() + _SPREAD_NS
    while perf_counter_ns() < end:
        pass


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
