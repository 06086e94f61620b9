"""TPUStrategy on as many virtual devices as CPU_NUM_DEVICES says; see docs/tpu.md for the command.

The number of devices is fixed once torch_xla has started, so that each number is a run of pytest.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch_xla", reason="needs torch_xla: pip install 'fastdist[tpu]'")
if os.environ.get("PJRT_DEVICE") != "CPU":
    pytest.skip("needs PJRT_DEVICE=CPU", allow_module_level=True)

import fastdist as fd
import torch
import torch.nn.functional as F
from fastdist import PerReplica, TPUStrategy, VariableAggregation, VariableSynchronization
from fastdist.errors import FastdistError, UnsupportedError
from strategy_pieces import adam, digits, plain, replica_id, require_close, sgd, train
from torch import nn

pytestmark = [pytest.mark.xla, pytest.mark.timeout(300)]
N = int(os.environ.get("CPU_NUM_DEVICES", "1"))
SUM, MEAN = VariableAggregation.SUM, VariableAggregation.MEAN
NONE, FIRST = VariableAggregation.NONE, VariableAggregation.ONLY_FIRST_REPLICA
ON_READ = VariableSynchronization.ON_READ


@pytest.fixture
def strategy() -> Iterator[TPUStrategy]:
    made = TPUStrategy()
    assert made.num_replicas_in_sync == N
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "run of .* was compiled again", UserWarning)
        yield made


def traced_id() -> torch.Tensor:
    return torch.as_tensor(replica_id()).to("xla")


def values_of(strategy: TPUStrategy, fn: Any, *args: Any) -> list[Any]:
    """What fn returns on each replica, as lists and numbers."""
    results = strategy.local_results(strategy.run(fn, args))
    made = [r.tolist() if isinstance(r, torch.Tensor) else r for r in results]
    return made if len(made) == N else made * N


# --- contexts, reduce, gather -------------------------------------------------------------------


def test_reduce_of_one_on_each(strategy: TPUStrategy) -> None:
    value = strategy.run(lambda: torch.tensor(1.0))
    with strategy.scope():
        assert strategy.reduce("sum", value) == N
    assert strategy.reduce("mean", value) == 1
    assert strategy.reduce("sum", strategy.run(lambda: 1.0)) == N
    ids = strategy.run(traced_id)
    assert strategy.reduce("sum", ids) == N * (N - 1) // 2
    assert strategy.reduce("mean", ids) == (N - 1) / 2
    assert strategy.reduce("max", ids) == N - 1
    assert strategy.reduce("min", ids) == 0
    assert [int(i) for i in strategy.local_results(ids)] == list(range(N))
    assert strategy.reduce_to("sum", ids, "cpu").device.type == "cpu"
    with pytest.raises(ValueError, match="got 'average'"):
        strategy.reduce("average", 1.0)  # type: ignore[arg-type]


def test_reduce_along_an_axis(strategy: TPUStrategy) -> None:
    value = strategy.run(lambda: torch.tensor([1.0, 2.0]) + traced_id() * 0)
    assert strategy.reduce("mean", value, axis=0) == 1.5
    assert strategy.reduce("sum", value, axis=0) == 3 * N
    assert strategy.reduce("sum", value).tolist() == [N, 2 * N]
    ragged = strategy.distribute_values_from_function(
        lambda c: torch.arange(c.replica_id_in_sync_group + 1.0)
    )
    rows = [float(x) for r in range(N) for x in range(r + 1)]
    assert float(strategy.reduce("mean", ragged, axis=0)) == pytest.approx(sum(rows) / len(rows))


def test_all_reduce_and_its_gradient(strategy: TPUStrategy) -> None:
    def step() -> Any:
        context = fd.get_replica_context()
        assert context is not None
        x = (torch.tensor([1.0, 2.0]).to(context.device) + traced_id() * 0).requires_grad_()
        total = context.all_reduce("sum", x)
        total.backward(torch.stack([torch.ones_like(total[0]), traced_id() * 1.0]))
        several = context.all_reduce("max", {"id": traced_id(), "one": 1.0})
        return total.detach(), x.grad, context.all_reduce("mean", traced_id()), several

    total, gradient, mean, several = strategy.run(step)
    for t, g, m, i, one in zip(
        *map(strategy.local_results, (total, gradient, mean, several["id"], several["one"])),
        strict=False,
    ):
        assert t.tolist() == [N, 2 * N]
        assert g.tolist() == [N, N * (N - 1) / 2]
        assert (m, i, one) == ((N - 1) / 2, N - 1, 1)


def test_all_gather_and_its_gradient(strategy: TPUStrategy) -> None:
    def step() -> Any:
        context = fd.get_replica_context()
        assert context is not None
        x = (torch.ones(2, 3).to(context.device) * traced_id()).requires_grad_()
        joined = context.all_gather(x, axis=1)
        weights = torch.arange(6.0 * N).reshape(2, 3 * N).to(context.device)
        joined.backward(weights)
        with pytest.raises(ValueError, match="at least one dimension"):
            context.all_gather(traced_id())
        return joined.detach(), x.grad

    joined, gradient = strategy.run(step)
    weights = torch.arange(6.0 * N).reshape(2, 3 * N)
    rows = zip(strategy.local_results(joined), strategy.local_results(gradient), strict=True)
    for own, (j, g) in enumerate(rows):
        assert j[0].tolist() == [float(r) for r in range(N) for _ in range(3)]
        assert g.tolist() == (N * weights[:, 3 * own : 3 * own + 3]).tolist()


def test_gather(strategy: TPUStrategy) -> None:
    value = strategy.run(lambda: torch.ones(2, 1, device="xla") * traced_id())
    assert strategy.gather(value).flatten().tolist() == [float(r) for r in range(N) for _ in "ab"]
    assert strategy.gather(value, axis=1).shape == (2, N)
    ragged = strategy.distribute_values_from_function(
        lambda c: torch.full((c.replica_id_in_sync_group + 1, 1), c.replica_id_in_sync_group)
    )
    expected = [r for r in range(N) for _ in range(r + 1)]
    assert strategy.gather(ragged).flatten().tolist() == expected
    with pytest.raises(ValueError, match="at least one dimension"):
        strategy.gather(strategy.run(traced_id))
    if N > 1:
        with pytest.raises(ValueError, match=r"\(2, 1\)"):
            strategy.gather(ragged, axis=1)
        with pytest.raises(ValueError, match=r"differ in shape or dtype, \[\(1, 1\), \(2, 1\)"):
            strategy.run(lambda x: x, (ragged,))


def test_contexts(strategy: TPUStrategy) -> None:
    with strategy.scope(), strategy.scope():
        assert fd.get_strategy() is strategy
        assert fd.get_replica_context() is None
        assert isinstance(strategy, fd.Strategy)
        with pytest.raises(RuntimeError, match="Mixing"):
            fd.OneDeviceStrategy("cpu").scope().__enter__()
    with fd.OneDeviceStrategy("cpu").scope(), pytest.raises(RuntimeError, match="Mixing"):
        strategy.run(lambda: None)
    with pytest.raises(ValueError, match="args must be a tuple or list, got Tensor"):
        strategy.run(lambda x: x, torch.ones(2))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="run was called inside run"):
        strategy.run(lambda: strategy.run(lambda: None))
    assert values_of(strategy, lambda: fd.get_replica_context().num_replicas_in_sync) == [N] * N


def test_an_exception_leaves_the_strategy_usable(strategy: TPUStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(2, 1)

    def failing() -> None:
        model(torch.ones(1, 2, device="xla")).sum().backward()
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost") as caught:
        strategy.run(failing)
    assert any(entry.name == "failing" for entry in caught.traceback)
    assert model.weight.grad is not None
    assert model.weight.grad.tolist() == [[1.0, 1.0]]
    assert strategy.reduce("sum", strategy.run(traced_id)) == N * (N - 1) // 2
    assert torch.autograd._engine_run_backward.__module__ == "torch.autograd.graph"  # type: ignore[attr-defined]


@pytest.mark.skipif(N == 1, reason="one device's values can be read")
@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: float(x[0]),
        lambda x: x if x.sum() > 0 else -x,
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: torch.zeros(3).copy_(x),
        lambda x: x[x > 1],
        lambda x: x.unique(),
        lambda x: x.nonzero(),
    ],
)
def test_values_are_not_there_while_tracing(strategy: TPUStrategy, read: Any) -> None:
    x = strategy.distribute_values_from_function(
        lambda c: torch.full((3,), c.replica_id_in_sync_group + 1.0)
    )
    kept = []

    def step(x: torch.Tensor) -> torch.Tensor:
        kept.append(x * 2)
        assert str(x) == f"{x}" == "<traced tensor of shape (3,)>"
        return read(x)  # type: ignore[no-any-return]

    with pytest.raises(UnsupportedError, match="values while run traces its function"):
        strategy.run(step, (x,))
    assert kept[0].tolist() == [2.0] * 3
    assert strategy.reduce("sum", strategy.run(traced_id)) == N * (N - 1) // 2


def test_merge_call(strategy: TPUStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)

    def merged(given: fd.Strategy, value: Any, scale: float) -> Any:
        assert fd.in_cross_replica_context()
        assert given is strategy
        with torch.no_grad():
            model.weight.fill_(3.0)
        return given.reduce("sum", value) * scale

    def step() -> Any:
        context = fd.get_replica_context()
        assert context is not None
        result = context.merge_call(merged, args=(traced_id() * 1.0,), kwargs={"scale": 2.0})
        assert fd.get_replica_context() is context
        return result + model.weight[0, 0].detach() * traced_id()

    expected = [N * (N - 1) + 3.0 * i for i in range(N)]
    assert values_of(strategy, step) == expected
    assert model.weight.item() == 3.0


# --- variables ----------------------------------------------------------------------------------


@pytest.mark.parametrize("aggregation", list(VariableAggregation))
def test_aggregated_on_write(strategy: TPUStrategy, aggregation: VariableAggregation) -> None:
    with strategy.scope():
        v = fd.Variable([1.0, 1.0], aggregation=aggregation)

    def step() -> torch.Tensor:
        v.assign(torch.ones(2) * 2)
        return v.value.clone()

    expected = 2.0 * N if aggregation is SUM else 2.0
    assert values_of(strategy, step) == [[expected] * 2] * N
    assert v.value.tolist() == [expected] * 2
    strategy.run(lambda: v.assign_add(1.0))
    expected += N if aggregation is SUM else 1
    assert v.value.tolist() == [expected] * 2
    v.assign(7)
    assert values_of(strategy, lambda: v.value.clone()) == [[7.0, 7.0]] * N
    strategy.check_in_sync()


def test_only_first_replica_and_each_its_own(strategy: TPUStrategy) -> None:
    with strategy.scope():
        first = fd.Variable(5, aggregation=FIRST)
        own = fd.Variable(0.0)
        with pytest.raises(ValueError, match="MEAN"):
            fd.Variable(1, aggregation=MEAN)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        first.assign(traced_id())
        own.assign(traced_id())
        return first.value.clone(), own.value.clone()

    assert values_of(strategy, lambda: step()[0]) == [0] * N
    assert values_of(strategy, lambda: step()[1]) == [float(i) for i in range(N)]
    assert first.value == 0
    assert [int(v) for v in strategy.local_results(own)] == list(range(N))
    own.assign(PerReplica(tuple(10.0 + i for i in range(N))) if N > 1 else 10.0)
    assert values_of(strategy, lambda: own.value.clone()) == [10.0 + i for i in range(N)]
    strategy.check_in_sync()  # of what is to be in sync


def test_aggregated_on_read(strategy: TPUStrategy) -> None:
    with strategy.scope():
        sums = fd.Variable(0, synchronization=ON_READ, aggregation=SUM)
        means = fd.Variable(0.0, synchronization=ON_READ, aggregation=MEAN)
        first = fd.Variable(9, synchronization=ON_READ, aggregation=FIRST)
        none = fd.Variable(9, synchronization=ON_READ)

    def step() -> None:
        for v in (sums, means, first, none):
            v.assign(traced_id())
            v.assign_add(0)

    strategy.run(step)
    strategy.run(lambda: None)  # changes nothing
    assert sums.value == N * (N - 1) / 2
    assert means.value == (N - 1) / 2
    assert first.value == 0
    if N > 1:
        with pytest.raises(ValueError, match="has no one value outside run"):
            _ = none.value
    assert [int(v) for v in strategy.local_results(none)] == list(range(N))
    assert strategy.reduce("sum", sums) == N * (N - 1) / 2
    sums.assign(11)
    strategy.run(lambda: sums.assign_add(1))
    assert sums.value == 11 + N


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.seen = fd.Variable(0, synchronization=ON_READ, aggregation=SUM)
        self.loss = fd.Variable(0.0, synchronization=ON_READ, aggregation=MEAN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.assign_add(len(x))
        out: torch.Tensor = self.layer(x)
        return out


def test_checkpoints_move_between_strategies(strategy: TPUStrategy) -> None:
    with strategy.scope():
        model = Counter()
        optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(3, 2, device="xla")).sum().backward()
        model.loss.assign(traced_id())
        optimizer.step()

    strategy.run(step)
    saved = {k: v.cpu() for k, v in model.state_dict().items()}
    assert saved["seen.value"] == 3 * N
    assert saved["loss.value"] == (N - 1) / 2
    states = optimizer.state_dict()

    other = fd.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    with other.scope():
        twin = Counter()
        twin_optimizer = torch.optim.Adam(twin.parameters())
    twin.load_state_dict(saved)
    twin_optimizer.load_state_dict(copy.deepcopy(states))
    assert twin.seen.value == 3 * N
    twin_x = torch.ones(3, 2)

    def twin_step() -> None:
        twin_optimizer.zero_grad()
        twin(twin_x).sum().backward()
        twin_optimizer.step()

    other.run(twin_step)
    strategy.run(step)
    for one, same in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one.detach().cpu(), same.detach(), rtol=0, atol=1e-6)

    model.load_state_dict(twin.state_dict())
    optimizer.load_state_dict(twin_optimizer.state_dict())
    assert model.seen.value == 3 * N + 9
    strategy.run(step)
    assert model.seen.value == 6 * N + 9
    strategy.check_in_sync()


def test_update_each_component(strategy: TPUStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(2, 1)
        v = fd.Variable(1.0)
    parts = strategy.distribute_values_from_function(lambda c: float(c.replica_id_in_sync_group))

    def add(component: torch.Tensor, x: Any) -> Any:
        component.add_(x)
        return x

    strategy.update(v, add, args=(parts,))
    assert [float(x) for x in strategy.local_results(v)] == [1.0 + i for i in range(N)]
    strategy.update(model.weight, lambda component, x: component.fill_(x), args=(3.0,))
    assert model.weight.tolist() == [[3.0, 3.0]]
    strategy.check_in_sync()


def test_out_of_sync_is_seen(strategy: TPUStrategy) -> None:
    with strategy.scope():
        model = nn.Linear(2, 2)

    def spoil() -> None:
        with torch.no_grad():
            model.bias.add_(traced_id())

    strategy.run(spoil)
    if N == 1:
        strategy.check_in_sync()
    else:
        with pytest.raises(FastdistError, match="bias"):
            strategy.check_in_sync()


# --- input --------------------------------------------------------------------------------------


def test_batches_are_cut_among_replicas(strategy: TPUStrategy) -> None:
    def examples(x: torch.Tensor) -> Any:
        context = fd.get_replica_context()
        assert context is not None
        return x.sum(), context.examples

    seen, rows = [], []
    for one in strategy.distribute_dataset(torch.arange(15.0), global_batch_size=4):
        total, sizes = strategy.run(examples, (one,))
        seen.append(sizes)
        rows.append(strategy.gather(strategy.run(lambda x: x * 1, (one,))).tolist())
        assert float(strategy.reduce("sum", total)) == sum(rows[-1])
    assert [sum(sizes) for sizes in seen] == [4, 4, 4, 3]
    assert seen[-1] == tuple(len(part) for part in torch.arange(3).tensor_split(N))
    assert [x for row in rows for x in row] == list(range(15))
    halves = strategy.distribute_dataset(torch.arange(100), global_batch_size=10)
    assert len(halves) == 10
    position = halves.state_dict()
    iterator = iter(halves)
    next(iterator)
    assert halves.state_dict()["step"] == position["step"] + 1  # what is read ahead counts not


def test_datasets_from_function(strategy: TPUStrategy) -> None:
    def make(context: Any) -> Any:
        return torch.arange(5 * 12).split(context.get_per_replica_batch_size(12))

    rows = [strategy.gather(one) for one in strategy.distribute_datasets_from_function(make)]
    assert [row.tolist() for row in rows] == torch.arange(60).view(5, 12).tolist()


# --- training -----------------------------------------------------------------------------------


def test_summed_gradients() -> None:
    strategy = TPUStrategy(gradient_reduction="sum")
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        model.weight.data.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        for _ in range(2):  # accumulated over two backwards
            (model.weight * (traced_id() + 1.0)).sum().backward()
        optimizer.step()

    strategy.run(step)
    assert model.weight.item() == pytest.approx(-0.1 * 2 * N * (N + 1) / 2)


def train_on_dataset(strategy: fd.Strategy, make: Any, epochs: int, **options: Any) -> Any:
    """Shuffled digits, of which the last batch has 97 examples of 100."""
    torch.manual_seed(1)
    with strategy.scope():
        model, optimizer = make()
    batches = strategy.distribute_dataset(digits(), shuffle=True, seed=3, **options)

    def step(batch: Any) -> torch.Tensor:
        x, y = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = [
        strategy.reduce("mean", strategy.run(step, args=(one,)))
        for _ in range(epochs)
        for one in batches
    ]
    strategy.check_in_sync()
    tensors = [*model.parameters(), *model.buffers()]
    values = [tensor.detach().cpu().clone() for tensor in tensors]
    return values, [float(loss) for loss in losses]


@pytest.mark.parametrize("make", [sgd, adam])
@pytest.mark.parametrize("size", [100, 898])
def test_digits_train_as_on_one_device(make: Any, size: int) -> None:
    """The last of 898 has one example: some replicas have none."""
    strategy = TPUStrategy()
    got, losses = train_on_dataset(strategy, make, 3, global_batch_size=size)
    wanted, same = train_on_dataset(fd.OneDeviceStrategy("cpu"), make, 3, global_batch_size=size)
    require_close(got, wanted, 4e-5)
    assert losses == pytest.approx(same, abs=1e-4)
    assert (strategy.compilations.count, strategy.compilations.repeated) == (1, 0)


def test_batches_made_by_hand(strategy: TPUStrategy) -> None:
    require_close([p.cpu() for p in train(strategy, sgd, epochs=3)], plain(sgd, epochs=3), 4e-5)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 32), nn.Linear(32, 10)
        self.norm = nn.BatchNorm1d(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(F.relu(self.norm(self.first(x))))
        return out


def normed() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Normed()
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


@pytest.mark.parametrize("size", [100, 600])
def test_batch_norm_is_that_of_each_replica(size: int) -> None:
    """Statistics of each replica's examples; the moving ones are the mean over replicas."""
    devices = [f"cpu:{i}" for i in range(N)]
    got, _ = train_on_dataset(TPUStrategy(), normed, 1, global_batch_size=size)
    wanted, _ = train_on_dataset(fd.MirroredStrategy(devices), normed, 1, global_batch_size=size)
    require_close(got, wanted, 4e-5)


