"""Optimizer steps for parameters on servers."""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fastdist.errors import FastdistError
from fastdist.ps.client.items import Item
from fastdist.ps.coordinator.worker import CallContext, StepAborted
from fastdist.ps.model.model import ServedModel
from fastdist.replicas.context import state

_STEP_BITS, _OPTIMIZER_BITS = 20, 8


class ServedSteps:
    """Makes `step` of a model's optimizers send gradients to servers, and pull the new values."""

    def __init__(self, model: ServedModel) -> None:
        bundle = model.bundle
        if bundle.first_optimizer + len(bundle.optimizers) > 1 << _OPTIMIZER_BITS:
            raise ValueError(f"over {1 << _OPTIMIZER_BITS} optimizers in the scopes of a strategy")
        # The model's values are recent enough for the next function: it was waiting when the last
        # step of each optimizer pulled them.
        self.is_fresh = False
        self._model = model
        self._context: CallContext | None = None
        self._steps = [0] * len(bundle.optimizers)  # in this call
        self._was_waiting = [False] * len(bundle.optimizers)  # the next function, at its step
        for number, optimizer in enumerate(bundle.optimizers):
            optimizer.__dict__["step"] = self._step_of(number, optimizer)

    def begin(self, context: CallContext) -> None:
        """Prepare for a call of a function."""
        self._context = context
        self.is_fresh = False
        self._steps = [0] * len(self._steps)
        self._was_waiting = [False] * len(self._steps)
        self._model.clear_gradients()

    def end(self) -> None:
        """Finish a call."""
        self._context = None

    def _round(self, context: CallContext, number: int) -> int:
        """Return a number that no other step of the job has, for this step of this optimizer."""
        if self._steps[number] >> _STEP_BITS:
            raise FastdistError(f"over {1 << _STEP_BITS} steps in one scheduled function")
        at = context.group << _OPTIMIZER_BITS | self._model.bundle.first_optimizer + number
        return at << _STEP_BITS | self._steps[number]

    def _step_of(self, number: int, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
        def step(self_: torch.optim.Optimizer, closure: Any = None) -> Any:
            self_.__dict__["_opt_called"] = True  # schedulers check it
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            # The examples of the batch that `run` was given on this worker, or its weight; or 1.
            replica = state.replica
            weights = None if replica is None else replica.weights or replica.examples
            self._step(number, optimizer, 1.0 if weights is None else float(sum(weights)))
            return loss

        step.__dict__["_wrapped_by_lr_sched"] = True
        return types.MethodType(step, optimizer)

    def _step(self, number: int, optimizer: torch.optim.Optimizer, weight: float) -> None:
        context = self._context
        if context is None:
            raise FastdistError(
                f"{type(optimizer).__name__}.step() was called outside a scheduled function: "
                "its parameters are on servers, which only workers update; use "
                "ClusterCoordinator.schedule"
            )
        rates = self._model.served_by(optimizer)
        gradients = [(parameter, lr) for parameter, lr in rates if parameter.grad is not None]
        changes: list[Item] = []
        self.is_fresh = False
        try:
            if context.size > 1:
                self._step_together(context, self._round(context, number), rates, weight)
            elif self._model.refuses_nonfinite:  # so that all servers apply the step, or none
                round = self._round(context, number)
                self._model.stage(self._model.changes(gradients), round)
                self._model.commit(round, gradients, 1.0)
                changes = self._model.buffers.changes(1.0)
            else:
                changes = self._model.changes(gradients) + self._model.buffers.changes(1.0)
            self._was_waiting[number] = not context.is_last()
            self._model.exchange(optimizer, changes)
        except (Exception, StepAborted):
            with contextlib.suppress(FastdistError):  # a server that is gone has dropped it
                self._model.discard(self._round(context, number))
            raise
        finally:
            self._steps[number] += 1  # some servers may have finished the round
            self._model.forget_rows(parameter for parameter, _ in rates)
        self.is_fresh = all(self._was_waiting)

    def _step_together(
        self,
        context: CallContext,
        round: int,
        rates: Sequence[tuple[nn.Parameter, float]],
        weight: float,
    ) -> None:
        """Apply the weighted mean of all workers' gradients and buffer changes.

        If a worker could not send its gradients, no worker's are applied.
        """
        failed: Exception | None = None
        try:
            if weight > 0:
                gradients = [(own, None) for own, _ in rates if own.grad is not None]
                self._model.stage(self._model.changes(gradients, weight), round, context.place)
                self._model.stage(self._model.buffers.changes(weight), round, context.place)
        except Exception as error:  # raised by all workers of the group
            failed = error

        def commit(total: float) -> None:
            if failed is not None:
                raise failed
            if total > 0:
                self._model.commit(round, rates, total, buffers=True)

        context.commit(weight if failed is None else math.nan, commit)
