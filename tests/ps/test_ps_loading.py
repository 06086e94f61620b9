"""Checkpoints of servers, read without servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fastdist as fd
import numpy as np
import pytest
import torch
from fastdist.ps import Client, DenseSpec, RowsSpec, RuleSpec, SavedRows, Server
from fastdist.ps.client.checkpoint import restore_checkpoint, save_checkpoint
from fastdist.ps.client.partition import FixedShards, RoundRobin
from ps_checkpoints import index_of, rewrite_index
from sharded_things import ShardedRows, ShardedVariable
from torch import nn

SGD = RuleSpec("SGD", {"lr": 1.0})
IDS = np.array([-5, 3, 2**62])


class Job:
    """A variable, a fixed and a hashed table on two servers, as scopes name them."""

    def __init__(self, stack: ExitStack, scope: int = 0) -> None:
        addresses = [stack.enter_context(Server()).address for _ in range(2)]
        self.client = stack.enter_context(Client(addresses))
        placement = RoundRobin(2, FixedShards(2))
        weight = DenseSpec(f"{scope}/bottom.weight", (4, 3), SGD)
        normal = ("normal", 0.0, 1.0)
        self.weight = ShardedVariable(
            self.client, weight, placement.place((4, 3), 4), np.arange(12).reshape(4, 3)
        )
        self.fixed = self._table(RowsSpec(f"{scope}/goods.weight", 2, SGD, 50, normal, 7))
        self.hashed = self._table(RowsSpec(f"{scope}/users.weight", 2, SGD, None, normal, 8))
        self.things: list[Any] = [self.weight, self.fixed, self.hashed]
        self.fixed.push([40, 2], np.ones((2, 2)))
        self.hashed.push(IDS, np.ones((3, 2)))

    def _table(self, spec: RowsSpec) -> ShardedRows:
        pieces = RoundRobin(2, FixedShards(2)).place((spec.rows or 2, spec.dim), 4)
        return ShardedRows(self.client, spec, pieces)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def test_values_and_tables_without_servers(stack: ExitStack, tmp_path: Path) -> None:
    job = Job(stack)
    save_checkpoint(job.client, tmp_path, job.things, state={"step": 12, "auc": [0.5, 0.75]})
    loaded = fd.ps.load(tmp_path)
    assert loaded.state == {"step": 12, "auc": [0.5, 0.75]}
    assert sorted(loaded.values) == ["bottom.weight", "goods.weight", "users.weight"]
    weight = loaded.values["bottom.weight"]
    assert isinstance(weight, torch.Tensor)
    assert torch.equal(weight, torch.arange(12.0).reshape(4, 3))
    users, items = loaded.values["users.weight"], loaded.values["goods.weight"]
    assert isinstance(users, SavedRows)
    assert isinstance(items, SavedRows)
    assert (len(users), len(items), users.limit, items.limit) == (3, 2, None, 50)
    assert not users.pieces[0][1].flags.writeable
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    assert sorted(np.concatenate([ids for ids, _ in users.pieces])) == sorted(IDS)
    for table, saved, ids in ((job.hashed, users, [3, 99, -5, 3]), (job.fixed, items, [2, 49, 40])):
        np.testing.assert_array_equal(saved.look_up(ids), table.pull(ids))
    with pytest.raises(IndexError, match="id 50 is out of range"):
        items.look_up([50])
    with pytest.raises(TypeError, match="integers"):
        users.look_up([0.5])


def test_the_prefix_is_found(stack: ExitStack, tmp_path: Path) -> None:
    jobs = [Job(stack, scope) for scope in range(2)]
    module = nn.ModuleDict({"goods": nn.Embedding(50, 2)})
    save_checkpoint(jobs[1].client, tmp_path, jobs[1].things)
    assert fd.ps.load(module, tmp_path) == []
    expected = jobs[1].fixed.pull(np.arange(50))
    np.testing.assert_array_equal(module["goods"].get_parameter("weight").detach(), expected)
    others = index_of(tmp_path)
    spec = others["objects"]["1/goods.weight"]["spec"]["RowsSpec"]
    again = {"spec": {"RowsSpec": {**spec, "name": "0/goods.weight"}}, "files": []}
    others["objects"]["0/goods.weight"] = again
    rewrite_index(tmp_path, others)
    with pytest.raises(ValueError, match=r"several modules.*pass prefix=, one of '0/', '1/'"):
        fd.ps.load(module, tmp_path)
    with pytest.raises(TypeError, match="a directory after the module"):
        fd.ps.load(module)  # type: ignore[call-overload]


def test_a_load_that_fails_changes_nothing(stack: ExitStack, tmp_path: Path) -> None:
    job = Job(stack)
    save_checkpoint(job.client, tmp_path, job.things)
    module = nn.ModuleDict(
        {"bottom": nn.Linear(3, 4, bias=False), "users": nn.EmbeddingBag(1000, 2)}
    )
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(ValueError, match=r"row of '0/users.weight' for the id .*load\(directory\)"):
        fd.ps.load(module, tmp_path)
    for name, value in module.state_dict().items():
        assert torch.equal(value, before[name])


def test_the_state_comes_back(stack: ExitStack, tmp_path: Path) -> None:
    job = Job(stack)
    with pytest.raises(TypeError, match="state must be what JSON can hold"):
        save_checkpoint(job.client, tmp_path / "none", job.things, state=torch.ones(1))
    assert not (tmp_path / "none").exists()
    save_checkpoint(job.client, tmp_path, job.things, state={"step": 3})
    assert restore_checkpoint(job.client, tmp_path, job.things) == {"step": 3}
