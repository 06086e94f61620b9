"""The bench on GPUs, without one: options, tables, and timing on a stream of the CPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import fastdist._core as _core
import pytest
from fastdist.cli.bench import report as text
from fastdist.cli.bench.cases import Case, array_cases, list_case
from fastdist.cli.bench.peers import Engine, find_peers
from fastdist.cli.bench.plot import write_plot
from fastdist.cli.bench.results import Measurement, Placement, Report, Row, median_us
from fastdist.cli.bench.session import Effort, Session
from fastdist.cli.bench.worker import Batches, Worker
from fastdist.cli.main import main
from paths import ROOT, TESTS
from stream_device import StreamDevice

has_torch = importlib.util.find_spec("torch") is not None
has_matplotlib = importlib.util.find_spec("matplotlib") is not None
without_gpu = pytest.mark.skipif(_core.why_no_cuda() == "", reason="this machine has a GPU")

ALONE = Placement(("H",), (0,))
SHARED = Placement(("H", "H"), (0, 1, 0))
APART = Placement(("H", "H"), (0, 1))


def run_bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "fastdist", "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


# Options


@without_gpu
def test_without_a_gpu_the_bench_says_why() -> None:
    done = run_bench("all_reduce", "--device", "cuda")
    assert done.returncode == 2
    assert done.stderr == f"fastdist bench: no GPU: {_core.why_no_cuda()}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("all_reduce", "--device", "cuda", "--array", "numpy"), "torch, empty, got 'numpy'"),
        (("all_reduce", "--array", "cupy"), "invalid choice: 'cupy'"),
        (("all_reduce", "--device", "cuda", "--vs", "gloo"), "out of torch, got 'gloo'"),
        (("all_reduce", "--device", "cuda", "--vs", "torch,mpi"), "got 'mpi'"),
        (("all_reduce", "--vs", "torch"), "got 'torch'"),
        (("barrier", "--device", "cuda"), "barrier is for --device cpu"),
        (("gather", "--device", "cuda", "--array", "empty"), "the root of a gather"),
    ],
)
def test_options_that_make_no_sense_on_gpus_are_refused_by_name(
    capfd: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SystemExit) as caught:  # argparse exits by itself
        sys.exit(main(["bench", *arguments]))
    assert caught.value.code == 2
    assert message in capfd.readouterr().err


def test_a_missing_peer_is_named_with_its_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert find_peers(["torch"], 2) == ([], {"torch": "pip install torch"})


@pytest.mark.skipif(not has_torch, reason="torch is not installed")
def test_an_installed_peer_is_started_by_fastdist_run() -> None:
    (engine,), _ = find_peers(["torch"], 2)
    assert (engine.driver, engine.command[2:6]) == ("torch_nccl", ("fastdist", "run", "-n", "2"))


# Where ranks are


def test_ranks_that_share_gpus_are_labelled() -> None:
    assert ALONE.sharing == APART.sharing == ""
    assert str(APART) == "2 x H"
    assert SHARED.sharing == "2 ranks share GPU 0"
    assert str(SHARED) == "2 x H; 2 ranks share GPU 0"
    assert str(Placement(("A", "B"), (1, 1))) == "1 x B; 2 ranks share GPU 1"


# Timing on a stream


@pytest.fixture(scope="module")
def stream() -> StreamDevice:
    return StreamDevice()


def test_work_is_timed_apart_from_the_host(stream: StreamDevice) -> None:
    batches = Batches(stream)

    def call() -> None:
        stream.enqueue(lambda: time.sleep(0.001))
        time.sleep(0.005)  # the host takes longer than the stream

    batches.times_ns([lambda: None] * 4, call, 4)  # finds out how long a lead it takes
    work, _ = batches.times_ns([lambda: None] * 10, call, 4)
    assert len(work) == 10
    assert sorted(work)[3] >= 1e6
    assert min(work) < 5e6
    _, host = batches.times_ns([lambda: None] * 6, call, 4)
    assert len(host) == 6
    assert sorted(host)[3] >= 5e6


def test_what_prepares_a_call_is_not_in_its_time(stream: StreamDevice) -> None:
    batches = Batches(stream)
    prepared: list[int] = []

    def prepare(number: int) -> Any:
        return lambda: stream.enqueue(lambda: (time.sleep(0.005), prepared.append(number)))

    work, _ = batches.times_ns([prepare(n) for n in range(6)], lambda: stream.enqueue(int), 4)
    assert prepared == list(range(6))
    assert min(work) < 5e6


class OneRankOnAStream:
    """An engine of one rank on a stream; it changes as many elements as it is told to."""

    rank = 0
    world_size = 1
    version = "test"

    def __init__(self, gpu: StreamDevice, corrupted: int, captured: bool = True) -> None:
        self.gpu = gpu
        self._corrupted = corrupted
        self._captured = captured

    def arrays(self, kind: str) -> Any:
        return self.gpu.arrays

    def barrier(self) -> None:
        pass

    def bind(self, case: Case, passes: Any, gets: Any) -> Any:
        passes = passes[-1] if case.model else passes

        def work() -> None:
            result = passes if gets is None else gets
            result[:] = passes
            result[: self._corrupted] += 1

        def call() -> None:
            if self.gpu.is_capturing and not self._captured:
                raise RuntimeError("cannot be captured")
            self.gpu.enqueue(work)

        return call


@pytest.mark.parametrize("corrupted", [0, 3])
@pytest.mark.parametrize("name", ["all_reduce", "all_gather"])
def test_a_corrupting_engine_is_found_out_in_calls_and_in_graphs(
    stream: StreamDevice, name: str, corrupted: int
) -> None:
    driver = OneRankOnAStream(stream, corrupted)
    worker = Worker(driver)
    case = array_cases(name, (4000,), 1, array="torch")[0]
    assert worker.prepare(case) == ("", "")
    times = worker.time(5)
    assert {kind: len(part) for kind, part in times.items()} == {
        **{"host": 5, "graph": 5, "times": 5},
        "wall": 1,
    }
    assert all(ns > 0 for part in times.values() for ns in part)
    assert worker.check() == 3 * corrupted  # of the last timed call, of one more, and of a replay
    worker.drop_graph()
    worker.time(1)
    assert worker.check() == 2 * corrupted


def test_a_call_that_is_not_captured_is_measured_without_a_graph(stream: StreamDevice) -> None:
    driver = OneRankOnAStream(stream, 0, captured=False)
    worker = Worker(driver)
    reasons = worker.prepare(array_cases("all_reduce", (64,), 1, array="torch")[0])
    assert reasons == ("", "not captured: RuntimeError: cannot be captured")
    assert worker.time(3)["graph"] == []
    assert worker.check() == 0


def test_a_case_does_not_wait_for_the_stalls_of_the_last(stream: StreamDevice) -> None:
    worker = Worker(OneRankOnAStream(stream, 0))
    (case,) = array_cases("all_reduce", (64,), 1, array="torch")
    worker.prepare(case)
    assert worker._batches is not None
    first = worker._batches.copies
    worker._batches.copies *= 8
    worker.prepare(case)
    assert worker._batches.copies == first


def test_a_corrupted_list_on_a_stream_is_found_out(stream: StreamDevice) -> None:
    worker = Worker(OneRankOnAStream(stream, 2))
    worker.prepare(list_case("resnet50", "int8", "sum", "torch"))
    worker.drop_graph()
    assert worker.time(2)["graph"] == []
    assert worker.check() == 4


def stream_engine(name: str, driver: str) -> Engine:
    launcher = (
        sys.executable,
        "-m",
        "fastdist",
        "run",
        "-n",
        "2",
        str(TESTS / "cli" / "support" / "stream_worker.py"),
    )
    return Engine(name, driver, launcher, {"OMP_NUM_THREADS": "1"})


@pytest.mark.slow
def test_engines_on_streams_take_turns_and_graphs_are_theirs() -> None:
    engines = [
        stream_engine("fastdist", "fastdist_cuda"),
        stream_engine("torch", "torch_nccl"),  # refuses to be captured
    ]
    effort = Effort(iterations=4, warmup=1, rounds=2)
    with Session(engines, 2, effort, APART) as session:
        (case,) = array_cases("all_reduce", (4096,), 2, array="torch")
        row = session.measure(case)
        gathered = session.measure(
            array_cases("all_gather", (4096,), 2, dtype="int32", array="torch")[0]
        )
        with_mean = session.measure(replace(case, redop="mean"))
        assert session.copy_gb_per_s > 0
    assert [row.ours.wrong, gathered.ours.wrong, with_mean.ours.wrong] == [0, 0, 0]
    (other,) = row.others
    assert (row.ours.iterations, other.iterations, other.wrong) == (4, 4, 0)
    assert row.ours.p50_us > 0
    assert None not in (row.ours.host_us, row.ours.graph_us, other.host_us)
    assert (row.ours.host_p99_us or 0) >= (row.ours.host_us or 0) > 0
    assert row.ours.no_graph == ""
    assert (other.graph_us, other.no_graph) == (
        None,
        "not captured: RuntimeError: this is not captured",
    )
    assert row.floor_us == 0
    ratio = row.times_as_fast(other, "host_us")
    assert ratio == pytest.approx((other.host_us or 0) / (row.ours.host_us or 1))


# Figures and tables


def gpu_row(others: tuple[Measurement, ...] = (), floor_us: float = 5.0) -> Row:
    case = array_cases("all_reduce", (1 << 20,), 2, array="torch")[0]
    ours = Measurement("fastdist", 10.0, 20.0, 5, 0, host_us=2.0, host_p99_us=3.0, graph_us=9.0)
    return Row(case, 2, floor_us, ours, others)


TORCH = Measurement("torch", 30.0, 31.0, 5, 0, host_us=8.0, no_graph="not captured: x")


def gpu_report(placement: Placement, *rows: Row) -> Report:
    names = ("processor", "cores", "cache", "memory", "kernel", "python", "cuda driver")
    machine = dict.fromkeys(names, "1")
    engines = {"fastdist": "fastdist 1", "torch": "torch 1"}
    missing = {"torch": "pip install it"}
    return Report(2, machine, engines, missing, 50.0, list(rows), placement)


def test_host_and_graph_have_columns_of_their_own() -> None:
    row = gpu_row((TORCH, Measurement("second", unsupported="has no such thing")))
    table = text.Table(["torch", "second"], on_gpu=True)
    names, units = table.header()
    line, *notes = table.row(row)
    assert names.split()[-5:] == ["floor", "host", "graph", "torch", "second"]
    cells = (
        "1048576 262144 float32 sum 10.00 20.00 104.86 104.86 0 50 2.00 9.00 30.00 3.00x 8.00 n/a -"
    )
    assert " ".join(line.split()) == cells
    for name, cell in (("host", "2.00 "), ("graph", "9.00")):
        end = names.index(name) + len(name)
        assert line[:end].endswith(cell.strip())
    assert len(units) == len(line)
    assert notes == ["# torch: not captured: x", "# second: has no such thing"]


def test_the_tables_fit_a_narrow_terminal() -> None:
    row = gpu_row((TORCH, Measurement("second", unsupported="has no such thing")))
    table = text.Table(["torch", "second"], on_gpu=True, width=80)
    lines = table.header() + table.row(row)
    assert max(map(len, lines)) <= 80
    assert lines[2].split() == ["peer", "us", "ratio", "host"]
    assert lines[4].split() == ["torch", "30.00", "3.00x", "8.00"]


def test_the_median_of_no_times_is_none() -> None:
    assert median_us([3000, 1000, 2000]) == 2.0
    assert median_us([]) is None


def test_gpus_of_one_rank_each_have_no_floor() -> None:
    assert text.Table((), on_gpu=True).row(gpu_row(floor_us=0.0))[0].split()[9] == "-"


@pytest.mark.parametrize(
    ("placement", "expected"),
    [
        (SHARED, "2 ranks share GPU 0: not comparable with one rank per GPU"),
        (APART, "floor -: each rank has a GPU of its own"),
    ],
)
def test_the_table_says_what_the_gpus_are(placement: Placement, expected: str) -> None:
    report = gpu_report(placement, gpu_row((TORCH,)))
    assert f"# {placement}; CUDA 1" in text.heading(report, "all_reduce")
    assert expected in "\n".join(text.footing(report))


def test_json_and_plot_hold_what_is_measured_on_gpus(tmp_path: Path) -> None:
    case = array_cases("all_reduce", (1 << 22,), 2, array="torch")[0]
    report = gpu_report(SHARED, gpu_row((TORCH,)), replace(gpu_row((TORCH,)), case=case))
    loaded = text.report_object(report)
    assert loaded["gpus"]["shared"] == "2 ranks share GPU 0"
    assert loaded["gpus"]["of_rank"] == (0, 1, 0)
    row = loaded["rows"][0]
    assert (row["host_us"], row["host_p99_us"], row["graph_us"]) == (2.0, 3.0, 9.0)
    assert row["peers"]["torch"]["graph_us"] is None
    assert row["peers"]["torch"]["host_times_as_fast"] == 4.0
    json.dumps(loaded)
    if has_matplotlib:
        write_plot(report, tmp_path / "a.png")
        assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_tables_of_cpus_have_no_columns_of_gpus() -> None:
    table = text.Table(["gloo"])
    names, _ = table.header()
    assert names.split()[-2:] == ["floor", "gloo"]
    ours = Measurement("fastdist", 10.0, 20.0, 5, 0)
    assert table.row(replace(gpu_row(), ours=ours))[0].split()[-1] == "50"
    assert "host_us" not in text.row_object(replace(gpu_row(), ours=ours))


# torch.distributed, and the bars


@pytest.mark.skipif(not has_torch, reason="torch is not installed")
def test_overlapped_buckets_bring_every_tensor_back(tmp_path: Path) -> None:
    import torch
    import torch.distributed as dist
    from fastdist.cli.bench.drivers import bucketed, torch_arrays

    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        tensors = [torch.arange(4_000_000.0), torch.ones(3), torch.arange(5_000_000.0)]
        expected = [tensor.clone() for tensor in tensors]
        begin = partial(dist.all_reduce, async_op=True)
        bucketed(torch_arrays(), torch._foreach_copy_, tensors, "float32", begin)()
        assert all(torch.equal(got, right) for got, right in zip(tensors, expected, strict=True))
    finally:
        dist.destroy_process_group()


def gpu_bars() -> Any:
    path = ROOT / "benchmarks" / "gpu" / "gpu_bars.py"
    spec = importlib.util.spec_from_file_location("gpu_bars", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Found:
    """Gives the bars what a run would have found."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows

    def measure(self, cases: Any) -> Any:
        return [(row.case, row) for row in self._rows]


