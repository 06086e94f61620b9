"""What all strategies share: replicas, scope, run, reduce, gather."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from fastdist.context import ReplicaContext, state
from fastdist.data import (
    AutoShardPolicy,
    DistributedDataset,
    InputContext,
    InputLayout,
    distribute_dataset,
    distribute_datasets_from_function,
)
from fastdist.errors import FastdistError
from fastdist.metrics import adopt_metrics
from fastdist.random_streams import SharedStream, detours, draw_seed, replica_stream
from fastdist.reductions import CrossReplicaOp, gather_values, reduce_values
from fastdist.strategies.links import Ends, Links
from fastdist.strategies.members import Members
from fastdist.strategies.options import CommunicationOptions
from fastdist.strategies.replica_threads import Meeting, ReplicaThreads
from fastdist.strategies.scope import Scope
from fastdist.strategies.uneven import UnevenResults
from fastdist.values import PerReplica, leaves, local_results, map_structure, regroup, select
from fastdist.variables import Variable

M = TypeVar("M", bound=nn.Module)
_GRACE_S = 1.0


class Strategy:
    """Replicas that train one model together (tf.distribute.Strategy).

    Made by its subclasses, which say where the replicas are.

    Args:
        devices: of this process's replicas.
        make_links: makes their communicators; called again after a replica has failed.
        worker: this process's number, and `workers` how many there are.
        parameter_device: of the only copy of all parameters; None: every replica has one.
        options: how to communicate.

    Attributes:
        has_servers: whether variables are on parameter servers.
    """

    has_servers = False

    def __init__(
        self,
        devices: Sequence[torch.device],
        make_links: Callable[[], Links],
        *,
        worker: int = 0,
        workers: int = 1,
        parameter_device: torch.device | None = None,
        options: CommunicationOptions | None = None,
    ) -> None:
        self.devices = tuple(devices)
        self.options = options or CommunicationOptions()
        self.num_replicas_in_sync: int = workers * len(self.devices)
        first = worker * len(self.devices)
        self.local_replica_ids = tuple(range(first, first + len(self.devices)))
        self._worker = worker
        self._workers = workers
        self._make_links = make_links
        self._links = make_links()
        self._members = Members(
            self.devices,
            self.local_replica_ids,
            self.num_replicas_in_sync,
            self.options,
            parameter_device,
        )
        self._uneven = UnevenResults()
        self._threads: ReplicaThreads | None = None
        self._is_running = False
        self._lost = ""  # why no run is possible any more
        self._runs = 0
        if len(self.devices) > 1:
            self._threads = ReplicaThreads(self.devices)
            weakref.finalize(self, self._threads.close)

    def __repr__(self) -> str:
        places = ", ".join(map(str, self.devices))
        return (
            f"<fastdist.{type(self).__name__} {self.num_replicas_in_sync} replicas, here {places}>"
        )

    # --- making things --------------------------------------------------------------------------

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

    def mirror(self, module: M) -> M:
        """Adopt a module that was made outside the scope; returns it. Every worker must call."""
        self._adopt([module], [])
        return module

    def _adopt(self, roots: Sequence[nn.Module], made: Sequence[Any]) -> None:
        if self.num_replicas_in_sync > 1:
            adopt_metrics(roots, self)
        self._members.adopt(self._links, roots, made)

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

    def distribute_datasets_from_function(
        self, fn: Callable[[InputContext], Iterable[Any]], *, prefetch: int = 2
    ) -> DistributedDataset:
        """A dataset of per-replica batches that `fn` makes, once for each worker.

        Every worker must call. See `fastdist.data.distribute_datasets_from_function`.
        """
        return distribute_datasets_from_function(fn, self._input_layout(), prefetch=prefetch)

    def _input_layout(self) -> InputLayout:
        return InputLayout(
            num_replicas=self.num_replicas_in_sync,
            local_replicas=self.local_replica_ids,
            num_workers=self._workers,
            worker=self._worker,
            devices=self.devices,
            all_gather_ints=self._all_gather_ints,
        )

    def _all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        workers = self._links.workers
        if workers is None:
            return [list(values)]
        table: list[list[int]] = workers.all_gather(np.array([values], np.int64)).tolist()
        return table

    # --- running --------------------------------------------------------------------------------

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
            What fn returns; with several local replicas, a structure of per-replica values.

        Raises:
            ValueError: args is no tuple or list.
            RuntimeError: called inside another run, or in another strategy's scope.
            FastdistError: replicas have called different collectives, or go on with different
                hyperparameters.
            BaseException: what fn raised, in the first replica that failed.
        """
        self._before_run()
        if not isinstance(args, (tuple, list)):
            raise ValueError(f"run: args must be a tuple or list, got {type(args).__name__}")
        if state.replica is not None:
            raise RuntimeError("run was called inside run; replicas cannot have replicas")
        if state.scopes and state.scopes[-1] is not self:
            raise RuntimeError(
                f"Mixing strategies: the scope of {state.scopes[-1]!r} is open, got run of {self!r}"
            )
        if self._lost:
            raise FastdistError(self._lost)
        if self._is_running:
            raise RuntimeError("run was called while the strategy runs, in merge_call or a thread")
        given = (tuple(args), kwargs or {})
        examples = _examples_of(given)
        if self.num_replicas_in_sync == 1 and not self._members.is_routed:
            results = [self._run_replica(0, fn, given, examples, 0, self._call_merge)]
        else:
            seed = draw_seed() if self.num_replicas_in_sync > 1 else 0
            self._members.refresh()
            if self._workers > 1:
                self._runs += 1
                self._links.set_phase(self._runs)
            try:
                if self._threads is None:
                    results = [self._run_replica(0, fn, given, examples, seed, self._call_merge)]
                else:
                    results = self._run_threads(fn, given, examples, seed)
            except BaseException:
                self._recover()
                raise
            self._members.require_same_rates()
            self._members.note_values()
        if examples is not None:
            self._uneven.note(results, examples)
        return results[0] if len(results) == 1 else regroup(results, examples)

    def _before_run(self) -> None:
        """For strategies that can run at times only: raises where this is none."""

    def _run_threads(
        self, fn: Callable[..., Any], given: Any, examples: tuple[int, ...] | None, seed: int
    ) -> list[Any]:
        assert self._threads is not None
        links = self._links

        def body(replica: int, meeting: Meeting) -> Any:
            def merge(inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
                return meeting.merge(replica, (args, kwargs), lambda all_: self._merge(inner, all_))

            return self._run_replica(replica, fn, given, examples, seed, merge)

        def on_failure(replica: int, meeting: Meeting) -> None:
            # Leaving is for good where other processes take part. Those who wait for this replica
            # need it, those who end by themselves don't.
            if self._workers > 1 and meeting.others_end(_GRACE_S):
                return
            links.context[replica].close()
            links.gradients[replica].close()
            if self._workers > 1:
                self._lost = (
                    f"run failed in replica {replica} of this worker while others waited for it, "
                    "of other workers too; start the job again"
                )

        ends = Ends(links)

        def on_late(replica: int) -> None:
            if self._workers == 1:  # others' runs end when they like
                ends.note(replica)

        self._is_running = True
        try:
            with detours:
                results = self._threads.run(body, on_failure, on_late)
            ends.finish()
            return results
        finally:
            self._is_running = False

    def _recover(self) -> None:
        """A run has failed in its middle."""
        if self._workers == 1:
            self._links.close()
            self._links = self._make_links()
        self._members.recover(self._links)

    def _run_replica(
        self,
        replica: int,
        fn: Callable[..., Any],
        given: Any,
        examples: tuple[int, ...] | None,
        seed: int,
        merge: Callable[[Callable[..., Any], Any, Any], Any],
    ) -> Any:
        communicator = self._links.context[replica] if self._links.context else None
        weight = 1.0
        if examples is not None and self.options.gradient_reduction == "mean":
            share = examples[self.local_replica_ids[replica]] / max(1, sum(examples))
            weight = share * len(examples)
        twin = self._members.twin_index(replica)
        context = ReplicaContext(self, communicator, merge, replica, examples, weight, twin)
        syncs = self._members.syncs
        args, kwargs = select(given, replica)
        state.replica = context
        try:
            if communicator is None:
                return fn(*args, **kwargs)
            shared = self._threads is not None and context.device.type == "cpu"
            stream = SharedStream if shared else replica_stream
            with stream(context, seed), syncs[replica].step(examples) if syncs else nullcontext():
                return fn(*args, **kwargs)
        finally:
            state.replica = None

    def _merge(self, fn: Callable[..., Any], calls: Sequence[Any]) -> list[Any]:
        """What `merge_call` does once all replicas are there; in the caller's thread."""
        args, kwargs = _joined(list(calls))
        brings = self._threads is not None and not self._members.steps_by(fn)
        if brings:  # what fn changes of the users' own objects, and nothing else, holds for all
            self._members.note_values()
        with self._cross_replica():
            result = fn(self, *args, **kwargs)
        if brings:
            self._members.refresh()
        return [select(result, replica) for replica in range(len(calls))]

    def _call_merge(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return self._merge(fn, [(args, kwargs)])[0]

    @contextlib.contextmanager
    def _cross_replica(self) -> Iterator[None]:
        replica, state.replica = state.replica, None
        state.scopes.append(self)
        try:
            yield
        finally:
            state.scopes.pop()
            state.replica = replica

    def default_replica_context(self) -> ReplicaContext:
        """The context outside all scopes and runs, where the default strategy has one replica."""
        return ReplicaContext(self, None, self._call_merge)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A `with` statement: gradients of backward inside stay with their replica.

        They are added to `.grad`, and reduced with those of the next backward outside.
        """
        replica = state.replica
        syncs = self._members.syncs
        if replica is not None:
            syncs = syncs[replica.local_replica :][:1]
        with contextlib.ExitStack() as stack:
            for sync in syncs:
                stack.enter_context(sync.held())
            yield

    # --- values of all replicas -----------------------------------------------------------------

    def reduce(self, op: CrossReplicaOp, value: Any, axis: int | None = None) -> Any:
        """Reduce per-replica values over all replicas. Every worker must call.

        Args:
            op: "sum", "mean", "min" or "max". A mean of what `run` returned for a batch of
                `distribute_dataset` weighs each replica by its examples.
            value: what `run` returned; a structure of it works too.
            axis: reduce along this axis of each value too; lengths there may differ.
        """
        if op not in ("sum", "mean", "min", "max"):
            raise ValueError(f'reduce: op must be "sum", "mean", "min" or "max", got {op!r}')
        return map_structure(lambda leaf: self._reduce_leaf(op, leaf, axis), value)

    def _reduce_leaf(self, op: CrossReplicaOp, value: Any, axis: int | None) -> Any:
        values = self.local_results(value)
        if len(values) != len(self.devices):
            values = values * len(self.devices)  # the same on every replica
        weights = None
        examples = self._uneven.examples_of(values[0])
        if op == "mean" and axis is None and examples is not None:
            total = sum(examples)
            weights = [examples[i] / total for i in self.local_replica_ids]
        return reduce_values(self._links.workers, op, values, axis, weights)

    def reduce_to(self, op: CrossReplicaOp, value: Any, destination: Any) -> Any:
        """Reduce as `reduce` does, and put the result on a device. Every worker must call.

        Args:
            op: the reduction.
            value: per-replica values.
            destination: a device, or a tensor whose device is meant.
        """
        return self.reduce(op, value).to(_device_of(destination))

    def batch_reduce_to(self, op: CrossReplicaOp, pairs: Sequence[tuple[Any, Any]]) -> list[Any]:
        """`reduce_to` of several (value, destination) pairs. Every worker must call."""
        reduced = self.reduce(op, [value for value, _ in pairs])
        return [
            value.to(_device_of(destination))
            for value, (_, destination) in zip(reduced, pairs, strict=True)
        ]

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
        self._members.refresh()
        given = (tuple(args), kwargs or {})
        results = []
        with torch.no_grad():
            components = self._members.components(variable)
            for replica, component in enumerate(components):
                own_args, own_kwargs = select(given, replica)
                results.append(fn(component, *own_args, **own_kwargs))
        if isinstance(variable, Variable) or not self._members.is_central:
            self._members.note_values()  # else the only copy has changed; `run` brings it to all
        return results[0] if len(results) == 1 else regroup(results)

    def gather(self, value: Any, axis: int = 0) -> Any:
        """Join the replicas' tensors along an axis, in replica order. Every worker must call.

        Raises:
            ValueError: a scalar, or shapes that differ elsewhere.
        """

        def gather_leaf(leaf: Any) -> torch.Tensor:
            return gather_values(self._links.workers, self.local_results(leaf), axis)

        return map_structure(gather_leaf, value)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """The values of this process's replicas, in order (experimental_local_results).

        Args:
            value: what `run` returned, or a `fastdist.Variable` of this strategy.
        """
        if isinstance(value, Variable):
            return tuple(self._members.components(value))
        return local_results(value)

    def distribute_values_from_function(self, fn: Callable[[ReplicaContext], Any]) -> Any:
        """Per-replica values made by `fn(context)`, called once for each local replica in turn."""
        made = []
        for replica in range(len(self.devices)):
            made.append(fn(ReplicaContext(self, None, self._call_merge, replica)))
        return regroup(made)

    def check_in_sync(self) -> None:
        """Check that parameters and buffers are the same bits on every replica.

        Every worker must call, in cross-replica context.

        Raises:
            FastdistError: they differ; the message names the first tensor and the replicas.
        """
        self._members.refresh()
        self._members.require_in_sync(self._links.workers)


def _device_of(destination: Any) -> torch.device:
    if isinstance(destination, torch.Tensor):
        return destination.device
    return torch.device(destination)


def _examples_of(given: Any) -> tuple[int, ...] | None:
    """Of the first batch among the arguments."""
    for leaf in leaves(given):
        if type(leaf) is PerReplica and leaf.examples is not None:
            return leaf.examples
    return None


def _joined(calls: list[Any]) -> Any:
    """What is the same object on all replicas stays one; what differs becomes per-replica."""

    def join(*values: Any) -> Any:
        return values[0] if all(v is values[0] for v in values) else PerReplica(values)

    return map_structure(join, *calls)
