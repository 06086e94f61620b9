"""Compares a few elements of parameters and optimizers' states between replicas, each time others.

Replicas that drift apart, by random numbers in an update or by weights that one of them has loaded,
would train models of their own with the mean of all gradients. A hash of the elements travels with
the gradients; replicas exchange the elements themselves only if their hashes differ.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

import fastdist._core as _core
from fastdist.training.contributions import ReducedParameter
from fastdist.training.modules import is_materialized

_PARAMETERS, _STATES = 13, 3  # elements of a sample
_TURNS, _TURNS_ON_GPU = 4, 16  # of which one samples: 16 elements take 20 us, on a GPU 200
_MASK = (1 << 64) - 1
_ROUNDING = 1e-3  # relative, between machines and GPUs, whose arithmetic may differ


@dataclass(frozen=True, slots=True)
class Element:
    """An element of a parameter, or of a state that an optimizer keeps for it."""

    place: int  # of the parameter, equal on all replicas
    name: str  # of the parameter
    key: str  # the state's name; "" for the parameter itself
    index: int  # in memory
    value: float  # of complex numbers the magnitude

    @property
    def what(self) -> str:
        """The words for a message."""
        of = f"{self.key} of the optimizer's state of " if self.key else ""
        return f"{of}{self.name}[{self.index}]"


# An element's parameter, the state's name, the tensor and the position.
_Sampled = tuple[ReducedParameter, str, torch.Tensor, int]
_Remembered = tuple[ReducedParameter, str, weakref.ref[torch.Tensor], int]


class ParameterSample:
    """The elements of one replica's parameters and optimizers' states, by turns.

    All replicas have the optimizers in the same order.
    """

    def __init__(
        self,
        parameters: Sequence[ReducedParameter],
        optimizers: Sequence[weakref.ref[torch.optim.Optimizer]],
    ) -> None:
        alive = ((reduced, reduced.ref()) for reduced in parameters)
        self._parameters = [  # each with its number of elements and their size in bytes
            (reduced, p.numel(), p.element_size())
            for reduced, p in alive
            if p is not None and is_materialized(p) and p.is_contiguous() and p.numel() > 0
        ]
        self._optimizers = optimizers
        self._turn = 0
        self._last: list[_Remembered] = []

    def take(self) -> bytes:
        """Return the bytes of the next elements; nothing where replicas take no sample."""
        turn = self._turn
        self._turn += 1
        self._last = last = []
        if turn % _TURNS or not self._parameters:
            return b""
        turn //= _TURNS
        first = self._parameters[0][0].ref()
        if first is not None and first.is_cuda:
            if turn % (_TURNS_ON_GPU // _TURNS) or torch.cuda.is_current_stream_capturing():
                return b""
            for *named, tensor, index, _ in (*self._of_parameters(turn), *self._of_states(turn)):
                last.append((*named, weakref.ref(tensor), index))
            return repr([each.value for each in self.elements()]).encode()
        addresses, sizes = [], []
        for each in (*self._of_parameters(turn), *self._of_states(turn)):
            reduced, key, tensor, index, size = each
            address = tensor.data_ptr()
            if address and tensor.is_cpu:
                addresses.append(address + index * size)
                sizes.append(size)
                last.append((reduced, key, weakref.ref(tensor), index))
        return _core.read_memory(addresses, sizes)

    def _of_parameters(self, turn: int) -> Iterator[tuple[*_Sampled, int]]:
        parameters, bits = self._parameters, scattered(turn)
        count = len(parameters)
        for number in range(turn * _PARAMETERS, (turn + 1) * _PARAMETERS):
            reduced, elements, size = parameters[number % count]
            tensor = reduced.ref()
            if tensor is not None:
                yield reduced, "", tensor, (bits >> number % _PARAMETERS) % elements, size

    def _of_states(self, turn: int) -> Iterator[tuple[*_Sampled, int]]:
        if not self._optimizers:
            return
        count, bits = len(self._parameters), scattered(~turn & _MASK)
        optimizer = self._optimizers[turn % len(self._optimizers)]()
        for number in range(turn * _STATES, (turn + 1) * _STATES):
            reduced = self._parameters[number % count][0]
            parameter = reduced.ref()
            state = (
                None if parameter is None or optimizer is None else optimizer.state.get(parameter)
            )
            if not state:
                continue
            key = list(state)[number // count % len(state)]
            tensor = state[key]
            if isinstance(tensor, torch.Tensor) and tensor.numel() and tensor.is_contiguous():
                index = (bits >> number % _STATES) % tensor.numel()
                yield reduced, key, tensor, index, tensor.element_size()

    def elements(self) -> list[Element]:
        """Return the elements of the last sample."""
        return [
            element_of(reduced, key, tensor, index)
            for reduced, key, ref, index in self._last
            if (tensor := ref()) is not None
        ]


def element_of(reduced: ReducedParameter, key: str, tensor: torch.Tensor, index: int) -> Element:
    """Return an element of a parameter, or of a tensor that belongs to it."""
    element = tensor.detach().reshape(-1)[index]
    value = element.abs() if element.is_complex() else element
    return Element(reduced.place, reduced.name, key, index, float(value.item()))


def scattered(number: int) -> int:
    """Return a number that hardly depends on those before, by splitmix64 (Steele et al., 2014)."""
    number = number * 0x9E3779B97F4A7C15 & _MASK
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    return number ^ number >> 31


def first_difference(
    one: Sequence[Element], other: Sequence[Element], *, is_exact: bool
) -> tuple[Element, Element] | None:
    """Return the first element that differs between two replicas; None if none does.

    Elements that only one of them has are left out: replicas may release models at different times.
    `is_exact=False` allows for rounding.
    """
    theirs = {(each.place, each.key, each.index): each for each in other}
    for mine in one:
        found = theirs.get((mine.place, mine.key, mine.index))
        if found is None or mine.value == found.value:
            continue
        if mine.value != mine.value and found.value != found.value:  # NaN
            continue
        gap = abs(mine.value - found.value)
        if is_exact or not gap <= _ROUNDING * max(abs(mine.value), abs(found.value)):
            return mine, found
    return None
