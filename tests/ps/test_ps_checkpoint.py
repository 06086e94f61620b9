"""Checkpoints of servers: other numbers of servers, and failures."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastdist.ps import Client, DenseSpec, RowsSpec, RuleSpec, Server
from fastdist.ps.client.checkpoint import (
    has_checkpoint,
    remove_checkpoint,
    restore_checkpoint,
    save_checkpoint,
)
from fastdist.ps.client.loading import load
from fastdist.ps.client.partition import FixedShards, RoundRobin
from fastdist.ps.wire.snapshot import save
from full_disk import full_disk
from ps_checkpoints import ADAM, IDS, Job, index_of, names_in, require_same
from safetensors import safe_open
from sharded_things import ShardedRows, ShardedVariable
from torch import nn


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def files_of(directory: Path) -> set[str]:
    """Return the names of a checkpoint's files in a directory."""
    objects = index_of(directory)["objects"].values()
    named = {f"servers/{name}" for about in objects for name, *_ in about["files"]}
    return {*named, "servers/checkpoint.json"}


@pytest.mark.parametrize("layout", [(1, 1), (2, 2), (2, 4), (3, 1)])
def test_restore_into_another_number_of_servers(
    stack: ExitStack, tmp_path: Path, layout: tuple[int, int]
) -> None:
    """Training continues with the same values, optimizer states and step counts."""
    first = Job(stack, 4, 4)
    for seed in range(3):
        first.train(seed)
    save_checkpoint(first.client, tmp_path, first.things)
    second = Job(stack, *layout)
    second.train(77)
    restore_checkpoint(second.client, tmp_path, second.things)
    require_same(second.values(), first.values())
    for seed in range(3, 6):
        first.train(seed)
        second.train(seed)
    require_same(second.values(), first.values())
    save_checkpoint(second.client, tmp_path, second.things)
    third = Job(stack, 4, 4)
    restore_checkpoint(third.client, tmp_path, third.things)
    require_same(third.values(), first.values())


def test_without_slots_and_without_elements(stack: ExitStack, tmp_path: Path) -> None:
    sgd = RuleSpec("SGD", {"lr": 1.0})

    def things() -> list[Any]:
        client = stack.enter_context(Client([stack.enter_context(Server()).address]))
        pieces = RoundRobin(1).place((5,), 4)
        return [
            client,
            ShardedRows(client, RowsSpec("rows", 4, sgd), pieces),
            ShardedRows(client, RowsSpec("fixed", 4, sgd, rows=5), pieces),
            ShardedVariable(client, DenseSpec("w", (5,), sgd), pieces, np.ones(5)),
            ShardedVariable(client, DenseSpec("empty", (5, 0), sgd), pieces, np.ones((5, 0))),
            ShardedVariable(client, DenseSpec("scalar", (), sgd), RoundRobin(1).place((), 4), 3.0),
        ]

    client, *first = things()
    first[0].push([-3], np.ones((1, 4)))
    first[1].push([3], np.ones((1, 4)))
    save_checkpoint(client, tmp_path, first)
    client, *second = things()
    second[2].push(np.ones(5))
    second[4].push(1.0)
    restore_checkpoint(client, tmp_path, second)
    assert (second[0].pull([-3]) == -1).all()
    assert second[1].pull(np.arange(5))[:, 0].tolist() == [0, 0, 0, -1, 0]
    assert (second[2].pull() == 1).all()
    assert second[4].pull() == 3


def test_rows_that_no_worker_has_touched(stack: ExitStack, tmp_path: Path) -> None:
    """They begin as in the job that wrote the checkpoint, on servers and in plain modules."""
    sgd = RuleSpec("SGD", {"lr": 1.0})
    ids = np.arange(7)

    def tables(servers: int, seed: int) -> tuple[Client, list[ShardedRows]]:
        addresses = [stack.enter_context(Server()).address for _ in range(servers)]
        client = stack.enter_context(Client(addresses))
        made = []
        for name, rows in (("fixed", 7), ("hashed", None)):
            spec = RowsSpec(name, 2, sgd, rows, ("normal", 0.0, 1.0), seed)
            pieces = RoundRobin(servers, FixedShards(servers)).place((rows or servers, 2), 4)
            made.append(ShardedRows(client, spec, pieces))
        return client, made

    client, first = tables(3, 1)
    for table in first:
        assert len(np.unique(table.pull(ids)[:, 0])) == ids.size  # parts do not begin alike
        table.push([4], np.ones((1, 2)))
    before = [table.pull(ids) for table in first]
    save_checkpoint(client, tmp_path / "a", first)
    other, second = tables(2, 2)
    assert not np.array_equal(second[0].pull(ids), before[0])
    for table in second:
        table.push([5], np.ones((1, 2)))
    restore_checkpoint(other, tmp_path / "a", second)
    save_checkpoint(other, tmp_path / "b", second)
    last, third = tables(1, 3)
    restore_checkpoint(last, tmp_path / "b", third)
    for some in (second, third):
        for table, rows in zip(some, before, strict=True):
            assert np.array_equal(table.pull(ids), rows)
    module = nn.ParameterDict({name: torch.zeros(7, 2) for name in ("fixed", "hashed")})
    assert load(module, tmp_path / "b", prefix="") == []
    assert np.array_equal(module["fixed"].detach(), before[0])
    assert np.array_equal(module["hashed"].detach(), before[1])


