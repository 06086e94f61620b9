"""The names that completion shows in `fastdist` and its public modules."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys

import pytest
from paths import ROOT

MODULES = ("fastdist", "fastdist.cluster", "fastdist.ps")
API = ROOT / "docs" / "api"


@pytest.mark.parametrize("name", MODULES)
def test_dir_lists_the_public_names(name: str) -> None:
    module = importlib.import_module(name)
    assert dir(module) == sorted(module.__all__)
    assert len(set(module.__all__)) == len(module.__all__)


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_can_be_imported(name: str) -> None:
    pytest.importorskip("torch")
    module = importlib.import_module(name)
    assert [public for public in dir(module) if not hasattr(module, public)] == []


@pytest.mark.parametrize("name", [*MODULES, "fastdist.data", "fastdist.nn"])
def test_every_public_name_has_an_example_and_a_place_in_the_reference(name: str) -> None:
    pytest.importorskip("torch")
    pages = "".join(path.read_text(encoding="utf-8") for path in sorted(API.glob("*.md")))
    programs = "".join(re.findall(r"^```python\n(.*?)^```", pages, re.MULTILINE | re.DOTALL))
    module = importlib.import_module(name)
    without_example, without_place = [], []
    for public in module.__all__:
        found = getattr(module, public)
        if inspect.ismodule(found) or public == "__version__":
            continue
        if ">>> " not in (inspect.getdoc(found) or "") and public not in programs:
            without_example.append(public)
        method = f"](#fastdist.Communicator.{public})"  # the function has a method's docstring
        if f"\n::: {name}.{public}\n" not in pages and method not in pages:
            without_place.append(public)
    assert (without_example, without_place) == ([], [])


def test_dir_shows_names_that_are_not_loaded_yet() -> None:
    script = (
        "import sys, fastdist as fd\n"
        "assert {'MirroredStrategy', 'all_reduce', 'cluster', 'ps'} <= set(dir(fd)), dir(fd)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("allreduce", "all_reduce"),
        ("AllGather", "all_gather"),
        ("bcast", "broadcast"),
        ("rank", r"init\(\).rank"),
        ("get_world_size", r"init\(\).world_size"),
        ("ReduceOp", 'a string, such as op="sum"'),
        ("experimental_CommunicationOptions", "CommunicationOptions"),
        ("experimental", "the names in fastdist itself"),
        ("distribute", "the names in fastdist itself, such as fastdist.MirroredStrategy"),
        ("TPUClusterResolver", "fastdist.cluster.TPUClusterResolver"),
        ("ClusterSpec", "fastdist.cluster.ClusterSpec"),
    ],
)
def test_names_of_other_libraries_get_a_hint(name: str, ours: str) -> None:
    import fastdist

    with pytest.raises(AttributeError, match=f"no attribute '{name}'; use {ours}$"):
        getattr(fastdist, name)


def test_communicators_hint_at_their_names() -> None:
    import fastdist

    (comm,) = fastdist.local_group(1)
    with comm:
        for name, ours in (
            ("size", "world_size"),
            ("Get_rank", "rank"),
            ("allgather", "all_gather, or all_gather_object"),
            ("Reduce_scatter", "reduce_scatter"),
            ("Bcast", "broadcast"),
        ):
            with pytest.raises(AttributeError, match=f"'{name}'; use {ours}$"):
                getattr(comm, name)
            assert not hasattr(comm, name)
            assert name not in dir(comm)
        assert not hasattr(comm, "__cuda_array_interface__")


def test_an_unknown_name_is_an_attribute_error() -> None:
    import fastdist

    with pytest.raises(AttributeError, match="module 'fastdist' has no attribute 'all_redcue'"):
        _ = fastdist.all_redcue  # type: ignore[attr-defined]
    for name, ours in (("train", "Checkpoint"), ("coordinator", "ClusterCoordinator")):
        with pytest.raises(AttributeError, match=f"'{name}'; use fastdist.{ours}"):
            getattr(fastdist, name)
