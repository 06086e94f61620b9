"""The timed loop around one engine's call of one case on one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Protocol

from fastdist.cli.bench.bound_case import BoundCase
from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.driver import Call, Driver

_SPREAD_NS = 10_000_000


@dataclass(frozen=True, slots=True)
class Times:
    """Times of one rank's calls in nanoseconds.

    Attributes:
        times_ns: Time of each call; on a GPU, time of the enqueued work.
        wall_ns: Time of the whole loop.
        host_ns: Time until each call returned, on a GPU.
        graph_ns: Time of each replay of a graph with the call.
    """

    times_ns: list[int]
    wall_ns: int
    host_ns: list[int] = field(default_factory=list)
    graph_ns: list[int] = field(default_factory=list)


class Measured(Protocol):
    """A case bound to arrays, on a CPU or on a GPU.

    `no_graph` is the reason why the call was not captured in a graph; empty if it was captured or
    no graph was requested.
    """

    no_graph: str

    def time(self, iterations: int, graph: bool) -> Times:
        """Time `iterations` calls, and with `graph` as many replays. Every rank must call."""

    def wrong_elements(self, graph: bool) -> int:
        """Count wrong elements of the last timed call, and of another call.

        The data of the other call differs per element. Every rank must call.
        """


class MeasuredCall:
    """Times calls that have ended when they return."""

    def __init__(self, driver: Driver, case: Case, variant: str) -> None:
        self._bound = BoundCase(driver, case, variant)
        self._last_iteration = 0
        self.no_graph = ""

    def time(self, iterations: int, graph: bool = False) -> Times:
        bound = self._bound
        _spread_ranks()
        values = bound.fill_values(iterations)
        self._last_iteration = iterations - 1
        bound.barrier()
        began = perf_counter_ns()
        times_ns = _timed_loop(bound.fill, bound.barrier, bound.call, values)
        return Times(times_ns, perf_counter_ns() - began)

    def wrong_elements(self, graph: bool = False) -> int:
        return self._bound.wrong_elements(self._last_iteration, [self._bound.call])


def _spread_ranks() -> None:
    """Keep this rank's core busy until the scheduler has given each rank a core of its own.

    A message wakes ranks on the core of its sender. If they waited for each other there, the calls
    would show the scheduler's time slices and not the speed of the engine.
    """
    end = perf_counter_ns() + _SPREAD_NS
    while perf_counter_ns() < end:
        pass


def _timed_loop(
    fill: Callable[[float], object], barrier: Call, call: Call, values: Sequence[int]
) -> list[int]:
    times_ns = []
    for value in values:
        fill(value)  # leaves the data in this rank's cache, as a computation does
        barrier()
        began = perf_counter_ns()
        call()
        times_ns.append(perf_counter_ns() - began)
    return times_ns
