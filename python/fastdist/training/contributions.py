"""The share of one replica in the sum of each gradient over all replicas.

Gradients are weighted by examples when they are sent. Gradients that `no_sync` holds back are
weighted when they are computed, since they are sent along with a batch that has other weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch._compile import _disable_dynamo

from fastdist.collectives.communicator import Communicator
from fastdist.errors import FastdistError
from fastdist.replicas.per_replica import shares

GradientReduction = Literal["mean", "sum"]


class GradientHook(partial):  # type: ignore[type-arg]
    """A hook that fastdist registers, as a class that distinguishes it from users' hooks."""


@dataclass(frozen=True, slots=True)
class ReducedParameter:
    """A parameter whose gradient is reduced."""

    name: str
    ref: weakref.ref[torch.nn.Parameter]
    model: int  # the number of its model
    place: int  # its number among the parameters of all models; the same on all replicas
    shape: torch.Size  # replicas that have released it contribute zeros of this shape
    dtype: torch.dtype
    is_sparse: bool


@dataclass(slots=True)
class Accumulation:
    """The state that one backward leaves to the next, by place; outlives a `GradientSync`."""

    is_held: bool = False  # inside `no_sync`
    # From there until gradients are reduced: all are weighted as they are computed, on replicas
    # that have used a parameter inside and on those that have not.
    was_held: bool = False
    held: set[int] = field(default_factory=set)  # parameters whose gradients no_sync holds back
    weighs_early: bool = False  # hooks weight gradients as they are computed
    # Gradients that are sums over replicas already.
    reduced: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)
    unreduced: set[int] = field(default_factory=set)  # computed and not sent yet, under "sum"


