"""The parts of `fastdist bench`: sizes, shapes, messages, the check of results, figures."""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastdist.cli.bench import report as text
from fastdist.cli.bench import results
from fastdist.cli.bench.cases import (
    COLLECTIVES,
    GRADIENT_SHAPES,
    Case,
    array_cases,
    buffer_elements,
    list_case,
)
from fastdist.cli.bench.drivers import NUMPY_ARRAYS, ArrayLibrary, Call
from fastdist.cli.bench.peers import (
    MPI_NAMES,
    find_peers,
    parse_peers,
)
from fastdist.cli.bench.results import (
    Measurement,
    Report,
    Row,
    buffer_bytes,
    p99_us,
    slowest_rank,
)
from fastdist.cli.bench.session import reason_in
from fastdist.cli.bench.verify import count_wrong, patterned_inputs, write_input
from fastdist.cli.bench.worker import Worker
from fastdist.cli.machine_facts import total_cache_bytes
from fastdist.cli.sizes import format_size, parse_size, parse_sizes
from hypothesis import given
from hypothesis import strategies as st

has_torch = importlib.util.find_spec("torch") is not None
has_matplotlib = importlib.util.find_spec("matplotlib") is not None


# Sizes


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("8", 8),
        ("1K", 1024),
        ("64k", 65536),
        ("3M", 3 << 20),
        ("2GiB", 2 << 30),
        (" 5 MB ", 5 << 20),
    ],
)
def test_a_size_is_read_in_powers_of_1024(written: str, size: int) -> None:
    assert parse_size(written) == size


@pytest.mark.parametrize("written", ["", "0", "K", "-8", "1.5K", "8X", "8:16"])
def test_what_is_no_size_is_refused_by_name(written: str) -> None:
    with pytest.raises(ValueError, match="expected a size"):
        parse_size(written)


@given(st.integers(1, 1 << 45))
def test_a_size_survives_being_written_and_read(size: int) -> None:
    assert parse_size(format_size(size)) == size


@given(st.integers(1, 1 << 32), st.integers(1, 1 << 32))
def test_a_range_grows_by_fours_and_has_both_ends(first: int, last: int) -> None:
    first, last = sorted((first, last))
    sizes = parse_sizes(f"{first}:{last}")
    assert (sizes[0], sizes[-1]) == (first, last)
    assert sizes[:-1] == tuple(first * 4**index for index in range(len(sizes) - 1))
    assert len(sizes) == 1 or sizes[-2] < sizes[-1] <= 4 * sizes[-2]


@given(st.lists(st.integers(1, 1 << 40), min_size=1, max_size=20))
def test_a_list_of_sizes_stays_in_its_order(sizes: list[int]) -> None:
    assert parse_sizes(",".join(map(format_size, sizes))) == tuple(sizes)


@pytest.mark.parametrize("written", ["64:8", "8:", "8,,9"])
def test_a_range_that_makes_no_sense_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_sizes(written)


# Models and cases


@pytest.mark.parametrize(
    ("model", "tensors", "parameters"),
    [("resnet50", 161, 25_557_032), ("gpt2", 148, 124_439_808), ("bert", 199, 109_482_240)],
)
def test_a_model_has_the_tensors_and_parameters_of_the_original(
    model: str, tensors: int, parameters: int
) -> None:
    shapes = GRADIENT_SHAPES[model]
    assert len(shapes) == tensors
    assert sum(map(math.prod, shapes)) == parameters
    assert list_case(model, "float16", "sum", "numpy").bytes == 2 * parameters


@given(
    st.sampled_from(sorted(set(COLLECTIVES) - {"barrier"})),
    st.integers(1, 1 << 20),
    st.integers(2, 9),
)
def test_bytes_are_those_of_the_largest_buffer(name: str, size: int, world_size: int) -> None:
    case = array_cases(name, (size,), world_size)[0]
    ranks = range(world_size)
    largest = max(max(buffer_elements(name, case.count, rank, world_size)) for rank in ranks)
    assert case.bytes == 4 * largest
    assert case.bytes <= max(size, 4 * world_size)


def test_a_barrier_has_one_case_and_no_bytes() -> None:
    cases = array_cases("barrier", (8, 1024), 2)
    assert [(case.bytes, case.redop) for case in cases] == [(0, "")]


# Wrong results


