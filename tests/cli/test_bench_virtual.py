"""The bench on virtual GPUs: the engine for GPUs, measured and checked by the bench itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import fastdist._core as _core
import pytest
import small_list
from fastdist.cli.bench.cases import COLLECTIVES, Case, array_cases, list_case
from fastdist.cli.bench.peers import Engine
from fastdist.cli.bench.results import Placement, Row
from fastdist.cli.bench.session import Effort, Session
from paths import TESTS

MODULE = Path(_core.__file__).parent

pytestmark = pytest.mark.skipif(
    not (MODULE / "libvirtual_cudart.so").exists(), reason="this build has no virtual GPUs"
)


def engine(ranks: int, gpus: int) -> Engine:
    worker = (str(TESTS / "cli" / "support" / "virtual_bench.py"),)
    launcher = (sys.executable, "-m", "fastdist", "run", "-n", str(ranks))
    environment = {"OMP_NUM_THREADS": "1", "VIRTUAL_GPUS": str(gpus)}
    return Engine("fastdist", "fastdist_cuda", launcher + worker, environment)


@pytest.fixture(scope="module", params=[1, 2], ids=["shared", "apart"])
def session(request: pytest.FixtureRequest) -> Iterator[Session]:
    """Two ranks that share a GPU, or have one each."""
    effort = Effort(iterations=2, warmup=1, rounds=1)
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
        measured(session, array_cases(name, (size,), 2, array="torch")[0])


@pytest.mark.parametrize(
    ("dtype", "redop"), [("int32", "max"), ("float16", "mean"), ("uint8", "prod")]
)
def test_dtypes_and_reduce_ops(session: Session, dtype: str, redop: str) -> None:
    measured(
        session,
        array_cases("all_reduce", (100_000,), 2, dtype=dtype, redop=redop, array="torch")[0],
    )


@pytest.mark.slow
def test_a_list_is_measured_and_right(session: Session) -> None:
    small_list.add_small_list()
    measured(session, list_case(small_list.NAME, "float32", "sum", "torch"))
