"""The drivers of nccl4py and cupy against the packages themselves, as far as no GPU is needed.

What they would call is checked against the signatures that the packages have.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastdist.cli.bench.arrays import UnsupportedCaseError
from fastdist.cli.bench.cases import array_case, list_case
from fastdist.cli.bench.collectives import COLLECTIVES, buffer_elements
from fastdist.cli.bench.cupy_driver import CupyDriver, identity_of, text_of
from fastdist.cli.bench.models import gradient_shapes
from fastdist.cli.bench.nccl4py_driver import Nccl4pyDriver
from stream_device import StreamDevice

BARRIERLESS = sorted(set(COLLECTIVES) - {"barrier"})


def package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"{name} is not installed: {error}")


class Checked:
    """Stands in for a communicator: notes calls that the real class would have accepted."""

    def __init__(self, arguments_of: Callable[[str, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        self._arguments_of = arguments_of
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> None:
            self.calls.append((name, self._arguments_of(name, arguments, named)))

        return call


def buffers(name: str, rank: int) -> tuple[Any, Any]:
    elements = buffer_elements(name, 100, rank, 2)
    made = [np.zeros(count, np.float32) if count else None for count in elements]
    return made[0], made[1]


# nccl4py


@pytest.fixture
def nccl4py() -> Any:
    return package("nccl.core")


def nccl4py_driver(nccl: Any, rank: int) -> tuple[Nccl4pyDriver, Checked]:
    def arguments_of(name: str, given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
        signature = inspect.signature(getattr(nccl.Communicator, name))
        return dict(signature.bind(None, *given, **named).arguments)

    driver = object.__new__(Nccl4pyDriver)
    comm = Checked(arguments_of)
    names = {name: getattr(nccl, name) for name in ("SUM", "AVG", "PROD", "MIN", "MAX")}
    driver._nccl = SimpleNamespace(**names, group=nullcontext)
    driver._comm = comm
    driver.gpu = StreamDevice()
    driver.rank, driver.world_size = rank, 2
    driver._flag = np.zeros(1, np.int32)
    return driver, comm


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", BARRIERLESS)
def test_nccl4py_has_what_its_driver_calls(nccl4py: Any, name: str, rank: int) -> None:
    driver, comm = nccl4py_driver(nccl4py, rank)
    passes, gets = buffers(name, rank)
    driver.bind(array_case(name, 800, 2, "float32", "mean", "torch"), passes, gets)()
    assert all(arguments["stream"] == driver.gpu.stream for _, arguments in comm.calls)
    if name == "send_recv":
        assert [(call, arguments["peer"]) for call, arguments in comm.calls] == [
            ("send", 1 - rank),
            ("recv", 1 - rank),
        ]
        return
    ((_, arguments),) = comm.calls
    assert arguments["sendbuf"] is passes
    assert arguments["recvbuf"] is (passes if COLLECTIVES[name].in_place else gets)
    if COLLECTIVES[name].reduces:
        assert arguments["op"] == nccl4py.AVG
    if name in ("reduce", "broadcast", "gather", "scatter"):
        assert arguments["root"] == 0


def test_nccl4py_meets_and_reduces_lists(nccl4py: Any) -> None:
    assert len(nccl4py.UniqueId.from_bytes(bytes(128)).as_bytes) == 128
    versions = nccl4py.get_version()
    release = versions.libnccl.version if versions.libnccl else versions.nccl_bindings
    assert release.major == 2
    assert release.minor > 20
    assert release.micro >= 0
    driver, comm = nccl4py_driver(nccl4py, 0)
    driver.barrier_call()()
    arrays = [np.zeros(shape, np.float32) for shape in gradient_shapes("resnet50")]
    case = list_case("resnet50", "float32", "max", "torch")
    driver.bind_list(case, "one group", arrays)()
    assert [arguments["sendbuf"] is array for (_, arguments), array in
            zip(comm.calls[1:], arrays, strict=True)] == [True] * 161  # fmt: skip
    driver.bind_list(case, "25 MB buckets", arrays)()
    assert {name for name, _ in comm.calls} == {"allreduce"}
    assert len(comm.calls) == 1 + 161 + 4
    with pytest.raises(UnsupportedCaseError, match="one by one"):
        driver.bind_list(case, "one by one", arrays)


# cupy


class Lent(np.ndarray[Any, Any]):
    """A numpy array with cupy's way to its address."""

    @property
    def data(self) -> Any:  # type: ignore[override]
        return SimpleNamespace(ptr=self.ctypes.data)


