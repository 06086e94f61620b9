"""The bench on virtual GPUs: the engine for GPUs, measured and checked by the bench itself."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import fastdist._core as _core
import ml_dtypes
import numpy as np
import pytest
from fastdist.cli.bench import add_parser
from fastdist.cli.bench.cases import Case, array_case, list_case
from fastdist.cli.bench.collectives import COLLECTIVES
from fastdist.cli.bench.pack import PackBench, PackCase
from fastdist.cli.bench.pack_command import run_pack
from fastdist.cli.bench.peers import Engine
from fastdist.cli.bench.placement import Placement
from fastdist.cli.bench.results import Row
from fastdist.cli.bench.session import Effort, Session

HERE = Path(__file__).resolve().parent
MODULE = Path(_core.__file__).parent

pytestmark = pytest.mark.skipif(
    not (MODULE / "libvirtual_cudart.so").exists(), reason="this build has no virtual GPUs"
)


def engine(ranks: int, gpus: int) -> Engine:
    worker = (str(HERE / "virtual_bench.py"),)
    launcher = (sys.executable, "-m", "fastdist", "run", "-n", str(ranks))
    environment = {"OMP_NUM_THREADS": "1", "VIRTUAL_GPUS": str(gpus)}
    return Engine("fastdist", "fastdist_cuda", launcher + worker, environment)


@pytest.fixture(scope="module", params=[1, 2], ids=["shared", "apart"])
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    """Two ranks that share a GPU, or have one each."""
    effort = Effort(iterations=2, warmup=1, rounds=1, bind=False, graph=True)
    placement = Placement(("virtual",) * request.param, (0, 1 % request.param))
    with Session([engine(2, request.param)], 2, effort, placement) as session:
        yield session


def measured(session: Session, case: Case) -> Row:
    row = session.measure(case)
    assert row.ours.wrong == 0
    assert row.ours.iterations == 2
    assert None not in (row.ours.host_us, row.ours.graph_us), row.ours.no_graph
    return row


@pytest.mark.parametrize("name", sorted(set(COLLECTIVES) - {"barrier"}))
def test_every_collective_is_measured_and_right(session: Session, name: str) -> None:
    for size in (8, 300_000):
        measured(session, array_case(name, size, 2, "float32", "sum", "torch"))


@pytest.mark.parametrize(
    ("dtype", "redop"), [("int32", "max"), ("float16", "mean"), ("uint8", "prod")]
)
def test_dtypes_and_reduce_ops(session: Session, dtype: str, redop: str) -> None:
    measured(session, array_case("all_reduce", 100_000, 2, dtype, redop, "torch"))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_list_is_reduced_in_every_way(session: Session) -> None:
    row = measured(session, list_case("resnet50", "float32", "sum", "torch"))
    assert [way.engine for way in row.others] == ["fastdist: list in bf16", "fastdist: one array"]
    assert [(way.wrong, way.no_graph) for way in row.others] == [(0, ""), (0, "")]


@pytest.mark.parametrize("compress", ["", "bf16", "fp16"])
@pytest.mark.parametrize("bucket_bytes", [1 << 20, 1 << 30])
def test_lists_come_back_from_their_buckets(compress: str, bucket_bytes: int) -> None:
    from virtual_bench import VirtualGpu

    bench = PackBench(VirtualGpu(0), False, bucket_bytes, 1)
    rows = bench.measure(PackCase("resnet50", "float32", compress))
    assert [(row.way, row.direction, row.wrong) for row in rows] == [
        ("fastdist", "pack", 0),
        ("fastdist", "unpack", 0),
    ]
    assert all(row.p50_us > 0 and row.copy_percent > 0 for row in rows)
    assert [row.iterations for row in rows] == [4, 4]


def test_what_is_in_the_buckets_is_what_was_packed() -> None:
    from virtual_bench import VirtualGpu, va

    gpu = VirtualGpu(0)
    arrays = [va.array(np.arange(n, dtype=np.float32)) for n in (5, 0, 40_000, 1)]
    packed = _core.PackedList(arrays, 0, "bf16", 1 << 16)
    assert packed.nbytes == 16 + 80_000 + 16
    packed.pack(gpu.stream)
    for array in arrays:
        array.fill(-1)
    packed.unpack(gpu.stream)
    gpu.synchronize()
    rounded = np.arange(40_000, dtype=np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
    assert [array.numpy().tolist() for array in arrays] == [
        [0, 1, 2, 3, 4],
        [],
        rounded.tolist(),
        [0],
    ]


def test_lists_that_cannot_be_packed_are_refused() -> None:
    from virtual_bench import VirtualGpu, va

    VirtualGpu(0)
    integers, floats = va.zeros(3, "int32"), va.zeros(3, "float32")
    with pytest.raises(ValueError, match="one dtype, got int32 and float32"):
        _core.PackedList([integers, floats], 0, None, 1 << 20)
    with pytest.raises(TypeError, match="float32 and float64 arrays, got int32"):
        _core.PackedList([integers], 0, "bf16", 1 << 20)
    with pytest.raises(ValueError, match="at least one array"):
        _core.PackedList([], 0, None, 1 << 20)


def test_bench_pack_as_a_user_runs_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from virtual_bench import VirtualGpu

    module = ModuleType("fastdist.cli.bench.torch_gpu")
    module.open_gpu = VirtualGpu  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    files = ["--json", str(tmp_path / "a.json"), "--csv", str(tmp_path / "a.csv")]
    options = parser.parse_args(["bench", "pack", "--list", "resnet50", "--iters", "4", *files])
    assert run_pack(options) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [f"# wrote {tmp_path / name}" for name in ("a.json", "a.csv")]
    assert [line.split(",")[0] for line in lines if line.startswith("resnet50")] == [
        *["resnet50 float32"] * 2,
        *["resnet50 float32 as bf16"] * 2,
    ]
    found = json.loads((tmp_path / "a.json").read_text())
    assert [row["wrong"] for row in found["rows"]] == [0, 0, 0, 0]
    assert found["machine"]["gpus"].startswith("virtual GPU 0")
    assert len((tmp_path / "a.csv").read_text().splitlines()) == 5
