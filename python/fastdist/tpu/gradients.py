"""Reduces gradients, and buffers that forward has written, at the end of each backward.

One all-reduce per dtype is traced; XLA overlaps it with independent computations.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from fastdist.collectives.communicator import Communicator
from fastdist.tpu.adopted import AdoptedModules
from fastdist.tpu.padding import Padding
from fastdist.training.buffers import BufferedModule, BufferSync, buffered_modules
from fastdist.training.contributions import GradientReduction
from fastdist.training.patched import replaced

_ENGINE = "_engine_run_backward"


class TracedGradients:
    """Wraps torch's backward while a run is traced, in the tracing thread."""

    def __init__(
        self, adopted: AdoptedModules, communicator: Communicator, reduction: GradientReduction
    ) -> None:
        self.is_enabled = True  # False: gradients stay with their replica
        self.is_suspended = False  # in cross-replica context
        self._adopted = adopted
        self._communicator = communicator
        self._size = communicator.world_size
        self._reduction = reduction
        self._padding: Padding | None = None
        self._buffers = _buffer_sync(adopted.roots)
        self._thread = 0
        self._plain: Callable[..., Any] = vars(torch.autograd)[_ENGINE]

    @contextlib.contextmanager
    def tracing(self, padding: Padding | None) -> Iterator[None]:
        """Return a context in which backward reduces gradients."""
        self._padding = padding
        self._thread = threading.get_ident()
        self._plain = vars(torch.autograd)[_ENGINE]
        self._buffers = _buffer_sync(self._adopted.roots)
        try:
            with replaced(torch.autograd, _ENGINE, self._run_backward):
                yield
                if not self.is_suspended:
                    self._reduce([])
        finally:
            self._padding = None

    def _run_backward(self, *args: Any, **kwargs: Any) -> Any:
        is_own = threading.get_ident() == self._thread and not self.is_suspended
        if not is_own or not kwargs.get("accumulate_grad"):
            return self._plain(*args, **kwargs)
        parameters = [parameter for _, parameter in self._adopted.parameters]
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        fresh: list[torch.Tensor | None] = [None] * len(parameters)
        try:
            result = self._plain(*args, **kwargs)
            fresh = [parameter.grad for parameter in parameters]
        finally:
            for parameter, grad in zip(parameters, before, strict=True):
                parameter.grad = grad
        with torch.no_grad():
            if self._padding is not None and self._reduction == "mean":
                weight = self._padding.weight
                fresh = [None if grad is None else grad * weight for grad in fresh]
            self._take(parameters, fresh)
        return result

    def _take(self, parameters: list[torch.nn.Parameter], fresh: list[torch.Tensor | None]) -> None:
        held = self._adopted.held
        if not self.is_enabled:
            for parameter, grad in zip(parameters, fresh, strict=True):
                if grad is not None:
                    known = parameter.grad
                    if known is not None and id(parameter) not in held:
                        known = known if self._reduction == "mean" else known / self._size
                    parameter.grad = grad if known is None else known + grad
                    held.add(id(parameter))
            return
        sent, places = [], []
        for parameter, grad in zip(parameters, fresh, strict=True):
            if id(parameter) in held and parameter.grad is not None:
                grad = parameter.grad if grad is None else parameter.grad + grad
                parameter.grad = None
            if grad is not None:
                sent.append(grad)
                places.append(parameter)
        held.clear()
        for parameter, grad in zip(places, self._reduce(sent), strict=True):
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad

    def _reduce(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Reduce gradients; written buffers travel with them and become the mean over examples."""
        buffers = self._buffers.take_written()
        shares: list[torch.Tensor] = list(buffers)
        if self._padding is not None:
            has_examples, weight = self._padding.count > 0, self._padding.weight
            shares = [
                torch.where(has_examples, buffer * weight, torch.zeros_like(buffer))
                for buffer in buffers
            ]
        # One list with one op becomes one all-reduce per dtype.
        is_mean = self._reduction == "mean"
        sent = gradients if is_mean else [grad * self._size for grad in gradients]
        reduced = [tensor.clone() for tensor in (*sent, *shares)]
        if reduced:
            self._communicator.all_reduce(reduced, "mean")
        for buffer, mean in zip(buffers, reduced[len(gradients) :], strict=True):
            buffer.data = mean
        return reduced[: len(gradients)]


def _buffer_sync(roots: Sequence[nn.Module]) -> BufferSync:
    modules = buffered_modules(roots)
    described = [BufferedModule.of(place, module) for place, module in enumerate(modules)]
    return BufferSync(described, len(modules))
