"""The host of a worker: prepares modules and optimizers around each function."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastdist.errors import FastdistError
from fastdist.ps.coordinator.per_worker import set_worker_index
from fastdist.ps.coordinator.worker import CallContext
from fastdist.ps.model.embeddings import EmbeddingBagCollection, TableLookup
from fastdist.ps.model.model import ServedModel
from fastdist.ps.model.plan import Bundle
from fastdist.ps.model.steps import ServedSteps
from fastdist.replicas.random_streams import stream_seed

_current: list[ServedWorker] = []


def this_strategy() -> Any:
    """Return the strategy of this worker."""
    return _current[0].strategy


def worker_of(strategy: object) -> ServedWorker | None:
    """Return the worker that this process is, if `strategy` is its strategy."""
    return next((worker for worker in _current if worker.strategy is strategy), None)


def adopt_on_worker(bundle: Bundle) -> list[Any]:
    """Adopt a bundle from the chief on this worker; return its parts."""
    _current[0].adopt(bundle)
    return bundle.parts()


class ServedWorker:
    """Runs functions on modules whose values are on servers."""

    # Uses of the strategy, which is a layer above: client, _adopt and _cross_replica.
    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self._models: dict[str, tuple[ServedModel, ServedSteps]] = {}  # by prefix of the bundle
        self._state: dict[str, Any] = {"generation": 0}
        self._reported: dict[str, set[str]] = {}  # live buffers that the chief knows
        self._context: CallContext | None = None
        self._has_lost_calls = False  # that the last function's values were meant for
        _current[:] = [self]
        register_optimizer_step_pre_hook(self._require_served)

    def _require_served(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Reject the step of an optimizer that no scope has made, for a parameter on servers."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if any(model.serves(parameter) for model, _ in self._models.values()):
                    raise FastdistError(
                        f"{type(optimizer).__name__} cannot step, because it was not made in the "
                        f"scope: its parameter of shape {tuple(parameter.shape)} is on the servers"
                    )

    def begin_job(self, index: int, seed: int) -> None:
        """Forget everything of the previous job: a new chief has connected."""
        self._models.clear()
        self._state = {"generation": 0}
        self._reported = {}
        set_worker_index(index)
        torch.manual_seed(stream_seed(seed, index))

    def reconnect(self) -> None:
        """Let the next function pull the values."""
        self._has_lost_calls = True

    def adopt(self, bundle: Bundle) -> None:
        """Adopt modules and optimizers from the chief."""
        self.strategy._adopt(bundle.roots, [*bundle.optimizers, *bundle.others])
        model = ServedModel(self.strategy.client, bundle, initialize=False)
        steps = ServedSteps(model)
        self._models[bundle.prefix] = model, steps
        self._apply(bundle.prefix)
        model.begin_pull()
        model.end_pull()
        if self._context is not None:
            steps.begin(self._context)

    def apply_state_update(self, state_update: bytes) -> None:
        """Apply learning rates, live buffers and modes; reconnect if servers were restored."""
        before, self._state = self._state["generation"], pickle.loads(state_update)
        for prefix, (model, steps) in self._models.items():
            if self._state["generation"] != before:
                model.connect(initialize=False)
                steps.is_fresh = False
            self._apply(prefix)

    def _apply(self, prefix: str) -> None:
        if prefix in self._state:
            model, _ = self._models[prefix]
            live, rates, modes = self._state[prefix]
            model.buffers.live |= set(live)
            model.set_rates(rates)
            model.set_modes(modes)

    def run(self, call: Callable[[], Any], context: CallContext) -> Any:
        """Run a call in cross-replica context, with the servers' values."""
        self._context = context
        everything = list(self._models.values())
        stale = []
        for model, steps in everything:
            is_stale = self._has_lost_calls or not steps.is_fresh or model.awaits_rows
            must_pull = context.has_state and is_stale
            # The previous function has left its changes to this one; a pull would overwrite them.
            if steps.is_fresh and (must_pull or not context.has_state):
                model.buffers.send_changed(1)
            if must_pull:
                stale.append(model)
        self._has_lost_calls &= not context.has_state
        for model in stale:
            model.begin_pull()
        for _, steps in everything:
            steps.begin(context)
        for model in stale:
            model.end_pull()
        try:
            with self.strategy._cross_replica():
                return call()
        finally:
            self._context = None
            # The call may have added models.
            for model, steps in self._models.values() if context.has_state else ():
                steps.end()
                if not steps.is_fresh:  # otherwise the next function sends them
                    model.buffers.send_changed(context.size)

    def prefetch(self, batch: Any, layer: nn.Module | None) -> None:
        """Ask for the rows of a later batch; see `ParameterServerStrategy.prefetch`."""
        if isinstance(layer, TableLookup):
            layer.served_table().prefetch(batch)
            return
        if not isinstance(layer, EmbeddingBagCollection | None):
            raise TypeError(
                f"prefetch: layer must be an embedding of the scope, got {layer!r:.200}"
            )
        layers = [one for model, _ in self._models.values() for one in model.collections]
        if not sum(one.prefetch(batch) for one in (layers if layer is None else [layer])):
            raise ValueError(
                "prefetch: expected the features of an fd.nn.EmbeddingBagCollection of the scope, "
                f"as its forward takes them, alone or in a tuple, list or dict; got {batch!r:.200}"
            )

    def state_update(self) -> bytes:
        """Return the names of buffers that workers have changed, if there are new ones."""
        live = {prefix: model.buffers.live for prefix, (model, _) in self._models.items()}
        if live == self._reported:
            return b""
        self._reported = {prefix: set(names) for prefix, names in live.items()}
        return pickle.dumps(live)
