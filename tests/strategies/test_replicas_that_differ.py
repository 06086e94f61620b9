"""Replicas that do not train the same model on the same batches: each is told, none is silent."""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import fastdist as fd
import numpy as np
import pytest
import torch
from fastdist import Strategy
from fastdist.errors import FastdistError
from fastdist.training.contributions import ReducedParameter
from fastdist.training.parameter_sample import Element, ParameterSample, first_difference
from replica_runs import Run, ranks, run
from torch import nn
from torch.utils.data import DataLoader, Dataset, SequentialSampler, Subset

__all__ = ["ranks", "run"]  # fixtures


@pytest.mark.parametrize("skips", [{1: [1]}, {1: [1], 0: [3]}, {0: [2]}, {1: [1], 2: [1]}])
def test_a_backward_left_out_on_one_replica(run: Run, skips: dict[int, list[int]]) -> None:
    """A step may return early, by `if not loss.isfinite()`; the first shifted backward tells."""

    def case(strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Linear(3, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(turn: int) -> None:
            replica = fd.get_replica_context().replica_id_in_sync_group
            if turn in skips.get(replica, []):
                return
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()

        def loop() -> None:
            for turn in range(6):
                strategy.run(step, (turn,))

        first = min(min(turns) for turns in skips.values())
        message = (
            rf"replica \d is in run {first + 2}, replica \d in run {first + 1}: replica \d has"
        )
        with pytest.raises(FastdistError, match=message) as caught:
            loop()
        assert set(caught.value.ranks) <= set(skips)
        with torch.no_grad():
            model.weight.fill_(1.0)
            model.bias.fill_(0.0)
        for turn in range(10, 15):
            strategy.run(step, (turn,))
        strategy.check_in_sync()

    run(case)


def test_the_second_backward_of_a_run_left_out(run: Run) -> None:
    def case(strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Linear(3, 1)

        def step(backwards: int) -> None:
            for _ in range(backwards):
                model(torch.ones(2, 3)).sum().backward()

        own = strategy.local_replica_ids[0]

        def two_runs() -> None:
            strategy.run(step, (1 if own == 0 else 2,))
            strategy.run(step, (1,))

        with pytest.raises(FastdistError, match="replica 0 is in run 2, replica 1 in run 1"):
            two_runs()

    run(case)


def test_a_run_on_the_chief_alone(run: Run) -> None:
    def case(strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Linear(3, 1)
        step = lambda: model(torch.ones(2, 3)).sum().backward()  # noqa: E731
        strategy.run(step)
        if strategy.is_chief:
            with torch.no_grad():
                strategy.run(lambda: model(torch.ones(2, 3)))
        with pytest.raises(
            FastdistError, match="replica 0 is in run 3, replica 1 in run 2"
        ) as caught:
            strategy.run(step)
        assert caught.value.ranks == (0,)

    run(case)


@pytest.mark.parametrize("how", ["drawn in run", "loaded by one", "state of one", "changed by one"])
def test_replicas_that_drift_apart(run: Run, how: str) -> None:
    def case(strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
            rate = 0.0 if how == "state of one" else 0.01
            optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        last = strategy.num_replicas_in_sync - 1
        own = strategy.local_replica_ids[0]
        if how == "loaded by one" and own == last:
            model.load_state_dict({name: v + 1 for name, v in model.state_dict().items()})

        def step(turn: int) -> None:
            optimizer.zero_grad()
            model(torch.ones(4, 3) * turn).square().mean().backward()
            optimizer.step()
            if how == "drawn in run" and own == last:
                with torch.no_grad():
                    model[0].weight[1] = torch.randn(3)
            if how == "state of one" and own == last and turn == 2:
                optimizer.state[model[0].weight]["exp_avg"].add_(1)
            if how == "changed by one" and own == last:
                model[2].bias.data.add_(0.25)

        whole = r"of the optimizer's state of 0.weight\[" if how == "state of one" else ""

        def loop() -> None:
            for turn in range(50):
                strategy.run(step, (turn,))

        with pytest.raises(FastdistError, match=rf"drifted apart: .*{whole}") as caught:
            loop()
        assert caught.value.ranks == (last,)
        assert (f"where replica {last} alone differs" in str(caught.value)) == (last > 1)

    run(case)


def test_settings_of_optimizers_in_tensors_that_differ_little(run: Run) -> None:
    def case(strategy: Strategy) -> None:
        last = strategy.num_replicas_in_sync - 1
        own = strategy.local_replica_ids[0]
        with strategy.scope():
            model = nn.Linear(3, 1)
            betas = torch.tensor(0.9 + 1e-6 * (own == last)), torch.tensor(0.999)
            optimizer = torch.optim.Adam(model.parameters(), betas=betas)

        def step() -> None:
            optimizer.zero_grad()
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()

        strategy.run(step)
        with pytest.raises(FastdistError, match="different optimizer steps") as caught:
            strategy.run(step)
        assert caught.value.ranks == (last,)

    run(case)


def test_batches_of_other_sizes(run: Run) -> None:
    def case(strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Linear(3, 1)
        size = 12 if strategy.is_chief else 6
        batches = strategy.distribute_dataset(torch.ones(24, 3), global_batch_size=size)
        message = (
            r"global batches have different sizes: this one is 12 examples, \[.*\] on replica 0, "
            r"6 examples, \[.*\] on replica 1"
        )

        def loop() -> None:
            for batch in batches:
                strategy.run(lambda x: model(x).mean().backward(), args=(batch,))

        with pytest.raises(FastdistError, match=message) as caught:
            loop()
        assert caught.value.ranks == (1,)

    run(case)


def test_sizes_that_change_whether_replicas_weigh_the_same(run: Run) -> None:
    def case(strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Linear(3, 1)
        size = 12 if strategy.is_chief else 7
        batches = strategy.distribute_dataset(torch.ones(24, 3), global_batch_size=size)

        def loop() -> None:
            for batch in batches:
                strategy.run(lambda x: model(x).mean().backward(), args=(batch,))

        with pytest.raises(FastdistError, match="different sizes: this one is 12 examples"):
            loop()

    run(case)


class Examples(Dataset[Any]):
    """Each example is what `make` returns for its index."""

    def __init__(self, length: int, make: Callable[[int], Any]) -> None:
        self.length = length
        self.make = make

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def _floats(i: int) -> torch.Tensor:
    return torch.full((3,), float(i))


def _split(own: int) -> Any:
    order = np.random.default_rng(own).permutation(40)[:24]
    return Subset(Examples(40, _example), order.tolist())


def _example(i: int) -> dict[str, Any]:
    return {"x": _floats(i), "y": 0}


# What each replica gives to distribute_dataset, and the words of the error.
DIFFERENT: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "arrays": (lambda own: {"source": torch.arange(72.0).view(24, 3).roll(own, 0)}, "other ex"),
    "shuffled arrays": (
        lambda own: {"source": torch.arange(72.0).view(24, 3) + own, "shuffle": True},
        "other examples",
    ),
    "a split": (lambda own: {"source": _split(own)}, "other examples"),
    "a split, shuffled": (lambda own: {"source": _split(own), "shuffle": True}, "other examples"),
    "a split, loaded": (
        lambda own: {"source": _split(own), "num_workers": int(own == 0)},
        "other examples",
    ),
    "order of files": (
        lambda own: {"source": Examples(24, lambda i: _floats((i + own) % 24))},
        "other examples",
    ),
    "numbers of classes": (
        lambda own: {"source": Examples(24, lambda i: (_floats(i), [0, 1, 2][(i + own) % 3]))},
        "other examples",
    ),
    "lengths": (
        lambda own: {"source": torch.arange(72.0).view(24, 3)[: 24 - 6 * own]},
        "length is 24 on replica 0, 18 on replica 1",
    ),
    "seeds": (
        lambda own: {"source": torch.arange(72.0).view(24, 3), "shuffle": True, "seed": own},
        "seed is 0 on replica 0, 1 on replica 1",
    ),
    "a sampler": (
        lambda own: {"source": DataLoader(_split(own), 6, sampler=SequentialSampler(range(24)))},
        "other examples",
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_data_that_differs(run: Run, what: str) -> None:
    make, words = DIFFERENT[what]

    def case(strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Linear(3, 1)
        given = make(min(strategy.local_replica_ids[0], 1))
        if not isinstance(given["source"], DataLoader):
            given["global_batch_size"] = 6

        def step(batch: Any) -> None:
            x = batch["x"] if isinstance(batch, dict) else batch
            model(x[0] if isinstance(x, tuple) else x).mean().backward()

        def loop() -> None:
            for batch in strategy.distribute_dataset(given.pop("source"), **given):
                strategy.run(step, args=(batch,))

        with pytest.raises(FastdistError, match=words):
            loop()

    run(case)


@pytest.mark.parametrize("weight", [None, 1.0])
def test_a_batch_left_out(run: Run, weight: float | None) -> None:
    def case(strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Linear(3, 1)
        batches = iter(strategy.distribute_dataset(torch.ones(24, 3), global_batch_size=6))

        def loop() -> None:
            for turn in range(4):
                batch = next(batches)
                if turn == 1 and not strategy.is_chief:
                    batch = next(batches)
                strategy.run(lambda x: model(x).mean().backward(), (batch,), weight=weight)

        message = "this one is step 1 of epoch 0 on replica 0, step 2 of epoch 0 on replica 1"
        with pytest.raises(FastdistError, match=message):
            loop()

    run(case)


def test_two_batches_in_different_proportions(run: Run) -> None:
    def case(strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Linear(3, 1)
        n = strategy.num_replicas_in_sync
        pairs = [
            next(iter(strategy.distribute_dataset(torch.ones(size, 3), global_batch_size=size)))
            for size in (3 * n, 4 * n + 1, 2 * n)
        ]
        even, uneven, smaller = pairs
        step = lambda a, b: (model(a).mean() + model(b).mean()).backward()  # noqa: E731
        with pytest.raises(ValueError, match=r"different proportions, \[3, 3.*\] and \[5, 4"):
            strategy.run(step, (even, uneven))
        strategy.run(step, (even, smaller))
        strategy.run(step, (even, uneven), weight=1)

    run(case)


def test_batches_of_other_sizes_with_weights(run: Run) -> None:
    def case(strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Linear(3, 1)
        size = 12 if strategy.is_chief else 6
        (batch, *_) = strategy.distribute_dataset(torch.ones(24, 3), global_batch_size=size)
        with pytest.raises(FastdistError, match="global_batch_size is 12 on replica 0, 6 on"):
            strategy.run(lambda x: model(x).mean().backward(), args=(batch,), weight=2)

    run(case)


def _noisy(i: int) -> torch.Tensor:
    return _floats(i) + float(np.random.default_rng().random())


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("labels", [False, True])
def test_augmentations_and_a_look_at_the_data_may_differ(
    run: Run, labels: bool, shuffle: bool
) -> None:
    def case(strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Linear(3, 1)
        make = (lambda i: (_noisy(i), i)) if labels else (lambda i: (_noisy(i),))
        batches = strategy.distribute_dataset(
            Examples(24, make), global_batch_size=6, shuffle=shuffle, drop_remainder=True
        )
        if strategy.is_chief:
            print(next(iter(batches)))
            if shuffle:
                batches.set_epoch(0)
        for _epoch in range(2):
            for batch in batches:
                strategy.run(lambda x, *_: model(x).mean().backward(), args=batch)

    run(case)


class Own(nn.Linear):
    """Prints where it lies, which differs from process to process."""

    def extra_repr(self) -> str:
        return f"{super().extra_repr()} on cuda:{id(self) % 8} at {hex(id(self))}"


SETTINGS: dict[str, tuple[Callable[[int], nn.Module], str]] = {
    "dropout": (lambda own: nn.Dropout(0.1 + own / 2), r"rank 1: 0: Dropout\(p=0.6"),
    "momentum": (lambda own: nn.BatchNorm1d(3, momentum=own / 2), "momentum=0.5"),
    "class": (lambda own: [nn.ReLU(), nn.GELU()][own], "rank 0: 0: ReLU"),
    "frozen": (lambda own: nn.Linear(3, 3).requires_grad_(own == 0), "rank 1: 0.weight.*, frozen"),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_settings_of_modules_that_differ(run: Run, what: str) -> None:
    make, words = SETTINGS[what]

    def case(strategy: Strategy) -> None:
        own = min(strategy.local_replica_ids[0], 1)

        def scope() -> None:
            with strategy.scope():
                model = nn.Sequential(make(own), Own(3, 1))  # noqa: F841

        with pytest.raises(FastdistError, match=f"(?s)the model differs .*{words}"):
            scope()
        with strategy.scope():
            model = nn.Sequential(make(0), Own(3, 1))  # noqa: F841

    run(case)


class Noisy(torch.optim.SGD):
    """SGD with Langevin noise, as it is written for one device."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=1e-2)


def test_statistics_of_a_part_of_a_batch(run: Run) -> None:
    """torch's update_bn gets whole batches, and gives the statistics of one device."""
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))

    def case(strategy: Strategy) -> None:
        with strategy.scope():
            model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
            averaged = torch.optim.swa_utils.AveragedModel(model)
            plain = nn.Linear(3, 4)
        batches = strategy.distribute_dataset(x, global_batch_size=8)
        parts = [strategy.local_results(batch)[0] for batch in batches]
        with pytest.raises(FastdistError, match=r"AveragedModel.*this replica's part of a batch"):
            torch.optim.swa_utils.update_bn(parts, averaged)
        averaged.eval()
        assert averaged(parts[0]).shape[1] == plain(parts[0]).shape[1] == 4
        assert torch.equal(strategy.run(lambda: model(x[:4])).values[0], model(x[:4]))
        torch.optim.swa_utils.update_bn(x.split(8), averaged)
        alone = nn.BatchNorm1d(4, momentum=None)
        for part in x.split(8):
            alone(model[0](part))
        torch.testing.assert_close(averaged.module[1].running_mean, alone.running_mean)
        strategy.check_in_sync()

    run(case)


def test_optimizers_draw_the_same_on_all_replicas(run: Run) -> None:
    def case(strategy: Strategy) -> list[Any]:
        torch.manual_seed(3)
        with strategy.scope():
            model = nn.Linear(3, 2)
            optimizer = Noisy(model.parameters(), lr=0.1)

        def step() -> torch.Tensor:
            optimizer.zero_grad()
            before = torch.rand(1)
            model(torch.ones(4, 3)).square().mean().backward()
            optimizer.step()
            return torch.cat([before, torch.rand(1)])

        drawn = [strategy.local_results(strategy.run(step))[0].tolist() for _ in range(60)]
        strategy.check_in_sync()
        return [*drawn, model.weight.flatten().tolist()]

    results = run(case)
    assert len({tuple(result[-1]) for result in results}) == 1
    for turn in zip(*(result[:-1] for result in results), strict=True):
        assert len({tuple(pair) for pair in turn}) == len(results)  # functions draw their own
        assert all(before != after for before, after in turn)


def test_closures_draw_their_replicas_numbers(run: Run) -> None:
    def case(strategy: Strategy) -> list[float]:
        torch.manual_seed(3)
        with strategy.scope():
            model = nn.Linear(3, 2)
            optimizer = Noisy(model.parameters(), lr=0.1)
        seen = []

        def step() -> None:
            def closure() -> torch.Tensor:
                seen.append(float(torch.rand(())))
                optimizer.zero_grad()
                loss = model(torch.ones(4, 3)).square().mean()
                loss.backward()
                return loss

            optimizer.step(closure)

        for _ in range(5):
            strategy.run(step)
        strategy.check_in_sync()
        return seen

    results = run(case)
    assert len(set(map(tuple, results))) == len(results)


class Buffered(nn.Module):
    """Writes its buffers from what `of` makes of a batch."""

    def __init__(self, of: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.of = of
        self.scale = nn.Parameter(torch.ones(()))
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += self.of(x.detach())
        return x * self.scale


class RunningNorm(Buffered):
    pass


class Counting(Buffered):
    def __init__(self, of: Callable[[torch.Tensor], torch.Tensor], size: int) -> None:
        super().__init__(of)
        self.register_buffer("total", torch.zeros(size, dtype=torch.int64))


BUFFERS: dict[str, tuple[Callable[[], nn.Module], bool]] = {
    "sums": (lambda: Buffered(lambda x: x.sum(0)), True),
    "counts": (lambda: Counting(lambda x: (x[:, :1] % 4 == 0).sum(), 1 << 17), True),
    "equal counts": (lambda: Counting(lambda x: torch.tensor(1), 0), False),
    "the same": (lambda: Buffered(lambda x: torch.ones(3) / 3), False),
    "a normalization": (lambda: RunningNorm(lambda x: x.sum(0)), False),
    "batch norm": (lambda: nn.BatchNorm1d(3), False),
}


@pytest.mark.parametrize("what", BUFFERS)
def test_buffers_that_are_no_means_warn(run: Run, what: str) -> None:
    make, warns = BUFFERS[what]

    def case(strategy: Strategy) -> list[str]:
        with strategy.scope():
            model = nn.Sequential(make(), nn.Linear(3, 1))
        data = torch.arange(72.0).view(24, 3)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for batch in strategy.distribute_dataset(data, global_batch_size=6):
                strategy.run(lambda x: model(x).mean().backward(), args=(batch,))
        return [f"{w.filename} {w.message}" for w in caught]

    chief, *others = run(case)
    assert not any(others)
    assert len(chief) == warns
    for text in chief:
        assert re.match("<dynamic-code> (Buffered|Counting) has buffers that each replica", text)
        assert ": total. They" in text


def reduced(parameters: dict[str, torch.Tensor]) -> list[ReducedParameter]:
    return [
        ReducedParameter(name, weakref.ref(p), 0, place, p.shape, p.dtype, False)  # type: ignore[arg-type]
        for place, (name, p) in enumerate(parameters.items())
    ]


def test_a_sample_takes_other_elements_each_time_and_reads_any_parameter() -> None:
    freed = nn.Parameter(torch.ones(4))
    parameters = {
        "float": nn.Parameter(torch.randn(5, 7)),
        "double": nn.Parameter(torch.randn(3, dtype=torch.float64)),
        "half": nn.Parameter(torch.randn(11).to(torch.bfloat16)),
        "complex": nn.Parameter(torch.randn(2, 2, dtype=torch.complex64)),
        "one": nn.Parameter(torch.tensor(2.5)),
        "empty": nn.Parameter(torch.empty(0)),
        "columns": nn.Parameter(torch.randn(4, 6).t()),
        "meta": nn.Parameter(torch.empty(3, device="meta")),
        "freed": freed,
    }
    sample = ParameterSample(reduced(parameters), [])
    freed.untyped_storage().resize_(0)
    seen: dict[tuple[int, int], float] = {}
    for turn in range(400):
        taken = sample.take()
        assert bool(taken) == (turn % 4 == 0)
        for each in sample.elements():
            p = parameters[each.name].detach()
            assert each.value == float(
                p.reshape(-1)[each.index].abs() if p.is_complex() else p.reshape(-1)[each.index]
            )
            seen[each.place, each.index] = each.value
    names = list(parameters)
    found = {names[place] for place, _ in seen}
    assert found == {"float", "double", "half", "complex", "one"}
    assert len(seen) == 35 + 3 + 11 + 4 + 1  # every element


def test_rounding_is_no_difference_where_arithmetic_may_differ() -> None:
    def elements(*values: float) -> list[Element]:
        return [Element(place, "w", "", 0, value) for place, value in enumerate(values)]

    nan = float("nan")
    one, other = elements(1.0, 0.0, nan), elements(1.0001, 0.0, nan)
    assert first_difference(one, other, is_exact=False) is None
    assert first_difference(one, other, is_exact=True) == (one[0], other[0])
    assert first_difference(one, one[1:], is_exact=True) is None
    for far in (elements(1.01, 0.0, nan), elements(1.0, 1e-30, nan), elements(1.0, 0.0, 2.0)):
        assert first_difference(one, far, is_exact=False) is not None


def test_torchs_sync_batch_norm_is_refused_and_converted(run: Run) -> None:
    def case(strategy: Strategy) -> None:
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        with (
            pytest.raises(fd.errors.UnsupportedError, match=r"^1 is torch's SyncBatchNorm"),
            strategy.scope(),
        ):
            torch.nn.SyncBatchNorm.convert_sync_batchnorm(net)
        with strategy.scope():
            model = fd.nn.SyncBatchNorm.convert(nn.SyncBatchNorm.convert_sync_batchnorm(net))
        x = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
        for batch in strategy.distribute_dataset(x, global_batch_size=12):
            strategy.run(lambda x: model(x).square().mean().backward(), args=(batch,))
        mean = model[0](x).mean(0) * 0.1
        assert torch.allclose(model[1].running_mean, mean, atol=1e-6)

    run(case)
