"""Reduces gradients, and buffers that forward has written, at the end of each backward.

One all-reduce per dtype is traced; XLA overlaps it with independent computations.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

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
        self.is_suspended = False  # in cross-replica context
        self._adopted = adopted
        self._communicator = communicator
        self._size = communicator.world_size
        self._reduction = reduction
        self._padding: Padding | None = None

    @contextlib.contextmanager
    def tracing(self, padding: Padding | None) -> Iterator[None]:
        """Return a context in which backward reduces gradients."""
        self._padding = padding
        self._thread = threading.get_ident()
        self._plain: Callable[..., Any] = vars(torch.autograd)[_ENGINE]
        described = [
            BufferedModule.of(place, module)
            for place, module in enumerate(buffered_modules(self._adopted.roots))
        ]
        self._buffers = BufferSync(described, len(described))
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
        before = [(parameter, parameter.grad) for _, parameter in self._adopted.parameters]
        for parameter, _ in before:
            parameter.grad = None
        try:
            result = self._plain(*args, **kwargs)
            made = [(p, p.grad) for p, _ in before if p.grad is not None]
        finally:
            for parameter, grad in before:
                parameter.grad = grad
        with torch.no_grad():
            gradients = [gradient for _, gradient in made]
            if self._padding is not None and self._reduction == "mean":
                gradients = [gradient * self._padding.weight for gradient in gradients]
            for (parameter, _), own in zip(made, self._reduce(gradients), strict=True):
                parameter.grad = own if parameter.grad is None else parameter.grad + own
        return result

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