def test_accumulation_over_runs(strategy: TPUStrategy) -> None:
    def gradients(strategy: fd.Strategy) -> list[torch.Tensor]:
        torch.manual_seed(2)
        with strategy.scope():
            model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))
        x = torch.randn(20, 3)

        def backward(batch: torch.Tensor) -> None:
            model(batch).square().mean().backward()

        batches = list(strategy.distribute_dataset(x, global_batch_size=8))
        with strategy.no_sync():
            strategy.run(backward, (batches[0],))
            strategy.run(backward, (batches[1],))
        strategy.run(backward, (batches[2],))
        strategy.run(backward, (batches[2],))
        return [p.grad.cpu() for p in model.parameters() if p.grad is not None]

    require_close(gradients(strategy), gradients(fd.OneDeviceStrategy("cpu")), 1e-6)


def test_gradients_used_outside_run(strategy: TPUStrategy) -> None:
    def trained(strategy: fd.Strategy) -> list[torch.Tensor]:
        torch.manual_seed(4)
        with strategy.scope():
            model = nn.Linear(64, 10)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        batches = strategy.distribute_dataset(digits(), global_batch_size=500)

        def backward(batch: Any) -> None:
            F.cross_entropy(model(batch[0]), batch[1]).backward()

        for one in batches:
            optimizer.zero_grad()
            strategy.run(backward, (one,))
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        strategy.check_in_sync()
        return [p.detach().cpu() for p in model.parameters()]

    require_close(trained(strategy), trained(fd.OneDeviceStrategy("cpu")), 1e-5)


