"""Checkpoints of `fd.Checkpoint` whose modules are on parameter servers, and their evaluators."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastdist as fd
import pytest
import torch
from ps_cluster import PsCluster
from served_net import Net, adagrad, batches, make, reference, same, step


@pytest.fixture(scope="module")
def cluster() -> Iterator[PsCluster]:
    cluster = PsCluster(workers=1, servers=2)
    yield cluster
    cluster.close()


def parts_of(model: Any, optimizer: Any) -> fd.Checkpoint:
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return fd.Checkpoint(model=model, optimizer=optimizer, schedule=schedule, step=0)


@pytest.mark.slow
def test_a_job_goes_on_with_its_checkpoint(cluster: PsCluster, tmp_path: Path) -> None:
    """Values, the state of the optimizer, the learning rate and the step; on emptied servers."""
    other, other_optimizer = reference(adagrad)
    other_checkpoint = parts_of(other, other_optimizer)
    saved = []
    for start in range(2):
        strategy = cluster.strategy()
        coordinator = cluster.coordinator(strategy)
        model, optimizer = make(strategy, adagrad)
        checkpoint = parts_of(model, optimizer)
        with fd.CheckpointManager(tmp_path, max_to_keep=2) as manager:
            path = manager.restore(checkpoint)
            assert (path is None) == (start == 0)
            assert checkpoint.step == 3 * start
            if start:
                same(model, saved[-1])
            for batch in batches(6)[checkpoint.step : checkpoint.step + 3]:
                for one, state in ((model, checkpoint), (other, other_checkpoint)):
                    if one is model:
                        coordinator.schedule(step, (one, optimizer, *batch))
                        coordinator.join()
                    else:
                        step(one, other_optimizer, *batch)
                    state.schedule.step()
                    state.step += 1
                same(model, other)
                manager.save(checkpoint, async_op=True)
            saved.append(Net())
            saved[-1].load_state_dict(other.state_dict())
            assert [path.name for path in manager.checkpoints] == [
                f"checkpoint-{checkpoint.step - 1}",
                f"checkpoint-{checkpoint.step}",
            ]
            if start:
                manager.end()
        del coordinator, strategy, checkpoint, model, optimizer
        gc.collect()
    evaluated = []
    for path in fd.checkpoints_iterator(tmp_path):  # in a job of its own, without servers
        plain = Net()
        assert fd.ps.load(plain, path) == []
        progress = fd.Checkpoint(step=0)
        progress.restore(path)
        evaluated.append(progress.step)
        with pytest.raises(ValueError, match=r"not \['model'\].*read by fastdist.ps.load"):
            fd.Checkpoint(model=Net()).restore(path)
    assert evaluated == [5, 6]
    same(plain, other)


def test_a_damaged_checkpoint_is_passed_over(cluster: PsCluster, tmp_path: Path) -> None:
    strategy = cluster.strategy()
    coordinator = cluster.coordinator(strategy)
    model, optimizer = make(strategy, adagrad)
    checkpoint = parts_of(model, optimizer)
    with fd.CheckpointManager(tmp_path) as manager:
        for number, batch in enumerate(batches(2)):
            coordinator.schedule(step, (model, optimizer, *batch))
            coordinator.join()
            checkpoint.step = number
            path = manager.save(checkpoint)
            if number == 0:
                before = Net()
                before.load_state_dict(model.state_dict())
        file = max(path.glob("part-*"), key=lambda file: file.stat().st_size)
        file.write_bytes(file.read_bytes()[:-1] + b"?")
        with pytest.warns(UserWarning, match="is damaged.*trying the checkpoint before"):
            assert manager.restore(checkpoint) == tmp_path / "checkpoint-0"
    assert checkpoint.step == 0
    same(model, before)
    assert (tmp_path / "damaged-checkpoint-1").is_dir()


def test_checkpoints_that_do_not_fit(cluster: PsCluster, tmp_path: Path) -> None:
    """Nothing is changed: neither on the servers nor in the program."""
    plain, plain_optimizer = reference(adagrad)
    parts_of(plain, plain_optimizer).save(tmp_path / "plain")
    strategy = cluster.strategy()
    coordinator = cluster.coordinator(strategy)
    model, optimizer = make(strategy, adagrad)
    fd.Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "without step")
    coordinator.schedule(step, (model, optimizer, *batches(1)[0]))
    coordinator.join()
    before = Net()
    before.load_state_dict(model.state_dict())
    checkpoint = parts_of(model, optimizer)
    with pytest.raises(ValueError, match="has nothing that parameter servers have written"):
        checkpoint.restore(tmp_path / "plain")
    with pytest.raises(ValueError, match=r"not \['schedule', 'step'\]"):
        checkpoint.restore(tmp_path / "without step")
    with pytest.raises(FileNotFoundError):
        checkpoint.restore(tmp_path / "nowhere")
    coordinator.join()
    same(model, before)
    with pytest.raises(FileExistsError):
        checkpoint.save(tmp_path / "plain")
    with strategy.scope():
        more = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"has no '1/weight'"):
        fd.Checkpoint(model=more).restore(tmp_path / "without step")


def test_rows_that_begin_later_after_a_restore_that_failed(
    cluster: PsCluster, tmp_path: Path
) -> None:
    """A checkpoint keeps the seed of the values on the servers, whatever the program's is."""

    def begin(seed: int) -> tuple[Any, fd.nn.Embedding]:
        strategy = cluster.strategy()
        with strategy.scope():
            table = fd.nn.Embedding(None, 2, initializer=("normal", 0.0, 1.0), seed=seed)
            torch.optim.SGD(table.parameters(), lr=1.0)
        return strategy, table

    ids = torch.arange(9)
    strategy, table = begin(1)
    before = table(ids).detach()
    strategy.save(tmp_path / "first")
    strategy, table = begin(2)
    strategy.restore(tmp_path / "first")
    with pytest.raises(FileNotFoundError):
        strategy.restore(tmp_path / "nowhere")
    strategy.save(tmp_path / "second")
    strategy, table = begin(3)
    assert not torch.equal(table(ids), before)
    strategy.restore(tmp_path / "second")
    assert torch.equal(table(ids), before)
