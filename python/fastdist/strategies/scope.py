"""The scope of a strategy: records modules and optimizers made inside, and adopts them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from fastdist.replicas.context import state
from fastdist.training.metrics import watch_metrics
from fastdist.training.modules import ModuleRecorder
from fastdist.training.watch_made import watch_made

if TYPE_CHECKING:
    from fastdist.strategies.base import Strategy

Adopt = Callable[[Sequence[nn.Module], Sequence[Any]], None]


class Scope:
    """The context manager that `Strategy.scope` returns."""

    def __init__(self, strategy: Strategy, adopt: Adopt) -> None:
        self._strategy = strategy
        self._adopt = adopt
        self._stack = ExitStack()
        self._recorder: ModuleRecorder | None = None
        self._made: list[Any] = []

    def __enter__(self) -> Strategy:
        if state.replica is not None:
            raise RuntimeError("a scope cannot be opened inside run")
        nested = bool(state.scopes)
        if nested and state.scopes[-1] is not self._strategy:
            raise RuntimeError(
                f"Mixing strategies: the scope of {state.scopes[-1]!r} is open, "
                f"got the scope of {self._strategy!r}"
            )
        state.scopes.append(self._strategy)
        if not nested:
            self._recorder = self._stack.enter_context(ModuleRecorder())
            kinds = (torch.optim.Optimizer, LRScheduler, GradScaler)
            self._stack.enter_context(watch_made(kinds, self._note))
            self._stack.enter_context(watch_metrics(self._recorder.note))
        return self._strategy

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        state.scopes.pop()
        self._stack.close()
        if self._recorder is not None and kind is None:
            made, self._made = self._made, []
            self._adopt(self._recorder.roots(), made)

    def _note(self, thing: Any) -> None:
        if not any(thing is known for known in self._made):  # a subclass calls its base's __init__
            self._made.append(thing)