def right_result(name: str, inputs: list[np.ndarray[Any, Any]], rank: int, redop: str) -> Any:
    """Return the result of a collective, computed by numpy."""
    world_size = len(inputs)
    stacked = np.stack(inputs).astype(np.float64 if inputs[0].dtype.kind == "f" else np.int64)
    reduced = {
        "sum": stacked.sum(0),
        "mean": stacked.mean(0),
        "prod": stacked.prod(0),
        "min": stacked.min(0),
        "max": stacked.max(0),
    }[redop].astype(inputs[0].dtype)
    results: dict[str, Callable[[], np.ndarray[Any, Any]]] = {
        "all_reduce": lambda: reduced,
        "reduce": lambda: reduced,
        "broadcast": lambda: inputs[0],
        "all_gather": lambda: np.concatenate(inputs),
        "gather": lambda: np.concatenate(inputs),
        "scatter": lambda: np.split(inputs[0], world_size)[rank],
        "reduce_scatter": lambda: np.split(reduced, world_size)[rank],
        "all_to_all": lambda: np.concatenate([np.split(x, world_size)[rank] for x in inputs]),
        "send_recv": lambda: inputs[rank - 1],
    }
    return results[name]().copy()


def patterned(library: ArrayLibrary, size: int, world_size: int, dtype: str, redop: str) -> Any:
    inputs = patterned_inputs(world_size, dtype, redop)
    arrays = [np.empty(size, dtype) for _ in range(world_size)]
    for rank, array in enumerate(arrays):
        write_input(library, [array], inputs, rank)
    return inputs, arrays


@pytest.mark.parametrize("name", sorted(set(COLLECTIVES) - {"barrier"}))
@pytest.mark.parametrize("size", [12, 200_004])
def test_wrong_elements_are_counted_exactly(name: str, size: int) -> None:
    library, world_size, rank = NUMPY_ARRAYS, 3, 1
    inputs, arrays = patterned(library, size, world_size, "float32", "sum")
    result = right_result(name, arrays, rank, "sum")
    assert count_wrong(library, [result], name, rank, inputs) == 0
    result[[0, len(result) // 2, -1]] += 1
    assert count_wrong(library, [result], name, rank, inputs) == 3
    result[0] = np.nan
    assert count_wrong(library, [result], name, rank, inputs) == 3


def test_blocks_in_the_wrong_order_are_wrong() -> None:
    library = NUMPY_ARRAYS
    inputs, arrays = patterned(library, 30_000, 3, "int32", "sum")
    swapped = np.concatenate([arrays[1], arrays[0], arrays[2]])
    assert count_wrong(library, [swapped], "all_gather", 0, inputs) > 30_000
    shifted = np.roll(right_result("all_reduce", arrays, 0, "sum"), 5)
    assert count_wrong(library, [shifted], "all_reduce", 0, inputs) > 10_000


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "uint8", "int64"])
@pytest.mark.parametrize("redop", ["sum", "prod", "min", "max", "mean"])
@pytest.mark.parametrize("world_size", [1, 2, 7])
def test_right_results_of_every_reduce_op_count_as_right(
    dtype: str, redop: str, world_size: int
) -> None:
    if redop == "mean" and "int" in dtype:
        pytest.skip("mean of integers is refused")
    library = NUMPY_ARRAYS
    inputs, arrays = patterned(library, 5000, world_size, dtype, redop)
    result = right_result("all_reduce", arrays, 0, redop)
    assert count_wrong(library, [result], "all_reduce", 0, inputs) == 0
    result[17] += 1
    assert count_wrong(library, [result], "all_reduce", 0, inputs) == 1


class OneRankDriver:
    """An engine of one rank; it changes as many elements of each result as it is told to."""

    gpu = None

    def __init__(self, corrupted: int) -> None:
        self.rank = 0
        self.world_size = 1
        self.version = "test"
        self._corrupted = corrupted

    def arrays(self, kind: str) -> ArrayLibrary:
        return NUMPY_ARRAYS

    def barrier(self) -> None:
        pass

    def bind(self, case: Case, passes: Any, gets: Any) -> Call:
        passes = passes[-1] if case.model else passes

        def call() -> None:
            result = passes if gets is None else gets
            result[:] = passes
            result[: self._corrupted] += 1

        return call


