"""The way that a collective would take between the ranks of this job, and its predicted time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

import fastdist._core as _core
from fastdist.cli.bench.cases import format_size, parse_size
from fastdist.cli.bench.collectives import COLLECTIVES, ROOT, buffer_elements
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
    count = nbytes // _ITEM // (n if COLLECTIVES[name].blocks else 1)
    passes, gets = buffer_elements(name, count, comm.rank, n)
    engine = comm.engine.compiled
    assert engine is not None
    is_gathered = name in ("all_gather", "gather", "scatter")
    argument_bytes = _ITEM * (count if is_gathered else passes)
    way, why, moves, crossings, link_bytes = engine.route(name, argument_bytes)
    exchange_s = _median_s(comm, comm.barrier, _LATENCY_CALLS)
    copy_s = _copy_seconds_per_byte(comm)
    memory_s = COLLECTIVES[name].floor_buffers(n) * nbytes * copy_s
    links = engine.links if isinstance(engine, _core.NetCommunicator) else None
    if links is None:
        predicted_s = exchange_s + (memory_s if moves else 0.0)
    else:
        predicted_s = crossings * links[0] + max(link_bytes / links[1], memory_s)
    call = _call(comm, name, np.ones(passes, np.float32), np.empty(gets, np.float32))
    measured_s = _median_s(comm, call, _calls_for(predicted_s))
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


def _call(
    comm: Communicator, name: str, given: np.ndarray, result: np.ndarray
) -> Callable[[], object]:
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: comm.all_reduce(given),
        "reduce": lambda: comm.reduce(given, root=ROOT),
        "broadcast": lambda: comm.broadcast(given, ROOT),
        "all_gather": lambda: comm.all_gather(given, out=result),
        "gather": lambda: comm.gather(given, ROOT, out=result if comm.rank == ROOT else None),
        "scatter": lambda: comm.scatter(given if comm.rank == ROOT else None, ROOT, out=result),
        "reduce_scatter": lambda: comm.reduce_scatter(given, out=result),
        "all_to_all": lambda: comm.all_to_all(given, out=result),
        "barrier": comm.barrier,
    }
    return calls[name]


def _calls_for(predicted_s: float) -> int:
    return int(min(_MOST_CALLS, max(_LEAST_CALLS, _MOST_S / max(predicted_s, 1e-6))))


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

    def copy() -> None:
        _core.copy(target, source)

    return _median_s(comm, copy, _LEAST_CALLS) / (2 * _COPY_BYTES * comm.world_size)