def test_save_while_in_use(stack: ExitStack, tmp_path: Path) -> None:
    """Every saved row is a value that the row had, as a whole."""
    job = Job(stack, 2, 2)
    begun, stop = threading.Event(), threading.Event()

    def change() -> None:
        with Client(job.client.servers) as client:
            table = ShardedRows(client, job.hashed.spec, job.hashed.pieces)
            for value in range(1, 10_000):
                table.assign(IDS, np.full((IDS.size, 2), value))
                begun.set()
                if stop.is_set():
                    return

    thread = threading.Thread(target=change)
    thread.start()
    assert begun.wait(20)
    for _ in range(5):
        save_checkpoint(job.client, tmp_path, job.things)
    stop.set()
    thread.join()
    other = Job(stack, 1, 1)
    restore_checkpoint(other.client, tmp_path, other.things)
    rows = other.hashed.pull(IDS)
    assert (rows[:, 0] == rows[:, 1]).all()
    assert rows.max() > 0
    assert names_in(tmp_path) == files_of(tmp_path)


@pytest.mark.slow
def test_values_belong_to_their_slots_and_steps(stack: ExitStack, tmp_path: Path) -> None:
    """Adagrad's slot counts pushes of ones, which determines the value."""
    client = stack.enter_context(Client([stack.enter_context(Server()).address]))
    spec = DenseSpec("w", (2_000_000,), RuleSpec("Adagrad", {"lr": 1.0, "eps": 0.0}))
    pieces = RoundRobin(1).place(spec.shape, 4)
    variable = ShardedVariable(client, spec, pieces, np.zeros(spec.shape, np.float32))
    stop = threading.Event()

    def push() -> None:
        with Client(client.servers) as other:
            pushed = ShardedVariable(other, spec, pieces)
            ones = np.ones(spec.shape, np.float32)
            while not stop.is_set():
                pushed.push(ones)

    thread = threading.Thread(target=push)
    thread.start()
    torn = 0
    try:
        for _ in range(50):
            save_checkpoint(client, tmp_path, [variable])
            (path,) = tmp_path.glob("servers/*.safetensors")
            with safe_open(path, framework="np") as file:
                values, slots = file.get_tensor("values"), file.get_tensor("slots")[0]
                step = json.loads(file.metadata()["fastdist"])["step"]
            pushes = slots.astype(int)
            assert step == pushes.max()
            torn += pushes.min() < step
            belongs = np.append(0.0, -np.cumsum(1 / np.sqrt(np.arange(1, step + 1))))
            np.testing.assert_allclose(values, belongs[pushes], atol=1e-3)
            if torn == 5:
                break
    finally:
        stop.set()
        thread.join()
    assert torn, "no push came while values were read; the variable is too small for this test"


def test_steps_are_those_of_the_checkpoint(stack: ExitStack, tmp_path: Path) -> None:
    """Adam's updates depend on the step count; servers that were not lost are ahead."""
    job = Job(stack, 2, 2)
    job.train(0)
    save_checkpoint(job.client, tmp_path, job.things)
    job.train(1)
    expected = job.values()
    for seed in range(2, 9):
        job.train(seed)
    restore_checkpoint(job.client, tmp_path, job.things)
    job.train(1)
    require_same(job.values(), expected)


