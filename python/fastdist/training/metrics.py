"""Adapts torchmetrics: each replica updates its own metric, and `compute` joins all of them.

A metric or collection made in the scope gets a class derived from its original class. In `run`,
updates change the replica's own states, and `compute` gathers the states of all replicas. Outside
`run`, `compute` and `reset` are called on every replica. Copies and pickles have the original
class. This module never imports torchmetrics: code that makes a metric has imported it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fastdist.collectives.communicator import Communicator
from fastdist.replicas.context import state
from fastdist.replicas.per_replica import map_structure
from fastdist.training.patched import replaced, watch_calls

_STRATEGY = "_fastdist_strategy"
_GROUPED = "_fastdist_grouped"
_NOTHING = object()
_classes: dict[type, type] = {}


class _ThreadState(threading.local):
    """`alone` is True in a metric's `forward`, which uses only this replica's batch."""

    alone = False


_thread = _ThreadState()


def _kinds() -> tuple[type[nn.Module], ...]:
    library = sys.modules.get("torchmetrics")
    found = (getattr(library, name, None) for name in ("Metric", "MetricCollection"))
    return tuple(kind for kind in found if kind is not None)


@contextlib.contextmanager
def watch_metrics(note: Callable[[nn.Module], None]) -> Iterator[None]:
    """Return a context manager that passes every metric and collection made or copied to `note`."""
    watched: set[type[nn.Module]] = set()
    with contextlib.ExitStack() as stack:

        def look(module: Any = None) -> None:
            for kind in _kinds():
                if kind not in watched:  # torchmetrics may be imported inside the context
                    watched.add(kind)
                    stack.enter_context(watch_calls(kind, "__setstate__", look))
                if isinstance(module, kind):
                    note(module)

        stack.enter_context(watch_calls(nn.Module, "__init__", look))
        look()
        yield


@contextlib.contextmanager
def with_metric_states(root: nn.Module) -> Iterator[None]:
    """Return a context manager inside which `root.state_dict()` has the states of all metrics."""
    metric = next(iter(_kinds()), None)
    metrics: list[Any] = [m for m in root.modules() if metric is not None and isinstance(m, metric)]
    before = [dict(metric._persistent) for metric in metrics]
    for metric in metrics:
        metric.persistent(True)
    try:
        yield
    finally:
        for metric, persistent in zip(metrics, before, strict=True):
            metric._persistent.update(persistent)


def note_updates(root: nn.Module) -> None:
    """Mark metrics whose states were loaded as updated."""
    kinds = _kinds()
    for module in root.modules():
        if isinstance(module, kinds[:1]):
            metric: Any = module
            _keep_lists(metric)
            metric._computed = None
            metric._update_count = max(1, metric._update_count)


def _keep_lists(metric: Any) -> None:
    """Turn list states back into lists: saving has joined their items."""
    for name, default in metric._defaults.items():
        value = getattr(metric, name)
        if isinstance(default, list) and isinstance(value, torch.Tensor):
            setattr(metric, name, [value])


def adopt_metrics(roots: Sequence[nn.Module], strategy: Any) -> None:
    """Adapt the metrics inside modules to a strategy of several replicas."""
    for module in metrics_in(roots):
        if _STRATEGY not in module.__dict__:
            _adopt(module, strategy)


def metrics_in(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the metrics and collections inside modules."""
    kinds = _kinds()
    return [module for root in roots for module in root.modules() if isinstance(module, kinds)]


def _adopt(metric: Any, strategy: Any) -> None:
    kind = type(metric)
    if kind not in _classes:
        is_collection = issubclass(kind, sys.modules["torchmetrics"].MetricCollection)
        _classes[kind] = (_collection_class if is_collection else _metric_class)(kind)
    metric.__dict__[_STRATEGY] = strategy
    for name, call in (("update", _update), ("compute", _compute)):
        if name in metric.__dict__:  # Metric sets both on each instance, MetricCollection does not
            metric.__dict__[name] = functools.wraps(metric.__dict__[name])(
                functools.partial(call, metric, metric.__dict__[name])
            )
    object.__setattr__(metric, "__class__", _classes[kind])


