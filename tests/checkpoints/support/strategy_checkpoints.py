"""Tests of checkpoints, for every strategy."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastdist as fd
import pytest
import torch
import torch.nn.functional as F
from fastdist import Strategy
from fastdist.checkpoints import directory_lock
from full_disk import full_disk
from replica_tests import on_replicas
from torch import nn

_STEPS = 6


class Job:
    """A training job: what a user's program makes before it restores."""

    def __init__(self, strategy: Strategy, width: int = 8) -> None:
        self.strategy = strategy
        torch.manual_seed(3)
        with strategy.scope():
            self.model = nn.Sequential(
                nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 1)
            )
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
            self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 4])
        generator = torch.Generator().manual_seed(5)
        source = torch.utils.data.TensorDataset(torch.randn(36, 4, generator=generator))
        self.batches = strategy.distribute_dataset(
            source, global_batch_size=9, shuffle=True, seed=7
        )
        self.checkpoint = fd.Checkpoint(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            data=self.batches,
            step=0,
            history=[],
        )

    def train(self, until: int, after: Callable[[int], Any] = lambda step: None) -> None:
        """Train to a step, and call `after` after each; epochs have 4."""
        checkpoint = self.checkpoint
        while checkpoint.step < until:
            for batch in self.batches:
                result = self.strategy.run(self._step, args=(batch,))
                checkpoint.history.append(float(self.strategy.reduce("mean", result)))
                checkpoint.step += 1
                after(checkpoint.step)
                if checkpoint.step == until:
                    break

    def _step(self, batch: tuple[torch.Tensor]) -> torch.Tensor:
        (x,) = batch
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.model(x), x.sum(1, keepdim=True))
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return loss.detach()

    def require_same(self, other: Job) -> None:
        """Raise unless both have the same bits everywhere."""
        assert self.checkpoint.history == other.checkpoint.history
        assert self.scheduler.state_dict() == other.scheduler.state_dict()
        assert self.batches.state_dict() == other.batches.state_dict()
        for name, value in self.model.state_dict().items():
            assert torch.equal(value, other.model.state_dict()[name]), name
        ours, theirs = self.optimizer.state_dict()["state"], other.optimizer.state_dict()["state"]
        assert ours.keys() == theirs.keys()
        for i, state in ours.items():
            assert all(torch.equal(state[name], theirs[i][name]) for name in state)


