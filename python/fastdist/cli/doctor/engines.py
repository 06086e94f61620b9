"""The engine for each kind of array, and a trial call."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from fastdist.cli.doctor.facts import Fact, State
from fastdist.cli.doctor.libraries import version_of
from fastdist.collectives.communicator import Communicator
from fastdist.collectives.engines.nccl_library import why_unusable
from fastdist.collectives.init import local_group

_RANKS = 2
_TIMEOUT_S = 10.0
_EXPECTED = [3.0, 30.0]


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
    """Check the result of an all_reduce between two threads of this process."""
    try:
        communicators = local_group(_RANKS, timeout=_TIMEOUT_S)
        try:
            with ThreadPoolExecutor(_RANKS) as threads:
                results = list(threads.map(_all_reduce, communicators))
        finally:
            for communicator in communicators:
                communicator.close()
    except Exception as error:  # any failure belongs into the report
        text = f"failed: {type(error).__name__}: {error}"
        return [Fact("all_reduce", False, text, State.BAD)]
    if results != [_EXPECTED] * _RANKS:
        text = f"wrong: expected {_EXPECTED} on each rank, got {results}"
        return [Fact("all_reduce", False, text, State.BAD)]
    return [Fact("all_reduce", True, f"right on {_RANKS} ranks (threads)", State.GOOD)]


def _all_reduce(communicator: Communicator) -> list[float]:
    array = np.array([1, 10], np.float32) * (communicator.rank + 1)
    result: list[float] = communicator.all_reduce(array).tolist()
    return result


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
