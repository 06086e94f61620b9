"""Tests of calls around `run` and of mistakes that must be reported, for every strategy.

A test hands a function to `strategies.run`, which calls it with a strategy once in every process.
"""

from __future__ import annotations

import functools
import gc
import io
import random
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import fastdist as fd
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from digits_training import replica_id, require_close
from fastdist import Strategy
from fastdist.errors import CollectiveMismatchError, FastdistError, PeerFailureError
from replica_tests import on_replicas
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils import _pytree as pytree


class Output(dict[str, Any]):
    """A structure of its own, registered as transformers registers its ModelOutput."""

    def update(self, *_: object, **__: object) -> None:
        raise RuntimeError("You cannot use ``update``")


pytree.register_pytree_node(
    Output,
    lambda output: (list(output.values()), list(output)),
    lambda values, names: Output(zip(names, values, strict=True)),
    serialized_type_name="Output",
)


def rows(count: int, width: int = 4, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def trained(
    strategy: Strategy,
    make: Callable[[], nn.Module],
    between: Callable[[nn.Module, Any], None],
    optimizer_of: Any = torch.optim.SGD,
) -> list[torch.Tensor]:
    """The parameters after a step on each of four batches, with something done between them."""
    torch.manual_seed(0)
    with strategy.scope():
        model = make()
        optimizer = optimizer_of(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for batch in strategy.distribute_dataset(rows(32), global_batch_size=8):
        strategy.run(step, (batch,))
        between(model, optimizer)
    strategy.check_in_sync()
    return [parameter.detach().clone() for parameter in model.parameters()]


class ProgramsContract:
    """Calls around `run`. Subclasses choose the strategy."""

    # --- results --------------------------------------------------------------------------------

    @pytest.mark.slow
    @on_replicas
    def test_a_mean_weighs_whatever_was_computed(self, strategy: Strategy) -> None:
        """The mean of 1, 1, 4 is 2 for tensors, numbers, numpy values and their results."""
        (batch,) = strategy.distribute_dataset(torch.tensor([1.0, 1.0, 4.0]), global_batch_size=3)

        def mean(kind: Callable[[torch.Tensor], Any]) -> Any:
            return strategy.run(lambda x: kind(x.mean() if len(x) else x.sum()), (batch,))

        for kind in (torch.clone, torch.Tensor.item, torch.Tensor.numpy):
            assert float(strategy.reduce("mean", mean(kind))) == 2.0
        doubled = fd.map(lambda value: {"twice": 2 * value}, mean(torch.Tensor.item))
        assert float(strategy.reduce("mean", doubled)["twice"]) == 4.0
        assert float(strategy.reduce("mean", fd.map(torch.mul, mean(torch.clone), 3.0))) == 6

    @on_replicas
    def test_a_mean_weighs_what_was_kept_for_an_epoch(self, strategy: Strategy) -> None:
        data = strategy.distribute_dataset(
            torch.tensor([1.0, 1.0, 4.0, 10.0, 10.0]), global_batch_size=3
        )
        losses = [strategy.run(lambda x: float(x.mean()) if len(x) else 0.0, (b,)) for b in data]
        assert [float(loss) for loss in strategy.reduce("mean", losses)] == [2.0, 10.0]
        if strategy.num_replicas_in_sync == 2:
            with pytest.raises(ValueError, match="divided differently among replicas"):
                fd.map(lambda a, b: a + b, *losses)

    @on_replicas
    def test_a_result_is_no_number(self, strategy: Strategy) -> None:
        result = strategy.run(lambda: torch.tensor(2.0))
        if strategy.num_replicas_in_sync == 1:
            assert result == 2
            return
        hint = r"strategy\.reduce\('mean', value\)"
        uses: list[Callable[[Any], Any]] = [
            float,
            bool,
            lambda x: x + 1,
            lambda x: 0.0 + x,
            lambda x: x < 3,
            lambda x: f"{x:.3f}",
            np.asarray,
            lambda x: torch.ones(1) * x,
        ]
        for use in uses:
            with pytest.raises(TypeError, match=hint):
                use(result)
        with pytest.raises(AttributeError, match=f"no attribute 'item'.*{hint}"):
            result.item()
        assert "2." in str(result)

    @on_replicas
    def test_structures_of_other_libraries(self, strategy: Strategy) -> None:
        result = strategy.run(lambda: Output(loss=torch.ones(()), name="a", none=None))
        assert type(result) is Output
        assert result["name"] == "a"
        assert result["none"] is None
        total = strategy.reduce("sum", Output(loss=result["loss"]))
        assert type(total) is Output
        assert total["loss"] == strategy.num_replicas_in_sync

    # --- mistakes -------------------------------------------------------------------------------

    @on_replicas
    def test_cross_replica_calls_in_run(self, strategy: Strategy) -> None:
        with strategy.scope():
            variable = fd.Variable(0.0)
        for call, hint in (
            (lambda: strategy.reduce("sum", 1.0), "get_replica_context.*all_reduce"),
            (lambda: strategy.gather(torch.ones(1)), "get_replica_context.*all_gather"),
            (lambda: strategy.update(variable, torch.Tensor.add_, (1.0,)), "merge_call"),
        ):
            with pytest.raises(RuntimeError, match=f"inside run.*{hint}"):
                strategy.run(call)
        iterator = iter(strategy.distribute_dataset(torch.arange(8), global_batch_size=4))
        with pytest.raises(RuntimeError, match="dataset was iterated inside run"):
            strategy.run(lambda: next(iterator))

    def test_a_model_that_was_made_outside(self, strategies: Any) -> None:
        def case(strategy: Strategy) -> None:
            if strategy.num_replicas_in_sync == 1:
                return
            model = nn.Linear(4, 1)

            def with_an_optimizer(x: torch.Tensor) -> None:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                model(x).square().mean().backward()
                optimizer.step()

            def by_hand(x: torch.Tensor) -> None:
                model(x).mean().backward()
                model.weight.data.sub_(model.weight.grad)
                model.zero_grad()

            class Trainer:
                def __init__(self) -> None:
                    self.parts = {"model": model}

                def step(self, x: torch.Tensor, scale: float = 1.0) -> None:
                    self.helper(x * scale)

                def helper(self, x: torch.Tensor) -> None:
                    self.parts["model"](x).mean().backward()

            compiled = torch.compile(by_hand, backend="eager")
            trainer = Trainer()
            scaled = functools.partial(trainer.step, scale=2.0)
            (batch,) = strategy.distribute_dataset(rows(8), global_batch_size=8)
            for step in (with_an_optimizer, by_hand, trainer.step, scaled, compiled, by_hand):
                with pytest.raises(ValueError, match=r"Linear's \w+ was made outside the scope"):
                    strategy.run(step, (batch,))
            with pytest.raises(ValueError, match=r"Linear's \w+ was made outside the scope"):
                strategy.run(lambda given, x: given(x).mean().backward(), (nn.Linear(4, 1), batch))
            average = torch.optim.swa_utils.AveragedModel(model)  # is not trained
            strategy.run(lambda x: average.update_parameters(model), (batch,))
            model(torch.ones(1, 4)).sum().backward()  # not in run
            model.requires_grad_(False)
            strategy.run(lambda x: model(x).sum(), (batch,))

        strategies.run(case)

    @on_replicas
    def test_an_update_of_a_foreign_tensor(self, strategy: Strategy) -> None:
        if strategy.num_replicas_in_sync > 1:
            with pytest.raises(ValueError, match="made in the strategy's scope, got Tensor"):
                strategy.update(torch.zeros(1), lambda component: component)  # type: ignore[arg-type]

    @on_replicas
    def test_values_that_cannot_be_reduced(self, strategy: Strategy) -> None:
        ones = strategy.run(lambda: torch.ones(2, 2))
        n = strategy.num_replicas_in_sync
        assert float(strategy.reduce("sum", ones, axis=(0, 1))) == 4 * n
        assert float(strategy.reduce("max", ones, axis=(0, 1))) == 1
        assert strategy.reduce("sum", strategy.run(lambda: True)) == n
        hint = "got None; does the function passed to run return a value"
        with pytest.raises(TypeError, match=hint):
            strategy.reduce("mean", strategy.run(lambda: None))
        with pytest.raises(TypeError, match="expected tensors or numbers, got 'a'"):
            strategy.reduce("sum", strategy.run(lambda: "a"))
        for axis in (2, (0, 2), ()):
            with pytest.raises(ValueError, match=r"out of range for a value of shape \(2, 2\)"):
                strategy.reduce("sum", ones, axis=axis)
        with pytest.raises(TypeError, match=r"sparse_coo tensor of shape \(2, 2\).*to_dense"):
            strategy.run(
                lambda: fd.get_replica_context().all_reduce("sum", torch.eye(2).to_sparse())
            )

    @on_replicas
    def test_a_mismatch_names_the_users_line(self, strategy: Strategy) -> None:
        def uneven() -> None:
            fd.get_replica_context().all_reduce("sum", torch.ones(1 + replica_id()))

        if strategy.num_replicas_in_sync == 1:
            return
        with pytest.raises(CollectiveMismatchError) as caught:
            strategy.run(uneven)
        lines = str(caught.value).splitlines()[1:]
        assert len(lines) == strategy.num_replicas_in_sync
        assert all(line.endswith(" in uneven") for line in lines), lines

    @on_replicas
    def test_a_model_that_needs_examples(self, strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Linear(4, 1)

        def step(x: torch.Tensor) -> None:
            if not len(x):
                raise ZeroDivisionError("no sequence")
            model(x).sum().backward()

        (batch,) = strategy.distribute_dataset(rows(1), global_batch_size=4)
        if strategy.num_replicas_in_sync == 1:
            strategy.run(step, (batch,))
            return
        error: type[FastdistError] = PeerFailureError
        message = "rank [0-9] "
        if strategy.local_replica_ids[0] > 0:
            error, message = FastdistError, "no example of this batch.*Zero.*drop_remainder"
        with pytest.raises(error, match=message):
            strategy.run(step, (batch,))

    # --- around run -----------------------------------------------------------------------------

    @on_replicas
    def test_gradients_through_gathers_of_uneven_batches(self, strategy: Strategy) -> None:
        """A contrastive loss compares all examples of the global batch with each other."""

        def trained(strategy: Strategy, size: int) -> list[torch.Tensor]:
            torch.manual_seed(0)
            with strategy.scope():
                model = nn.Linear(4, 8).double()
                optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

            def step(x: torch.Tensor, y: torch.Tensor) -> None:
                optimizer.zero_grad()
                context = fd.get_replica_context()
                a, b = context.all_gather((model(x), model(y)))
                total = context.all_reduce("sum", model(x).sum(0))
                loss = F.cross_entropy(a @ b.T, torch.arange(len(a)))
                (loss + 1e-2 * total.square().sum()).backward()
                optimizer.step()

            pairs = rows(16).double(), rows(16, seed=1).double()
            for batch in strategy.distribute_dataset(pairs, global_batch_size=size):
                strategy.run(step, batch)
            strategy.check_in_sync()
            return [parameter.detach().clone() for parameter in model.parameters()]

        for size in (8, 5, 3):  # of 16 examples: even, uneven, and one replica without any
            one = trained(fd.OneDeviceStrategy("cpu"), size)
            require_close(trained(strategy, size), one, 1e-12)

    @on_replicas
    def test_changes_between_runs(self, strategy: Strategy) -> None:
        def clamp(model: nn.Module, optimizer: Any) -> None:
            for parameter in model.parameters():
                parameter.data.clamp_(-0.05, 0.05)

        def forget(model: nn.Module, optimizer: Any) -> None:
            optimizer.state.clear()

        one = fd.OneDeviceStrategy("cpu")
        for between, optimizer in ((clamp, torch.optim.SGD), (forget, torch.optim.Adam)):
            made = [
                trained(each, lambda: nn.Linear(4, 1), between, optimizer)
                for each in (strategy, one)
            ]
            require_close(*made, 1e-6)

    @on_replicas
    def test_modes_around_run(self, strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Linear(4, 4)
        x = torch.ones(2, 4)

        def look() -> dict[str, str]:
            y = model(x)
            return {"grad": str(y.requires_grad), "dtype": str(y.dtype)}

        with torch.no_grad():
            assert strategy.run(look)["grad"] == "False"
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert strategy.run(look)["dtype"] == "torch.bfloat16"
        with torch.inference_mode():
            assert strategy.local_results(strategy.run(torch.is_inference_mode_enabled)) == (True,)

    def test_modules_of_other_kinds(self, strategies: Any) -> None:
        makers: dict[str, Callable[[], nn.Module]] = {
            "scripted": lambda: nn.Sequential(torch.jit.script(nn.Linear(4, 1))),
            "traced by fx": lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 1))),
            "weight norm": lambda: parametrizations.weight_norm(nn.Linear(4, 1)),
            "pruned": lambda: prune.l1_unstructured(nn.Linear(4, 1), "weight", amount=0.5),
        }

        def case(strategy: Strategy) -> None:
            one = fd.OneDeviceStrategy("cpu")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch says that scripting is old
                for make in makers.values():
                    made = [trained(each, make, lambda *_: None) for each in (strategy, one)]
                    require_close(*made, 1e-6)

        strategies.run(case)

    @on_replicas
    def test_parameters_that_were_captured(self, strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Linear(4, 1)
        weight = model.weight
        strategy.run(lambda: (model(torch.ones(2, 4)).mean() + weight.square().sum()).backward())
        assert torch.allclose(weight.grad, 1 + 2 * weight)

    @on_replicas
    def test_sync_batch_norm_converts_in_the_scope(self, strategy: Strategy) -> None:
        def plain() -> nn.Module:
            return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))

        convert = fd.nn.SyncBatchNorm.convert
        with strategy.scope():
            first = convert(plain())
        made = plain()
        with strategy.scope():
            second = convert(made)
        third = strategy.mirror(convert(plain()))
        with strategy.scope():
            fourth = plain()
        fourth = convert(fourth)
        for model in (first, second, third, fourth):
            strategy.run(lambda model=model: model(torch.randn(4, 3)).square().sum().backward())
        strategy.check_in_sync()

    @on_replicas
    def test_a_schedulers_state_is_plain(self, strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Linear(2, 2)
            optimizer = torch.optim.Adam(model.parameters())
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        strategy.run(lambda: (model(torch.ones(1, 2)).sum().backward(), optimizer.step())[1])
        file = io.BytesIO()
        torch.save(scheduler.state_dict(), file)
        assert b"fastdist" not in file.getvalue()
        file.seek(0)
        scheduler.load_state_dict(torch.load(file))

    @on_replicas
    def test_models_are_released(self, strategy: Strategy) -> None:
        """A search makes many models in one strategy; those that are gone take no part any more."""
        gone = []
        for size in range(2, 8):
            with strategy.scope():
                model = nn.Sequential(nn.Linear(size, 3), nn.BatchNorm1d(3))
                optimizer = torch.optim.Adam(model.parameters())

            def step(model: Any = model, optimizer: Any = optimizer, size: int = size) -> None:
                optimizer.zero_grad()
                model(torch.randn(4, size)).square().mean().backward()
                optimizer.step()

            for _ in range(2):
                strategy.run(step)
            gone += [weakref.ref(model[0].weight), weakref.ref(optimizer)]
            if strategy.local_replica_ids[0] == 0:  # replicas may release at different times
                del model, optimizer, step
                gc.collect()
        model = optimizer = step = None  # type: ignore[assignment]
        strategy.run(lambda: None)
        gc.collect()
        assert [ref() for ref in gone] == [None] * 12

    @on_replicas
    def test_other_random_numbers(self, strategy: Strategy) -> None:
        """Numbers of Python, numpy and of generators are as the program has seeded them."""

        def draw() -> list[float]:
            generator = torch.Generator().manual_seed(0)
            return [
                np.random.rand(),
                random.random(),
                float(torch.rand((), generator=generator)),
            ]

        seen = set()
        for _ in range(3):
            np.random.seed(0)
            random.seed(0)
            own = [strategy.local_results(value)[0] for value in strategy.run(draw)]
            seen.add(tuple(own))
        assert len(seen) == 1

    @on_replicas
    def test_modules_of_another_thread(self, strategy: Strategy) -> None:
        other: list[nn.Module] = []
        with strategy.scope():
            model = nn.Linear(2, 2)
            thread = threading.Thread(target=lambda: other.append(nn.Linear(3, 3)))
            thread.start()
            thread.join()
        if strategy.local_replica_ids[0] == 0:
            other[0](torch.ones(1, 3)).sum().backward()  # is nobody else's
        strategy.run(lambda: model(torch.ones(1, 2)).sum().backward())
