"""The way that a collective would take between the ranks of this job, and its predicted time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np

import fastdist._core as _core
from fastdist.cli.bench.cases import array_case, format_size, parse_size
from fastdist.cli.bench.collectives import COLLECTIVES, buffer_elements
from fastdist.cli.bench.fastdist_driver import FastdistCalls
from fastdist.cli.doctor.facts import Fact, Section
from fastdist.collectives.communicator import Communicator
from fastdist.collectives.init import init

NAMES = tuple(name for name in COLLECTIVES if name != "send_recv")
_ITEM = 4  # float32
_COPY_BYTES = 32 << 20
_LATENCY_CALLS = 200
_LEAST_CALLS, _MOST_CALLS, _MOST_S = 5, 50, 1.0


def explain(name: str, size: str) -> list[Section]:
    """Explain a call. Every rank of the job must call.

    Args:
        name: the collective.
        size: bytes of the larger of a rank's two buffers, like "4M", as in `fastdist bench`.

    Returns:
        The facts, on rank 0; nothing on other ranks.

    Raises:
        ValueError: unknown collective or malformed size.
    """
    if name not in NAMES:
        raise ValueError(f"expected one of {', '.join(NAMES)}, got {name!r}")
    nbytes = parse_size(size)
    with init() as comm:
        return _explain(comm, name, nbytes)


def _explain(comm: Communicator, name: str, nbytes: int) -> list[Section]:
    n = comm.world_size
    case = array_case(name, nbytes, n, "float32", "sum", "numpy")
    passes, gets = buffer_elements(name, case.count, comm.rank, n)
    engine = comm.engine.compiled
    assert engine is not None
    is_gathered = name in ("all_gather", "gather", "scatter")
    argument_bytes = _ITEM * (case.count if is_gathered else passes)
    way, why, moves, crossings, link_bytes = engine.route(name, argument_bytes)
    exchange_s = _median_s(comm, comm.barrier, _LATENCY_CALLS)
    copy_s = _copy_seconds_per_byte(comm)
    memory_s = COLLECTIVES[name].floor_buffers(n) * nbytes * copy_s
    links = engine.links if isinstance(engine, _core.NetCommunicator) else None
    if links is None:
        predicted_s = exchange_s + (memory_s if moves else 0.0)
    else:
        predicted_s = crossings * links[0] + max(link_bytes / links[1], memory_s)
    given = np.ones(passes, np.float32) if passes else None
    result = np.empty(gets, np.float32) if gets else None
    call = FastdistCalls(comm).bind(case, given, result)
    calls = int(min(_MOST_CALLS, max(_LEAST_CALLS, _MOST_S / max(predicted_s, 1e-6))))
    measured_s = _median_s(comm, call, calls)
    if comm.rank != 0:
        return []
    facts = [
        Fact("call", name, f"{name}, {format_size(nbytes)} of float32 on {n} ranks"),
        Fact("engine", type(comm.engine).__name__, type(comm.engine).__name__),
        Fact("way", way, way),
        Fact("why", why, why),
    ]
    if links is not None:
        latency, bandwidth = links
        facts += [
            Fact("crossings", crossings, f"{crossings}, {latency * 1e6:.0f} µs each"),
            Fact(
                "link_bytes",
                link_bytes,
                f"{link_bytes:,.0f} bytes on the busiest link, {bandwidth / 1e6:.0f} MB/s",
            ),
        ]
    facts += [_time("predicted_us", predicted_s), _time("measured_us", measured_s)]
    return [Section("explain", tuple(facts))]


def _time(key: str, seconds: float) -> Fact:
    return Fact(key, round(seconds * 1e6, 2), f"{seconds * 1e6:,.1f} µs", label=key[:-3])


def _median_s(comm: Communicator, call: Callable[[], object], calls: int) -> float:
    """Return the median over calls of the slowest rank's time."""
    call()  # the first one finds cold connections
    times = np.empty(calls)
    for i in range(calls):
        comm.barrier()
        start = time.perf_counter()
        call()
        times[i] = time.perf_counter() - start
    return float(statistics.median(comm.all_reduce(times, "max")))


def _copy_seconds_per_byte(comm: Communicator) -> float:
    """Return the time of a byte of memory traffic while all ranks copy."""
    source, target = np.ones(_COPY_BYTES, np.uint8), np.zeros(_COPY_BYTES, np.uint8)
    copy = partial(_core.copy, target, source)
    return _median_s(comm, copy, _LEAST_CALLS) / (2 * _COPY_BYTES * comm.world_size)
