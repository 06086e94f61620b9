"""Random numbers for the code that loads data: they depend on seed, epoch and position alone.

In a loader process, the process's own generators are seeded before each example. In the process
that trains, a thread loads while the training steps draw from torch's default generator. So a mode
that is active in the loading thread alone passes a generator of its own to every operation of torch
that draws.
"""

from __future__ import annotations

import functools
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _pop_mode,
    _push_mode,
)
from torch.utils.data import get_worker_info

from fastdist.replicas.random_streams import stream_seed

T = TypeVar("T")


def epoch_seed(seed: tuple[int, ...], epoch: int) -> int:
    """Return a seed of 63 bits for an epoch."""
    return int(np.random.SeedSequence((*seed, epoch)).generate_state(1, np.uint64)[0] >> 1)


@contextmanager
def streams_by_position(seed: int) -> Iterator[Callable[[int], None]]:
    """Return a context manager whose function begins the example at the position it is given.

    What is drawn from then on depends on the seed and the position: in a loader process from the
    default generators of torch, numpy and Python's `random`, otherwise from torch's.
    """
    if get_worker_info() is not None:
        yield lambda position: _seed_process(stream_seed(seed, position))
        return
    with _OwnGenerator(seed) as own:
        yield lambda position: own.begin(stream_seed(seed, position))


def with_own_draws(start: Callable[[], Iterator[T]], seed: int) -> Iterator[T]:
    """Iterate over `start()`; it and its items draw from a random stream of their own in torch."""
    own = _OwnGenerator(seed)
    with own:
        items = start()
    return _each(items, own)


def _each(items: Iterator[T], own: _OwnGenerator) -> Iterator[T]:
    while True:
        with own:  # not while the consumer has the item
            try:
                item = next(items)
            except StopIteration:
                return
        yield item


class _OwnGenerator(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces torch's default generators in the thread that enters it."""

    supports_higher_order_operators = True

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.begin(seed)

    def begin(self, seed: int) -> None:
        """Begin a stream."""
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    # The base class's methods also set flags of the whole process, for torch.compile.
    def __enter__(self) -> _OwnGenerator:
        _push_mode(self)
        return self

    def __exit__(self, *error: object) -> None:
        if _get_current_dispatch_mode() is self:  # not in a forked child
            _pop_mode()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        drawing = _with_generator(func)
        if drawing is None or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        device = _device_of(args, kwargs)
        if device.type == "meta":
            return func(*args, **kwargs)
        return drawing(*args, **{**kwargs, "generator": self._on(device)})

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch would load its compiler with the first operation

    def _on(self, device: torch.device) -> torch.Generator:
        generator = self._generators.get(device)
        if generator is None:
            generator = torch.Generator(device)
            self._generators[device] = generator.manual_seed(self._seed)
        return generator


@functools.cache
def _with_generator(op: Any) -> Any:
    """Return the overload of an operation that takes a generator; None if there is none.

    Operations without such an overload still draw from the default generator: fused dropout and
    attention on GPUs, and `rand_like`, `randn_like`, `randint_like` before torch 2.10.
    """
    names = _arguments(op)
    if "generator" in names:
        return op
    packet = getattr(op, "overloadpacket", None)
    overloads = [] if packet is None else [getattr(packet, name) for name in packet.overloads()]
    return next((o for o in overloads if _arguments(o) == names | {"generator"}), None)


def _arguments(op: Any) -> set[str]:
    schema = getattr(op, "_schema", None)
    return set() if schema is None else {argument.name for argument in schema.arguments}


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device:
    for value in (*args, kwargs.get("out")):
        if isinstance(value, torch.Tensor):
            return value.device
    return torch.device(kwargs.get("device") or "cpu")


def _seed_process(seed: int) -> None:
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)


def _leave() -> None:
    """Stop redirecting draws in a forked child, such as a loader process."""
    while isinstance(_get_current_dispatch_mode(), _OwnGenerator):
        _pop_mode()


os.register_at_fork(after_in_child=_leave)