def test_each_replica_has_its_own_random_stream(strategy: TPUStrategy) -> None:
    def draw() -> torch.Tensor:
        layer = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True).to("xla")
        attended = layer(*[torch.ones(1, 2, 4, device="xla")] * 3)[0].detach().flatten()
        drawn = [
            torch.rand(2),
            F.dropout(torch.ones(4)),
            torch.randn(3, device="xla"),
            torch.randint(0, 1000, (3,)).float(),
            torch.empty(3, device="xla").normal_(),
            torch.bernoulli(torch.full((20,), 0.5)),
            torch.randperm(9).float(),
            torch.rand_like(torch.ones(2, device="xla")),
            attended * 0,
        ]
        return torch.cat([values.to("xla") for values in drawn])

    runs = []
    for _ in range(2):
        torch.manual_seed(5)
        rows = values_of(strategy, draw)
        assert len({tuple(row) for row in rows}) == N
        assert all(sorted(row[35:44]) == list(range(9)) for row in rows)
        assert all(set(row[2:6]) <= {0.0, 2.0} for row in rows)
        runs.append([*rows, torch.rand(1).tolist()])
    assert runs[0] == runs[1]
    if N > 1:
        with pytest.raises(UnsupportedError, match="poisson"):
            strategy.run(lambda: torch.poisson(torch.ones(2, device="xla")))


