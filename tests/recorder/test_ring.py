"""Reading records: whole ones, torn ones, and files that are none."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path

import fastdist as fd
import numpy as np
import pytest
from fastdist.recorder import ring
from fastdist.recorder.place import record_paths
from fastdist.recorder.ring import UnreadableError, read_records
from synthetic_records import call_at, write_records


def test_records_are_read(tmp_path: Path) -> None:
    records = read_records(write_records(tmp_path, rank=2, world_size=4, sequences=range(5, 9)))
    assert records is not None
    assert (records.rank, records.world_size, records.job) == (2, 4, "0123456789abcdef")
    assert [call.sequence for call in records.calls] == [5, 6, 7, 8]
    last = records.calls[-1]
    assert (last.site, str(last.signature)) == ("/home/me/train.py:12 in step", "barrier()")
    assert (last.is_running, last.is_failed) == (False, False)
    assert last.done_s is not None
    assert last.done_s - last.entered_s == pytest.approx(1e-3, abs=1e-6)
    usual = records.usual[last.site]
    assert (usual.calls, usual.p99_s) == (4, pytest.approx(1e-3, abs=1e-6))


def test_a_call_that_goes_on_has_no_end(tmp_path: Path) -> None:
    records = read_records(write_records(tmp_path, running=True))
    assert records is not None
    assert [call.is_running for call in records.calls] == [False, False, True]


def test_torn_entries_are_left_out(tmp_path: Path) -> None:
    path = write_records(tmp_path, sequences=range(1, 6))
    data = bytearray(path.read_bytes())
    data[call_at(2) : call_at(2) + 8] = bytes(8)  # it is being written
    data[call_at(4) : call_at(4) + 8] = (999).to_bytes(8, "little")  # at the wrong place
    path.write_bytes(data)
    again = bytearray(data[ring._CALLS_AT : ring._CALLS_END])
    at = call_at(5) - ring._CALLS_AT
    again[at : at + 8] = (5 + ring._CALLS).to_bytes(8, "little")  # it was overwritten meanwhile
    snapshot = ring.Snapshot(path, bytes(data), bytes(again))
    assert snapshot.calls["sequence"].tolist() == [1, 3]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": b"0.0.1"}, "fastdist 0.0.1"),
        ({"format": 9}, "records of format 9"),
        ({"magic": b"nonsense"}, "holds no records"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = write_records(tmp_path, **change)
    with pytest.raises(UnreadableError, match=message):
        read_records(path)


@pytest.mark.parametrize("size", [3, 100, 512, 5000, 200_000, 405_503])
def test_cut_files_are_refused(tmp_path: Path, size: int) -> None:
    path = write_records(tmp_path)
    os.truncate(path, size)
    with pytest.raises(UnreadableError):
        read_records(path)


def test_files_that_vanish_or_begin_are_skipped(tmp_path: Path) -> None:
    assert read_records(tmp_path / "1-2-3.calls") is None
    for size in (0, ring._BYTES):
        path = write_records(tmp_path)
        path.write_bytes(bytes(size))
        assert read_records(path) is None


@pytest.mark.parametrize("seed", range(20))
def test_damaged_files_are_read_or_refused(tmp_path: Path, seed: int) -> None:
    path = write_records(tmp_path, sequences=range(1, 200))
    draw = np.random.default_rng(seed)
    data = np.frombuffer(path.read_bytes(), np.uint8).copy()
    at = draw.integers(8, len(data), 20_000)
    data[at] = draw.integers(0, 256, len(at))
    path.write_bytes(data.tobytes())
    with contextlib.suppress(UnreadableError):
        read_records(path)


def test_a_ring_that_is_written_gives_whole_calls() -> None:
    """Two threads write 4,000 calls while another reads."""
    ranks = fd.local_group(2)
    path = next(each.path for each in record_paths() if each.is_here and each.pid == os.getpid())
    ends = threading.Event()

    def write(rank: int) -> None:
        comm, array = ranks[rank], np.zeros(3)
        for _ in range(2_000):
            comm.all_reduce(array)
        ends.set()

    writers = [threading.Thread(target=write, args=(rank,)) for rank in range(2)]
    for writer in writers:
        writer.start()
    reads = 0
    while not ends.is_set():
        records = read_records(path)
        assert records is not None
        ours = [c for c in records.calls if c.site.endswith(" in write")]
        for call in ours:
            assert str(call.signature) == 'all_reduce(float64 × 3, op="sum")'
            assert 1 <= call.sequence <= 2_000
            assert abs(call.entered_s - time.monotonic()) < 60
        reads += 1
    for writer in writers:
        writer.join()
    assert reads > 3
    for comm in ranks:
        comm.close()
