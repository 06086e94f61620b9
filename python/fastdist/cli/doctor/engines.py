"""The engine for each kind of array, and a trial call."""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter_ns

import numpy as np

from fastdist.cli.doctor.facts import Fact, State
from fastdist.cli.doctor.libraries import version_of
from fastdist.collectives.communicator import Communicator
from fastdist.collectives.engines.nccl_library import why_unusable
from fastdist.collectives.init import local_group

_RANKS = 2
_WARMUP_CALLS = 50
_CALLS = 500
_TIMEOUT_S = 10.0


def engines_section() -> list[Fact]:
    """Return all engines, available or not."""
    return [
        _engine("local", "any array, world of one"),
        _engine("host", "CPU arrays, ranks of one machine"),
        _engine("nccl", "arrays on GPUs", why_unusable()),
        _engine("net", "CPU arrays across machines, by TCP"),
        _engine("xla", "XLA tensors in TPUStrategy", _why_missing("torch_xla")),
    ]


def arrays_section() -> list[Fact]:
    """Return the engine for each kind of array between the ranks of one machine."""
    why = why_unusable()
    return [
        Fact("numpy", "host", "host", State.GOOD),
        _used("host", "ml_dtypes", "numpy_bfloat16_float8", "numpy bfloat16, float8"),
        _used("host", "torch", "torch_cpu", "torch on CPU"),
        Fact("other_dlpack_cpu", "host", "host", State.GOOD, "other DLPack on CPU"),
        Fact("buffer_protocol", "host", "host", State.GOOD),
        _used("nccl", "torch", "torch_cuda", "torch on GPU", why),
        _used("nccl", "cupy", "cupy", "cupy", why),
        _used("nccl", None, "other_cuda", "other arrays on GPU", why),
    ]


def check_section() -> list[Fact]:
    """Check result and latency of an all_reduce between two threads of this process."""
    try:
        latencies_us = _all_reduce_between_threads()
    except Exception as error:  # any failure belongs into the report
        text = f"failed: {type(error).__name__}: {error}"
        return [Fact("all_reduce", False, text, State.BAD)]
    p50_us = statistics.median(latencies_us)
    return [
        Fact("all_reduce", True, f"right on {_RANKS} ranks (threads)", State.GOOD),
        Fact("p50_us", round(p50_us, 2), f"{p50_us:.1f} µs for 8 bytes", label="latency, p50"),
    ]


def _engine(engine: str, serves: str, why: str = "") -> Fact:
    """Return what an engine serves; `why` tells why it is not available."""
    if why:
        return Fact(engine, "not available", f"not available  {serves}: {why}", State.ABSENT)
    return Fact(engine, "available", f"available   {serves}", State.GOOD)


def _why_missing(library: str) -> str:
    return f"{library} is not installed" if version_of(library) is None else ""


def _used(engine: str, library: str | None, key: str, label: str, why: str = "") -> Fact:
    """Return the engine for a library's arrays; none if it cannot be used, which `why` tells."""
    why = (_why_missing(library) if library else "") or why
    if why:
        return Fact(key, None, f"none: {why}", State.ABSENT, label)
    return Fact(key, engine, engine, State.GOOD, label)


def _all_reduce_between_threads() -> list[float]:
    """Return the times of rank 0's calls in µs, after checking the result on every rank."""
    communicators = local_group(_RANKS, timeout=_TIMEOUT_S)
    try:
        with ThreadPoolExecutor(_RANKS) as threads:
            latencies_us, *_ = threads.map(_call_repeatedly, communicators)
        return latencies_us
    finally:
        for communicator in communicators:
            communicator.close()


def _call_repeatedly(communicator: Communicator) -> list[float]:
    array = np.array([1, 10], np.float32) * (communicator.rank + 1)
    expected = np.array([1, 10], np.float32) * (_RANKS * (_RANKS + 1) / 2)
    result = np.empty_like(array)
    times_us = []
    for _ in range(_WARMUP_CALLS + _CALLS):
        result.fill(0)
        start_ns = perf_counter_ns()
        communicator.all_reduce(array, out=result)
        times_us.append((perf_counter_ns() - start_ns) / 1e3)
        if not np.array_equal(result, expected):
            raise ArithmeticError(f"expected {expected}, got {result}")
    return times_us[_WARMUP_CALLS:]