@pytest.mark.parametrize("corrupted", [0, 3])
@pytest.mark.parametrize("name", ["all_reduce", "all_gather"])
def test_a_corrupting_engine_is_found_out_in_timed_calls_and_after(
    name: str, corrupted: int
) -> None:
    worker = Worker(OneRankDriver(corrupted))
    assert worker.prepare(array_cases(name, (4000,), 1)[0]) == ("", "")
    times = worker.time(4)
    assert {kind: len(part) for kind, part in times.items()} == {
        **{"times": 4, "wall": 1},
        **{"host": 0, "graph": 0},
    }
    assert 0 < sum(times["times"]) <= times["wall"][0]
    assert worker.check() == 2 * corrupted  # of the last timed call, and of one more


def test_a_corrupted_list_is_found_out() -> None:
    worker = Worker(OneRankDriver(2))
    worker.prepare(list_case("resnet50", "int8", "sum", "numpy"))
    worker.time(1)
    assert worker.check() == 4


# Figures and tables


def row_of(p50_us: float, others: tuple[Measurement, ...] = ()) -> Row:
    case = array_cases("all_reduce", (1 << 20,), 2)[0]
    ours = Measurement("fastdist", p50_us, 2 * p50_us, 5, 0)
    return Row(case, 2, 50.0, ours, others)


def report_of(*rows: Row) -> Report:
    names = ("processor", "cores", "cache", "memory", "kernel", "python")
    machine = dict.fromkeys(names, "1")
    engines = {"fastdist": "fastdist 1", "gloo": "gloo 1", "mpich": "MPICH 1"}
    return Report(2, machine, engines, {"impi": "pip install it"}, 50.0, list(rows))


def test_the_slowest_rank_counts() -> None:
    assert slowest_rank([[1, 5, 3], [2, 4, 3]]) == [2, 5, 3]


def test_figures_are_those_of_nccl_tests() -> None:
    case = array_cases("all_reduce", (4000,), 4)[0]
    assert p99_us([*range(900, 999), 1000, 5000]) == 1
    row = Row(case, 4, 0.0, Measurement("fastdist", 0.95), ())
    assert row.algbw(0.95) == pytest.approx(4000 / 950)
    assert row.busbw(0.95) == pytest.approx(4000 / 950 * 2 * 3 / 4)
    factors = {name: spec.bus_factor(4) for name, spec in COLLECTIVES.items()}
    assert factors["all_gather"] == factors["reduce_scatter"] == factors["all_to_all"] == 0.75
    assert factors["broadcast"] == factors["reduce"] == factors["send_recv"] == 1


def test_a_ratio_says_how_many_times_as_fast_fastdist_is() -> None:
    row = row_of(10.0)
    assert row.times_as_fast(Measurement("gloo", 30.0)) == 3
    assert row.times_as_fast(Measurement("gloo", unsupported="no")) is None
    assert row.floor_percent == 500


def test_columns_stand_under_their_names() -> None:
    others = (Measurement("gloo", 30.0), Measurement("mpich", unsupported="has no such thing"))
    row = row_of(10.0, others)
    table = text.Table(["gloo", "mpich"])
    names, units = table.header()
    line, note = table.row(row)
    assert names.split() == [
        *("bytes", "count", "type", "redop", "p50", "p99", "algbw", "busbw", "wrong", "floor"),
        "gloo",
        "mpich",
    ]
    cells = "1048576 262144 float32 sum 10.00 20.00 104.86 104.86 0 500 30.00 3.00x n/a"
    assert " ".join(line.split()) == cells
    assert line.index("10.00") + len("10.00") == names.index("p50") + len("p50")
    assert len(units) >= len(line)
    assert note == "# mpich: has no such thing"
    assert table.row(row) == [line]


def test_a_narrow_terminal_gets_fewer_columns_and_peers_below() -> None:
    others = (Measurement("gloo", 30.0), Measurement("mpich", unsupported="has no such thing"))
    row = row_of(10.0, others)
    table = text.Table(["gloo", "mpich"], width=80)
    names, _, peers = table.header()
    ours, *below, _ = table.row(row)
    assert names.split()[:3] == ["bytes", "type", "redop"]
    assert ours.split()[:3] == ["1048576", "float32", "sum"]
    assert peers.split() == ["peer", "us", "ratio"]
    assert [line.split() for line in below] == [["gloo", "30.00", "3.00x"], ["mpich", "n/a"]]
    end = names.index("p50") + len("p50")
    assert (ours[:end].split()[-1], below[0][:end].split()[-1]) == ("10.00", "30.00")
    # One peer fits where the terminal is somewhat wider.
    assert len(text.Table(["gloo"], width=102).row(row_of(10.0, others[:1]))) == 1


