"""A random stream of its own for each replica, all of them drawn from the process's one.

At every run each process draws one number from torch's default generator, the same on all
processes that were seeded alike; it and the replica's id make the seed of the replica's stream.
Afterwards the default generator is where the draw left it, so that random numbers drawn outside
`run` stay the same on all processes, and `torch.manual_seed` alone makes a whole job reproducible.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fastdist.context import ReplicaContext

_MIX = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio: spreads seeds that are close


def draw_seed() -> int:
    """A number that all processes draw alike."""
    return int(torch.empty((), dtype=torch.int64).random_())


def replica_seed(seed: int, replica: int) -> int:
    """The seed of one replica's stream."""
    return (seed + (replica + 1) * _MIX) & (2**63 - 1)


@contextmanager
def replica_stream(context: ReplicaContext, seed: int) -> Iterator[None]:
    """While it is open, this process's default generators give the replica's stream."""
    generator = _generator(context.device)
    before = generator.get_state()
    generator.manual_seed(replica_seed(seed, context.replica_id_in_sync_group))
    try:
        yield
    finally:
        generator.set_state(before)


@contextmanager
def shared_stream(context: ReplicaContext, seed: int) -> Iterator[None]:
    """The same for replicas that are threads and share the generator of the CPU.

    torch has one for all threads, so that each function that draws from it gets the replica's
    state put in before and taken out after, one thread at a time.
    """
    generator = torch.Generator()
    generator.manual_seed(replica_seed(seed, context.replica_id_in_sync_group))
    with _OwnState(generator):
        yield


class _OwnState(TorchFunctionMode):
    """Runs torch's random functions on a generator's state; in one thread."""

    _turn = threading.Lock()

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in _RANDOM or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        shared = torch.default_generator
        with self._turn:
            before = shared.get_state()
            shared.set_state(self._generator.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                self._generator.set_state(shared.get_state())
                shared.set_state(before)


_RANDOM = frozenset(
    f"{name}{suffix}"
    for name in (
        *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout"),
        *("feature_alpha_dropout", "native_dropout", "rrelu", "gumbel_softmax"),
        *("scaled_dot_product_attention", "multi_head_attention_forward"),
        *("rnn_tanh", "rnn_relu", "lstm", "gru", "fractional_max_pool2d", "fractional_max_pool3d"),
        *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm"),
        *("bernoulli", "binomial", "multinomial", "normal", "poisson", "random", "uniform"),
        *("cauchy", "exponential", "geometric", "log_normal"),
    )
    for suffix in ("", "_")
)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generator: torch.Generator = torch.cuda.default_generators[index]
        return generator
    return torch.default_generator
