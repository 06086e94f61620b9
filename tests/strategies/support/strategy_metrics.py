"""Metrics of torchmetrics give the same in every strategy as on one device."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import fastdist as fd
import torch
from fastdist import Strategy
from replica_tests import on_replicas
from torch import nn

CLASSES = 5


def predictions(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    scores = torch.rand(count, CLASSES, generator=generator)
    return scores, torch.randint(CLASSES, (count,), generator=generator)


def quiet(case: Callable[[Strategy], None]) -> Callable[[Strategy], None]:
    """Without what torchmetrics says of memory, and of classes that have no examples."""

    def quiet_case(strategy: Strategy) -> None:
        with warnings.catch_warnings():
            for message in (
                "Metric .* will save all targets",
                "No positive samples in targets",
                "The ``compute`` method of metric SumMetric was called before",
            ):
                warnings.filterwarnings("ignore", message, UserWarning)
            case(strategy)

    return quiet_case


class Judged(nn.Module):
    """A model that holds its metric."""

    def __init__(self, metric: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.metric = metric


def make_metrics() -> dict[str, Any]:
    """Each with a name that says how its batches are made."""
    import torchmetrics as tm
    from torchmetrics import classification as tmc

    class Largest(tm.Metric):
        """A reduction of the user's own, and a list that has none."""

        full_state_update = False

        def __init__(self) -> None:
            super().__init__()
            self.add_state("top", torch.zeros(2), dist_reduce_fx=lambda rows: rows.amax(0))
            self.add_state("rows", [], dist_reduce_fx=None)

        def update(self, values: torch.Tensor) -> None:
            self.top = torch.maximum(self.top, torch.stack([values.max(), -values.min()]))
            self.rows.append(values)

        def compute(self) -> torch.Tensor:
            return torch.cat([self.top, *self.rows])

    accuracy = tmc.MulticlassAccuracy(CLASSES)
    return {
        "scores": accuracy,
        "scores auroc": tmc.MulticlassAUROC(CLASSES, thresholds=None),
        "scores thresholds": tmc.MulticlassAveragePrecision(CLASSES, thresholds=7),
        "scores composed": 2 * tmc.MulticlassF1Score(CLASSES) + 1,
        "scores wrapped": tm.ClasswiseWrapper(tmc.MulticlassRecall(CLASSES, average=None)),
        "scores collection": tm.MetricCollection(
            [
                tmc.MulticlassPrecision(CLASSES),
                tmc.MulticlassRecall(CLASSES),
                tmc.MulticlassAUROC(CLASSES, thresholds=None),
            ],
            prefix="val_",
        ),
        "scores groups": tm.MetricCollection(
            {"a": tmc.MulticlassPrecision(CLASSES), "b": tmc.MulticlassRecall(CLASSES)},
            compute_groups=[["a", "b"]],
        ),
        "pairs pearson": tm.PearsonCorrCoef(),
        "pairs spearman": tm.SpearmanCorrCoef(),
        "pairs error": tm.MeanSquaredError(),
        "pairs weighted": tm.MeanMetric(),
        "values largest": tm.MaxMetric(),
        "values smallest": tm.MinMetric(),
        "values sum": tm.SumMetric(),
        "values joined": tm.CatMetric(),
        "values custom": Largest(),
    }


def arguments(name: str, scores: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, ...]:
    kind = name.partition(" ")[0]
    if kind == "scores":
        return scores, labels
    return (scores[:, 0], scores[:, 1]) if kind == "pairs" else (scores[:, 0],)


