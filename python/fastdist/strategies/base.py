"""What every strategy offers, whatever its replicas are: scope, run, reduce, gather, datasets."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, final

import torch
from torch import nn

from fastdist.data import (
    AutoShardPolicy,
    DistributedDataset,
    InputContext,
    InputLayout,
    distribute_dataset,
    distribute_datasets_from_function,
)
from fastdist.errors import UnsupportedError
from fastdist.replicas.context import ReplicaContext, state
from fastdist.replicas.cross_replica import CrossReplicaOp
from fastdist.replicas.per_replica import PerReplica, leaves, map_structure
from fastdist.replicas.variables import Variable
from fastdist.strategies.scope import Scope
from fastdist.training.graphed import GraphedStep, capture_graph

M = TypeVar("M", bound=nn.Module)
_PLAIN = (torch.Tensor, int, float, bool, str, type(None))  # that no batch is inside of


class Strategy(ABC):
    """Replicas that train one model together (tf.distribute.Strategy).

    Args:
        devices: of this process's replicas.
        worker: this process's number, and `workers` how many there are.

    Attributes:
        has_servers: whether variables are on parameter servers.
    """

    has_servers = False

    def __init__(
        self, devices: Sequence[torch.device], *, worker: int = 0, workers: int = 1
    ) -> None:
        self.devices = tuple(devices)
        self.num_replicas_in_sync: int = workers * len(self.devices)
        first = worker * len(self.devices)
        self.local_replica_ids = tuple(range(first, first + len(self.devices)))
        self._worker = worker
        self._num_workers = workers

    def __repr__(self) -> str:
        places = ", ".join(map(str, self.devices))
        return (
            f"<fastdist.{type(self).__name__} {self.num_replicas_in_sync} replicas, here {places}>"
        )

    # --- making things --------------------------------------------------------------------------

    @final
    def scope(self) -> Scope:
        """A `with` statement: modules and optimizers made inside belong to this strategy.

        When it ends their initial values are those of the chief on all replicas. Every worker
        must make the same. Schedulers and GradScalers that are used in `run` must be made inside
        too.

        Raises:
            RuntimeError: ("Mixing") another strategy's scope is open.
            FastdistError: the modules differ between workers.
        """
        return Scope(self, self._adopt)

    @final
    def mirror(self, module: M) -> M:
        """Adopt a module that was made outside the scope; returns it. Every worker must call."""
        self._adopt([module], [])
        return module

    @abstractmethod
    def _adopt(self, roots: Sequence[nn.Module], made: Sequence[Any]) -> None:
        """Take modules, and optimizers, schedulers and scalers."""

    @final
    def distribute_dataset(
        self,
        source: Any,
        *,
        global_batch_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_remainder: bool = False,
        auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        prefetch: int = 2,
    ) -> DistributedDataset:
        """Cut a source into global batches and each of them among the replicas.

        Every worker must call. See `fastdist.data.distribute_dataset` for the arguments.
        """
        return distribute_dataset(
            source,
            self._input_layout(),
            global_batch_size=global_batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_remainder=drop_remainder,
            auto_shard_policy=auto_shard_policy,
            collate_fn=collate_fn,
            num_workers=num_workers,
            prefetch=prefetch,
        )

    @final
    def distribute_datasets_from_function(
        self, fn: Callable[[InputContext], Iterable[Any]], *, prefetch: int = 2
    ) -> DistributedDataset:
        """A dataset of per-replica batches that `fn` makes, once for each worker.

        Every worker must call. See `fastdist.data.distribute_datasets_from_function`.
        """
        return distribute_datasets_from_function(fn, self._input_layout(), prefetch=prefetch)

    @abstractmethod
    def _input_layout(self) -> InputLayout:
        """Where the replicas are, for datasets."""

    # --- running --------------------------------------------------------------------------------

    @final
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `fn` once for each replica of this process, in replica context.

        Gradients are weighted by the examples that each replica has of the first batch among the
        arguments.

        Args:
            fn: what each replica does.
            args: its arguments, a tuple or list; per-replica values inside become each
                replica's own.
            kwargs: as args.

        Returns:
            What fn returns. Where the job has several replicas, its tensors and numbers are
            `PerReplica` values, which carry how many examples each replica had.

        Raises:
            ValueError: args is not a tuple or list.
            RuntimeError: called inside another run, or in another strategy's scope.
            FastdistError: replicas have called different collectives.
            PeerFailureError: `fn` has failed on another replica, which the error names.
            BaseException: what fn raised on this replica.
        """
        if not isinstance(args, (tuple, list)):
            raise ValueError(f"run: args must be a tuple or list, got {type(args).__name__}")
        if state.replica is not None:
            raise RuntimeError("run was called inside run; replicas cannot have replicas")
        if state.scopes and state.scopes[-1] is not self:
            raise RuntimeError(
                f"Mixing strategies: the scope of {state.scopes[-1]!r} is open, got run of {self!r}"
            )
        given = (tuple(args), kwargs or {})
        return self._run(fn, given, examples_of(given))

    @final
    def make_graphed(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """A function for `run` that on GPUs replays `step` as a CUDA graph.

        The first calls with arguments of a kind (shapes, dtypes, values that are no tensors) run as
        they are. Then the step is captured with the collectives in it, and every later call is one
        launch. Only what it does on the GPU is done again: what it prints or counts happens once,
        and learning rates stay those of the capture unless they are tensors. Optimizers must be
        made with `capturable=True` where they have it. Uneven batches run as they are, and so does
        everything on other devices.

        Args:
            step: what `run` would be called with; takes and returns structures of tensors.

        Raises:
            UnsupportedError: variables are on parameter servers.
        """
        if all(device.type != "cuda" for device in self.devices):
            return step
        if self.has_servers:
            raise UnsupportedError(
                "make_graphed: a CUDA graph cannot send gradients to parameter servers"
            )
        return GraphedStep(step, capture_graph)

    @abstractmethod
    def _run(self, fn: Callable[..., Any], given: Any, examples: tuple[int, ...] | None) -> Any:
        """What `run` does once it is allowed; `given` is the pair of args and kwargs."""

    @contextlib.contextmanager
    def _cross_replica(self) -> Iterator[None]:
        """While it is open, the running thread is in cross-replica context."""
        replica, state.replica = state.replica, None
        state.scopes.append(self)
        try:
            yield
        finally:
            state.scopes.pop()
            state.replica = replica

    @final
    def _require_cross_replica(self, call: str) -> None:
        if state.replica is not None:
            instead = {"reduce": "all_reduce", "gather": "all_gather"}.get(call)
            hint = f"; use fastdist.get_replica_context().{instead}" if instead else ""
            raise RuntimeError(
                f"strategy.{call} was called inside run, and is for code outside of it{hint}, "
                "or call it in merge_call"
            )

    @abstractmethod
    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """A `with` statement: gradients of backward inside stay with their replica.

        They are added to `.grad`, and reduced with those of the next backward outside.
        """

    # --- values of all replicas -----------------------------------------------------------------

    @final
    def reduce(self, op: CrossReplicaOp, value: Any, axis: int | None = None) -> Any:
        """Reduce per-replica values over all replicas. Every worker must call.

        Args:
            op: "sum", "mean", "min" or "max". A mean of what `run` returned for a batch of
                `distribute_dataset`, or of what `fastdist.map` made of it, weighs each replica by
                its examples.
            value: what `run` returned; a structure of it works too.
            axis: reduce along this axis of each value too; lengths there may differ.

        Raises:
            RuntimeError: called inside `run`, where `get_replica_context().all_reduce` is meant.
        """
        self._require_cross_replica("reduce")
        if op not in ("sum", "mean", "min", "max"):
            raise ValueError(f'reduce: op must be "sum", "mean", "min" or "max", got {op!r}')
        return map_structure(lambda leaf: self._reduce_leaf(op, leaf, axis), value)

    @abstractmethod
    def _reduce_leaf(self, op: CrossReplicaOp, value: Any, axis: int | None) -> Any:
        """`reduce` of what is no structure."""

    @final
    def reduce_to(self, op: CrossReplicaOp, value: Any, destination: Any) -> Any:
        """Reduce as `reduce` does, and put the result on a device. Every worker must call.

        Args:
            op: the reduction.
            value: per-replica values.
            destination: a device, or a tensor whose device is meant.
        """
        return self.reduce(op, value).to(_device_of(destination))

    @final
    def batch_reduce_to(self, op: CrossReplicaOp, pairs: Sequence[tuple[Any, Any]]) -> list[Any]:
        """`reduce_to` of several (value, destination) pairs. Every worker must call."""
        reduced = self.reduce(op, [value for value, _ in pairs])
        return [
            value.to(_device_of(destination))
            for value, (_, destination) in zip(reduced, pairs, strict=True)
        ]

    @abstractmethod
    def update(
        self,
        variable: nn.Parameter | Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `fn(component, *args, **kwargs)` for a variable on each local replica.

        Args:
            variable: a parameter of a module made in the scope, or a `fastdist.Variable`.
            fn: changes its component, a tensor; gradients are off.
            args: per-replica values inside become the component's own.
            kwargs: as args.

        Returns:
            What fn returns; with several local replicas, per-replica values.
        """

    @final
    def gather(self, value: Any, axis: int = 0) -> Any:
        """Join the replicas' tensors along an axis, in replica order. Every worker must call.

        Raises:
            ValueError: a scalar, or shapes that differ elsewhere.
            RuntimeError: called inside `run`, where `get_replica_context().all_gather` is meant.
        """
        self._require_cross_replica("gather")
        return map_structure(lambda leaf: self._gather_leaf(leaf, axis), value)

    @abstractmethod
    def _gather_leaf(self, value: Any, axis: int) -> torch.Tensor:
        """`gather` of what is no structure."""

    @abstractmethod
    def local_results(self, value: Any) -> tuple[Any, ...]:
        """The values of this process's replicas, in order (experimental_local_results).

        Args:
            value: what `run` returned, or a `fastdist.Variable` of this strategy.
        """

    @abstractmethod
    def distribute_values_from_function(self, fn: Callable[[ReplicaContext], Any]) -> Any:
        """Per-replica values made by `fn(context)`, called once for each local replica in turn."""

    @abstractmethod
    def check_in_sync(self) -> None:
        """Check that parameters and buffers are the same bits on every replica.

        Every worker must call, in cross-replica context.

        Raises:
            FastdistError: they differ; the message names the first tensor and the replicas.
        """


def examples_of(given: Any) -> tuple[int, ...] | None:
    """How many examples each replica has of the first batch among the arguments of `run`."""
    kind = type(given)
    if kind is PerReplica:
        examples: tuple[int, ...] | None = given.examples
        return examples
    if kind is dict:
        given = given.values()
    elif not isinstance(given, (tuple, list)):
        if kind in _PLAIN:
            return None
        inner = leaves(given)
        given = () if len(inner) == 1 and inner[0] is given else inner
    for part in given:
        if (found := examples_of(part)) is not None:
            return found
    return None


def _device_of(destination: Any) -> torch.device:
    if isinstance(destination, torch.Tensor):
        return destination.device
    return torch.device(destination)
