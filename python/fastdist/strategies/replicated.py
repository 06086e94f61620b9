"""The base class of strategies whose replicas are processes."""

from __future__ import annotations

import atexit
import contextlib
import gc
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import numpy as np
import torch
from torch import nn

from fastdist._config import settings
from fastdist.collectives.communicator import Communicator
from fastdist.collectives.init import default_communicator, elastic_member, next_world
from fastdist.errors import (
    ClusterConfigError,
    CollectiveMismatchError,
    FastdistError,
    LostRankError,
)
from fastdist.replicas.context import ReplicaContext, state
from fastdist.replicas.cross_replica import (
    Axes,
    CrossReplicaOp,
    Weight,
    gather_values,
    reduce_values,
    weights_of,
)
from fastdist.replicas.devices import working_on_gpu
from fastdist.replicas.per_replica import PerReplica, map_structure, select, shares, wrap
from fastdist.replicas.random_streams import draw_seed, replica_stream
from fastdist.replicas.starting import require_intact_files
from fastdist.replicas.variables import Variable
from fastdist.strategies.adopted import AdoptedModules
from fastdist.strategies.base import Strategy
from fastdist.strategies.central import CentralParameters
from fastdist.training.communicators import CommunicationOptions
from fastdist.training.metrics import adopt_metrics


