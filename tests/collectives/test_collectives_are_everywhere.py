"""Each table of collectives has all of them: a new one fails here until it is everywhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import fastdist as fd
import pytest
from fastdist.cli.bench.cases import COLLECTIVES
from fastdist.collectives.engines.engine import OPS
from fastdist.recorder import signatures
from paths import ROOT
from ranks import ThreadRanks

MESSAGES = {"send", "recv"}
REFUSED_ON_TPUS = {"reduce", "gather", "scatter", "all_to_all", *MESSAGES}


def of_cpp() -> list[str]:
    table = re.search(r"kOps\{(.*?)\}", read("csrc/core/types.cpp"), re.DOTALL)
    assert table is not None
    return re.findall(r'"(\w+)"', table[1])


def of_running_engine() -> Iterable[str]:
    return ThreadRanks(1).run(lambda comm: set(comm.engine.compiled.calls(1.0)))[0]


def of_tpus() -> Iterable[str]:
    return set(re.findall(r"    def _(\w+)\(", read("python/fastdist/tpu/engine.py"))) & set(OPS)


def of_torch_backend() -> Iterable[str]:
    source = read("python/fastdist/integrations/torch_backend/calls.py")
    return re.findall(r"self\._comm\.(\w+)", source)


def of_docs() -> Iterable[str]:
    rows = re.findall(r"^\| (`.*?) \|", read("docs/communicator.md"), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(\w+)\(", row)} & set(OPS)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("table", "lacks"),
    [
        (of_cpp, set()),
        (of_running_engine, set()),
        (of_tpus, REFUSED_ON_TPUS),
        (of_torch_backend, set()),
        (lambda: vars(fd.Communicator), set()),
        (lambda: vars(fd), set()),
        (lambda: fd.__all__, set()),
        (lambda: COLLECTIVES, MESSAGES),  # as send_recv
        (of_docs, set()),
    ],
    ids=[
        *("names in C++", "engine that runs", "TPUs", "backend of torch", "methods"),
        *("functions", "public names", "bench", "documentation"),
    ],
)
def test_all_are_in(table: Callable[[], Iterable[str]], lacks: set[str]) -> None:
    assert set(table()) & set(OPS) == set(OPS) - lacks


def test_names_of_cpp_are_those_of_python() -> None:
    assert of_cpp() == list(signatures.OPS)
    assert of_cpp()[: len(OPS)] == list(OPS)
