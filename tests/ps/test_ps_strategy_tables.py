"""Embeddings whose rows are on parameter servers, and encodings of values."""

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fastdist as fd
import numpy as np
import pytest
import torch
from fastdist.errors import FastdistError
from ps_cluster import PsCluster
from served_net import F, adagrad, batches, make, reference, same, sgd, step
from torch import nn


@pytest.fixture(scope="module")
def cluster() -> Iterator[PsCluster]:
    cluster = PsCluster(workers=2, servers=3)
    yield cluster
    cluster.close()


def test_hashed_embeddings(cluster: PsCluster) -> None:
    strategy = cluster.strategy(max_staleness=0)
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        table = fd.nn.Embedding(None, 4, initializer=("normal", 0.0, 1.0), seed=3)
        bag = fd.nn.EmbeddingBag(None, 4, mode="mean", initializer=("constant", 1.0, 0.0))
        optimizer = sgd([*table.parameters(), *bag.parameters()])
    ids = torch.tensor([2**62 + 5, -7, 2**62 + 5, 11])
    before = table(ids).detach()
    assert torch.equal(before[0], before[2])

    def train(ids: torch.Tensor) -> None:
        (table(ids).sum() + bag(ids.reshape(2, 2)).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()

    coordinator.schedule(train, (ids,))
    coordinator.join()
    expected = before - 0.1
    expected[[0, 2]] -= 0.1  # twice in the batch
    torch.testing.assert_close(table(ids).detach(), expected)
    rows = bag(ids.reshape(-1, 1)).detach()
    torch.testing.assert_close(rows[1], torch.full((4,), 1 - 0.05))
    torch.testing.assert_close(rows[0], torch.full((4,), 1 - 0.1))
    assert "weight" not in table.state_dict()
    kept = [s["rows"] for i in range(3) for s in strategy.client.stats(i)["objects"] if "rows" in s]
    assert sum(kept) == 6


def test_tables_begin_with_values_of_their_own(cluster: PsCluster) -> None:
    """Seeds are drawn from torch's generator, as by torch's own layers; servers begin alike."""

    ids = torch.arange(9)

    def made(limit: int | None) -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(1)
        return fd.nn.Embedding(limit, 4), fd.nn.EmbeddingBag(limit, 4, mode="sum")

    alone = made(9)
    first, second = alone[0](ids), alone[1](ids[:, None])
    assert not torch.equal(first, second)
    for limit in (9, None):
        strategy = cluster.strategy(max_staleness=0)
        with strategy.scope():
            layers = made(limit)
        assert torch.equal(layers[0](ids), first)
        assert torch.equal(layers[1](ids[:, None]), second)
    torch.manual_seed(2)
    assert not torch.equal(fd.nn.Embedding(9, 4)(ids), first)


def peak_kib() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def test_the_chief_does_not_hold_the_rows(cluster: PsCluster) -> None:
    strategy = cluster.strategy(max_staleness=0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is the present size
    before = peak_kib()
    with strategy.scope():
        table = fd.nn.Embedding(1_000_000, 64)  # 250 MiB
        sgd(table.parameters())
    assert peak_kib() - before < 100 << 10
    with pytest.raises(ValueError, match="num_embeddings must be at least 0"), strategy.scope():
        fd.nn.Embedding(-1, 64)


@pytest.mark.parametrize("limit", [None, 10])
def test_gradients_that_outlive_a_step(cluster: PsCluster, limit: int | None) -> None:
    """A gradient that is not zeroed is applied again with the next one added, as in torch."""
    strategy = cluster.strategy(max_staleness=0)
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        table = fd.nn.Embedding(limit, 1, initializer=("constant", 0.0, 0.0))
        optimizer = sgd(table.parameters())
    rows = nn.Embedding(10, 1, _weight=torch.zeros(10, 1))
    rows_optimizer = sgd(rows.parameters())

    def train(rows: Any, optimizer: Any) -> None:
        def backward(*ids: int) -> None:
            rows(torch.tensor(ids)).sum().backward()

        late = rows(torch.tensor([7])).sum()
        backward(4)
        optimizer.step()
        backward(1, 2, 3)
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        backward(4, 4)
        backward(2, 5)
        optimizer.step()
        optimizer.zero_grad()
        late.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        coordinator.schedule(train, (table, optimizer))
        train(rows, rows_optimizer)
    coordinator.join()
    torch.testing.assert_close(table(torch.arange(10)).detach(), rows.weight.detach())


def test_ids_are_kept_as_long_as_gradients(cluster: PsCluster) -> None:
    strategy = cluster.strategy(max_staleness=0)
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        table = fd.nn.Embedding(None, 1)
        optimizer = sgd(table.parameters())

    def train() -> int:
        for i in range(50):
            optimizer.zero_grad()
            table(torch.arange(i, i + 3)).sum().backward()
            optimizer.step()
        return len(table._table._ids)

    def keep() -> None:
        table(torch.tensor([1])).sum().backward()
        kept = table.weight.grad
        optimizer.zero_grad()
        optimizer.step()
        table.weight.grad = kept
        optimizer.step()

    assert coordinator.schedule(train).fetch() == 1
    coordinator.schedule(keep)
    with pytest.raises(
        FastdistError, match="'weight' has rows of a backward pass whose gradients an"
    ):
        coordinator.join()


CLIPPINGS: dict[str, Any] = {
    "norm": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.5),
    "largest": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.5, torch.inf),
    "one by one": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.5, foreach=False),
    "together": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.5, foreach=True),
    "values": lambda parameters: nn.utils.clip_grad_value_(parameters, 0.7),
    "values together": lambda parameters: nn.utils.clip_grad_value_(parameters, 0.7, foreach=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, 9])
