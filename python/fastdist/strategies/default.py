"""Strategies of one device, and functions that return a thread's strategy and replica context."""

from __future__ import annotations

import functools
from typing import cast

import torch

from fastdist.replicas.context import ReplicaContext, state
from fastdist.replicas.devices import usable_device
from fastdist.strategies.base import Strategy
from fastdist.strategies.replicated import ReplicatedStrategy


class OneDeviceStrategy(ReplicatedStrategy):
    """Puts modules and data on one device (tf.distribute.OneDeviceStrategy).

    Args:
        device: a device, as for `torch.device`.

    Raises:
        ValueError: torch cannot use the device.

    Examples:
        >>> import fastdist as fd, torch
        >>> strategy = fd.OneDeviceStrategy("cpu")
        >>> strategy.run(lambda: torch.ones(2).sum())
        tensor(2.)
    """

    def __init__(self, device: str | torch.device) -> None:
        super().__init__(usable_device(device))


class DefaultStrategy(ReplicatedStrategy):
    """The strategy outside all scopes: one replica on the CPU, without communication.

    Code that is written for strategies also runs under it.

    Examples:
        >>> import fastdist as fd
        >>> fd.DefaultStrategy().num_replicas_in_sync
        1
    """

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))


@functools.cache
def _default() -> DefaultStrategy:
    return DefaultStrategy()


def get_strategy() -> Strategy:
    """Return the strategy of the innermost scope or run; outside, the default strategy.

    Examples:
        >>> import fastdist as fd
        >>> strategy = fd.OneDeviceStrategy("cpu")
        >>> with strategy.scope():
        ...     fd.get_strategy() is strategy
        True
    """
    if state.replica is not None:
        return cast(Strategy, state.replica.strategy)
    if state.scopes:
        return cast(Strategy, state.scopes[-1])
    return _default()


def has_strategy() -> bool:
    """Return True inside the scope or run of a strategy other than the default strategy.

    Examples:
        >>> import fastdist as fd
        >>> fd.has_strategy()
        False
        >>> with fd.OneDeviceStrategy("cpu").scope():
        ...     fd.has_strategy()
        True
    """
    return get_strategy() is not _default()


def get_replica_context() -> ReplicaContext | None:
    """Return this replica's context; None in cross-replica context.

    Examples:
        >>> import fastdist as fd
        >>> strategy = fd.OneDeviceStrategy("cpu")
        >>> strategy.run(lambda: fd.get_replica_context().replica_id_in_sync_group)
        0
    """
    if state.replica is not None:
        return state.replica
    return None if state.scopes else ReplicaContext(_default(), None)