class ReplicatedStrategy(Strategy):
    """A strategy in which this process is one replica.

    `run` calls the user's function in the caller's thread. Subclasses find or start the other
    replicas.

    Args:
        device: device of this replica.
        world: the communicator of all replicas, one per rank; None if this is the only replica.
        central: the owner of the only copy of all parameters; None if every replica has a copy.
        options: communication options.
        refuses_run: the message of `run` in a process that has no replica.
    """

    def __init__(
        self,
        device: torch.device,
        world: Communicator | None = None,
        *,
        central: CentralParameters | None = None,
        options: CommunicationOptions | None = None,
        refuses_run: str | None = None,
    ) -> None:
        rank, replicas = (0, 1) if world is None else (world.rank, world.world_size)
        if replicas > 1 and device.type == "cuda":
            torch.cuda.set_device(device)  # the device "cuda" of this process from now on
        super().__init__([device], worker=rank, workers=replicas)
        self.options = options or CommunicationOptions()
        self._device = device
        self.is_elastic = world is not None and elastic_member() is not None
        if self.is_elastic:
            self._require_first(replicas, central)
        self._refuses_run = refuses_run
        self.central = central
        everyone = world if replicas > 1 else None
        self._members = AdoptedModules(device, everyone, self.options, central)
        if replicas > 1 or self.is_elastic:
            if not _connected_strategies:
                atexit.unregister(_leave_all)
                atexit.register(_leave_all)
            _connected_strategies.add(self)  # leaves at exit
        self._is_running = False
        self._members.connect()
        require_intact_files()

    def _adopt(self, roots: Sequence[nn.Module], made: Sequence[Any]) -> None:
        with self.communicator():
            if self.num_replicas_in_sync > 1 or self.is_elastic:
                adopt_metrics(roots, self)
            self._members.adopt(roots, made)

    def adopt_new(self) -> None:
        """Adopt what the open scope has made so far, on any replica. Every replica must call."""
        scope = self._open_scope
        is_open = bool(state.scopes) and state.scopes[-1] is self  # in this thread
        if scope is None or not is_open or self.has_servers or self._is_running:
            return
        with self.together():
            is_new, workers = scope.has_new, self._members.connect()
            if workers is not None:
                is_new = bool(workers.all_reduce(np.array([is_new]), "max")[0])
            if is_new:
                scope.adopt()

    def _require_first(self, replicas: int, central: CentralParameters | None) -> None:
        if len(_connected_strategies):
            gc.collect()  # collects unreferenced strategies
        others = any(other.is_elastic for other in _connected_strategies)
        if replicas > 1 or central is not None or others:
            raise ClusterConfigError(
                f"{type(self).__name__}: an elastic job has one strategy, a MirroredStrategy or "
                "MultiWorkerMirroredStrategy that is made before its ranks meet by regroup"
            )

    @property
    def has_left(self) -> bool:
        """True after a failure, until the replicas have connected again."""
        return self.num_replicas_in_sync > 1 and not self._members.is_connected

    def broadcast(self, but: Collection[int]) -> None:
        """Take replica 0's values of all tensors but those with these ids. A collective."""
        with self.communicator() as workers:
            if workers is not None:
                self._members.broadcast(workers, but)

    def regroup(self) -> None:
        """Go on with the replicas that an elastic job has now. Every replica must call.

        The replicas' values differ until they are restored.
        """
        self._members.leave()
        timeout_s = self.options.timeout_s or settings().timeout_s
        world = next_world(default_communicator(), timeout_s)
        self._take_place(world.rank, world.world_size)
        self._members.move(world if world.world_size > 1 else None)
        self._members.connect()
        for dataset in list(self._datasets):
            dataset.divide_anew(self._input_layout())

    # --- running --------------------------------------------------------------------------------

    @final
    def _run(
        self, fn: Callable[..., Any], given: Any, batch: PerReplica[Any] | None, weight: Weight
    ) -> Any:
        if self._refuses_run is not None:
            raise FastdistError(self._refuses_run)
        if self._is_running:
            raise RuntimeError(
                "run was called while the strategy is running: in merge_call, or in another thread"
            )
        examples = None if batch is None else batch.examples
        scope: AbstractContextManager[None] = nullcontext()
        if self._device.type == "cuda":
            scope = working_on_gpu(self._device)
        self._members.connect()
        self.adopt_new()
        if self.num_replicas_in_sync == 1:
            with scope:
                context = ReplicaContext(self, None, 0, examples, weights_of(weight, None))
                return self._call(fn, given, context, None)
        communicators = self._members.communicators
        assert communicators is not None
        weights: tuple[float, ...] | None = examples
        if weight is not None:
            with self.together():
                weights = weights_of(weight, communicators.gradients)
        context = ReplicaContext(self, communicators.replicas, 0, examples)
        self._set_weights(context, weights)
        seed = draw_seed()
        self._members.refresh()
        self._is_running = True
        try:
            with scope, self._members.run(fn, given, batch, seed):
                result = self._call(fn, given, context, seed)
        except BaseException:
            self._members.leave()
            raise
        finally:
            self._is_running = False
        return wrap([result], examples, context.weights if context.is_weighed else None)

    def _set_weights(self, context: ReplicaContext, weights: tuple[float, ...] | None) -> None:
        context.weights = weights
        parts = shares(weights) if self.options.gradient_reduction == "mean" else None
        context.relative_weight = 1.0 if parts is None else parts[self._worker] * len(parts)

    def _weigh(self, context: ReplicaContext, weight: Weight) -> None:
        weights = weights_of(weight, context.communicator)
        self._set_weights(context, weights)
        if self._members.sync is not None:
            self._members.sync.weigh(weights)

    def _call(
        self, fn: Callable[..., Any], given: Any, context: ReplicaContext, seed: int | None
    ) -> Any:
        examples = context.examples
        args, kwargs = select(given)
        state.replica = context
        try:
            if seed is None:
                return fn(*args, **kwargs)
            sync = self._members.sync
            step = nullcontext() if sync is None else sync.step(examples, context.weights)
            with replica_stream(context, seed), step:
                return fn(*args, **kwargs)
        except Exception as error:
            replica_id = context.replica_id_in_sync_group
            if examples is None or examples[replica_id] or isinstance(error, FastdistError):
                raise
            raise FastdistError(
                f"replica {replica_id} has no example of this batch, whose "
                f"{sum(examples)} examples were divided {list(examples)}, and the function failed "
                f"without examples: {type(error).__name__}: {error}. If the model needs examples, "
                "use drop_remainder=True in distribute_dataset, or another global_batch_size"
            ) from error
        finally:
            state.replica = None

    @contextlib.contextmanager
    def communicator(self) -> Iterator[Communicator | None]:
        """Return a context manager around communication outside `run`; None with one replica.

        After a failed collective the next call makes new communicators, so that the failure of a
        replica is reported once.
        """
        workers = self._members.connect()
        try:
            yield workers
        except (CollectiveMismatchError, LostRankError):
            self._members.leave()
            raise

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Return a context manager around calls that all replicas make outside `run`.

        If a replica raises an exception, replicas that wait for it raise PeerFailureError.
        """
        try:
            yield
        except BaseException:
            self._members.leave()
            raise

    def refresh(self) -> None:
        """Adopt what was added to modules since; `run` does so too. Every replica must call."""
        with self.communicator():
            self._members.refresh()

    def _merge(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self._cross_replica():
            return select(fn(self, *args, **kwargs))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context manager: gradients of backward inside are not reduced yet."""
        sync = self._members.sync
        with nullcontext() if sync is None else sync.held():
            yield

    # --- values of all replicas -----------------------------------------------------------------

    def _reduce(self, op: CrossReplicaOp, value: Any, axis: Axes) -> Any:
        with self.communicator() as workers:
            self._members.end_runs()
            return map_structure(lambda leaf: self._reduce_leaf(workers, op, leaf, axis), value)

    def _reduce_leaf(
        self, workers: Communicator | None, op: CrossReplicaOp, value: Any, axis: Axes
    ) -> Any:
        weights = None
        if op == "mean" and axis is None and type(value) is PerReplica:
            everyone = shares(value.weights or value.examples)
            weights = None if everyone is None else [everyone[self._worker]]
        return reduce_values(workers, op, _values_of(value), axis, weights)

    def update(
        self,
        variable: nn.Parameter | Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `fn(component, *args, **kwargs)` for a variable on each local replica."""
        self._require_cross_replica("update")
        own_args, own_kwargs = select((tuple(args), kwargs or {}))
        with self.communicator(), torch.no_grad():
            result = self._members.update(variable, lambda c: fn(c, *own_args, **own_kwargs))
        return result if self.num_replicas_in_sync == 1 else wrap([result])

    def _gather(self, value: Any, axis: int) -> Any:
        with self.communicator() as workers:
            self._members.end_runs()
            return map_structure(lambda leaf: gather_values(workers, _values_of(leaf), axis), value)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the values of this process's replicas, in order (experimental_local_results)."""
        values = _values_of(value)
        if type(value) is PerReplica and value.origin is not None:
            self._members.watch_parts(values)
        return values

    def check_in_sync(self) -> None:
        """Check that parameters and buffers are bitwise equal on all replicas."""
        self.adopt_new()
        with self.communicator():
            self._members.refresh()
            self._members.average_buffers()
            self._members.require_in_sync()


def _values_of(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Variable):
        return (value.component,)
    return value.values if type(value) is PerReplica else (value,)


_connected_strategies: weakref.WeakSet[ReplicatedStrategy] = weakref.WeakSet()


def replicas_of(modules: Iterable[nn.Module]) -> ReplicatedStrategy | None:
    """Return the strategy of several replicas that the first adopted module belongs to."""
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    for tensor in tensors:
        for strategy in _connected_strategies:
            if strategy._members.has(tensor):
                return strategy
    return None


def _leave_all() -> None:
    """Leave at exit, so that waiting replicas fail before this process is gone."""
    for strategy in list(_connected_strategies):
        strategy._members.leave()
