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
    """What one rank has measured of some calls, in nanoseconds.

    Attributes:
        times_ns: Of each call; on a GPU, of what it has enqueued.
        wall_ns: Of everything, including what is around the calls.
        host_ns: Of each call on a GPU, until it returned.
        graph_ns: Of each replay of a graph with the call.
    """

    times_ns: list[int]
    wall_ns: int
    host_ns: list[int] = field(default_factory=list)
    graph_ns: list[int] = field(default_factory=list)


class Measured(Protocol):
    """A case that is bound to arrays and can be timed, on a CPU or on a GPU.

    `no_graph` says why the call was not captured; empty where it was, or where nobody asked.
    """

    no_graph: str

    def time(self, iterations: int, graph: bool) -> Times:
        """Runs the call so often, and its graph. Every rank must call."""

    def wrong_elements(self, graph: bool) -> int:
        """Wrong elements of the last timed call, and of one more on data that differs per element.

        Every rank must call.
        """


class MeasuredCall:
    """Times calls that are over when they return."""

    def __init__(self, driver: Driver, case: Case, variant: str) -> None:
        self._bound = BoundCase(driver, case, variant)
        self._last_iteration = 0
        self.no_graph = ""

    def time(self, iterations: int, graph: bool = False) -> Times:
        """See `Measured`."""
        bound = self._bound
        _spread_ranks()
        values = bound.fill_values(iterations)
        self._last_iteration = iterations - 1
        bound.barrier()
        began = perf_counter_ns()
        times_ns = _timed_loop(bound.fill, bound.barrier, bound.call, values)
        return Times(times_ns, perf_counter_ns() - began)

    def wrong_elements(self, graph: bool = False) -> int:
        """See `Measured`."""
        return self._bound.wrong_elements(self._last_iteration, [self._bound.call])


def _spread_ranks() -> None:
    """Keeps this rank's core busy until the scheduler has given each rank a core of its own.

    A message wakes ranks on the core that it came from; where they then wait for each other in a
    loop, a call lasts as long as the scheduler's turns, which says nothing about the engine.
    """
    end = perf_counter_ns() + _SPREAD_NS
    while perf_counter_ns() < end:
        pass


def _timed_loop(
    fill: Callable[[float], object], barrier: Call, call: Call, values: Sequence[int]
) -> list[int]:
    times_ns = []
    for value in values:
        fill(value)  # the data is where a computation would have left it: with this rank
        barrier()
        began = perf_counter_ns()
        call()
        times_ns.append(perf_counter_ns() - began)
    return times_ns