@pytest.mark.parametrize(
    ("peer_us", "peer_host_us", "verdicts"),
    [
        (10.0, 4.0, ["pass", "pass", "pass", "pass"]),
        (9.7, 3.3, ["pass", "MISS", "pass", "MISS"]),
        (0.0, None, ["pass", "skip", "pass", "skip"]),
    ],
)
def test_one_array_has_bars_for_the_gpu_and_for_the_host(
    peer_us: float, peer_host_us: float | None, verdicts: list[str]
) -> None:
    peer = Measurement("torch", peer_us, host_us=peer_host_us)
    others = (peer,) if peer_us else ()
    bars = list(gpu_bars().all_reduce(Found([gpu_row(others)])))
    assert [bar.verdict for bar in bars] == verdicts
    assert bars[2].measured == 2.0
    slow = replace(gpu_row(others).ours, host_us=5.1)
    bars = list(gpu_bars().all_reduce(Found([replace(gpu_row(others), ours=slow)])))
    assert bars[2].verdict == "MISS"


def test_lists_are_held_against_the_buckets_of_ddp() -> None:
    torch = Measurement("torch", 12.0)
    bars = list(gpu_bars().gradient_list(Found([gpu_row((torch,))])))
    assert [(bar.measured, bar.verdict) for bar in bars] == [(0, "pass"), (1.2, "MISS")]


def test_memory_has_its_bars() -> None:
    ranks = [{"again_bytes": 0, "growth_bytes": 0}, {"again_bytes": 0, "growth_bytes": 2 << 20}]
    assert [bar.verdict for bar in gpu_bars().memory_bars(ranks)] == ["pass", "MISS"]


@without_gpu
def test_bars_without_a_gpu_say_why(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "gpu" / "gpu_bars.py"
    done = subprocess.run(
        [sys.executable, str(script), "--out", str(tmp_path / "a.json")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (2, f"no GPU: {_core.why_no_cuda()}\n")
    assert not (tmp_path / "a.json").exists()
