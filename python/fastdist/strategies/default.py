"""The strategy outside all scopes, and which strategy a thread is in."""

from __future__ import annotations

import functools
from typing import cast

import torch

from fastdist.replicas.context import ReplicaContext, state
from fastdist.strategies.base import Strategy
from fastdist.strategies.replicated import ReplicatedStrategy


class DefaultStrategy(ReplicatedStrategy):
    """Passes everything through; what `get_strategy` gives outside a scope.

    It lets code that is written for strategies run without one.
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))


@functools.cache
def _default() -> DefaultStrategy:
    return DefaultStrategy()


def get_strategy() -> Strategy:
    """The strategy of the innermost scope or run; the default strategy outside. Never None."""
    if state.replica is not None:
        return cast(Strategy, state.replica.strategy)
    if state.scopes:
        return cast(Strategy, state.scopes[-1])
    return _default()


def has_strategy() -> bool:
    """True inside the scope or run of a strategy other than the default one."""
    return get_strategy() is not _default()


def get_replica_context() -> ReplicaContext | None:
    """This replica's context; None in cross-replica context."""
    if state.replica is not None:
        return state.replica
    return None if state.scopes else _default().default_replica_context()