def test_joining_uneven_batches_otherwise_is_refused(strategy: TPUStrategy) -> None:
    def norm(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.vector_norm(x)

    even, uneven = strategy.distribute_dataset(torch.arange(2.0 * N + 1), global_batch_size=2 * N)
    strategy.run(norm, (even,))
    with pytest.raises(UnsupportedError, match="linalg_vector_norm joins the examples of an unev"):
        strategy.run(norm, (uneven,))
    with pytest.warns(UserWarning, match=r"len\(\) of an uneven batch"):
        strategy.run(lambda x: len(x), (uneven,))


@pytest.mark.parametrize(
    "loss",
    [
        lambda s, y: F.cross_entropy(s, y, weight=torch.arange(1.0, 4.0).to(s.device)),
        lambda s, y: F.cross_entropy(s, y, label_smoothing=0.1),
        lambda s, y: F.nll_loss(F.log_softmax(s, 1), y),
        lambda s, y: F.mse_loss(s, F.one_hot(y, 3).float()),
        lambda s, y: F.binary_cross_entropy_with_logits(s, F.one_hot(y, 3).float()),
        lambda s, y: F.poisson_nll_loss(s, F.one_hot(y, 3).float()),
        lambda s, y: (
            fd.nn.compute_average_loss(F.cross_entropy(s, y, reduction="none")) * 0
            + F.smooth_l1_loss(s.reshape(-1), F.one_hot(y, 3).float().reshape(-1))
        ),
        lambda s, y: (s.t().unsqueeze(0).transpose(1, 2) ** 2).mean((0, 1)).sum(),
        lambda s, y: s.logsumexp(1).mean() + s.mean(0).square().sum() * 0,
    ],
)
def test_losses_of_uneven_batches(strategy: TPUStrategy, loss: Any) -> None:
    """As on one device: what each replica has, weighted by its examples."""

    def gradient(strategy: fd.Strategy) -> tuple[torch.Tensor, float]:
        torch.manual_seed(0)
        with strategy.scope():
            model = nn.Linear(4, 3)
        data = torch.randn(11, 4), torch.arange(11) % 3
        value = 0.0
        for one in strategy.distribute_dataset(data, global_batch_size=8):

            def step(batch: Any) -> torch.Tensor:
                model.zero_grad()
                result: torch.Tensor = loss(model(batch[0]), batch[1])
                result.backward()
                return result.detach()

            value = float(strategy.reduce("mean", strategy.run(step, (one,))))
        assert model.weight.grad is not None
        return model.weight.grad.cpu(), value

    wanted: Any = fd.MirroredStrategy([f"cpu:{i}" for i in range(N)])
    (got, value), (same, expected) = gradient(strategy), gradient(wanted)
    torch.testing.assert_close(got, same, rtol=0, atol=1e-6)
    assert value == pytest.approx(expected, abs=1e-5)


def test_sync_batch_norm(strategy: TPUStrategy) -> None:
    """Statistics of the global batch, of which 7 or 6 of 10 rows are filling."""

    def trained(strategy: fd.Strategy, norm: type[nn.Module]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with strategy.scope():
            model = nn.Sequential(nn.Linear(4, 3), norm(3), nn.Linear(3, 1))  # type: ignore[call-arg]
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        for one in strategy.distribute_dataset(torch.randn(24, 4), global_batch_size=10):
            strategy.run(step, (one,))
        strategy.check_in_sync()
        return [t.detach().cpu() for t in (*model.parameters(), *model.buffers())]

    one = fd.OneDeviceStrategy("cpu")
    require_close(trained(strategy, fd.nn.SyncBatchNorm), trained(one, nn.BatchNorm1d), 1e-5)


@pytest.mark.parametrize("steps", [1, 3])
def test_metrics_are_those_of_all_examples(steps: int) -> None:
    tm = pytest.importorskip("torchmetrics")
    classification = tm.classification

    def measured(strategy: fd.Strategy) -> dict[str, Any]:
        with strategy.scope():
            metrics = tm.MetricCollection(
                [
                    classification.MulticlassAUROC(5, thresholds=None),
                    classification.MulticlassPrecision(5),
                    classification.MulticlassRecall(5),
                ]
            )
            error = tm.MeanSquaredError()
            mean = tm.MeanMetric()
        generator = torch.Generator().manual_seed(0)
        data = torch.rand(43, 5, generator=generator), torch.arange(43) % 5

        def step(batch: Any) -> None:
            scores, labels = batch
            metrics.update(scores, labels)
            error.update(scores[:, 0], scores[:, 1])
            mean.update(scores[:, 0])
            if N > 1 and isinstance(strategy, TPUStrategy):
                with pytest.raises(UnsupportedError, match="a metric can be updated, and no more"):
                    mean.compute()

        found: dict[str, Any] = {}
        for _ in range(2):
            metrics.reset()
            for one in strategy.distribute_dataset(data, global_batch_size=10):
                strategy.run(step, (one,))
            found = {**metrics.compute(), "error": error.compute(), "mean": mean.compute()}
        return found

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Metric .* will save all targets", UserWarning)
        got = measured(TPUStrategy(steps_per_execution=steps))
        wanted = measured(fd.OneDeviceStrategy("cpu"))
    for name, value in wanted.items():
        torch.testing.assert_close(got[name].cpu(), value, rtol=1e-5, atol=1e-6)


# --- compilation --------------------------------------------------------------------------------


def test_new_shapes_are_counted_and_named() -> None:
    strategy = TPUStrategy()

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def shaped(*shape: int) -> Any:
        return strategy.distribute_values_from_function(lambda c: torch.ones(shape))

    strategy.run(double, (shaped(3, 1),))
    strategy.run(double, (shaped(3, 1),))
    assert (strategy.compilations.count, strategy.compilations.repeated) == (1, 0)
    with pytest.warns(
        UserWarning, match=r"double was compiled again.*: float32\[5, 1\].* float32\[3"
    ):
        strategy.run(double, (shaped(5, 1),))
    assert (strategy.compilations.count, strategy.compilations.repeated) == (2, 1)
    state = {"factor": torch.ones(1)}

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * state["factor"].to(x.device).sum()

    strategy.run(scaled, (shaped(3, 1),))
    state["factor"] = torch.ones(2)
    with pytest.warns(UserWarning, match="for the shapes that it had before"):
        strategy.run(scaled, (shaped(3, 1),))


def test_one_all_reduce_for_each_dtype() -> None:
    strategy = TPUStrategy()
    programs: list[str] = []
    execute = strategy._mesh.step

    def recorded(tensors: Any) -> None:
        programs.append(strategy._mesh.program_of(tensors))
        execute(tensors)

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.wide = Normed(), nn.Linear(10, 2).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.wide(self.net(x).double())
            return out

    with strategy.scope():
        model = Mixed()
        optimizer = torch.optim.AdamW(model.parameters())
    batches = strategy.distribute_dataset(torch.randn(48, 64), global_batch_size=16)
    strategy._mesh.step = recorded  # type: ignore[method-assign]

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for one in batches:
        strategy.run(step, (one,))
    assert len(programs) == len(batches)
    for program in programs:
        assert program.count(" all-reduce(") == (2 if N > 1 else 0)
        assert "all-gather" not in program
    assert strategy.compilations.count == 1


@pytest.mark.parametrize("make", [sgd, adam])
def test_several_steps_in_one_program(make: Any) -> None:
    strategy = TPUStrategy(steps_per_execution=6)
    got, losses = train_on_dataset(strategy, make, 1, global_batch_size=100)
    wanted, same = train_on_dataset(fd.OneDeviceStrategy("cpu"), make, 1, global_batch_size=100)
    require_close(got, wanted, 4e-5)
    assert losses == pytest.approx(same, abs=1e-4)
    assert strategy.compilations.count == 1


def test_partitioned_by_xla() -> None:
    strategy = TPUStrategy(spmd="auto")
    assert strategy.num_replicas_in_sync == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "run of .* was compiled again", UserWarning)
        got, _ = train_on_dataset(strategy, normed, 1, global_batch_size=100)
    wanted, _ = train_on_dataset(fd.OneDeviceStrategy("cpu"), normed, 1, global_batch_size=100)
    require_close(got, wanted, 4e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"spmd": "some"}, 'spmd must be "manual" or "auto", got \'some\''),
        ({"steps_per_execution": 0}, "steps_per_execution must be positive, got 0"),
        ({"gradient_reduction": "max"}, 'gradient_reduction must be "mean" or "sum"'),
    ],
)
def test_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TPUStrategy(**arguments)
