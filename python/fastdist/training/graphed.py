"""Steps as CUDA graphs: captured once, replayed by one launch instead of thousands."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch

from fastdist.replicas.context import state
from fastdist.replicas.per_replica import leaves, map_structure, shares

# Calls before the capture, in which libraries choose their kernels and communicators connect.
_WARM_UP_CALLS = 3
_MAX_GRAPHS = 8  # each graph holds its own memory

Replay = Callable[[], Any]


def capture_graph(step: Callable[[], Any]) -> Replay:
    """Capture the GPU operations of `step`; its other effects happen once, during this call."""
    graph = torch.cuda.CUDAGraph()
    # In this mode other threads, which load data, may make calls that the capture cannot contain.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = step()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def is_capturing() -> bool:
    """Return True while the current stream is captured, when the host may wait for nothing."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class GraphedStep:
    """The result of `Strategy.make_graphed`; must be called in `run`.

    `capture` calls a function, and returns one that repeats its GPU operations.
    """

    def __init__(
        self, step: Callable[..., Any], capture: Callable[[Callable[[], Any]], Replay]
    ) -> None:
        self._step = step
        self._capture = capture
        self._calls: dict[Hashable, int] = {}
        self._graphs: dict[Hashable, tuple[list[torch.Tensor], Replay]] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the step, or replay it."""
        replica = state.replica
        if replica is None:
            raise RuntimeError("a graphed step must be called by strategy.run")
        if shares(replica.weights) is not None:  # a graph would repeat this batch's weights
            return self._step(*args, **kwargs)
        given = (args, kwargs)
        key = _kind_of(given)
        if key not in self._graphs:
            calls = self._calls[key] = self._calls.get(key, 0) + 1
            if calls <= _WARM_UP_CALLS or not self._has_room():
                return self._step(*args, **kwargs)
            own_args, own_kwargs = map_structure(_copied, given)
            replay = self._capture(lambda: self._step(*own_args, **own_kwargs))
            self._graphs[key] = _tensors_of((own_args, own_kwargs)), replay
        inputs, replay = self._graphs[key]
        for own, theirs in zip(inputs, _tensors_of(given), strict=True):
            own.copy_(theirs)
        return map_structure(_copied, replay())

    def _has_room(self) -> bool:
        if len(self._graphs) < _MAX_GRAPHS:
            return True
        warnings.warn(
            f"a graphed step was called with more than {_MAX_GRAPHS} kinds of arguments (shapes, "
            "dtypes, values of non-tensors); further kinds run without a graph. Pad batches to a "
            "few shapes",
            stacklevel=4,
        )
        return False


def _kind_of(given: Any) -> Hashable:
    """Return a key that is equal for arguments that can use the same graph."""

    def kind(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return (tuple(leaf.shape), leaf.dtype, leaf.device, leaf.requires_grad)
        if type(leaf).__hash__ is None:
            raise TypeError(
                "arguments of a graphed step must be tensors or hashable, since a graph is "
                f"captured for their values, got {type(leaf).__name__}"
            )
        return leaf

    return repr(map_structure(lambda leaf: None, given)), tuple(map(kind, leaves(given)))


def _tensors_of(given: Any) -> list[torch.Tensor]:
    return [leaf for leaf in leaves(given) if isinstance(leaf, torch.Tensor)]


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