class Contributions:
    """The contributions of one replica, by a parameter's index in `parameters`.

    `weights` are what each replica counts, such as its examples; None if all count the same.
    `arrived` tells of each parameter whether the backward under way has computed its gradient.
    """

    def __init__(
        self,
        parameters: Sequence[ReducedParameter],
        replicas: Communicator,
        accumulation: Accumulation,
        reduction: GradientReduction,
    ) -> None:
        self.weights: tuple[float, ...] | None = None
        self.arrived = [False] * len(parameters)
        self._parameters = parameters
        self._replicas = replicas
        self._accumulation = accumulation
        self._reduction = reduction
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def watch(self, i: int) -> None:
        """Register the hook that a gradient passes before it is added to `.grad`, if it needs one.

        Every trainable parameter must be watched.
        """
        if self._reduction == "sum":
            self._watch_before(i, self._before_gradient)
        elif self._accumulation.weighs_early:
            self._watch_before(i, self._weighted)

    def hold(self, watched: Iterable[int]) -> None:
        """Prepare for `no_sync`: gradients are weighted as they are computed from now on."""
        if self._reduction == "mean" and not self._accumulation.weighs_early:
            self._accumulation.weighs_early = True
            for i in watched:
                self._watch_before(i, self._weighted)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _watch_before(self, i: int, method: Callable[..., torch.Tensor | None]) -> None:
        hook = GradientHook(call_weakly, weakref.WeakMethod(method), i)
        parameter = self._parameters[i].ref()
        if parameter is not None:
            self._hooks.append(parameter.register_hook(hook))  # type: ignore[no-untyped-call]

    def arrive(self, i: int) -> None:
        """Note that the backward under way has computed a gradient."""
        self.arrived[i] = True
        if self._reduction == "sum":
            self._accumulation.unreduced.add(self._parameters[i].place)

    def is_there(self, i: int) -> bool:
        """Return True if this replica has a gradient to send."""
        return self.arrived[i] or self._is_held(i)

    def weight(self) -> float | None:
        """Return this replica's share of the mean; None if all have the same share."""
        everyone = shares(self.weights)
        return None if everyone is None else everyone[self._replicas.rank]

    def share(self) -> float:
        """Return the factor of this replica's gradients in the sum over replicas."""
        if self._reduction == "sum":
            return 1.0
        weight = None if self._accumulation.was_held else self.weight()
        return 1.0 / self._replicas.world_size if weight is None else weight

    def take(self, i: int, device: torch.device) -> torch.Tensor:
        """Return the gradient of a parameter, in memory that may be reduced in place.

        For a parameter that this replica has released, make zeros on `device`.
        """
        reduced = self._parameters[i]
        parameter = reduced.ref()
        if parameter is None:
            return torch.zeros(reduced.shape, dtype=reduced.dtype, device=device)
        if parameter.grad is not None:
            if self._reduction == "sum" and not self.arrived[i]:
                self._before_gradient(i)
            if _is_shared(parameter.grad):
                parameter.grad = parameter.grad.clone()
            return parameter.grad
        return torch.zeros_like(parameter, memory_format=torch.preserve_format)

    def take_sparse(self, i: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the indices and weighted rows of a sparse gradient; None without a gradient."""
        parameter = self._parameters[i].ref()
        if parameter is None or parameter.grad is None:
            return None
        if self._reduction == "sum" and not self.arrived[i]:
            self._before_gradient(i)
        grad = parameter.grad.coalesce()
        return grad.indices().cpu(), (grad.values() * self.share()).cpu()

    def weigh(self, gradients: list[torch.Tensor], weight: float) -> None:
        """Multiply gradients by this replica's weight, if they are not weighted already."""
        if self._accumulation.was_held:
            torch._foreach_div_(gradients, self._replicas.world_size)
        elif weight == 0.0:
            torch._foreach_zero_(gradients)
        else:
            torch._foreach_mul_(gradients, weight)

    def note_sum(self, i: int, parameter: torch.nn.Parameter) -> None:
        """Note that `.grad` is a sum over replicas, which must not be summed again."""
        if self._reduction == "sum" and parameter.grad is not None:
            place = self._parameters[i].place
            self._accumulation.reduced[place] = weakref.ref(parameter.grad)
            self._accumulation.unreduced.discard(place)

    def _is_held(self, i: int) -> bool:
        return self._parameters[i].place in self._accumulation.held

    def _before_gradient(self, i: int, gradient: object = None) -> None:
        """Divide a reduced sum in `.grad` by the number of replicas before adding to it.

        The next reduction then adds the parts up to the same sum.
        """
        parameter = self._parameters[i].ref()
        grad = None if parameter is None else parameter.grad
        place = self._parameters[i].place
        known = self._accumulation.reduced.pop(place, None)
        if grad is None or place in self._accumulation.unreduced or self._is_held(i):
            return
        if known is not None and known() is grad:
            grad.div_(self._replicas.world_size)
        elif grad._nnz() if grad.is_sparse else grad.any():
            name = self._parameters[i].name
            raise FastdistError(
                f"the gradient of {name} was assigned since the last backward. With "
                'gradient_reduction="sum" fastdist cannot tell whether it is the sum over the '
                "replicas or this replica's own: change it in place, as .grad.mul_(0.5) does, or "
                "set it to None before backward and add it afterwards"
            )

    def _weighted(self, i: int, gradient: torch.Tensor) -> torch.Tensor | None:
        """Weight a gradient that `no_sync` holds back, or that may be added to such a one."""
        weight = self.weight()
        if weight is None or not self._accumulation.was_held:
            return None
        if weight == 0.0:  # the gradient of an empty batch is often NaN
            return torch.zeros_like(gradient)
        return gradient * (weight * self._replicas.world_size)


def _is_shared(gradient: torch.Tensor) -> bool:
    """Return True if something else, such as another gradient, uses a new gradient's memory.

    Without a summation in between, autograd gives several parameters views of one result, which
    must not be reduced in place once per parameter.
    """
    if gradient._version or gradient.requires_grad:
        return False
    return _uses(gradient) > _USES_OF_ONE_TENSOR


def _uses(tensor: torch.Tensor) -> int:
    uses: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return uses


_USES_OF_ONE_TENSOR = _uses(torch.ones(1))


@_disable_dynamo
def call_weakly(method: Any, *given: Any) -> Any:
    """Call a weakly bound method; torch's hooks would keep a strategy alive forever."""
    found = method()
    return None if found is None else found(*given)
