"""Which strategy and which replica the running thread belongs to (tf.distribute's contexts).

Cross-replica context: inside a strategy's scope, outside `run`; values of all replicas are at hand.
Replica context: inside `run`, or outside any scope, where the default strategy has one replica.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch._compile import _disable_dynamo

from fastdist.collectives.autograd import all_gather, all_reduce
from fastdist.collectives.communicator import Communicator, ReduceOp
from fastdist.replicas.per_replica import map_structure

MergeCall = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class Replicas(Protocol):
    """What a context needs to know of its strategy."""

    num_replicas_in_sync: int
    local_replica_ids: tuple[int, ...]
    devices: tuple[torch.device, ...]
    has_servers: bool


class ReplicaContext:
    """What one replica of a running `strategy.run` knows and can do (tf.distribute.ReplicaContext).

    Attributes:
        strategy: the strategy that runs.
        replica_id_in_sync_group: from 0 to num_replicas_in_sync - 1, over all processes.
        local_replica: from 0 on, among the replicas of this process.
        device: where this replica computes.
        examples: of the batch that `run` was given, for each replica of the job; None where it
            was given no batch from `distribute_dataset`.
        communicator: of all replicas; None where there is one.
        weight: what this replica's gradients count for in their mean, 1 being the average.
    """

    def __init__(
        self,
        strategy: Replicas,
        communicator: Communicator | None,
        merge: MergeCall,
        local_replica: int = 0,
        examples: tuple[int, ...] | None = None,
        weight: float = 1.0,
    ) -> None:
        self.strategy = strategy
        self.local_replica = local_replica
        self.replica_id_in_sync_group: int = strategy.local_replica_ids[local_replica]
        self.device: torch.device = strategy.devices[local_replica]
        self.examples = examples
        self.weight = weight
        self.communicator = communicator
        self._merge = merge

    def __repr__(self) -> str:
        return (
            f"<fastdist.ReplicaContext {self.replica_id_in_sync_group} "
            f"of {self.num_replicas_in_sync} on {self.device}>"
        )

    @property
    def num_replicas_in_sync(self) -> int:
        """Replicas of the whole job."""
        return self.strategy.num_replicas_in_sync

    @_disable_dynamo
    def all_reduce(self, op: ReduceOp, value: Any) -> Any:
        """Reduce over all replicas; every replica gets the result, in new tensors.

        Every replica must call. Differentiable for sum and mean: the gradient is the all_reduce
        of the gradients.

        Args:
            op: as for `Communicator.all_reduce`.
            value: a tensor or number, or a structure of them, alike on all replicas.
        """
        return map_structure(lambda leaf: all_reduce(self.communicator, op, leaf), value)

    @_disable_dynamo
    def all_gather(self, value: Any, axis: int = 0) -> Any:
        """Join the replicas' tensors along an axis, in replica order.

        Every replica must call. Differentiable: the gradient is the all_reduce of the gradients,
        cut to the own part.

        Args:
            value: a tensor of at least one dimension, or a structure of them; sizes may differ
                between replicas in `axis` only.
            axis: along which to join.

        Raises:
            ValueError: a scalar, or shapes that differ elsewhere.
        """
        return map_structure(lambda leaf: all_gather(self.communicator, leaf, axis), value)

    @_disable_dynamo
    def merge_call(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `fn(strategy, *args, **kwargs)` once, in cross-replica context.

        Every replica of this process must call. What differs between their arguments reaches `fn`
        as per-replica values; each replica gets its own part of what `fn` returns.

        Raises:
            FastdistError: a replica ended without calling; the message names it.
        """
        return self._merge(fn, args, kwargs or {})


class _ThreadState(threading.local):
    """What a thread is in the middle of."""

    def __init__(self) -> None:
        self.scopes: list[Replicas] = []
        self.replica: ReplicaContext | None = None


state = _ThreadState()


def in_cross_replica_context() -> bool:
    """True inside a scope and outside `run`."""
    return state.replica is None and bool(state.scopes)
