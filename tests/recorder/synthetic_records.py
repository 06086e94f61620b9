"""Files of records as csrc/core/recorder.h lays them out, of ranks that do not exist."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from fastdist import __version__
from fastdist.recorder import ring
from fastdist.recorder.place import own_namespace
from fastdist.recorder.system import start_of

KEY = 77
BARRIER = 10


def write_records(
    folder: Path,
    rank: int = 0,
    world_size: int = 1,
    sequences: range = range(1, 4),
    running: bool = False,
    engine: bytes = b"host",
    signature: int = BARRIER,
    **header: Any,
) -> Path:
    """Write the records of a rank of this process that has made barriers, 1 ms each.

    Args:
        sequences: of the barriers.
        running: the last barrier has not ended.
        signature: packed, of other calls than barriers.
        header: fields of the header.
    """
    now_ns = time.monotonic_ns()
    data = bytearray(ring._BYTES)
    head = np.zeros(1, ring._HEADER)
    fields: dict[str, Any] = {
        "magic": b"fastdist",
        "format": 2,
        "pid": os.getpid(),
        "started": start_of(os.getpid()),
        "monotonic_ns": now_ns - 10**9,
        "realtime_ns": time.time_ns(),
        "rank": rank,
        "world_size": world_size,
        "clock": 1,
        "ticks": now_ns - 10**9,
        "calls": len(sequences),
        "communicators": 1,
        "sites": 1,
        "version": __version__.encode(),
        "job": b"0123456789abcdef",
        "host": b"here",
        "program": b"train.py",
    }
    for name, value in (fields | header).items():
        head[name] = value
    member = np.array([(rank, world_size, KEY, 1, engine)], ring._COMMUNICATOR)
    put(data, 0, head)
    put(data, ring._COMMUNICATORS_AT, member)
    put(data, ring._SITES_AT, np.array([b"/home/me/train.py:12 in step"], ring._SITE))
    for i, sequence in enumerate(sequences, 1):
        began_ns = now_ns - (len(sequences) - i + 1) * 2_000_000
        is_last = running and i == len(sequences)
        done_ns, outcome = (0, 0) if is_last else (began_ns + 1_000_000, 1)
        call = (i, began_ns, 0, done_ns, signature, 0, sequence, 0, 1, 0, outcome, 0)
        put(data, call_at(i), np.array([call], ring._CALL))
    path = folder / f"{own_namespace()}-{head['pid'][0]}-{rank:08x}.calls"
    path.write_bytes(data)
    return path


def call_at(number: int) -> int:
    return ring._CALLS_AT + number % ring._CALLS * ring._CALL.itemsize


def put(data: bytearray, at: int, array: np.ndarray[Any, Any]) -> None:
    data[at : at + array.nbytes] = array.tobytes()