def global_batches(count: int, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    scores, labels = predictions(count)
    return list(zip(scores.split(size), labels.split(size), strict=True))


def evaluate(
    strategy: Strategy, metrics: dict[str, Any], count: int, size: int, call: Callable[..., Any]
) -> None:
    """Updates metrics with so many examples, in batches of `size`; the last one may be smaller."""
    dataset = strategy.distribute_dataset(predictions(count), global_batch_size=size)

    def step(batch: Any) -> None:
        for name, metric in metrics.items():
            call(metric, *arguments(name, *batch))

    for batch in dataset:
        strategy.run(step, args=(batch,))


def update(metric: Any, *args: torch.Tensor) -> None:
    metric.update(*args)


def require_same(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)


class MetricsContract:
    """Metrics. Subclasses choose the strategy."""

    def test_metrics_see_all_examples(self, strategies: Any) -> None:
        @quiet
        def case(strategy: Strategy) -> None:
            plain = make_metrics()
            with strategy.scope():
                metrics = make_metrics()
            # Two examples in the last batch: some replicas get none. Then all get as many; then
            # all of it again from the beginning, and four replicas are too many.
            for epoch, (count, size) in enumerate([(26, 8), (32, 8), (6, 3)]):
                evaluate(strategy, metrics, count, size, update)
                for name, metric in plain.items():
                    for batch in global_batches(count, size):
                        metric.update(*arguments(name, *batch))
                for _ in range(2):
                    for name, metric in metrics.items():
                        got, wanted = metric.compute(), plain[name].compute()
                        if epoch == 1 and name in ("values joined", "values custom"):
                            got, wanted = got.sort().values, wanted.sort().values
                        require_same(got, wanted)
                wanted = [metric.compute() for metric in plain.values()]

                def inside(wanted: Any) -> None:
                    for (name, metric), value in zip(metrics.items(), wanted, strict=True):
                        got = metric.compute()
                        if not name.startswith("values"):
                            require_same(got, value)

                strategy.run(inside, args=(wanted,))
                if epoch == 1:
                    for metric in (*metrics.values(), *plain.values()):
                        metric.reset()
            strategy.check_in_sync()

        strategies.run(case)

    @on_replicas
    def test_forward_gives_the_batchs_value_and_accumulates(self, strategy: Strategy) -> None:
        from torchmetrics import MetricCollection
        from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

        def make() -> Any:
            return MetricCollection(
                MulticlassAccuracy(CLASSES, average="micro"),
                MulticlassAUROC(CLASSES, average="macro", thresholds=3),
            )

        with strategy.scope():
            metric = make()
        plain = make()
        values: list[Any] = []

        def call(metric: Any, scores: torch.Tensor, labels: torch.Tensor) -> None:
            value = metric(scores, labels)["MulticlassAccuracy"]
            if len(labels):
                assert value == (scores.argmax(1) == labels).float().mean()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # classes without examples
            for _ in range(2):
                evaluate(strategy, {"scores": metric}, 17, 8, call)
                for batch in global_batches(17, 8):
                    plain(*batch)
                require_same(metric.compute(), plain.compute())
        assert values == []

    def test_sync_on_step(self, strategies: Any) -> None:
        @quiet
        def case(strategy: Strategy) -> None:
            from torchmetrics import MeanSquaredError, SpearmanCorrCoef

            with strategy.scope():
                metrics = [
                    MeanSquaredError(dist_sync_on_step=True),
                    SpearmanCorrCoef(dist_sync_on_step=True),
                ]
            plain = [MeanSquaredError(), SpearmanCorrCoef()]
            dataset = strategy.distribute_dataset(predictions(11), global_batch_size=8)
            for batch, (scores, _) in zip(dataset, global_batches(11, 8), strict=True):
                got = strategy.run(
                    lambda b: [m(b[0][:, 0], b[0][:, 1]) for m in metrics], args=(batch,)
                )
                for value, metric in zip(got, plain, strict=True):
                    wanted = metric(scores[:, 0], scores[:, 1])
                    for own in strategy.local_results(value):
                        require_same(own, wanted)
            for metric, other in zip(metrics, plain, strict=True):
                require_same(metric.compute(), other.compute())

        strategies.run(case)

    @on_replicas
    def test_updates_outside_run(self, strategy: Strategy) -> None:
        from torchmetrics import MeanMetric, MetricCollection, SumMetric

        workers = strategy.num_replicas_in_sync // len(strategy.devices)
        with strategy.scope():
            total, mean = SumMetric(), MeanMetric()
            both = MetricCollection([SumMetric(), MeanMetric()])
        state = torch.get_rng_state()
        for i in range(1, 4):
            total.update(1.0)
            assert mean(2.0) == 2
            assert both(3.0) == {"SumMetric": 3, "MeanMetric": 3}
            assert total.compute() == i * workers
            assert mean.compute() == 2
            assert both.compute() == {"SumMetric": 3 * i * workers, "MeanMetric": 3}
        strategy.run(lambda: total.update(1.0))
        assert total.compute() == 3 * workers + strategy.num_replicas_in_sync
        both.reset()
        both.update(1.0)
        assert both.compute() == {"SumMetric": workers, "MeanMetric": 1}
        if strategy.num_replicas_in_sync == 1:
            assert torch.equal(torch.get_rng_state(), state)

    @on_replicas
    def test_metrics_that_only_some_replicas_update(self, strategy: Strategy) -> None:
        from torchmetrics import CatMetric, PearsonCorrCoef

        with strategy.scope():
            cat, pearson = CatMetric(), PearsonCorrCoef()
        last = strategy.num_replicas_in_sync - 1
        x, y = predictions(9)[0][:, :2].T

        def step() -> None:
            context = fd.get_replica_context()
            assert context is not None
            if context.replica_id_in_sync_group == last:
                cat.update(x)
                pearson.update(x, y)

        plain = PearsonCorrCoef()
        for i in range(1, 3):
            strategy.run(step)
            plain.update(x, y)
            assert cat.compute().tolist() == x.tolist() * i
            require_same(pearson.compute(), plain.compute())

    @on_replicas
    def test_a_metric_never_updated_warns(self, strategy: Strategy) -> None:
        from torchmetrics import MeanSquaredError

        with strategy.scope():
            metric = MeanSquaredError()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            metric.compute()
        chief = 0 in strategy.local_replica_ids
        assert len([w for w in caught if "before" in str(w.message)]) == int(chief)

    @on_replicas
    def test_copies_know_no_strategy(self, strategy: Strategy) -> None:
        import torchmetrics as tm
        from torchmetrics.classification import MulticlassAccuracy

        with strategy.scope():
            model = Judged(tm.MetricCollection([MulticlassAccuracy(CLASSES)]))
            bare = MulticlassAccuracy(CLASSES)
        assert isinstance(bare, MulticlassAccuracy)
        evaluate(strategy, {"scores": bare, "scores too": model.metric}, 16, 8, update)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for one in (
            copy.deepcopy(bare),
            pickle.loads(pickle.dumps(bare)),
            bare.clone(),
            copy.deepcopy(model).metric["MulticlassAccuracy"],
            model.metric.clone(prefix="x_")["x_MulticlassAccuracy"],
            torch.load(file, weights_only=False).metric["MulticlassAccuracy"],
        ):
            assert type(one) is MulticlassAccuracy
            assert not [name for name in vars(one) if "fastdist" in name]
            one.reset()
            one.update(*predictions(3))
            plain = MulticlassAccuracy(CLASSES)
            plain.update(*predictions(3))
            assert one.compute() == plain.compute()

    @on_replicas
    def test_clones_made_in_the_scope(self, strategy: Strategy) -> None:
        import torchmetrics as tm
        from torchmetrics.classification import MulticlassAccuracy

        outside = MulticlassAccuracy(CLASSES)
        with strategy.scope():
            train = tm.MetricCollection([MulticlassAccuracy(CLASSES)], prefix="train_")
            test = train.clone(prefix="test_")
            alone = outside.clone()
        evaluate(strategy, {"scores": train}, 8, 8, update)
        evaluate(strategy, {"scores": test, "scores too": alone}, 18, 8, update)
        for metric, count in ((train, 8), (test, 18), (alone, 18)):
            plain = MulticlassAccuracy(CLASSES)
            plain.update(*predictions(count))
            value = metric.compute()
            require_same(value if metric is alone else next(iter(value.values())), plain.compute())

    @on_replicas
    def test_collections_join_metrics_with_the_same_states(self, strategy: Strategy) -> None:
        import torchmetrics as tm
        from torchmetrics import classification as tmc

        def make() -> Any:
            low, high = tmc.BinaryAccuracy(threshold=0.1), tmc.BinaryAccuracy(threshold=0.9)
            return tm.MetricCollection(
                {"low": low, "high": high, "recall": tmc.BinaryRecall(threshold=0.1)}
            )

        with strategy.scope():
            metric = make()
        plain = make()
        # Alike at first: between the thresholds nothing lies in the first batch's parts.
        scores = torch.tensor([0.95, 0.01, 0.02, 0.99, 0.5, 0.5, 0.4, 0.6, 0.3, 0.2] * 2)
        labels = torch.tensor([1, 0, 1, 0, 1, 1, 0, 0, 1, 0] * 2)
        for _ in range(2):
            for batch in strategy.distribute_dataset((scores, labels), global_batch_size=10):
                strategy.run(lambda b: metric.update(*b), args=(batch,))
            plain.update(scores, labels)
            require_same(metric.compute(), plain.compute())
        assert sorted(map(sorted, metric.compute_groups.values())) == [
            ["high"],
            ["low", "recall"],
        ]

    @on_replicas
    def test_counts_survive_new_parameters(self, strategy: Strategy) -> None:
        import torchmetrics as tm

        with strategy.scope():
            model = Judged(tm.MetricCollection([tm.SumMetric(), tm.MeanMetric()]))
            bare = tm.SumMetric()
        n = strategy.num_replicas_in_sync

        def step() -> None:
            bare.update(1.0)
            model.metric.update(1.0)

        strategy.run(step)
        with torch.no_grad():
            model.layer.weight = nn.Parameter(torch.ones(2, 2))
        strategy.run(step)
        assert bare.compute() == 2 * n
        assert model.metric.compute()["SumMetric"] == 2 * n
        model.eval()
        model.load_state_dict(model.state_dict())
        assert bare.compute() == 2 * n

    def test_persistent_states_are_saved_once(self, strategies: Any) -> None:
        @quiet
        def case(strategy: Strategy) -> None:
            import torchmetrics as tm

            with strategy.scope():
                model = Judged(tm.SumMetric())
                model.metric.persistent(True)
            n = strategy.num_replicas_in_sync
            strategy.run(lambda: model.metric.update(1.0))
            saved = model.state_dict()
            assert saved["metric.sum_value"] == n
            strategy.run(lambda: model.metric.update(1.0))
            assert model.metric.compute() == 2 * n
            for _ in range(2):
                model.metric.reset()
                model.load_state_dict(copy.copy(saved))
                assert model.metric.compute() == n
            strategy.run(lambda: model.metric.update(1.0))
            assert model.metric.compute() == 2 * n

        strategies.run(case)

    @on_replicas
    def test_a_gather_of_the_users_own(self, strategy: Strategy) -> None:
        import torchmetrics as tm

        with strategy.scope():
            metric = tm.SumMetric(
                dist_sync_fn=lambda tensor, group: [tensor, torch.ones(())],
                distributed_available_fn=lambda: True,
            )
            local = tm.SumMetric(sync_on_compute=False)

        def step() -> None:
            metric.update(2.0)
            local.update(2.0)

        strategy.run(step)
        assert metric.compute() == 3
        assert local.compute() == 2

    @on_replicas
    def test_wrappers(self, strategy: Strategy) -> None:
        import torchmetrics as tm

        n = strategy.num_replicas_in_sync
        with strategy.scope():
            tracker = tm.MetricTracker(tm.MeanMetric(), maximize=True)
            extremes = tm.MinMaxMetric(tm.MeanMetric())
        for epoch in range(2):
            with strategy.scope():
                tracker.increment()

            def step(value: float) -> None:
                context = fd.get_replica_context()
                assert context is not None
                tracker.update(value + context.replica_id_in_sync_group)
                extremes.update(value)

            strategy.run(step, args=(float(epoch),))
            assert extremes.compute()["raw"] == (epoch / 2)
        assert extremes.compute() == {"raw": 0.5, "min": 0, "max": 0.5}
        assert tracker.compute_all().tolist() == [(n - 1) / 2, 1 + (n - 1) / 2]
        assert tracker.best_metric() == 1 + (n - 1) / 2