def test_clipping(cluster: PsCluster, limit: int | None) -> None:
    """Gradients of a row that is used twice are summed before clipping, as for dense gradients."""
    torch.manual_seed(0)
    strategy = cluster.strategy(max_staleness=0)
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        table = fd.nn.Embedding(limit, 2, initializer=("constant", 0.5, 0.0))
        out = nn.Linear(2, 1)
        optimizer = sgd([*table.parameters(), *out.parameters()])
    rows, own_out = nn.Embedding(9, 2, _weight=torch.full((9, 2), 0.5)), copy.deepcopy(out)
    own_optimizer = sgd([*rows.parameters(), *own_out.parameters()])

    def train(rows: Any, out: Any, optimizer: Any, way: str) -> float:
        optimizer.zero_grad()
        for ids in ([1, 2, 2], [2, 3]):
            out(rows(torch.tensor(ids))).square().sum().backward()
        parameters = [*rows.parameters(), *out.parameters()]
        norm = nn.utils.get_total_norm([one.grad for one in parameters])
        torch.testing.assert_close(norm**2, sum(one.grad.norm() ** 2 for one in parameters))
        CLIPPINGS[way](parameters)
        optimizer.step()
        return float(norm)

    for way in CLIPPINGS:
        value = coordinator.schedule(train, (table, out, optimizer, way))
        expected = train(rows, own_out, own_optimizer, way)
        np.testing.assert_allclose(value.fetch(), expected, rtol=1e-5)
    coordinator.join()
    torch.testing.assert_close(table(torch.arange(9)).detach(), rows.weight.detach())
    torch.testing.assert_close(out.weight, own_out.weight)


def test_row_wise_adagrad(cluster: PsCluster, tmp_path: Path) -> None:
    """Fixed and hashed rows equal one process, also after a restore into new servers' values."""
    ids = torch.arange(9)
    one = nn.Embedding(9, 5, dtype=torch.float64)
    expected = fd.ps.RowWiseAdagrad(one.parameters(), lr=0.1, lr_decay=0.2)
    nn.init.ones_(one.weight)
    scale = torch.arange(1.0, 6.0)  # so that a row's gradients differ

    def begin() -> tuple[Any, Any, Any]:
        strategy = cluster.strategy(max_staleness=0)
        with strategy.scope():
            ones = ("constant", 1.0, 0.0)
            tables = nn.ModuleList(fd.nn.Embedding(rows, 5, initializer=ones) for rows in (9, None))
            optimizer = fd.ps.RowWiseAdagrad(tables.parameters(), lr=0.1, lr_decay=0.2)
        return strategy, tables, optimizer

    def train(strategy: Any, tables: Any, optimizer: Any, some: torch.Tensor) -> None:
        coordinator = cluster.coordinator(strategy)

        def step() -> None:
            optimizer.zero_grad()
            sum((table(some) * scale).square().sum() for table in tables).backward()
            optimizer.step()

        coordinator.schedule(step)
        coordinator.join()
        expected.zero_grad()
        (one(some) * scale).square().sum().backward()
        expected.step()
        for table in tables:
            torch.testing.assert_close(
                table(ids).detach(), one.weight.detach().float(), rtol=1e-5, atol=1e-5
            )

    strategy, tables, optimizer = begin()
    train(strategy, tables, optimizer, ids[[1, 4, 4, 8]])
    strategy.save(tmp_path)
    again, tables, optimizer = begin()
    again.restore(tmp_path)
    train(again, tables, optimizer, ids[[4, 5]])


