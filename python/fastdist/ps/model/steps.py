"""Steps of optimizers whose parameters are on servers."""

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
from fastdist.ps.coordinator.worker import StepAborted, Turn
from fastdist.ps.model.model import ServedModel
from fastdist.replicas.context import ReplicaContext, state
from fastdist.training.tensor_stamps import GradientStamp

_STEP_BITS, _OPTIMIZER_BITS = 20, 8
# So many elements of small gradients are sent in one message.
_JOINT_SIZE = 1 << 16


@dataclass(slots=True)
class _Staged:
    """A gradient that was there in backward; its request, when it has been sent."""

    stamp: GradientStamp
    values: tuple[str, str]
    round: int
    pending: Pending[None] | None = None


def _examples(replica: ReplicaContext | None) -> float:
    """Of the batch that `run` was given on this worker; 1 where there is none."""
    if replica is None or replica.examples is None:
        return 1.0
    return float(sum(replica.examples))


class ServedSteps:
    """Makes `step` of a model's optimizers send gradients to the servers, and fetch what they give.

    Gradients are sent while backward runs, small ones together, to wait on the servers for the
    step. When something changes them in between (clipping, a second backward), they are sent again
    by the step, and from then on by steps alone.

    Args:
        model: what the optimizers train.

    Attributes:
        is_fresh: whether the model has values that are new enough for the next function: it was
            there already when the last step asked for them.

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
        self._turn: Turn | None = None
        self._staged: dict[int, _Staged] = {}  # by the parameter's id
        self._unsent: dict[int, list[nn.Parameter]] = {}  # by round: those to be sent together
        self._steps = [0] * len(bundle.optimizers)  # in this turn
        self._is_early = [True] * len(bundle.optimizers)
        for number, optimizer in enumerate(bundle.optimizers):
            optimizer.__dict__["step"] = self._step_of(number, optimizer)
            for group in optimizer.param_groups:
                for parameter in filter(model.serves, group["params"]):
                    parameter.register_post_accumulate_grad_hook(self._hook(number))

    def begin(self, turn: Turn) -> None:
        """A function is called."""
        self._turn = turn
        self.is_fresh = False
        self._steps = [0] * len(self._steps)
        self._staged.clear()
        self._unsent.clear()
        self._model.clear_gradients()

    def end(self) -> None:
        """The function has ended; gradients that no step has taken are not applied."""
        self._turn = None
        for round in {staged.round for staged in self._staged.values()}:
            self._model.discard(round)
        self._staged.clear()
        self._unsent.clear()

    def _round(self, turn: Turn, number: int) -> int:
        """Of this step of this optimizer; no other step of the job has it."""
        if self._steps[number] >> _STEP_BITS:
            raise FastdistError(f"over {1 << _STEP_BITS} steps in one scheduled function")
        at = turn.group << _OPTIMIZER_BITS | self._first + number
        return at << _STEP_BITS | self._steps[number]

    # --- backward -------------------------------------------------------------------------------

    def _hook(self, number: int) -> Callable[[torch.Tensor], None]:
        def gradient_is_there(parameter: torch.Tensor) -> None:
            turn = self._turn
            # Where workers step together, what one takes back could not be told from the rest.
            if turn is None or turn.size > 1 or not self._is_early[number]:
                return
            if id(parameter) not in self._staged:  # else a second backward
                assert isinstance(parameter, nn.Parameter)
                round = self._round(turn, number)
                stamp, values = GradientStamp(parameter), _summary(parameter)
                self._staged[id(parameter)] = _Staged(stamp, values, round)
                unsent = self._unsent.setdefault(round, [])
                unsent.append(parameter)
                is_small = self._model.is_small(parameter)
                if not is_small or sum(one.numel() for one in unsent) >= _JOINT_SIZE:
                    self._send(round)

        return gradient_is_there

    def _send(self, round: int) -> None:
        """What backward has made for a round, unless it is gone already."""
        given = [one for one in self._unsent.pop(round, ()) if one.grad is not None]
        pending = self._model.begin_push([(parameter, None) for parameter in given], round)
        for parameter in given:
            self._staged[id(parameter)].pending = pending

    # --- step -----------------------------------------------------------------------------------

    def _step_of(self, number: int, optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
        def step(self_: torch.optim.Optimizer, closure: Any = None) -> Any:
            self_.__dict__["_opt_called"] = True  # which schedulers look for
            loss = None
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            self._step(number, optimizer, _examples(state.replica))
            return loss

        step.__dict__["_wrapped_by_lr_sched"] = True
        return types.MethodType(step, optimizer)

    def _step(self, number: int, optimizer: torch.optim.Optimizer, weight: float) -> None:
        turn = self._turn
        if turn is None:
            raise FastdistError(
                f"{type(optimizer).__name__}.step() was called outside a scheduled function: "
                "parameters are on servers, which take gradients from workers; use "
                "ClusterCoordinator.schedule"
            )
        rates = self._model.served_by(optimizer)
        given = [(parameter, lr) for parameter, lr in rates if parameter.grad is not None]
        try:
            if turn.size > 1:
                self._step_together(turn, self._round(turn, number), rates, weight)
            elif self._take_staged(turn, number, given):
                self._model.commit(self._round(turn, number), given, 1.0)
            elif self._model.refuses_nonfinite:  # all servers apply it, or none
                round = self._round(turn, number)
                self._model.begin_push(given, round).result()
                self._model.commit(round, given, 1.0)
            else:
                self._model.begin_push(given, 0).result()
        except (Exception, StepAborted):
            with contextlib.suppress(FastdistError):  # servers that are gone have dropped it
                self._model.discard(self._round(turn, number))
            raise
        finally:
            self._steps[number] += 1  # some servers may have ended the round
        self._model.forget_rows(parameter for parameter, _ in rates)
        if turn.size == 1:
            self._model.buffers.send_changed(1)
        self.is_fresh = not turn.is_last()
        self._model.begin_pull()
        self._model.end_pull()

    def _step_together(
        self,
        turn: Turn,
        round: int,
        rates: Sequence[tuple[nn.Parameter, float]],
        weight: float,
    ) -> None:
        """The mean of all workers' gradients and changes of buffers, weighted.

        Or none, when some could not be sent.
        """
        failed: Exception | None = None
        try:
            if weight > 0:
                given = [(parameter, None) for parameter, _ in rates if parameter.grad is not None]
                self._model.begin_push(given, round, weight).result()
                self._model.buffers.stage_changed(round, weight)
        except Exception as error:  # the others wait, and are to know
            failed = error

        def lead(total: float) -> None:
            if failed is not None:
                raise failed
            if total > 0:
                self._model.commit(round, rates, total, buffers=True)

        turn.commit(weight if failed is None else math.nan, lead)

    def _take_staged(
        self, turn: Turn, number: int, given: Sequence[tuple[nn.Parameter, float]]
    ) -> bool:
        """Whether what was sent in backward is what the step is to apply; else it is dropped."""
        if not self._is_early[number]:
            return False
        now = self._round(turn, number)
        for round in list(self._unsent):
            self._send(round)
        taken = [self._staged.pop(id(parameter), None) for parameter, _ in given]
        sent = [one for one in taken if one is not None and one.pending is not None]
        for pending in [one.pending for one in sent if one.pending is not None]:
            pending.result()
        if len(sent) == len(given) and not any(
            one.round != now or one.stamp.is_stale(parameter) or one.values != _summary(parameter)
            for one, (parameter, _) in zip(sent, given, strict=True)
        ):
            return bool(sent)
        self._is_early[number] = False
        for round in {one.round for one in sent}:
            self._model.discard(round)
        self._steps[number] += 1  # that round has ended
        return False


def _summary(parameter: torch.Tensor) -> tuple[str, str]:
    """Differs between gradients with other values; NaN is equal to NaN.

    GradScaler.unscale_, and what is written through `.data`, leave no other trace.
    """
    gradient = parameter.grad
    assert gradient is not None
    values = gradient._values() if gradient.is_sparse else gradient
    flat = values.detach().reshape(-1)
    return float(flat.sum()).hex(), float(flat.dot(flat)).hex()
