"""What a worker of a parameter-server job does around each function."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fastdist.errors import FastdistError
from fastdist.ps.coordinator.per_worker import set_worker_index
from fastdist.ps.coordinator.worker import Turn
from fastdist.ps.model.bundle import Bundle
from fastdist.ps.model.model import ServedModel
from fastdist.ps.model.steps import ServedSteps
from fastdist.replicas.random_streams import replica_seed

if TYPE_CHECKING:
    from fastdist.ps.strategy import ParameterServerStrategy

_here: list[ServedWorker] = []


def strategy_here() -> Any:
    """The strategy of this worker."""
    return _here[0].strategy


def is_worker_of(strategy: object) -> bool:
    """Whether this process is a worker, and this its strategy."""
    return bool(_here) and _here[0].strategy is strategy


def adopt_here(bundle: Bundle) -> Bundle:
    """Take what the chief has made in a scope."""
    _here[0].adopt(bundle)
    return bundle


class ServedWorker:
    """Runs functions on modules whose values are on servers.

    Args:
        strategy: of this task.
    """

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        self.strategy = strategy
        self._models: dict[str, tuple[ServedModel, ServedSteps]] = {}  # by prefix of the bundle
        self._news: dict[str, Any] = {"generation": 0}
        self._told: dict[str, set[str]] = {}  # the live buffers that the chief knows of
        self._turn: Turn | None = None
        _here[:] = [self]
        register_optimizer_step_pre_hook(self._require_served)

    def _require_served(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Optimizers of scopes have a step of their own; this is another one's."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if any(model.serves(parameter) for model, _ in self._models.values()):
                    raise FastdistError(
                        f"{type(optimizer).__name__} was not made in the scope, and cannot step: "
                        f"its parameter of shape {tuple(parameter.shape)} is on the servers"
                    )

    def begin(self, index: int, seed: int) -> None:
        """A chief has come, which knows nothing of those before it."""
        self._models.clear()
        self._news = {"generation": 0}
        self._told = {}
        set_worker_index(index)
        torch.manual_seed(replica_seed(seed, index))

    def parts(self, made: Bundle) -> Sequence[Any]:
        """What functions may refer to."""
        return made.parts()

    def adopt(self, bundle: Bundle) -> None:
        """Modules and optimizers have come."""
        self.strategy.adopt_bundle(bundle)
        model = ServedModel(
            self.strategy.client,
            bundle,
            initialize=False,
            lock=self.strategy.client_lock,
        )
        steps = ServedSteps(model)
        self._models[bundle.prefix] = model, steps
        self._apply(bundle.prefix)
        model.begin_pull()
        model.end_pull()
        if self._turn is not None:
            steps.begin(self._turn)

    def take_news(self, news: bytes) -> None:
        """Learning rates, live buffers, or servers that were started again."""
        before, self._news = self._news["generation"], pickle.loads(news)
        for prefix, (model, steps) in self._models.items():
            if self._news["generation"] != before:
                model.connect(initialize=False)
                steps.is_fresh = False
            self._apply(prefix)

    def _apply(self, prefix: str) -> None:
        if prefix in self._news:
            model, _ = self._models[prefix]
            live, rates, modes = self._news[prefix]
            model.buffers.live |= set(live)
            model.set_rates(rates)
            model.set_modes(modes)

    def run(self, call: Callable[[], Any], turn: Turn) -> Any:
        """Call it in cross-replica context, with the servers' values."""
        self._turn = turn
        everything = list(self._models.values())
        models = everything if turn.has_state else []
        for model, steps in everything if not turn.has_state else ():
            if steps.is_fresh:  # the function before has left this to one that uses the model
                model.buffers.send_changed(1)
        stale = [model for model, steps in models if not steps.is_fresh]
        for model in stale:
            model.begin_pull()
        for _, steps in everything:
            steps.begin(turn)
        for model in stale:
            model.end_pull()
        try:
            with self.strategy.in_function():
                return call()
        finally:
            self._turn = None
            # The call may have brought more of them.
            for model, steps in self._models.values() if turn.has_state else ():
                steps.end()
                if not steps.is_fresh:  # else the next function finds what this one has changed
                    model.buffers.send_changed(turn.size)

    def news(self) -> bytes:
        """Which buffers some worker has changed, when there are more."""
        live = {prefix: model.buffers.live for prefix, (model, _) in self._models.items()}
        if live == self._told:
            return b""
        self._told = {prefix: set(names) for prefix, names in live.items()}
        return pickle.dumps(live)