def test_states_of_tables_are_on_servers_alone(cluster: PsCluster) -> None:
    strategy = cluster.strategy()
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        model = nn.ModuleList([fd.nn.Embedding(None, 64), nn.Embedding(20_000, 64)])
        optimizer = adagrad(model.parameters())  # creates its state at once
    assert not optimizer.state
    ids = torch.tensor([7])

    def train() -> int:
        sum(table(ids).sum() for table in model).backward()
        optimizer.step()
        return len(optimizer.state)

    before = [table(ids).detach() for table in model]
    assert coordinator.schedule(train).fetch() == 0
    coordinator.join()
    for table, row in zip(model, before, strict=True):
        torch.testing.assert_close(table(ids).detach(), row - 0.1)
    sizes = [len(definition.blob) for _, definition in strategy.definitions._named.values()]
    assert max(sizes) < 100_000


def test_cached_rows(cluster: PsCluster) -> None:
    strategy = cluster.strategy()
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        table = fd.nn.Embedding(
            None, 4, initializer=("constant", 0.0, 0.0), cached_rows=64, cache_age=3
        )
        optimizer = sgd(table.parameters())

    def requests() -> int:
        return int(sum(strategy.client.stats(i)["requests"] for i in range(3)))

    def look(times: int) -> list[float]:
        return [float(table(torch.tensor([5, 6])).detach()[0, 0]) for _ in range(times)]

    def train() -> list[float]:
        before = look(1)
        table(torch.tensor([5])).sum().backward()
        optimizer.step()
        return before + look(1)

    def look_often() -> tuple[int, float]:
        look(1)
        begun = requests()
        seen = look(9)
        return requests() - begun - 3, seen[-1]

    assert look(1) == [0.0]
    for pushed in (-0.1, -0.2):
        before, after = coordinator.schedule(train).fetch()
        np.testing.assert_allclose(after, before - 0.1, rtol=1e-5)  # its own push, at once
        coordinator.join()
        np.testing.assert_allclose(look(1), [pushed], rtol=1e-5)  # the chief has no cache
    asked, last = coordinator.schedule(look_often).fetch()
    assert asked <= 3 * 4  # of nine lookups of two rows, every fourth pulls
    np.testing.assert_allclose(last, -0.2, rtol=1e-5)


@pytest.mark.slow
def test_narrow_wires(cluster: PsCluster) -> None:
    for wire in ("bfloat16", "float16", "int8"):
        strategy = cluster.strategy(wire=wire, max_staleness=0)
        coordinator = cluster.coordinator(strategy)
        model, optimizer = make(strategy, sgd)
        other, other_optimizer = reference(sgd)
        for batch in batches(4):
            coordinator.schedule(step, (model, optimizer, *batch))
            step(other, other_optimizer, *batch)
        coordinator.join()
        same(model, other, 0.05)
    with pytest.raises(ValueError, match="wire must be one of float32"):
        cluster.strategy(wire="int4")


def test_gradients_that_are_not_finite(cluster: PsCluster) -> None:
    strategy = cluster.strategy(refuse_nonfinite=True)
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        model = nn.Linear(2, 2)
        optimizer = sgd(model.parameters())
    before = model.weight.detach().clone()

    def train(x: Any) -> None:
        model(x).sum().backward()
        optimizer.step()

    coordinator.schedule(train, (torch.tensor([[float("nan"), 1.0]]),))
    with pytest.raises(ValueError, match="'0/weight': 2 of 4 elements of the gradient are NaN"):
        coordinator.join()
    coordinator.join()
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize(("limit", "padding"), [(None, 2**62), (None, -1), (9, 4), (9, -1)])
def test_padding(cluster: PsCluster, limit: int | None, padding: int) -> None:
    strategy = cluster.strategy()
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        table = fd.nn.Embedding(limit, 3, padding_idx=padding, seed=1)
        optimizer = sgd(table.parameters())
    ids = torch.tensor([padding if limit is None else padding % limit, 3])
    before = table(ids).detach()
    assert torch.equal(before[0], torch.zeros(3))

    def train() -> None:
        table(ids).sum().backward()
        optimizer.step()

    coordinator.schedule(train)
    coordinator.join()
    expected = before - torch.tensor([[0.0], [0.1]])
    torch.testing.assert_close(table(ids).detach(), expected)
    if limit is not None:
        plain = fd.nn.Embedding(limit, 3, padding_idx=padding, seed=1)
        torch.testing.assert_close(plain(ids).detach(), before)
        with pytest.raises(ValueError, match="within 9 embeddings, got 9"):
            fd.nn.Embedding(limit, 3, padding_idx=limit)