def _is_outside() -> bool:
    return state.replica is None and not _thread.alone


def _has_no_examples() -> bool:
    context = state.replica
    if context is None or context.examples is None:
        return False
    return context.examples[context.replica_id_in_sync_group] == 0


def _communicator() -> Communicator | None:
    return None if state.replica is None else state.replica.communicator


def _everywhere(metric: Any, call: Callable[[], Any]) -> Any:
    """Call on every replica, in `run`, and return the result of this process's replica."""
    results = []

    def step() -> None:
        results.append(call())

    with torch.random.fork_rng(devices=[]):  # `run` draws a number; a metric must not
        metric.__dict__[_STRATEGY].run(step)
    return results[0]


def _update(metric: Any, update: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    if _thread.alone or not _has_no_examples():
        update(*args, **kwargs)


def _compute(metric: Any, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _is_outside():
        return _everywhere(metric, lambda: metric.compute(*args, **kwargs))
    if "_computed" in metric.__dict__:
        metric._computed = None  # another replica may have been updated since
    return compute(*args, **kwargs)


def _reset(metric: Any, reset: Callable[[], None]) -> None:
    if _is_outside():
        _everywhere(metric, lambda: metric.reset())
    else:
        reset()


def _gathered(*_: Any, **__: Any) -> None:
    """Return a marker for `_join_states` in the argument `dist_sync_fn` of torchmetrics."""


def _metric_class(plain: Any) -> type:
    class Adopted(plain):  # type: ignore[misc]
        @property
        def update_called(self) -> bool:
            """True in `run` of several replicas: another replica's metric may be updated."""
            return super().update_called or _communicator() is not None

        def reset(self) -> None:
            _reset(self, super().reset)

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            context = state.replica
            if context is None:
                with replaced(_thread, "alone", True):
                    return super().forward(*args, **kwargs)
            if self.dist_sync_on_step or not _has_no_examples():
                return super().forward(*args, **kwargs)
            lists = [isinstance(default, list) for default in self._defaults.values()]
            if any(lists) or None in self._reductions.values():
                return torch.tensor(torch.nan)  # torchmetrics cannot compute these without data
            kept = {**self._copy_state_dict(), "_update_count": self._update_count}
            value = super().forward(*args, **kwargs)  # an empty batch must not change the states
            for name, before in kept.items():
                setattr(self, name, before)
            return value

        def sync(
            self,
            dist_sync_fn: Any = None,
            process_group: Any = None,
            should_sync: bool = True,
            distributed_available: Any = None,
        ) -> None:
            if dist_sync_fn is None:
                dist_sync_fn, distributed_available = _gathered, lambda: _communicator() is not None
            super().sync(dist_sync_fn, process_group, should_sync, distributed_available)

        def _sync_dist(self, dist_sync_fn: Any = None, process_group: Any = None) -> None:
            communicator = _communicator()
            if dist_sync_fn is _gathered and communicator is not None:
                _join_states(self, communicator)
            else:
                super()._sync_dist(dist_sync_fn, process_group)

        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            """Join persistent states over all replicas; then every worker must call."""
            make = super().state_dict
            if not _is_outside() or not any(self._persistent.values()):
                return make(*args, **kwargs)

            def joined() -> Any:
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "compute of .* before its update")
                    with self.sync_context():
                        return make(*args, **kwargs)

            return _everywhere(self, joined)

        def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
            """Load the states on the first replica only, so that they count once."""
            is_held = any(prefix + name in state_dict for name in self._defaults)
            if is_held:
                self.reset()
            super()._load_from_state_dict(state_dict, prefix, *args)
            _keep_lists(self)
            if is_held and 0 not in self.__dict__[_STRATEGY].local_replica_ids:
                with replaced(_thread, "alone", True):
                    self.reset()

    return _like(plain, Adopted)


def _collection_class(plain: Any) -> type:
    class Adopted(plain):  # type: ignore[misc]
        _groups: dict[int, list[str]]

        def update(self, *args: Any, **kwargs: Any) -> None:
            _update(self, super().update, *args, **kwargs)

        def compute(self) -> Any:
            value = _compute(self, super().compute)
            communicator = _communicator()
            if communicator is not None and self._enable_compute_groups is True:
                self._agree_on_groups(communicator)
            return value

        def reset(self) -> None:
            _reset(self, super().reset)

        def _merge_compute_groups(self) -> None:
            """Do nothing: one replica's first batch cannot show which states are equal."""

        def _agree_on_groups(self, communicator: Communicator) -> None:
            """Group metrics whose states are equal on every replica, to update each group once."""
            if _GROUPED in self.__dict__:
                return
            if self._groups_checked:
                super()._merge_compute_groups()
            gathered = communicator.all_gather_object((self._groups_checked, self._groups))
            everyone = [groups.values() for is_checked, groups in gathered if is_checked]
            if everyone:
                places = {
                    name: tuple(next(g for g in groups if name in g)[0] for groups in everyone)
                    for name in self._modules
                }
                alike = itertools.groupby(sorted(places, key=places.__getitem__), places.get)
                self._groups = {i: list(names) for i, (_, names) in enumerate(alike)}
                self.__dict__[_GROUPED] = True

    return _like(plain, Adopted)


def _like(plain: type, kind: type) -> type:
    """Give an adopted class the names of its original; copies and pickles have the original."""

    def reduce(self: Any, protocol: Any) -> Any:
        stripped: Any = object.__new__(plain)
        own = self.__dict__.items()
        stripped.__dict__.update((k, v) for k, v in own if not k.startswith("_fastdist"))
        return stripped.__reduce_ex__(1)  # later protocols check the object's class

    kind.__reduce_ex__ = reduce  # type: ignore[method-assign, assignment]
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(kind, name, getattr(plain, name))
    return kind


def _join_states(metric: Any, communicator: Communicator) -> None:
    """Replace a metric's states by the joined states of all replicas. Every replica must call.

    Elements of list states are ordered by update, then by replica: the order of the examples, up to
    the first batch that had no examples for some replicas.
    """
    own = {name: getattr(metric, name) for name in metric._reductions}
    gathered = communicator.all_gather_object((_is_updated(metric), map_structure(_pack, own)))
    rank, device = communicator.rank, metric.device
    if metric.compute_on_cpu and any(isinstance(value, list) for value in own.values()):
        device = torch.device("cpu")
    states = [
        own if i == rank else map_structure(functools.partial(_unpack, device), packed)
        for i, (is_updated, packed) in enumerate(gathered)
        if is_updated
    ]
    if not states and rank == 0:
        name = type(metric).__name__
        warnings.warn(
            f"compute of {name} was called before its update on any replica", stacklevel=2
        )
    for name, reduction in metric._reductions.items():
        values = [one[name] for one in states]
        if len(values) <= 1:
            joined = values[0] if values else own[name]
        elif isinstance(values[0], torch.Tensor):
            joined = torch.stack(values) if reduction is None else reduction(torch.stack(values))
        else:
            rows = itertools.zip_longest(*values, fillvalue=_NOTHING)
            joined = [item for row in rows for item in row if item is not _NOTHING]
            joined = reduction(joined) if joined and reduction is not None else joined
        setattr(metric, name, joined)


def _is_updated(metric: Any) -> bool:
    if metric._update_count > 0:
        return True
    pairs = [(getattr(metric, name), default) for name, default in metric._defaults.items()]
    return any(
        len(now) > 0 if isinstance(default, list) else not torch.equal(now, default.to(now.device))
        for now, default in pairs
    )


def _pack(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    data = torch.empty(leaf.numel(), dtype=leaf.dtype).copy_(leaf.detach().flatten())
    return functools.partial(_tensor, data.view(torch.uint8).numpy(), leaf.dtype, leaf.shape)


def _unpack(device: torch.device, leaf: Any) -> Any:
    return leaf().to(device) if isinstance(leaf, functools.partial) else leaf


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(data).view(dtype).reshape(shape)