def test_other_files_in_the_directory_stay(stack: ExitStack, tmp_path: Path) -> None:
    """Only files of earlier checkpoints are removed, complete or not."""
    job = Job(stack, 2, 2)
    others = {"model.safetensors", "fastdist-mine.safetensors", "below/checkpoint.json"}
    for name in [".unfinished-servers/part-7-00012.safetensors", *others]:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"precious")
    for _ in range(2):
        save_checkpoint(job.client, tmp_path, job.things)
        assert names_in(tmp_path) == {*files_of(tmp_path), *others}
    remove_checkpoint(tmp_path)
    remove_checkpoint(tmp_path)
    assert names_in(tmp_path) == others


def test_a_save_that_was_killed_at_its_end(stack: ExitStack, tmp_path: Path) -> None:
    """The earlier checkpoint was set aside, and the new one had not got its name yet."""
    job = Job(stack, 2, 2)
    save_checkpoint(job.client, tmp_path, job.things, state=5)
    (tmp_path / "servers").rename(tmp_path / ".replaced-servers")
    assert has_checkpoint(tmp_path)
    (tmp_path / "servers").rename(tmp_path / ".replaced-servers")
    assert restore_checkpoint(job.client, tmp_path, job.things) == 5


def test_a_disk_that_cannot_be_written(stack: ExitStack, tmp_path: Path) -> None:
    job = Job(stack, 2, 1)
    job.train(0)
    save_checkpoint(job.client, tmp_path, job.things)
    before = job.values()
    names = names_in(tmp_path)
    job.train(1)
    part = job.hashed.parts[0][2]
    known = {server: number for thing in job.things for server, number, _ in thing.parts}
    job.hashed.parts = [(0, known[0], part), (1, known[1] + 99, part)]
    with pytest.raises(ValueError, match=r"object \d+ does not exist"):
        save_checkpoint(job.client, tmp_path, job.things)
    assert names_in(tmp_path) == names
    other = Job(stack, 1, 1)
    restore_checkpoint(other.client, tmp_path, other.things)
    require_same(other.values(), before)
    below = tmp_path / "servers" / "checkpoint.json" / "below"
    with pytest.raises(OSError, match=r"cannot write|Not a directory|File exists"):
        save_checkpoint(job.client, below, job.things[:1])


def test_a_disk_that_is_full(stack: ExitStack, tmp_path: Path) -> None:
    """A limit on the size of files stands in for a full disk: the write fails halfway."""
    job = Job(stack, 2, 2)
    large = ShardedVariable(
        job.client,
        DenseSpec("large", (40_000,), ADAM),
        RoundRobin(2).place((40_000,), 4),
        np.zeros(40_000, np.float32),
    )
    save_checkpoint(job.client, tmp_path, [*job.things, large])
    before = {name: (tmp_path / name).read_bytes() for name in names_in(tmp_path)}
    job.train(1)
    large.push(np.ones(40_000, np.float32))
    with full_disk(100_000), pytest.raises(OSError, match=r"cannot write .*File too large"):
        save_checkpoint(job.client, tmp_path, [*job.things, large])
    assert {name: (tmp_path / name).read_bytes() for name in names_in(tmp_path)} == before
    restore_checkpoint(job.client, tmp_path, [*job.things, large])
    assert not large.pull().any()


