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
from fastdist.ps.client.checkpoint import restore_checkpoint, save_checkpoint
from ps_checkpoints import Job, require_same
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
    name = json.loads((tmp_path / "index.json").read_text())["files"]["w0"][1]
    damage(tmp_path / name)
    with pytest.raises(kind, match=name):
        restore_checkpoint(job.client, tmp_path, job.things[::-1])
    require_same(job.values(), before)
    module = nn.ParameterDict({"w1": torch.ones(()), "w0": torch.ones(10, 3)})
    with pytest.raises(kind, match=name):
        fd.ps.load(module, tmp_path, prefix="")
    assert (module["w1"] == 1).all()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("w0", lambda names: names[:1]),
        ("w0", lambda names: names[1:]),
        ("w0", lambda names: [names[0], names[0]]),
        ("w0", lambda names: [*names, "copy"]),
        ("w0", lambda names: [names[0], "copy"]),
        ("fixed", lambda names: names[:1]),
        ("fixed", lambda names: [*names, "copy"]),
        ("hashed", lambda names: names[1:]),
        ("hashed", lambda names: [names[0], "copy"]),
        ("hashed", lambda names: []),
    ],
)
def test_missing_and_duplicated_rows(
    stack: ExitStack, tmp_path: Path, name: str, change: Any
) -> None:
    job = Job(stack, 2, 2)
    job.train(0)
    save_checkpoint(job.client, tmp_path, job.things)
    before = job.values()
    index = json.loads((tmp_path / "index.json").read_text())
    names = index["files"][name]
    (tmp_path / "copy").write_bytes((tmp_path / names[0]).read_bytes())
    index["files"][name] = change(names)
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(
        ValueError, match=r"missing|duplicated|missing for some servers|hold 50 rows|no checksum"
    ):
        restore_checkpoint(job.client, tmp_path, job.things)
    require_same(job.values(), before)


@pytest.mark.parametrize(
    "damage",
    [
        lambda index: "",
        lambda index: json.dumps(index)[:50],
        lambda index: "{}",
        lambda index: "[]",
        lambda index: "null",
        lambda index: "[" * 100_000,
        lambda index: "\udcff",
        lambda index: json.dumps({**index, "format": 7}),
        lambda index: json.dumps({**index, "files": [1]}),
        lambda index: json.dumps({**index, "files": {"w0": 3}}),
        lambda index: json.dumps({**index, "files": {"w0": [3]}}),
        lambda index: json.dumps({**index, "files": {"w0": ["../x"]}}),
        lambda index: json.dumps({**index, "specs": {}}),
        lambda index: json.dumps({**index, "specs": {"w0": index["specs"]["w1"]}}),
    ],
)
def test_a_damaged_index(stack: ExitStack, tmp_path: Path, damage: Any) -> None:
    job = Job(stack, 1, 1)
    save_checkpoint(job.client, tmp_path, job.things)
    path = tmp_path / "index.json"
    path.write_bytes(damage(json.loads(path.read_text())).encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"index\.json is damaged, or of another version"):
        restore_checkpoint(job.client, tmp_path, job.things)
    with pytest.raises(ValueError, match=r"index\.json is damaged, or of another version"):
        fd.ps.load(nn.Linear(2, 2), tmp_path)
    save_checkpoint(job.client, tmp_path, job.things)
    restore_checkpoint(job.client, tmp_path, job.things)
