"""The contexts of tf.distribute: the strategy and the replica of the running thread.

Cross-replica context: inside a strategy's scope and outside `run`; code can use the values of all
replicas. Replica context: inside `run`, or outside any scope, in the default strategy's replica.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch._compile import _disable_dynamo

from fastdist.collectives.autograd import all_gather, all_reduce, as_tensor, with_gradient
from fastdist.collectives.communicator import Communicator
from fastdist.collectives.types import ReduceOp
from fastdist.errors import FastdistError
from fastdist.replicas.per_replica import map_structure


class Replicas(Protocol):
    """The interface of a strategy that contexts use."""

    num_replicas_in_sync: int
    local_replica_ids: tuple[int, ...]
    devices: tuple[torch.device, ...]
    has_servers: bool

    def _merge(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any: ...

    def _weigh(self, context: ReplicaContext, weight: Any) -> None: ...


class ReplicaContext:
    """The context of one replica while `strategy.run` runs (tf.distribute.ReplicaContext).

    Attributes:
        strategy: the strategy that runs.
        replica_id_in_sync_group: number in the whole job, from 0 to num_replicas_in_sync - 1.
        local_replica: number among the replicas of this process, from 0.
        device: the device of this replica.
        examples: number of examples of each replica of the job in the batch passed to `run`; None
            if `run` got no batch from `distribute_dataset`.
        weights: what each replica's gradients count in their mean: its examples, unless `run` or
            `weight` was given another weight; None if all count the same.
        communicator: the communicator of all replicas; None if there is one replica.
        relative_weight: the weight of this replica's gradients in their mean; the average is 1.

    Examples:
        >>> import fastdist as fd, torch
        >>> def total():
        ...     replica = fd.get_replica_context()
        ...     own = torch.tensor(replica.replica_id_in_sync_group + 1.0)
        ...     return replica.all_reduce("sum", own)
        >>> fd.OneDeviceStrategy("cpu").run(total)
        tensor(1.)
    """

    def __init__(
        self,
        strategy: Replicas,
        communicator: Communicator | None,
        local_replica: int = 0,
        examples: tuple[int, ...] | None = None,
        weights: tuple[float, ...] | None = None,
    ) -> None:
        self.strategy = strategy
        self.local_replica = local_replica
        self.replica_id_in_sync_group: int = strategy.local_replica_ids[local_replica]
        self.device: torch.device = strategy.devices[local_replica]
        self.examples = examples
        self.weights: tuple[float, ...] | None = weights
        self.relative_weight = 1.0
        self.communicator = communicator

    def __repr__(self) -> str:
        return (
            f"<fastdist.ReplicaContext {self.replica_id_in_sync_group} "
            f"of {self.num_replicas_in_sync} on {self.device}>"
        )

    @property
    def is_weighed(self) -> bool:
        """True if `run` or `weight` was given a weight."""
        return self.weights is not self.examples

    @property
    def num_replicas_in_sync(self) -> int:
        """The number of replicas of the whole job."""
        return self.strategy.num_replicas_in_sync

    @_disable_dynamo
    def weight(self, weight: float | torch.Tensor) -> None:
        """Let this replica's part count `weight` in means from here to the end of the run.

        For a weight that is known only in the run, such as the number of tokens that a mask leaves.
        Every replica must call, before the backward that it is for. Gradients of the backwards
        that follow are weighted by it, and what `run` returns by the last one, as by the `weight`
        of `run`.

        Args:
            weight: a number, or a tensor of one element.

        Raises:
            TypeError: `weight` is not a number.
            ValueError: a replica's weight is negative or not finite.
            UnsupportedError: called on TPUs.
        """
        self.strategy._weigh(self, weight)

    @_disable_dynamo
    def all_reduce(self, op: ReduceOp, value: Any) -> Any:
        """Reduce over all replicas; every replica gets the result, in new tensors.

        Every replica must call. Differentiable for sum and mean, also if replicas have different
        numbers of examples.

        Args:
            op: the `op` of `Communicator.all_reduce`. A "mean" is over replicas: for that over
                examples, multiply by `relative_weight` first.
            value: a tensor, a number, or a structure of tensors and numbers, which all replicas
                pass with equal shapes and dtypes.
        """
        reduced = partial(all_reduce, self.communicator, op)
        return map_structure(lambda leaf: self._weighted(reduced, leaf), value)

    @_disable_dynamo
    def all_gather(self, value: Any, axis: int = 0) -> Any:
        """Join the replicas' tensors along an axis, in replica order.

        Every replica must call. Differentiable, also if replicas have different numbers of
        examples.

        Args:
            value: a tensor of at least one dimension, or a structure of tensors; sizes may differ
                between replicas in `axis` only.
            axis: the axis along which to join.

        Raises:
            ValueError: the value is a scalar, or shapes differ in another dimension than `axis`.
        """
        gathered = partial(all_gather, self.communicator, axis=axis)
        return map_structure(lambda leaf: self._weighted(gathered, leaf), value)

    def _weighted(self, collective: Callable[[torch.Tensor], torch.Tensor], leaf: Any) -> Any:
        """Call a collective whose gradients are those of the weighted mean of all losses.

        Other replicas' losses count with the weights of those replicas, but at the end of backward
        all gradients of this replica are multiplied by its own weight, as it is then.
        """
        tensor = as_tensor(leaf)
        is_traced = isinstance(self.relative_weight, torch.Tensor)
        if not tensor.requires_grad or (self.communicator is None and not is_traced):
            return collective(tensor)
        return with_gradient(collective(with_gradient(tensor, self._unweighted)), self._counted)

    def _counted(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient of this replica's loss as it counts."""
        weight: Any = self.relative_weight
        if isinstance(weight, float) and weight in (0.0, 1.0):
            return gradient if weight else torch.zeros_like(gradient)  # in place of NaN
        counted: torch.Tensor = gradient * weight
        return counted

    def _unweighted(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient of all losses such that this replica's weight makes it right."""
        weight: Any = self.relative_weight
        if isinstance(weight, torch.Tensor):  # traced
            return gradient * torch.where(weight > 0, 1.0 / weight, 0.0)
        if weight:
            return gradient if weight == 1.0 else gradient / weight
        has_examples = self.examples is None or self.examples[self.replica_id_in_sync_group] > 0
        if has_examples and gradient.any():
            raise FastdistError(
                f"replica {self.replica_id_in_sync_group} counts nothing in the mean, but losses "
                "of other replicas depend on what it computes, by all_gather, all_reduce or "
                "SyncBatchNorm: a gradient with the weight 0 would be lost. Give each replica's "
                "part a weight above 0, or leave out examples that count nothing"
            )
        return torch.zeros_like(gradient)

    @_disable_dynamo
    def merge_call(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run `fn(strategy, *args, **kwargs)` in cross-replica context.

        Every replica must call. If each replica is a process, each process calls `fn` with its
        own arguments. Under TPUStrategy `fn` is called once per process: arguments that differ
        between replicas reach it as per-replica values, and each replica gets its own part of the
        result.

        Raises:
            FastdistError: a replica ended without calling; the message names the replica.
        """
        return self.strategy._merge(fn, args, kwargs or {})


class _ThreadState(threading.local):
    """The open scopes and the running replica of a thread."""

    def __init__(self) -> None:
        self.scopes: list[Replicas] = []
        self.replica: ReplicaContext | None = None


state = _ThreadState()


def in_cross_replica_context() -> bool:
    """Return True inside a scope and outside `run`.

    Examples:
        >>> import fastdist as fd
        >>> strategy = fd.OneDeviceStrategy("cpu")
        >>> with strategy.scope():
        ...     fd.in_cross_replica_context(), strategy.run(fd.in_cross_replica_context)
        (True, False)
    """
    return state.replica is None and bool(state.scopes)