class CheckpointContract:
    """Saving and restoring, bound as the contract."""

    @pytest.mark.parametrize("async_op", [False, True])
    @on_replicas
    def test_a_restored_job_ends_with_the_same_bits(
        self, strategy: Strategy, tmp_path: Path, async_op: bool
    ) -> None:
        job = Job(strategy)
        with fd.CheckpointManager(tmp_path, max_to_keep=2) as manager:
            assert manager.restore(job.checkpoint) is None

            def save(step: int) -> None:
                if step <= 3:
                    path = manager.save(job.checkpoint, async_op=async_op)
                    assert path == tmp_path / f"checkpoint-{step}"

            job.train(_STEPS, save)  # while the last one is written
        names = ["checkpoint-2", "checkpoint-3"]
        assert [path.name for path in manager.checkpoints] == names
        again = Job(strategy)
        with fd.CheckpointManager(tmp_path) as manager:
            assert manager.restore(again.checkpoint) == tmp_path / "checkpoint-3"
            assert again.checkpoint.step == 3
            again.train(_STEPS)
        again.require_same(job)

    def test_restored_lbfgs_rounds_as_before(self, strategies: Any, tmp_path: Path) -> None:
        """BLAS rounds by the alignment of memory, and LBFGS magnifies it."""
        generator = torch.Generator().manual_seed(1)
        x, y = torch.randn(39, 4, generator=generator), torch.arange(39) % 3

        def case(strategy: Strategy) -> None:
            if isinstance(strategy, fd.CentralStorageStrategy):
                return  # which takes no closures
            if isinstance(strategy, fd.MirroredStrategy) and strategy.options.shard_optimizer:
                return  # LBFGS looks at all parameters together

            def made() -> tuple[nn.Module, torch.optim.Optimizer]:
                torch.manual_seed(3)
                with strategy.scope():
                    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
                    optimizer = torch.optim.LBFGS(
                        model.parameters(), lr=0.3, max_iter=3, line_search_fn="strong_wolfe"
                    )
                return model, optimizer

            def train(model: nn.Module, optimizer: torch.optim.Optimizer, epochs: int) -> Any:
                def step(batch: Any) -> None:
                    def closure() -> Any:
                        optimizer.zero_grad()
                        loss = F.cross_entropy(model(batch[0]), batch[1])
                        loss.backward()
                        return loss

                    optimizer.step(closure)

                for _ in range(epochs):
                    for batch in strategy.distribute_dataset((x, y), global_batch_size=13):
                        strategy.run(step, args=(batch,))
                return torch.cat([p.detach().flatten() for p in model.parameters()])

            model, optimizer = made()
            train(model, optimizer, 1)
            fd.Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "saved")
            expected = train(model, optimizer, 3)
            model, optimizer = made()
            fd.Checkpoint(model=model, optimizer=optimizer).restore(tmp_path / "saved")
            assert torch.equal(train(model, optimizer, 3), expected)
            strategy.check_in_sync()

        strategies.run(case)

    def test_another_strategy_and_torch_alone_read_it(
        self, strategies: Any, tmp_path: Path
    ) -> None:
        def case(strategy: Strategy) -> dict[str, Any]:
            job = Job(strategy)
            job.train(2)
            job.checkpoint.save(tmp_path / "saved")
            if strategy.local_replica_ids[0] == 0:
                from safetensors.torch import load_file

                plain = nn.Sequential(
                    nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 1)
                )
                plain.load_state_dict(load_file(tmp_path / "saved" / "model.safetensors"))
                trained = job.model.state_dict()
                assert all(torch.equal(trained[n], v) for n, v in plain.state_dict().items())
            return {name: value.tolist() for name, value in job.model.state_dict().items()}

        saved = strategies.run(case)[0]
        job = Job(fd.OneDeviceStrategy("cpu"))
        job.checkpoint.restore(tmp_path / "saved")
        assert job.checkpoint.step == 2
        assert all(saved[n] == v.tolist() for n, v in job.model.state_dict().items())
        job.train(3)
        job.checkpoint.save(tmp_path / "continued")

        def restore(strategy: Strategy) -> int:
            continued = Job(strategy)
            continued.checkpoint.restore(tmp_path / "continued")
            assert continued.batches.state_dict()["step"] == 3
            strategy.check_in_sync()
            return continued.checkpoint.step

        assert set(strategies.run(restore)) == {3}

    @pytest.mark.parametrize(("aggregation", "value"), [("SUM", 1.0), ("MEAN", 0.5)])
    @on_replicas
    def test_variables_with_a_value_per_replica(
        self, strategy: Strategy, tmp_path: Path, aggregation: str, value: float
    ) -> None:
        def make(strategy: Strategy) -> Any:
            with strategy.scope():
                return fd.Variable(
                    torch.zeros(()),
                    synchronization=fd.VariableSynchronization.ON_READ,
                    aggregation=fd.VariableAggregation[aggregation],
                )

        n = strategy.num_replicas_in_sync
        variable = make(strategy)

        def assign() -> None:
            context = fd.get_replica_context()
            assert context is not None
            variable.assign(float(context.replica_id_in_sync_group) + 1)

        strategy.run(assign)
        total = {"SUM": n * (n + 1) / 2, "MEAN": (n + 1) / 2}[aggregation]
        fd.Checkpoint(count=variable).save(tmp_path / "saved")
        again = make(strategy)
        fd.Checkpoint(count=again).restore(tmp_path / "saved")
        assert float(again.value) == total
        own = strategy.local_results(again)[0]
        assert float(own) == (total / n if aggregation == "SUM" else total)

    def test_metrics_that_count_amid_an_epoch(self, strategies: Any, tmp_path: Path) -> None:
        torchmetrics = pytest.importorskip("torchmetrics")

        def case(strategy: Strategy) -> None:
            def make() -> Any:
                with strategy.scope():
                    return torchmetrics.MetricCollection(
                        {"mean": torchmetrics.MeanMetric(), "all": torchmetrics.CatMetric()}
                    )

            def update(metrics: Any, value: float) -> None:
                context = fd.get_replica_context()
                assert context is not None
                metrics.update(torch.tensor([value + context.replica_id_in_sync_group]))

            metrics, again = make(), make()
            strategy.run(update, args=(metrics, 1.0))
            fd.Checkpoint(metrics=metrics).save(tmp_path / "saved")
            fd.Checkpoint(metrics=again).restore(tmp_path / "saved")
            for each in (metrics, again):
                strategy.run(update, args=(each, 7.0))
            ours, theirs = metrics.compute(), again.compute()
            assert float(ours["mean"]) == float(theirs["mean"])
            assert sorted(ours["all"].tolist()) == sorted(theirs["all"].tolist())

        strategies.run(case)

    @on_replicas
    def test_a_checkpoint_of_another_model_changes_nothing(
        self, strategy: Strategy, tmp_path: Path
    ) -> None:
        Job(strategy).checkpoint.save(tmp_path / "saved")
        other = Job(strategy, width=6)
        before = {name: value.clone() for name, value in other.model.state_dict().items()}
        other.checkpoint.step = 41
        with pytest.raises(ValueError, match=r"another model; of another shape: 0.weight") as e:
            other.checkpoint.restore(tmp_path / "saved")
        assert "0.weight: (6, 4) here, (8, 4) saved" in str(e.value)
        assert other.checkpoint.step == 41
        assert all(torch.equal(before[n], v) for n, v in other.model.state_dict().items())
        with strategy.scope():
            deeper = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        with pytest.raises(ValueError, match=r"not in the checkpoint.*not in the model"):
            fd.Checkpoint(model=deeper).restore(tmp_path / "saved")
        with pytest.raises(ValueError, match="and not \\['other'\\]"):
            fd.Checkpoint(model=other.model, other=1).restore(tmp_path / "saved")
        with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
            other.checkpoint.restore(tmp_path / "nothing")
        with pytest.raises(FileExistsError, match="exists"):
            other.checkpoint.save(tmp_path / "saved")
        strategy.check_in_sync()

    def test_an_object_that_refuses_its_state_changes_nothing(
        self, strategies: Any, tmp_path: Path
    ) -> None:
        class Refusing:
            """Takes a state on all replicas but the last."""

            def __init__(self, strategy: Strategy, state: int) -> None:
                self.state = state
                self.refuses = strategy.num_replicas_in_sync - 1 in strategy.local_replica_ids

            def state_dict(self) -> dict[str, int]:
                return {"state": self.state}

            def load_state_dict(self, state: dict[str, int]) -> None:
                if self.refuses and state["state"] == 1:
                    raise ArithmeticError("it does not fit")
                self.state = state["state"]

        def case(strategy: Strategy) -> None:
            def parts(job: Job, state: int) -> dict[str, Any]:
                made = {name: getattr(job.checkpoint, name) for name in job.checkpoint.names}
                return made | {"refusing": Refusing(strategy, state)}

            saved, job, before = Job(strategy), Job(strategy), Job(strategy)
            saved.train(1)
            fd.Checkpoint(**parts(saved, 1)).save(tmp_path / "saved")
            checkpoint = fd.Checkpoint(**parts(job, 0))
            with pytest.raises((ArithmeticError, RuntimeError), match="it does not fit"):
                checkpoint.restore(tmp_path / "saved")
            job.require_same(before)
            assert (checkpoint.step, checkpoint.refusing.state) == (0, 0)

        strategies.run(case)

    @pytest.mark.parametrize("damage", ["altered", "truncated", "index", "missing"])
    @on_replicas
    def test_the_one_before_is_used(self, strategy: Strategy, tmp_path: Path, damage: str) -> None:
        job = Job(strategy)
        manager = fd.CheckpointManager(tmp_path)
        job.train(2, lambda step: manager.save(job.checkpoint))
        if strategy.local_replica_ids[0] == 0:
            _damage(tmp_path / "checkpoint-2", damage)
        again = Job(strategy)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert manager.restore(again.checkpoint) == tmp_path / "checkpoint-1"
        if strategy.local_replica_ids[0] == 0:
            (told,) = [str(w.message) for w in caught if "checkpoint-2" in str(w.message)]
            assert "damaged" in told
            if damage == "altered":
                assert "'3.weight'" in told
            assert (tmp_path / "damaged-checkpoint-2").exists()
        again.train(2)
        assert manager.save(again.checkpoint) == tmp_path / "checkpoint-2"
        manager.close()
        again.require_same(job)

    @pytest.mark.parametrize("async_op", [False, True])
    @on_replicas
    def test_a_full_disk_raises_everywhere(
        self, strategy: Strategy, tmp_path: Path, async_op: bool
    ) -> None:
        job = Job(strategy, width=4096)
        manager = fd.CheckpointManager(tmp_path)
        manager.save(job.checkpoint, 1)
        with full_disk(1 << 14):
            if async_op:
                manager.save(job.checkpoint, 2, async_op=True)  # the next call raises
            with pytest.raises(OSError, match="cannot write the checkpoint"):
                manager.save(job.checkpoint, 3, async_op=async_op)
        assert [path.name for path in manager.checkpoints] == ["checkpoint-1"]
        manager.save(job.checkpoint, 4)
        manager.close()
        left = {path.name for path in tmp_path.iterdir()}
        assert left == {".lock", "checkpoint-1", "checkpoint-4"}

    @pytest.mark.slow
    @on_replicas
    def test_another_job_is_refused(self, strategy: Strategy, tmp_path: Path) -> None:
        job = Job(strategy)
        script = (
            "import sys, time, pathlib\n"
            "from fastdist.checkpoints.directory_lock import DirectoryLock\n"
            "DirectoryLock(pathlib.Path(sys.argv[1])); print('held', flush=True)\n"
            "sys.stdin.read()"
        )
        holder = None
        if strategy.local_replica_ids[0] == 0:
            holder = subprocess.Popen(
                [sys.executable, "-c", script, str(tmp_path)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
        directory_lock.PATIENCE_S = 0.2
        manager = fd.CheckpointManager(tmp_path)
        for call in (manager.save, manager.restore):
            with pytest.raises(OSError, match="in use by another job"):
                call(job.checkpoint)
        if holder is not None:
            holder.communicate()
        manager.save(job.checkpoint)
        manager.close()

    @on_replicas
    def test_a_state_that_cannot_be_saved(self, strategy: Strategy, tmp_path: Path) -> None:
        with strategy.scope():
            model = nn.Linear(2, 1)
        checkpoint = fd.Checkpoint(model=model, settings={"device": object()})
        with pytest.raises(TypeError, match=r"device: a checkpoint holds .* got .*object"):
            checkpoint.save(tmp_path / "saved")
        assert not list(tmp_path.iterdir())

        def inside() -> None:
            with pytest.raises(RuntimeError, match="inside run"):
                checkpoint.save(tmp_path / "saved")

        strategy.run(inside)


def _damage(path: Path, damage: str) -> None:
    file = path / ("checkpoint.json" if damage == "index" else "model.safetensors")
    if damage == "missing":
        file.unlink()
        return
    data = bytearray(file.read_bytes())
    if damage == "truncated":
        del data[-1]
    else:
        data[len(data) // 2 if damage == "index" else -2] ^= 4
    file.write_bytes(data)
