"""The scope of a strategy: records modules and optimizers made inside, and adopts them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from fastdist.replicas.context import state
from fastdist.training.metrics import watch_metrics
from fastdist.training.modules import ModuleRecorder
from fastdist.training.patched import watch_made

extensions: list[Any] = []
"""Adapt the models of other frameworks: by the methods of `keras.extension.KerasExtension`."""


class Scope:
    """The context manager that `Strategy.scope` returns."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self._stack = ExitStack()
        self._recorder: ModuleRecorder | None = None
        self._made: list[Any] = []

    def __enter__(self) -> Any:
        if state.replica is not None:
            raise RuntimeError("a scope cannot be opened inside run")
        nested = bool(state.scopes)
        if nested and state.scopes[-1] is not self.strategy:
            raise RuntimeError(
                f"Mixing strategies: the scope of {state.scopes[-1]!r} is open, "
                f"got the scope of {self.strategy!r}"
            )
        state.scopes.append(self.strategy)
        if not nested:
            self._recorder = self._stack.enter_context(ModuleRecorder())
            kinds = (torch.optim.Optimizer, LRScheduler, GradScaler)
            self._stack.enter_context(watch_made(kinds, self._note))
            self._stack.enter_context(watch_metrics(self._recorder.note))
            for extension in extensions:
                self._stack.enter_context(extension.watch(self))
            self.strategy._open_scope = self
        return self.strategy

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        state.scopes.pop()
        self._stack.close()
        try:
            if kind is None:
                self.adopt()
        finally:
            if self._recorder is not None:
                self.strategy._open_scope = self._recorder = None

    def note_module(self, module: nn.Module) -> None:
        """Record a module, whether or not it registers anything with torch."""
        if self._recorder is not None:
            self._recorder.note(module)

    @property
    def has_new(self) -> bool:
        """True if something was made that is not adopted yet."""
        return self._recorder is not None and (self._recorder.has_new() or bool(self._made))

    def adopt(self) -> None:
        """Adopt what was made so far; the end of the scope adopts the rest. Every worker must call.

        Does nothing once the scope has ended.
        """
        if self._recorder is not None:
            made = list(self._made)
            roots: Sequence[nn.Module] = self._recorder.roots()
            for extension in extensions:
                roots = extension.adopt(self.strategy, roots)
            self.strategy._adopt(roots, made)
            del self._made[: len(made)]

    def _note(self, thing: Any) -> None:
        if not any(thing is known for known in self._made):  # a subclass calls its base's __init__
            self._made.append(thing)
