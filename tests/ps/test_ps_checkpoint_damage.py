"""Checkpoints with damaged, missing or replaced files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fastdist as fd
import numpy as np
import pytest
import torch
from fastdist.errors import DamagedCheckpointError
from fastdist.ps.client.checkpoint import restore_checkpoint, save_checkpoint
from ps_checkpoints import Job, index_of, require_same, rewrite_index
from safetensors import safe_open
from safetensors.numpy import save_file
from torch import nn


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def _flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 0x40
    path.write_bytes(data)


def _rewrite(path: Path, tensors: dict[str, Any] | None = None, **about: Any) -> None:
    """Replace a file's tensors and metadata."""
    with safe_open(path, framework="np") as file:
        kept = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = json.loads(file.metadata()["fastdist"])
    save_file({**kept, **(tensors or {})}, path, {"fastdist": json.dumps({**metadata, **about})})


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (_cut, ValueError),
        (_flip_a_bit, ValueError),
        (lambda path: path.write_bytes(b""), ValueError),
        (lambda path: path.write_bytes(b"precious" * 100), ValueError),
        (lambda path: save_file({"values": np.ones(3)}, path), ValueError),
        (lambda path: _rewrite(path, {"values": np.ones((1, 3), np.float32)}), ValueError),
        (lambda path: _rewrite(path, {"values": np.ones((5, 3))}), ValueError),
        (lambda path: _rewrite(path, {"more": np.ones(3)}), ValueError),
        (lambda path: _rewrite(path, part={"name": "other", "begin": 5, "end": 10}), ValueError),
        (lambda path: _rewrite(path, part={"name": "w0", "begin": "5", "end": 10}), ValueError),
        (lambda path: _rewrite(path, part=None), ValueError),
        (lambda path: path.unlink(), FileNotFoundError),
        (lambda path: (path.unlink(), path.mkdir()), OSError),
    ],
)
def test_a_damaged_file(stack: ExitStack, tmp_path: Path, damage: Any, kind: type) -> None:
    """The error names the file, and nothing has changed."""
    job = Job(stack, 2, 2)
    save_checkpoint(job.client, tmp_path, job.things)
    job.train(1)
    before = job.values()
    name, *_ = index_of(tmp_path)["objects"]["w0"]["files"][1]
    damage(tmp_path / "servers" / name)
    with pytest.raises(kind, match=name):
        restore_checkpoint(job.client, tmp_path, job.things[::-1])
    require_same(job.values(), before)
    module = nn.ParameterDict({"w1": torch.ones(()), "w0": torch.ones(10, 3)})
    with pytest.raises(kind, match=name):
        fd.ps.load(module, tmp_path, prefix="")
    assert (module["w1"] == 1).all()


def _with(others: Any, name: str, **about: Any) -> Any:
    objects = {**others["objects"], name: {**others["objects"][name], **about}}
    return {**others, "objects": objects}


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[:50],
        lambda text: "{}",
        lambda text: "[]",
        lambda text: "null",
        lambda text: "[" * 100_000,
        lambda text: "\udcff",
        lambda text: text.replace('"step": 3', '"step": 4'),
        lambda text: text.replace("w0", "w7"),
    ],
)
def test_a_damaged_index(stack: ExitStack, tmp_path: Path, damage: Any) -> None:
    job = Job(stack, 1, 1)
    save_checkpoint(job.client, tmp_path, job.things, state={"step": 3})
    path = tmp_path / "servers" / "checkpoint.json"
    path.write_bytes(damage(path.read_text()).encode(errors="surrogateescape"))
    _require_refused(job, tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda others: [1],
        lambda others: {"objects": [1], "state": 1},
        lambda others: {"objects": others["objects"]},
        lambda others: _with(others, "w0", files=3),
        lambda others: _with(others, "w0", files=[3]),
        lambda others: _with(
            others, "w0", files=[["../x", 3, {"name": "w0", "begin": 0, "end": 1}]]
        ),
        lambda others: _with(others, "w0", files=[["x", "y", {}]]),
        lambda others: _with(others, "w0", files=[["x", 3, {"begin": 0}]]),
        lambda others: _with(others, "w0", spec=None),
        lambda others: _with(others, "w0", spec=others["objects"]["w1"]["spec"]),
    ],
)
def test_an_index_that_makes_no_sense(stack: ExitStack, tmp_path: Path, change: Any) -> None:
    job = Job(stack, 1, 1)
    save_checkpoint(job.client, tmp_path, job.things)
    rewrite_index(tmp_path, change(index_of(tmp_path)))
    _require_refused(job, tmp_path)


def _require_refused(job: Job, directory: Path) -> None:
    for read in (
        lambda: restore_checkpoint(job.client, directory, job.things),
        lambda: fd.ps.load(nn.Linear(2, 2), directory),
    ):
        with pytest.raises(DamagedCheckpointError, match=r"checkpoint\.json is damaged"):
            read()
    save_checkpoint(job.client, directory, job.things)
    restore_checkpoint(job.client, directory, job.things)
