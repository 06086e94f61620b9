"""Programs that a strategy with parameter servers rejects, and the error messages."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fastdist as fd
import pytest
import torch
from fastdist.cluster import ClusterSpec, SimpleClusterResolver
from fastdist.errors import ClusterConfigError, FastdistError
from ps_cluster import PsCluster
from served_net import batches, make, sgd, step
from torch import nn


@pytest.fixture(scope="module")
def cluster() -> Iterator[PsCluster]:
    cluster = PsCluster(workers=2, servers=3)
    yield cluster
    cluster.close()


def test_the_chief_does_not_train(cluster: PsCluster) -> None:
    strategy = cluster.strategy()
    model, optimizer = make(strategy, sgd)
    with pytest.raises(FastdistError, match="the chief has no replica"):
        strategy.run(os.getpid)
    with pytest.raises(FastdistError, match="outside a scheduled function"):
        step(model, optimizer, *batches(1)[0])


def test_optimizers_of_other_scopes(cluster: PsCluster) -> None:
    strategy = cluster.strategy()
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        model = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="not made in the same scope"), strategy.scope():
        sgd(model.parameters())
    outside = sgd(model.parameters())

    def train(optimizer: Any) -> None:
        model(torch.ones(2)).sum().backward()
        optimizer = optimizer or sgd(model.parameters())
        optimizer.step()

    for optimizer in (outside, None):
        coordinator.schedule(train, (optimizer,))
        with pytest.raises(FastdistError, match=r"SGD .* not made in the scope.*\(2, 2\)"):
            coordinator.join()
    own = nn.Linear(2, 2)  # workers may train their own modules
    own_optimizer = sgd(own.parameters())

    def train_own() -> None:
        own(torch.ones(2)).sum().backward()
        own_optimizer.step()

    coordinator.schedule(train_own)
    coordinator.join()


@pytest.mark.parametrize(
    ("make_optimizer", "message"),
    [
        (torch.optim.Rprop, "cannot apply Rprop; expected one of SGD"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "amsgrad=False, got True"),
        (
            lambda p: fd.ps.RowWiseAdagrad(one for one in p if one.dim() == 2),
            r"hidden.weight is dense, but RowWiseAdagrad updates rows of embeddings",
        ),
    ],
)
def test_optimizers_that_servers_lack(
    cluster: PsCluster, make_optimizer: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make(cluster.strategy(), make_optimizer)


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1.0])
def test_invalid_learning_rates(cluster: PsCluster, rate: float) -> None:
    strategy = cluster.strategy()
    coordinator = cluster.coordinator(strategy)
    model, optimizer = make(strategy, sgd)

    def train(words: Any, bags: Any, labels: Any) -> None:
        nn.functional.cross_entropy(model(words, bags), labels).backward()
        model.hidden.weight.grad.mul_(0.5)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()

    message = f"SGD: lr must be a finite number, 0 or more, got {rate}"
    coordinator.schedule(train, batches(1)[0])
    with pytest.raises(ValueError, match=message):
        coordinator.join()
    optimizer.param_groups[0]["lr"] = rate
    with pytest.raises(ValueError, match=message):
        coordinator.schedule(os.getpid)


def test_parameter_groups_added_late(cluster: PsCluster) -> None:
    strategy = cluster.strategy()
    coordinator = cluster.coordinator(strategy)
    with strategy.scope():
        model = nn.Linear(2, 2)
        optimizer = sgd([model.weight])
    optimizer.add_param_group({"params": [model.bias]})
    with pytest.raises(
        ValueError, match=r"has 2 groups of .*, but servers know the 1 that it had when"
    ):
        coordinator.schedule(os.getpid)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("strategy.save", lambda strategy: strategy.save("nowhere")),
        ("strategy.restore", lambda strategy: strategy.restore("nowhere")),
        ("ClusterCoordinator", fd.ClusterCoordinator),
    ],
)
def test_calls_for_the_chief(cluster: PsCluster, name: str, call: Callable[[Any], Any]) -> None:
    strategy = cluster.strategy()
    coordinator = cluster.coordinator(strategy)
    assert strategy.is_chief
    assert coordinator.schedule(lambda: strategy.is_chief).fetch() is False
    late = coordinator.schedule(lambda: call(strategy))
    with pytest.raises(FastdistError, match=f"{name}.* called in a function on a worker"):
        late.fetch()


def test_models_that_servers_cannot_keep(cluster: PsCluster) -> None:
    strategy = cluster.strategy()
    with pytest.raises(ValueError, match="is lazy"), strategy.scope():
        _model: nn.Module = nn.LazyLinear(3)
    with pytest.raises(ValueError, match=r"has dtype torch\.float64"), strategy.scope():
        _model = nn.Linear(2, 2).double()
    with pytest.raises(ValueError, match="max_norm"), strategy.scope():
        _model = nn.Embedding(3, 3, max_norm=1.0)


@pytest.mark.parametrize("promise", [{"synchronous": True}, {"max_staleness": 1}])
def test_cached_rows_where_values_must_be_current(
    cluster: PsCluster, promise: dict[str, Any]
) -> None:
    strategy = cluster.strategy(**promise)
    refused = pytest.raises(
        ValueError, match="cached rows may be some lookups old, but synchronous=True"
    )
    with refused, strategy.scope():
        _model = fd.nn.Embedding(None, 2, cached_rows=8)


@pytest.mark.parametrize("missing", ["chief", "worker", "ps"])
def test_incomplete_clusters(missing: str) -> None:
    jobs = {"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]}
    del jobs[missing]
    resolver = SimpleClusterResolver(ClusterSpec(jobs), *list(ClusterSpec(jobs).chief))
    with pytest.raises(ClusterConfigError, match=f"no {missing}"):
        fd.ParameterServerStrategy(resolver)


def test_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    message = 'fastdist run --workers 4 --ps 2 train.py.*TF_CONFIG .*"chief": .*"ps": '
    with pytest.raises(ClusterConfigError, match=message):
        fd.ParameterServerStrategy()


def test_no_secret(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FASTDIST_SECRET")
    monkeypatch.setenv("FASTDIST_SECRET_FILE", str(tmp_path / "none"))
    spec = ClusterSpec({"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]})
    with pytest.raises(ClusterConfigError, match="cannot read the secret of this job"):
        fd.ParameterServerStrategy(SimpleClusterResolver(spec, "chief", 0))
    with pytest.raises(ClusterConfigError, match="evaluator must not create this strategy"):
        fd.ParameterServerStrategy(SimpleClusterResolver(spec, "evaluator", 0))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"device": "nonsense"}, ValueError, "'nonsense' is not a torch device"),
        ({"variable_partitioner": 3}, TypeError, r"such as fastdist.ps.FixedShards\(3\), got 3"),
        ({"wire": "float8"}, ValueError, "wire must be one of float32, bfloat16"),
        ({"max_staleness": -1}, ValueError, "max_staleness must be at least 0"),
        ({"max_staleness": 1, "synchronous": True}, ValueError, "requires synchronous=False"),
    ],
)
@pytest.mark.parametrize("job", ["chief", "worker", "ps"])
def test_all_tasks_reject_invalid_arguments(
    job: str, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    spec = ClusterSpec({"chief": ["a:1"], "worker": ["b:1"], "ps": ["c:1"]})
    with pytest.raises(error, match=message):
        fd.ParameterServerStrategy(SimpleClusterResolver(spec, job, 0), **arguments)
