"""A random stream of its own for each replica, all of them drawn from the process's one.

At every run each process draws one number from torch's default generator, the same on all
processes that were seeded alike; it and the replica's id make the seed of the replica's stream.
Afterwards the default generator is where the draw left it, so that random numbers drawn outside
`run` stay the same on all processes, and `torch.manual_seed` alone makes a whole job reproducible.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch._compile import _disable_dynamo
from torch.overrides import TorchFunctionMode

from fastdist.replicas.context import ReplicaContext

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
    generators = [torch.default_generator, *_of_gpu(context.device)]
    before = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(replica_seed(seed, context.replica_id_in_sync_group))
    try:
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


class SharedStream:
    """The same for replicas that are threads and share the generator of the CPU, not of a GPU.

    torch has one for all threads, so that each function that draws from it gets the replica's
    state put in before and taken out after, one thread at a time. What reads or sets the state
    (`torch.get_rng_state`, `manual_seed`; activation checkpoints do, and torch.compile) is led to
    the replica's own. Must be inside `detours`.
    """

    def __init__(self, context: ReplicaContext, seed: int) -> None:
        self._seed = replica_seed(seed, context.replica_id_in_sync_group)
        self._mode = _OwnState(self._seed)
        self._of_gpu = [(generator, generator.get_state()) for generator in _of_gpu(context.device)]

    def __enter__(self) -> None:
        for generator, _ in self._of_gpu:
            generator.manual_seed(self._seed)
        _thread.mode = self._mode
        self._mode.__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)  # type: ignore[no-untyped-call]
        _thread.mode = None
        for generator, state in self._of_gpu:
            generator.set_state(state)


class _Thread(threading.local):
    mode: _OwnState | None = None


class _Detours:
    """While open, stands in for two names of torch: a `with` statement around replicas' threads.

    `torch.random.default_generator`, by which torch reads and sets the state, and the function
    that runs backward: torch calls that with function modes off, and what backward computes again
    may draw.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._plain_backward: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._plain_backward = vars(torch.autograd)["_engine_run_backward"]
                self._set(self.run_backward, self)
            self._users += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._set(self._plain_backward, torch.default_generator)

    @staticmethod
    def _set(backward: Any, generator: Any) -> None:
        vars(torch.autograd)["_engine_run_backward"] = backward
        vars(torch.random)["default_generator"] = generator

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        """What backward computes again draws from the replica's stream."""
        with _thread.mode or nullcontext():
            return self._plain_backward(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        mode = _thread.mode
        return getattr(torch.default_generator if mode is None else mode.generator, name)


class _OwnState(TorchFunctionMode):
    """Runs torch's random functions on a generator of its own; in one thread."""

    _turn = threading.Lock()

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed

    @functools.cached_property
    def generator(self) -> torch.Generator:
        """Made when something draws."""
        return torch.Generator().manual_seed(self._seed)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if (
            getattr(func, "__name__", "") not in RANDOM_FUNCTIONS
            or kwargs.get("generator") is not None
        ):
            return func(*args, **kwargs)
        return self._draw(func, args, kwargs)

    @_disable_dynamo
    def _draw(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shared = torch.default_generator
        with self._turn:
            before = shared.get_state()
            shared.set_state(self.generator.get_state())
            try:
                return func(*args, **kwargs)
            finally:
                self.generator.set_state(shared.get_state())
                shared.set_state(before)


_thread = _Thread()
detours = _Detours()
RANDOM_FUNCTIONS = frozenset(
    f"{name}{suffix}"
    for name in (
        *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout"),
        *("feature_alpha_dropout", "native_dropout", "rrelu", "gumbel_softmax"),
        *("scaled_dot_product_attention", "multi_head_attention_forward"),
        *("rnn_tanh", "rnn_relu", "lstm", "gru", "fractional_max_pool2d", "fractional_max_pool3d"),
        *("rand", "rand_like", "randn", "randn_like", "randint", "randint_like", "randperm"),
        *("bernoulli", "binomial", "multinomial", "normal", "poisson", "random", "uniform"),
        *("kaiming_normal", "kaiming_uniform", "pca_lowrank", "svd_lowrank"),
        *("cauchy", "exponential", "geometric", "log_normal"),
        *("_standard_gamma", "_sample_dirichlet"),
    )
    for suffix in ("", "_")
)


def _of_gpu(device: torch.device) -> list[torch.Generator]:
    """The generator that torch has for this GPU; nothing for other devices."""
    if device.type != "cuda":
        return []
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.cuda.default_generators[index]]