def test_padding_stays_when_rows_are_dropped(cluster: PsCluster) -> None:
    strategy = cluster.strategy(max_staleness=0)
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        table = fd.nn.Embedding(None, 2, padding_idx=0, max_age=2)
        optimizer = sgd(table.parameters())

    def train(i: int) -> list[float]:
        table(torch.arange(1 + 200 * i, 200 + 200 * i)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return table(torch.tensor([0, 3])).detach()[0].tolist()

    values = [coordinator.schedule(train, (i,)) for i in range(6)]
    coordinator.join()
    assert coordinator.fetch(values) == [[0.0, 0.0]] * 6
    assert table(torch.tensor([0])).tolist() == [[0.0, 0.0]]


def test_embeddings_without_servers() -> None:
    plain = fd.nn.Embedding(5, 3, seed=1)
    assert torch.equal(plain(torch.tensor([1, 1, 4])), plain.weight[[1, 1, 4]])
    bag = fd.nn.EmbeddingBag(5, 3, mode="max", seed=1)
    assert torch.equal(bag(torch.tensor([[1, 2]]))[0], plain.weight[[1, 2]].amax(0))
    with pytest.raises(fd.errors.UnsupportedError, match="needs parameter servers"):
        fd.nn.Embedding(None, 3)


def test_ids_out_of_range(cluster: PsCluster) -> None:
    strategy = cluster.strategy()
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        model = nn.Embedding(5, 2)
    coordinator.schedule(lambda: model(torch.tensor([1, 5])))
    with pytest.raises(IndexError, match="row 5 of a table that has 5 rows"):
        coordinator.join()


class Direct(nn.Module):
    """Uses its weight in a way that servers do not support."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(9, 3)

    def forward(self, use: str) -> torch.Tensor:
        return USES[use](self.rows, self.rows.weight)


USES: dict[str, Any] = {
    "linear": lambda rows, weight: F.linear(rows(torch.tensor([1])), weight),
    "__getitem__": lambda rows, weight: weight[:2],
    "embedding": lambda rows, weight: F.embedding(torch.tensor([1]), weight),
    "square": lambda rows, weight: sum(one.square().sum() for one in rows.parameters()),
    "cat": lambda rows, weight: torch.cat([weight, weight]),
    "add": lambda rows, weight: weight.data + 1,
    "tolist": lambda rows, weight: weight.detach().tolist(),
    "sum": lambda rows, weight: weight.clone().sum(),
    "normal_": lambda rows, weight: nn.init.normal_(weight),
    "fill_": lambda rows, weight: weight.data.fill_(1.0),
}


def test_weights_of_tables_have_no_values(cluster: PsCluster) -> None:
    strategy = cluster.strategy()
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        model = Direct()
    for use in USES:
        message = rf"{use} needs the values of the weight 'rows.weight', .*subclass of nn.Embedding"
        with pytest.raises(fd.errors.UnsupportedError, match=message):
            model(use)
        coordinator.schedule(lambda use=use: model(use).detach())
        with pytest.raises(fd.errors.UnsupportedError, match=message):
            coordinator.join()
    weight = model.rows.weight
    assert (weight.shape, weight.numel(), weight.dtype) == ((9, 3), 27, torch.float32)
    assert (weight.requires_grad, weight.is_leaf, weight.grad) == (True, True, None)
    assert "rows on parameter servers" in repr(weight)
    again = copy.deepcopy(model)
    assert torch.equal(again.rows(torch.tensor([1])), model.rows(torch.tensor([1])))
    leaving = r"To save or export the trained model, call strategy.save"
    for save in (pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
        message = f"the weight 'rows.weight' cannot be pickled.*{leaving}"
        with pytest.raises(fd.errors.UnsupportedError, match=message):
            save(model)
    rows = torch.tensor([1])
    with pytest.raises(fd.errors.UnsupportedError, match=leaving):
        torch.export.export(model.rows, (rows,))
    layer = nn.Linear(3, 2)  # torch compiles it, and calls the rows as they are
    compiled = torch.compile(nn.Sequential(model.rows, layer), backend="aot_eager")
    for _ in range(3):
        assert torch.equal(compiled(rows), layer(model.rows(rows)))
    compiled(rows).sum().backward()
    assert layer.weight.grad is not None


FEATURES = {"day": (7, 3, "sum"), "shop": (None, 4, "mean"), "word": (50, 8, "max")}


class Collected(nn.Module):
    """Bags of three features, fused or each alone, and a layer."""

    def __init__(self, fused: bool, limit: int | None) -> None:
        super().__init__()
        bags = {
            name: fd.nn.EmbeddingBag(rows or limit, dim, mode=mode, seed=len(name))
            for name, (rows, dim, mode) in FEATURES.items()
        }
        bags["shop_before"] = bags["shop"]
        self.collection = fd.nn.EmbeddingBagCollection(bags)
        self.fused = fused
        self.head = nn.Linear(19, 1)
        nn.init.constant_(self.head.weight, 0.1)
        nn.init.constant_(self.head.bias, 0.0)

    def forward(self, features: dict[str, Any]) -> torch.Tensor:
        if self.fused:
            pooled = self.collection(features)
        else:
            pooled = {
                name: bag(
                    *features[name] if isinstance(features[name], tuple) else [features[name]]
                )
                for name, bag in self.collection.bags.items()
            }
        return self.head(torch.cat([pooled[name] for name in sorted(pooled)], 1))


def features_of(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)

    def ids(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(most, shape, generator=generator)

    return {
        "day": ids(7, 6, 2),
        "shop": (ids(40, 11), torch.tensor([0, 1, 1, 5, 9, 10])),  # the second bag is empty
        "shop_before": ids(40, 6, 1),
        "word": ids(50, 6, 3),
    }


@pytest.mark.parametrize("fused", [True, False])
def test_collections_train_like_bags_on_one_device(cluster: PsCluster, fused: bool) -> None:
    alone = Collected(fused=False, limit=40)
    alone_optimizer = sgd(alone.parameters())
    strategy = cluster.strategy(max_staleness=0)
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        model = Collected(fused, limit=None)
        optimizer = sgd(model.parameters())

    def train(model: nn.Module, optimizer: Any, seed: int) -> None:
        model(features_of(seed)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for seed in range(8):
        coordinator.schedule(train, (model, optimizer, seed))
        train(alone, alone_optimizer, seed)
    coordinator.join()
    for seed in (0, 50):
        given = features_of(seed)
        torch.testing.assert_close(model(given), alone(given), rtol=2e-5, atol=2e-5)


class Jagged:
    """A stand-in for torchrec's JaggedTensor, with the methods that a collection calls."""

    def __init__(self, ids: torch.Tensor, lengths: list[int], weights: Any = None) -> None:
        self._ids, self._weights = ids, weights
        self._offsets = torch.tensor([0, *lengths]).cumsum(0)

    def values(self) -> torch.Tensor:
        return self._ids

    def offsets(self) -> torch.Tensor:
        return self._offsets

    def weights_or_none(self) -> Any:
        return self._weights


@pytest.mark.parametrize("include_last_offset", [True, False])
def test_jagged_features_of_torchrec(include_last_offset: bool) -> None:
    ids, weights = torch.tensor([1, 2, 3]), torch.tensor([1.0, 2.0, 0.5])
    feature = Jagged(ids, [2, 0, 1], weights)
    bag = fd.nn.EmbeddingBag(9, 2, mode="sum", include_last_offset=include_last_offset)
    got = fd.nn.EmbeddingBagCollection({"a": bag})({"a": feature})["a"]
    rows = bag.weight
    expected = torch.stack([rows[1] + 2 * rows[2], torch.zeros(2), 0.5 * rows[3]])
    torch.testing.assert_close(got, expected)


KEYED = """
import torch, torchrec
import fastdist as fd

features = torchrec.KeyedJaggedTensor(
    keys=["a", "b"], values=torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([2, 0, 1, 1])
)
bags = {name: fd.nn.EmbeddingBag(9, 2, mode="sum") for name in "ab"}
got = fd.nn.EmbeddingBagCollection(bags)(features)
rows = bags["a"].weight
torch.testing.assert_close(got["a"], torch.stack([rows[1] + rows[2], torch.zeros(2)]))
torch.testing.assert_close(got["b"], bags["b"].weight[3:5])
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchrec") is None, reason="torchrec is not installed")
def test_keyed_jagged_tensors() -> None:
    """In a process of its own: importing torchrec leaves threads and warnings behind."""
    subprocess.run([sys.executable, "-c", KEYED], check=True, timeout=120)


def test_what_is_no_bag(cluster: PsCluster) -> None:
    with pytest.raises(TypeError, match="the bag of 'a' must be an EmbeddingBag, got Linear"):
        fd.nn.EmbeddingBagCollection({"a": nn.Linear(2, 2)})
    with pytest.raises(KeyError, match="day"):
        Collected(fused=True, limit=40)({})
