"""The state of a running `fit`, besides the model's weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastdist.checkpoints.agreement import Ranks
from fastdist.collectives.communicator import Communicator
from fastdist.keras.callback_states import CallbackStates
from fastdist.keras.fit_position import FitPosition, random_state, set_random_state
from fastdist.keras.metrics import variables_of
from fastdist.keras.optimizers import gather_states, make_room
from fastdist.keras.saved import put_values, require_same_shapes, values_of


class FitState:
    """The optimizer, metrics, callbacks, position and random generators of a running `fit`.

    Metrics and callbacks have a state per replica. Every replica must call the methods.

    Args:
        callbacks: the callbacks of this replica whose states are saved.
        params: the argument of the callbacks' `set_params` in `fit`.

    Attributes:
        position: the position in the data.
    """

    def __init__(
        self, model: Any, iterator: Any, callbacks: Sequence[Any], params: dict[str, Any]
    ) -> None:
        self._model = model
        self._ranks = Ranks([model])
        self._callbacks = CallbackStates(callbacks, params)
        self.position = FitPosition(iterator, model)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all replicas."""
        gather_states(self._model)
        metrics = [tensor.cpu() for tensor in values_of(variables_of(self._model.metrics))]
        with self._ranks.communicator() as workers:
            return {
                "optimizer": values_of(self._optimizer_variables()),
                "metrics": [metrics] if workers is None else workers.all_gather_object(metrics),
                "callbacks": self._callbacks.collect(workers),
                "position": self.position.state(),
                "random": random_state(self._model),
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state; if it does not fit, nothing is changed."""
        optimizer, metrics = self._optimizer_variables(), variables_of(self._model.metrics)
        with self._ranks.communicator() as workers:
            own_metrics = _own_metrics(state["metrics"], metrics, workers)
            require_same_shapes("optimizer", optimizer, state["optimizer"])
            require_same_shapes("set of metrics", metrics, own_metrics)
            make_room(self._model)
            put_values(optimizer, state["optimizer"])
            put_values(metrics, own_metrics)
            self._callbacks.restore(state["callbacks"], 0 if workers is None else workers.rank)
        self.position.load(state["position"])
        set_random_state(self._model, state["random"])

    def _optimizer_variables(self) -> list[Any]:
        optimizer = self._model.optimizer
        return [] if optimizer is None else list(optimizer.variables)


def _own_metrics(
    saved: Sequence[Sequence[torch.Tensor]], variables: Sequence[Any], workers: Communicator | None
) -> list[torch.Tensor]:
    """Return this replica's metrics; another number of replicas has the same results."""
    rank, replicas = (0, 1) if workers is None else (workers.rank, workers.world_size)
    if len(saved) == replicas:
        return list(saved[rank])
    own = []
    for variable, values in zip(variables, zip(*saved, strict=True), strict=False):
        if variable.aggregation == "sum":
            total = torch.stack(values).sum(0).to(values[0].dtype)
            own.append(torch.zeros_like(total) if rank else total)
        elif variable.aggregation == "mean":
            own.append(torch.stack(values).double().mean(0).to(values[0].dtype))
        else:
            own.append(values[0])
    return own
