"""Checks before each step of a strategy's optimizers, in `run` and outside."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from fastdist.errors import FastdistError
from fastdist.recorder.phases import Phase, enter
from fastdist.replicas.context import ReplicaContext, state
from fastdist.replicas.per_replica import Origin
from fastdist.replicas.random_streams import CommonStream
from fastdist.training.contributions import GradientReduction, call_weakly
from fastdist.training.gradients import GradientSync
from fastdist.training.patched import replaced
from fastdist.training.step_record import StepRecord


class OptimizerSteps:
    """Hooks into the steps of optimizers that hold a strategy's parameters.

    The loss that a closure returns is reduced over all replicas: optimizers such as LBFGS choose
    the step size by it, and replicas must take the same step. `has_one_copy` is True if all
    replicas have one copy of the parameters.
    """

    def __init__(
        self, reduction: GradientReduction, *, is_sharded: bool, has_one_copy: bool
    ) -> None:
        self.optimizers = weakref.WeakSet[torch.optim.Optimizer]()  # of the strategy
        self.record = StepRecord()  # to be compared with other replicas
        self._is_sharded = is_sharded
        self._reduction = reduction
        self._parameters: dict[int, weakref.ref[torch.Tensor]] = {}  # including replaced ones
        self._foreign = weakref.WeakKeyDictionary[torch.optim.Optimizer, int]()
        self._runs = 0
        self._has_begun = False
        self._has_one_copy = has_one_copy
        self._sync: GradientSync | None = None
        self._common: CommonStream | None = None  # of the present run
        self._depth = 0  # of steps that other steps call

    def begin(self) -> None:
        """Register the hooks of a job with several replicas; they are removed with this object."""
        if self._has_begun:
            return
        self._has_begun = True
        before = register_optimizer_step_pre_hook(
            functools.partial(call_weakly, weakref.WeakMethod(self._before_step))
        )
        after = register_optimizer_step_post_hook(
            functools.partial(call_weakly, weakref.WeakMethod(self._after_step))
        )
        for hook in (before, after):
            weakref.finalize(self, hook.remove)

    @contextlib.contextmanager
    def run(self, common: CommonStream, origin: Origin | None) -> Iterator[None]:
        """Return a context manager: steps inside are steps of replicas in `run`.

        Optimizers that draw, such as for noise or rounding, draw from the common stream.
        """
        self._runs += 1
        self._depth = 0
        self.record.begin_run(origin)
        with replaced(self, "_common", common):
            yield

    def watch(self, parameters: Iterable[torch.Tensor], sync: GradientSync | None) -> None:
        """Set the parameters that only the optimizers may change, and the strategy's sync."""
        alive = {key: ref for key, ref in self._parameters.items() if ref() is not None}
        self._parameters = alive | {id(p): weakref.ref(p) for p in parameters}
        self._sync = sync

    @_disable_dynamo
    def _before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        context = state.replica
        if optimizer not in self.optimizers:
            if (context is not None and self._common is not None) or self._has_one_copy:
                self._require_foreign(optimizer)
            return None
        self.prepare(optimizer)
        if context is not None and self._is_sharded:
            self.record.require_reduced()
        enter(Phase.OPTIMIZER)
        if not self._has_one_copy:
            self.record.note(optimizer)
        if context is None:
            return None
        self._draw_alike(1)
        if "closure" in kwargs:
            kwargs = {**kwargs, "closure": self._global(context, kwargs["closure"])}
        elif len(args) > 1:
            args = (args[0], self._global(context, args[1]), *args[2:])
        else:
            return None
        return args, kwargs

    @_disable_dynamo
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        enter(Phase.USER if state.replica is None else Phase.FORWARD)
        if optimizer in self.optimizers and state.replica is not None:
            self._draw_alike(-1)

    def _draw_alike(self, change: int) -> None:
        """Enter or leave a step, in which all replicas draw the same random numbers."""
        if self._common is None:
            return
        was, self._depth = self._depth, max(0, self._depth + change)
        if was == 0 and change > 0:
            self._common.enter()
        elif was == 1 and change < 0:
            self._common.leave()

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that the strategy's optimizer may step now, and hash gradients to be recorded."""
        if self._sync is not None and self._sync.is_reducing:
            raise FastdistError(
                f"{type(optimizer).__name__}.step() was called during backward, before the "
                "gradients were reduced over replicas; call it after backward() has returned"
            )
        if state.replica is not None:
            if self._sync is not None:
                self._sync.require_reduced()
            self._require_own(optimizer)
        if self.record.digests is not None:
            self.record.digests.note_step()

    def _is_own(self, parameter: torch.Tensor) -> bool:
        known = self._parameters.get(id(parameter))
        return known is not None and known() is parameter

    def _require_foreign(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that an optimizer made outside the scope belongs to the current run only."""
        name = type(optimizer).__name__
        for group in optimizer.param_groups:
            if any(map(self._is_own, group["params"])):
                raise ValueError(
                    f"{name} was made outside the scope of the strategy whose parameters it "
                    "holds; make it inside `with strategy.scope():`"
                )
        in_run = state.replica is not None and self._common is not None
        if in_run and self._foreign.setdefault(optimizer, self._runs) != self._runs:
            raise ValueError(
                f"{name} and the module it trains were made outside the scope, so every replica "
                "trains a separate model: make both inside `with strategy.scope():`"
            )

    def _require_own(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not self._is_own(parameter):
                    raise ValueError(
                        f"{type(optimizer).__name__} holds a parameter of shape "
                        f"{tuple(parameter.shape)} that is in none of the strategy's modules: make "
                        "its module in the scope, or pass the module to strategy.mirror"
                    )

    def _global(self, context: ReplicaContext, closure: Any) -> Any:
        if closure is None:
            return None

        def reduced() -> Any:
            self._draw_alike(-1)
            try:
                loss = closure()
            finally:
                self._draw_alike(1)
            if loss is None:
                return None
            part = torch.as_tensor(loss).detach()
            # A replica without examples often has the loss NaN.
            weight = context.relative_weight
            part = part * weight if weight else torch.zeros_like(part)
            return context.all_reduce(self._reduction, part)

        return reduced