def test_the_floor_is_left_out_where_the_caches_hold_the_buffers() -> None:
    row = replace(row_of(10.0), fits_caches=True)
    assert text.Table(()).row(row)[0].split()[9] == "-"
    assert text.row_object(row)["floor_percent"] is None
    assert "# floor -: the caches hold the buffers of all ranks" in text.footing(report_of(row))
    assert "floor -" not in "".join(text.footing(report_of(row_of(10.0))))


def test_the_buffers_of_all_ranks_are_counted() -> None:
    def nbytes(name: str) -> int:
        return buffer_bytes(array_cases(name, (1200,), 3)[0], 3)

    assert nbytes("all_reduce") == 3 * 1200
    assert nbytes("all_gather") == 3 * (400 + 1200)
    assert nbytes("gather") == 3 * 400 + 1200
    assert nbytes("barrier") == 0
    assert buffer_bytes(list_case("resnet50", "float32", "sum", "numpy"), 2) == 8 * 25_557_032


def test_caches_are_counted_once_however_many_cores_share_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    for core, sharers in ((0, "0-1"), (1, "0-1"), (2, "2-3"), (3, "2-3")):
        for number, (level, size) in enumerate(((1, "32K"), (3, "16384K"), (2, "512K"))):
            index = tmp_path / f"cpu{core}" / "cache" / f"index{number}"
            index.mkdir(parents=True)
            for name, content in (("level", level), ("size", size), ("shared_cpu_list", sharers)):
                (index / name).write_text(f"{content}\n")
    assert total_cache_bytes(tmp_path) == 32 << 20
    assert total_cache_bytes(tmp_path / "absent") == 0


def test_a_wide_spread_and_few_calls_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = row_of(10.0)
    quiet = replace(quiet, ours=replace(quiet.ours, iterations=20))
    wide = array_cases("all_reduce", (64,), 2)[0]
    rows = [quiet, replace(quiet, case=wide, ours=replace(quiet.ours, p99_us=51.0))]
    assert report_of(quiet).warnings == []
    for cores, why in (
        (2, "something else, such as another program, took a core during calls"),
        (1, "2 ranks take turns on 1 cores"),
    ):
        monkeypatch.setattr(results, "usable_cores", lambda cores=cores: cores)
        assert report_of(*rows).warnings == [
            f"busy machine: p99 is more than 5 times p50 at all_reduce 64 B; {why}"
        ]
    rows[0] = replace(quiet, ours=replace(quiet.ours, iterations=19))
    wide_warning, few = report_of(*rows).warnings
    assert few == "too few calls: fewer than 20 at all_reduce 1 MiB; --time-s or --iters gives more"
    assert text.footing(report_of(*rows))[-2:] == [
        f"# warning: {wide_warning}",
        f"# warning: {few}",
    ]
    wrong = replace(quiet, others=(Measurement("gloo", 30.0, wrong=2),))
    told = "# warning: WRONG RESULTS: gloo got 2 elements of all_reduce 1 MiB wrong"
    assert text.footing(report_of(wrong))[-1] == told


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("", ""),
        ("-----\nno hosts\nsee the manual\n", "no hosts"),
        (
            "Traceback:\n  x\nValueError: a\nmore.words.OtherError: b\nend",
            "more.words.OtherError: b",
        ),
        (
            "[0] Traceback:\n[ 1] ImportError: no torch\nfastdist run: rank 1 failed",
            "ImportError: no torch",
        ),
    ],
)
def test_the_reason_of_a_failure_is_found_in_its_output(output: str, reason: str) -> None:
    assert reason_in(output) == reason


def test_json_holds_what_the_table_shows() -> None:
    report = report_of(row_of(10.0, (Measurement("gloo", 30.0),)))
    loaded = json.loads(json.dumps(text.report_object(report)))
    assert loaded["missing"] == {"impi": "pip install it"}
    assert loaded["rows"][0]["p50_us"] == 10
    assert loaded["rows"][0]["peers"]["gloo"]["times_as_fast"] == 3


# Peers


def test_mpi_stands_for_every_mpi() -> None:
    assert parse_peers("mpi,gloo,mpich") == (*MPI_NAMES, "gloo")
    with pytest.raises(ValueError, match="got 'nccl'"):
        parse_peers("gloo,nccl")


@pytest.mark.parametrize("name", MPI_NAMES)
def test_a_missing_peer_is_named_with_its_pip_command(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _, missing = find_peers([name], 2)
    prefix = tmp_path / "fastdist" / "peers" / name
    assert f"pip install --ignore-installed --prefix {prefix} " in missing[name]
