"""Routed objects of which all replicas share one copy of the parameters and optimizer states."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fastdist.errors import FastdistError
from fastdist.replicas.context import state
from fastdist.replicas.per_replica import PerReplica
from fastdist.strategies.routing import Routing
from fastdist.strategies.tensor_stamps import GradientStamp
from fastdist.training.metrics import metrics_in
from fastdist.training.module_structure import buffers_of
from fastdist.training.modules import is_materialized


class CentralRouting(Routing):
    """The users' own objects are on the parameters' device; replicas there share their memory.

    A replica on another device has a copy of each parameter, which it computes with. When all
    replicas call `step`, the optimizer steps once, on the users' own parameters, and the copies
    get the new values.

    Args:
        devices: of all local replicas.
        home: where parameters and optimizer states are.
        require_allowed: raises where an optimizer must not step now.
    """

    _not_copied = Routing._not_copied | {"state"}

    def __init__(
        self,
        devices: Sequence[torch.device],
        home: torch.device,
        require_allowed: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        super().__init__(devices, first=1 if devices[0] == home else 0)
        self._home = home
        self._require_allowed = require_allowed
        self._brought: dict[int, int] = {}  # versions of replica 0's parameters, by the user's id
        self._taken: dict[int, GradientStamp] = {}  # from replica 0, by the parameter's id

    def note_values(self) -> None:
        """Also bring what replica 0 has written besides parameters to the users' own objects."""
        if self._first == 0:
            with torch.no_grad():
                for root in self._modules:
                    twin = self.twin(root, 0)
                    for own, other in zip(buffers_of([root]), buffers_of([twin]), strict=True):
                        own.copy_(other)
                    for own, other in zip(root.parameters(), twin.parameters(), strict=True):
                        self._take_value(own, other)
                        self._take_gradient(own, other)
            for optimizer in self._optimizers:
                _take_rates(optimizer, self.twins_of(optimizer)[0])
            for thing in self._others:
                thing.__dict__.update(self.plain_state(self.twins_of(thing)[0]))
        super().note_values()

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer twins, all of which step the optimizer itself."""
        number = len(self._optimizers)
        super().add_optimizer(optimizer)
        for twin in self.twins_of(optimizer):
            twin.state = type(optimizer.state)(optimizer.state.default_factory)
        for thing in (optimizer, *self.twins_of(optimizer)):
            thing.__dict__["step"] = types.MethodType(self._common_step(number), thing)

    def _memo(self, roots: Sequence[nn.Module], twin: int) -> dict[int, Any]:
        device = self._twin_devices[twin]
        if twin == self._first == 0:  # metrics are the replicas' own, this one's the users' object
            metrics = metrics_in(roots)
            for metric in metrics:
                metric.to(device)
            return {id(part): part for metric in metrics for part in metric.modules()}
        if device != self._home:
            return {}
        return {
            id(parameter): nn.Parameter(parameter.detach(), parameter.requires_grad)
            for root in roots
            for parameter in root.parameters()
            if is_materialized(parameter)
        }

    def _common_step(self, number: int) -> Callable[..., Any]:
        def step(optimizer: torch.optim.Optimizer, closure: Any = None) -> Any:
            optimizer.__dict__["_opt_called"] = True  # which schedulers look for
            context = state.replica
            if context is None:
                return type(optimizer).step(optimizer, closure)
            if closure is not None:
                raise ValueError(
                    f"{type(optimizer).__name__}.step got a closure; under CentralStorageStrategy "
                    "the optimizer steps once for all replicas and cannot evaluate them anew"
                )
            self._require_allowed(optimizer)
            return context.merge_call(self._step, (number,))

        step.__dict__["_wrapped_by_lr_sched"] = True
        return step

    def _step(self, strategy: object, number: Any) -> None:
        """In cross-replica context: every replica has its gradients, and waits."""
        del strategy
        if isinstance(number, PerReplica):
            raise FastdistError(
                f"replicas step different optimizers: numbers {list(number.values)} in the order "
                "in which they were made"
            )
        optimizer = self._optimizers[number]
        optimizer.__dict__["_opt_called"] = True
        twins = self.twins_of(optimizer)
        if self._first == 0:
            _take_rates(optimizer, twins[0])
            for own, other in _pairs(optimizer, twins[0]):
                self._take_value(own, other)
                self._take_gradient(own, other)
        type(optimizer).step(optimizer)
        with torch.no_grad():
            for twin in twins:
                for own, other in _pairs(optimizer, twin):
                    if own.data_ptr() != other.data_ptr():
                        other.copy_(own)
        if self._first == 0:
            self._note_brought(_pairs(optimizer, twins[0]))

    def refresh(self, stepped: set[int]) -> None:
        """Steps change nothing that the twins have a copy of."""
        del stepped
        super().refresh(set())

    def _refresh_tensors(self) -> None:
        super()._refresh_tensors()
        if self._first == 0:
            for root in self._modules:
                pairs = zip(root.parameters(), self.twin(root, 0).parameters(), strict=True)
                self._note_brought(list(pairs))

    def _note_brought(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._brought.update((id(own), other._version) for own, other in pairs)

    def _take_value(self, own: torch.Tensor, other: torch.Tensor) -> None:
        """What replica 0 has written into a parameter by itself: a state_dict that it loaded."""
        if not is_materialized(own) or not is_materialized(other):
            return
        if self._brought.get(id(own), other._version) != other._version:
            with torch.no_grad():
                own.copy_(other)
            self._brought[id(own)] = other._version

    def _take_gradient(self, own: torch.Tensor, other: torch.Tensor) -> None:
        if is_materialized(other) and not is_materialized(own):
            raise FastdistError(
                "a lazy module made its parameters inside run; under CentralStorageStrategy with "
                "parameters on another device call it once outside run first"
            )
        taken = self._taken.get(id(own))
        if taken is None or taken.is_stale(other):
            own.grad = None if other.grad is None else other.grad.to(self._home, copy=True)
            self._taken[id(own)] = GradientStamp(other)


def _take_rates(optimizer: torch.optim.Optimizer, twin: torch.optim.Optimizer) -> None:
    for group, mirror in zip(optimizer.param_groups, twin.param_groups, strict=True):
        group.update((key, value) for key, value in mirror.items() if key != "params")


def _pairs(
    optimizer: torch.optim.Optimizer, twin: torch.optim.Optimizer
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each parameter, and the twin's."""
    if len(optimizer.param_groups) != len(twin.param_groups):
        raise ValueError(
            "add_param_group was called in run; under CentralStorageStrategy with parameters on "
            "another device call it outside"
        )
    return [
        pair
        for group, mirror in zip(optimizer.param_groups, twin.param_groups, strict=True)
        for pair in zip(group["params"], mirror["params"], strict=True)
    ]