def test_a_slow_save_is_waited_for_and_done_once(
    stack: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    may_end = threading.Event()

    def slow(*args: Any) -> list[str]:
        calls.append(args)
        time.sleep(1)
        may_end.wait(20)
        return save(*args)

    monkeypatch.setattr("fastdist.ps.server.service.save", slow)
    server = stack.enter_context(Server())
    client = stack.enter_context(Client([server.address], timeout_s=0.5, retry_s=0.1))
    pieces = RoundRobin(1).place((3,), 4)
    thing = ShardedVariable(client, DenseSpec("w", (3,), ADAM), pieces, np.ones(3))
    saving = threading.Thread(target=save_checkpoint, args=(client, tmp_path, [thing]))
    saving.start()
    with Client([server.address]) as other:
        while not calls:
            other.stats(0)
        other.stats(0)
        assert saving.is_alive()
    may_end.set()
    saving.join()
    assert len(calls) == 1
    assert server.stats()["repeated"] == 0
    thing.assign(np.zeros(3))
    restore_checkpoint(client, tmp_path, [thing])
    assert (thing.pull() == 1).all()


def test_missing_variables(stack: ExitStack, tmp_path: Path) -> None:
    job = Job(stack, 1, 1)
    with pytest.raises(FileNotFoundError):
        restore_checkpoint(job.client, tmp_path, job.things)
    save_checkpoint(job.client, tmp_path, job.dense[:1])
    with pytest.raises(ValueError, match="has no 'w1'; it has w0"):
        restore_checkpoint(job.client, tmp_path, job.dense[:2])
    pieces = RoundRobin(1).place((12, 3), 4)
    client = stack.enter_context(Client([stack.enter_context(Server()).address]))
    larger = ShardedVariable(client, DenseSpec("w0", (12, 3), ADAM), pieces, np.zeros((12, 3)))
    with pytest.raises(ValueError, match=r"'w0' as .*\(10, 3\).*expected .*\(12, 3\)"):
        restore_checkpoint(client, tmp_path, [larger])


MOMENTUM = RuleSpec("SGD", {"lr": 0.1, "momentum": 0.9})


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (DenseSpec("w", (4,), ADAM), DenseSpec("w", (4, 3), ADAM)),
        (DenseSpec("w", (8,), ADAM), DenseSpec("w", (4,), ADAM)),
        (DenseSpec("w", (2, 6), ADAM), DenseSpec("w", (2, 3, 2), ADAM)),
        (DenseSpec("w", (3, 2), MOMENTUM), DenseSpec("w", (3, 2), ADAM)),
        (DenseSpec("w", (3,), RuleSpec("Adagrad", {"lr": 0.1})), DenseSpec("w", (3,), MOMENTUM)),
        (RowsSpec("w", 4, ADAM, rows=9), RowsSpec("w", 4, ADAM, rows=8)),
        (RowsSpec("w", 4, ADAM, rows=9), RowsSpec("w", 4, ADAM)),
        (RowsSpec("w", 4, ADAM), RowsSpec("w", 2, ADAM)),
        (RowsSpec("w", 4, RuleSpec("Adagrad")), RowsSpec("w", 4, RuleSpec("RowWiseAdagrad"))),
        (RowsSpec("w", 4, ADAM), DenseSpec("w", (4, 4), ADAM)),
    ],
)
def test_of_another_shape_or_rule(
    stack: ExitStack, tmp_path: Path, saved: DenseSpec | RowsSpec, wanted: DenseSpec | RowsSpec
) -> None:
    """The checkpoint is rejected before anything changes."""

    def things(spec: DenseSpec | RowsSpec, value: float) -> tuple[Client, list[Any]]:
        client = stack.enter_context(Client([stack.enter_context(Server()).address]))
        placement = RoundRobin(1)
        first = DenseSpec("first", (2,), ADAM)
        made: list[Any] = [
            ShardedVariable(client, first, placement.place((2,), 4), np.full(2, value))
        ]
        if isinstance(spec, DenseSpec):
            pieces = placement.place(spec.shape, 4)
            made.append(ShardedVariable(client, spec, pieces, np.full(spec.shape, value)))
        else:
            made.append(ShardedRows(client, spec, placement.place((spec.rows or 1, spec.dim), 4)))
            made[-1].push([1], np.ones((1, spec.dim)))
        return client, made

    client, before = things(saved, 1.0)
    save_checkpoint(client, tmp_path, before)
    client, after = things(wanted, 2.0)
    with pytest.raises(ValueError, match=r"has 'w' as .*Spec\(.*, expected .*Spec\("):
        restore_checkpoint(client, tmp_path, after)
    assert (after[0].pull() == 2).all()


@pytest.mark.slow
def test_many_files_in_a_long_path(stack: ExitStack, tmp_path: Path) -> None:
    """Restored into as many pieces, and into one."""
    client = stack.enter_context(Client([stack.enter_context(Server()).address]))
    directory = tmp_path / ("ü" * 100) / ("y" * 200)
    many = RoundRobin(1, FixedShards(1500)).place((1500, 2), 4)
    spec = DenseSpec("w", (1500, 2), RuleSpec("SGD"))
    value = np.arange(3000, dtype=np.float32).reshape(1500, 2)
    variable = ShardedVariable(client, spec, many, value)
    save_checkpoint(client, directory, [variable])
    variable.assign(np.zeros((1500, 2)))
    restore_checkpoint(client, directory, [variable])
    np.testing.assert_array_equal(variable.pull(), value)
    client = stack.enter_context(Client([stack.enter_context(Server()).address]))
    pieces = RoundRobin(1).place((1500, 2), 4)
    whole = ShardedVariable(client, spec, pieces, np.zeros((1500, 2)))
    restore_checkpoint(client, directory, [whole])
    np.testing.assert_array_equal(whole.pull(), value)
