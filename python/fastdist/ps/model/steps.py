"""Optimizer steps for parameters on servers."""

from __future__ import annotations

import contextlib
import math
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fastdist.errors import FastdistError
from fastdist.ps.client.requests import Pending
from fastdist.ps.coordinator.worker import CallContext, StepAborted
from fastdist.ps.model.model import ServedModel
from fastdist.replicas.context import ReplicaContext, state
from fastdist.training.tensor_stamps import GradientStamp

_STEP_BITS, _OPTIMIZER_BITS = 20, 8
# Number of elements of small gradients that are sent in one message.
_MESSAGE_SIZE = 1 << 16


@dataclass(slots=True)
class _Staged:
    """A gradient that backward has produced; `pending` is its request, once it has been sent."""

    stamp: GradientStamp
    values: tuple[str, str]
    round: int
    pending: Pending[None] | None = None


def _examples(replica: ReplicaContext | None) -> float:
    """Return the examples of the batch that `run` was given on this worker; 1 without a batch."""
    if replica is None or replica.examples is None:
        return 1.0
    return float(sum(replica.examples))


class ServedSteps:
    """Makes `step` of a model's optimizers send gradients to servers, and pull the new values.

    Gradients are sent while backward runs, small ones together, and wait on the servers for the
    step. If something changes them before the step (clipping, a second backward), the step sends
    them again, and later gradients of that optimizer are sent by steps only.

    Args:
        model: the modules and optimizers.

    Attributes:
        is_fresh: True if the model's values are recent enough for the next function: it was waiting
            when the last step pulled them.

    Raises:
        ValueError: there are too many optimizers.
    """

    def __init__(self, model: ServedModel) -> None:
        bundle = model.bundle
        if bundle.first_optimizer + len(bundle.optimizers) > 1 << _OPTIMIZER_BITS:
            raise ValueError(f"over {1 << _OPTIMIZER_BITS} optimizers in the scopes of a strategy")
        self.is_fresh = False
        self._model = model
        self._first = bundle.first_optimizer
        self._context: CallContext | None = None
        self._staged: dict[int, _Staged] = {}  # by the parameter's id
        self._unsent: dict[int, list[nn.Parameter]] = {}  # by round
        self._steps = [0] * len(bundle.optimizers)  # in this call
        self._is_early = [True] * len(bundle.optimizers)
        for number, optimizer in enumerate(bundle.optimizers):
            optimizer.__dict__["step"] = self._step_of(number, optimizer)
            for group in optimizer.param_groups:
                for parameter in filter(model.serves, group["params"]):
                    parameter.register_post_accumulate_grad_hook(self._hook(number))

    def begin(self, context: CallContext) -> None:
        """Prepare for a call of a function."""
        self._context = context
        self.is_fresh = False
        self._steps = [0] * len(self._steps)
        self._staged.clear()
        self._unsent.clear()
        self._model.clear_gradients()

    def end(self) -> None:
        """Finish a call; gradients that no step has used are dropped."""
        self._context = None
        for round in {staged.round for staged in self._staged.values()}:
            self._model.discard(round)
        self._staged.clear()
        self._unsent.clear()

    def _round(self, context: CallContext, number: int) -> int:
        """Return a number that no other step of the job has, for this step of this optimizer."""
        if self._steps[number] >> _STEP_BITS:
            raise FastdistError(f"over {1 << _STEP_BITS} steps in one scheduled function")
        at = context.group << _OPTIMIZER_BITS | self._first + number
        return at << _STEP_BITS | self._steps[number]

    # --- backward -------------------------------------------------------------------------------

    def _hook(self, number: int) -> Callable[[torch.Tensor], None]:
        def on_gradient(parameter: torch.Tensor) -> None:
            context = self._context
            # In a group, a worker could not take back what it has staged.
            if context is None or context.size > 1 or not self._is_early[number]:
                return
            if id(parameter) not in self._staged:  # otherwise this is a second backward
                assert isinstance(parameter, nn.Parameter)
                round = self._round(context, number)
                stamp, values = GradientStamp(parameter), _checksum(parameter)
                self._staged[id(parameter)] = _Staged(stamp, values, round)
                unsent = self._unsent.setdefault(round, [])
                unsent.append(parameter)
                is_small = self._model.is_small(parameter)
                if not is_small or sum(map(_gradient_size, unsent)) >= _MESSAGE_SIZE:
                    self._send(round)

        return on_gradient

    def _send(self, round: int) -> None:
        """Send the gradients that backward has produced for a round, unless they were cleared."""
        parameters = [p for p in self._unsent.pop(round, ()) if p.grad is not None]
        pending = self._model.begin_push([(parameter, None) for parameter in parameters], round)
        for parameter in parameters:
            self._staged[id(parameter)].pending = pending

    # --- step -----------------------------------------------------------------------------------

    def _step_of(self, number: int, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
        def step(self_: torch.optim.Optimizer, closure: Any = None) -> Any:
            self_.__dict__["_opt_called"] = True  # schedulers check it
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._step(number, optimizer, _examples(state.replica))
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
        try:
            if context.size > 1:
                self._step_together(context, self._round(context, number), rates, weight)
            elif self._use_staged(context, number, gradients):
                self._model.commit(self._round(context, number), gradients, 1.0)
            elif self._model.refuses_nonfinite:  # so that all servers apply the step, or none
                round = self._round(context, number)
                self._model.begin_push(gradients, round).result()
                self._model.commit(round, gradients, 1.0)
            else:
                self._model.begin_push(gradients, 0).result()
        except (Exception, StepAborted):
            with contextlib.suppress(FastdistError):  # a server that is gone has dropped it
                self._model.discard(self._round(context, number))
            raise
        finally:
            self._steps[number] += 1  # some servers may have finished the round
        self._model.forget_rows(parameter for parameter, _ in rates)
        if context.size == 1:
            self._model.buffers.send_changed(1)
        self.is_fresh = not context.is_last()
        self._model.begin_pull()
        self._model.end_pull()

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
                gradients = [
                    (parameter, None) for parameter, _ in rates if parameter.grad is not None
                ]
                self._model.begin_push(gradients, round, weight).result()
                self._model.buffers.stage_changed(round, weight)
        except Exception as error:  # raised by all workers of the group
            failed = error

        def commit(total: float) -> None:
            if failed is not None:
                raise failed
            if total > 0:
                self._model.commit(round, rates, total, buffers=True)

        context.commit(weight if failed is None else math.nan, commit)

    def _use_staged(
        self, context: CallContext, number: int, gradients: Sequence[tuple[nn.Parameter, float]]
    ) -> bool:
        """Return True if the gradients that backward has sent are valid; drop them otherwise."""
        if not self._is_early[number]:
            return False
        now = self._round(context, number)
        for round in list(self._unsent):
            self._send(round)
        taken = [self._staged.pop(id(parameter), None) for parameter, _ in gradients]
        sent = [staged for staged in taken if staged is not None and staged.pending is not None]
        for pending in [staged.pending for staged in sent if staged.pending is not None]:
            pending.result()
        if len(sent) == len(gradients) and not any(
            staged.round != now
            or staged.stamp.is_stale(parameter)
            or staged.values != _checksum(parameter)
            for staged, (parameter, _) in zip(sent, gradients, strict=True)
        ):
            return bool(sent)
        self._is_early[number] = False
        for round in {staged.round for staged in sent}:
            self._model.discard(round)
        self._steps[number] += 1  # the discarded round cannot be used again
        return False


def _gradient_size(parameter: torch.Tensor) -> int:
    gradient = parameter.grad
    if gradient is None:
        return 0
    return gradient._values().numel() if gradient.is_sparse else gradient.numel()


def _checksum(parameter: torch.Tensor) -> tuple[str, str]:
    """Return a checksum of a gradient's values; NaN equals NaN.

    GradScaler.unscale_, and writes through `.data`, do not bump the tensor's version.
    """
    gradient = parameter.grad
    assert gradient is not None
    values = gradient._values() if gradient.is_sparse else gradient
    flat = values.detach().reshape(-1)
    return float(flat.sum()).hex(), float(flat.dot(flat)).hex()