def cupy_driver(rank: int) -> tuple[CupyDriver, Checked]:
    nccl = package("cupy.cuda.nccl")
    if not nccl.available:
        pytest.skip("cupy finds no NCCL")

    def arguments_of(name: str, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        assert named == {}
        text = inspect.getdoc(getattr(nccl.NcclCommunicator, name)) or ""
        match = re.search(r"\(self, ([^)]*)\)", text)
        assert match is not None, text
        names = [part.split()[-1].lower() for part in match[1].split(",")]
        return dict(zip(names, given, strict=True))

    driver = object.__new__(CupyDriver)
    comm = Checked(arguments_of)
    driver._nccl, driver._comm = nccl, comm
    driver.gpu = StreamDevice()
    driver.rank, driver.world_size = rank, 2
    driver._flag = np.zeros(1, np.int32).view(Lent)
    return driver, comm


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", BARRIERLESS)
def test_cupy_has_what_its_driver_calls(name: str, rank: int) -> None:
    driver, comm = cupy_driver(rank)
    passes, gets = (None if b is None else b.view(Lent) for b in buffers(name, rank))
    driver.bind(array_case(name, 800, 2, "float32", "mean", "cupy"), passes, gets)()
    nccl = driver._nccl
    addresses = [None if b is None else b.data.ptr for b in (passes, gets)]
    for call, arguments in comm.calls:
        count = arguments.get("count", arguments.get("recvcount"))
        assert (count, arguments["datatype"]) == (case_count(name), nccl.NCCL_FLOAT32)
        assert arguments["stream"] == driver.gpu.stream
        if "op" in arguments:
            assert arguments["op"] == nccl.NCCL_AVG
        if call in ("send", "recv"):
            begin = addresses[call == "recv"]
            buffer = arguments.get("sendbuf", arguments.get("recvbuf"))
            blocked = (name, call) in (
                ("all_to_all", "send"),
                ("all_to_all", "recv"),
                ("gather", "recv"),
                ("scatter", "send"),
            )
            assert begin is not None
            assert buffer == begin + (4 * case_count(name) * arguments["peer"] if blocked else 0)
    sent = {"all_to_all": 4, "send_recv": 2, "gather": 1 + 2 * (rank == 0),
            "scatter": 1 + 2 * (rank == 0)}  # fmt: skip
    assert len(comm.calls) == sent.get(name, 1)


def case_count(name: str) -> int:
    return array_case(name, 800, 2, "float32", "sum", "cupy").count


@pytest.mark.parametrize("identity", [bytes(range(128)), tuple(range(-64, 64))])
def test_identities_of_cupy_survive_the_way_between_ranks(identity: Any) -> None:
    assert identity_of(text_of(identity)) == identity


def test_cupy_meets_and_reduces_lists() -> None:
    driver, comm = cupy_driver(0)
    driver.barrier_call()()
    identity = driver._nccl.get_unique_id()
    assert len(identity) == 128
    assert identity_of(text_of(identity)) == identity
    arrays = [np.zeros(n, np.float32).view(Lent) for n in (5_000_000, 7, 2_000_000)]
    case = list_case("resnet50", "float32", "sum", "cupy")
    driver.bind_list(case, "one group", arrays)()
    assert [arguments["sendbuf"] for _, arguments in comm.calls[1:]] == [
        array.data.ptr for array in arrays
    ]
    with pytest.raises(UnsupportedCaseError, match="int16"):
        driver.bind_list(list_case("resnet50", "int16", "sum", "cupy"), "one group", arrays)
