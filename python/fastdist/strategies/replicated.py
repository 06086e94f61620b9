"""Strategies whose replicas are threads or processes that talk through communicators."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from fastdist.data import (
    InputLayout,
)
from fastdist.errors import FastdistError
from fastdist.replicas.context import ReplicaContext, state
from fastdist.replicas.cross_replica import CrossReplicaOp, gather_values, reduce_values
from fastdist.replicas.devices import require_own_gpus, working_on
from fastdist.replicas.per_replica import PerReplica, local_results, map_structure, regroup, select
from fastdist.replicas.random_streams import SharedStream, detours, draw_seed, replica_stream
from fastdist.replicas.variables import Variable
from fastdist.strategies.adopted import Members
from fastdist.strategies.base import Strategy
from fastdist.strategies.communicators import Ends, Links
from fastdist.strategies.options import CommunicationOptions
from fastdist.strategies.replica_threads import Meeting, ReplicaThreads
from fastdist.strategies.uneven import UnevenResults
from fastdist.training.metrics import adopt_metrics

M = TypeVar("M", bound=nn.Module)
_GRACE_S = 1.0


class LinkedStrategy(Strategy):
    """Each replica runs the user's function in a thread of its own, or in a process.

    Made by its subclasses, which say where the replicas are.

    Args:
        devices: of this process's replicas.
        make_links: makes their communicators; called again after a replica has failed.
        worker: this process's number, and `workers` how many there are.
        parameter_device: of the only copy of all parameters; None: every replica has one.
        options: how to communicate.
    """

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
        require_own_gpus(devices)
        if workers > 1 and len(devices) == 1 and devices[0].type == "cuda":
            torch.cuda.set_device(devices[0])  # what "cuda" means to this process, from now on
        super().__init__(devices, worker=worker, workers=workers)
        self.options = options or CommunicationOptions()
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
        self._has_gpus = any(device.type == "cuda" for device in self.devices)
        self._scopes: Sequence[AbstractContextManager[None]] = [nullcontext()] * len(self.devices)
        self._threads: ReplicaThreads | None = None
        self._is_running = False
        self._lost = ""  # why no run is possible any more
        self._runs = 0
        if len(self.devices) > 1:
            self._threads = ReplicaThreads(self.devices)
            weakref.finalize(self, self._threads.close)

    def _adopt(self, roots: Sequence[nn.Module], made: Sequence[Any]) -> None:
        if self.num_replicas_in_sync > 1:
            adopt_metrics(roots, self)
        self._members.adopt(self._links, roots, made)

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

    def _run(self, fn: Callable[..., Any], given: Any, examples: tuple[int, ...] | None) -> Any:
        if self._lost:
            raise FastdistError(self._lost)
        if self._is_running:
            raise RuntimeError("run was called while the strategy runs, in merge_call or a thread")
        if self._has_gpus:
            self._scopes = working_on(self.devices)
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
            with self._scopes[replica]:
                if communicator is None:
                    return fn(*args, **kwargs)
                draws = replica_stream if self._threads is None else SharedStream
                step = syncs[replica].step(examples) if syncs else nullcontext()
                with draws(context, seed), step:
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

    def update(
        self,
        variable: nn.Parameter | Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `fn(component, *args, **kwargs)` for a variable on each local replica."""
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

    def _gather_leaf(self, value: Any, axis: int) -> torch.Tensor:
        return gather_values(self._links.workers, self.local_results(value), axis)

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


def _joined(calls: list[Any]) -> Any:
    """What is the same object on all replicas stays one; what differs becomes per-replica."""

    def join(*values: Any) -> Any:
        return values[0] if all(v is values[0] for v in values) else PerReplica(values)

    return map_structure(join, *calls)
