"""The base class of strategies: scope, run, reduce, gather, datasets."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar, final, get_args, overload

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

from fastdist.collectives.communicator import Communicator
from fastdist.collectives.hints import refuse_keywords, unknown_name, unknown_op
from fastdist.data import AutoShardPolicy, DistributedDataset, InputContext
from fastdist.data.distribute import build, build_from_function
from fastdist.data.input_context import InputLayout
from fastdist.data.pipelines import ArrayPipeline
from fastdist.data.request import DatasetOptions, Request, checked
from fastdist.errors import UnsupportedError
from fastdist.recorder.phases import Phase, phase
from fastdist.replicas.context import ReplicaContext, state
from fastdist.replicas.cross_replica import Axes, CrossReplicaOp, Weight
from fastdist.replicas.per_replica import PerReplica, leaves, shares, wrap
from fastdist.replicas.variables import Variable
from fastdist.strategies.scope import Scope, extensions
from fastdist.training.graphed import GraphedStep, capture_graph

if TYPE_CHECKING:
    from typing import Unpack

M = TypeVar("M", bound=nn.Module)
K = TypeVar("K")
V = TypeVar("V", torch.Tensor, float)  # a result that becomes PerReplica
Args: TypeAlias = tuple[Any, ...] | list[Any]
Kwargs: TypeAlias = dict[str, Any] | None
Array: TypeAlias = torch.Tensor | np.ndarray[Any, Any]
_OTHER_NAMES = {  # of tf.distribute, torch.distributed and MPI
    "allreduce": "reduce, or get_replica_context().all_reduce in a function that run calls",
    "extended": "the methods of the strategy itself, such as update and reduce_to",
    "makenumpydataset": "distribute_dataset",
    "numreplicas": "num_replicas_in_sync",
    "rank": "local_replica_ids[0]",
    "runv2": "run",
    "size": "num_replicas_in_sync",
    "worldsize": "num_replicas_in_sync",
}
_PLAIN = (torch.Tensor, int, float, bool, str, type(None))  # types that contain no batch


class Strategy(ABC):
    """Replicas that train one model together (tf.distribute.Strategy).

    Args:
        devices: devices of this process's replicas.
        worker: number of this process, from 0.
        workers: number of processes.

    Attributes:
        is_chief: True in one process of the job, for work that is done once, such as printing.
        has_servers: True if variables are on parameter servers.

    Examples:
        >>> import fastdist as fd, torch
        >>> strategy = fd.OneDeviceStrategy("cpu")  # or any other
        >>> with strategy.scope():
        ...     model = torch.nn.Linear(2, 1)
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> def step(batch):
        ...     optimizer.zero_grad()
        ...     loss = model(batch).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     return loss.detach()
        >>> for batch in strategy.distribute_dataset(torch.ones(8, 2), global_batch_size=4):
        ...     loss = strategy.reduce("mean", strategy.run(step, args=(batch,)))
        >>> loss.shape
        torch.Size([])
    """

    has_servers = False
    _make_copy: Callable[[bool], Any] | None = None  # see InputLayout

    def __init__(
        self, devices: Sequence[torch.device], *, worker: int = 0, workers: int = 1
    ) -> None:
        self.devices = tuple(devices)
        self._finished_epochs = weakref.WeakKeyDictionary[Any, dict[Any, list[int]]]()  # by data
        self._datasets: weakref.WeakSet[DistributedDataset[Any]] = weakref.WeakSet()
        self._open_scope: Scope | None = None
        self._take_place(worker, workers)

    def _take_place(self, worker: int, workers: int) -> None:
        """Set the number of this process and of all, and what follows from them."""
        self.num_replicas_in_sync: int = workers * len(self.devices)
        first = worker * len(self.devices)
        self.local_replica_ids = tuple(range(first, first + len(self.devices)))
        self.is_chief = worker == 0
        self._worker = worker
        self._num_workers = workers

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            owner = type(self).__name__
            raise AttributeError(
                unknown_name(owner, name, dir(type(self)), _OTHER_NAMES), name=name, obj=self
            )

    def __repr__(self) -> str:
        places = ", ".join(map(str, self.devices))
        return (
            f"<fastdist.{type(self).__name__} {self.num_replicas_in_sync} replicas, here {places}>"
        )

    # --- making things --------------------------------------------------------------------------

    @final
    def scope(self) -> contextlib.AbstractContextManager[Strategy]:
        """Return a context manager: modules and optimizers made inside belong to this strategy.

        At its end all replicas get the chief's initial values. Every worker must make the same
        modules. Schedulers and GradScalers that are used in `run` must be made inside too.

        Raises:
            RuntimeError: ("Mixing") another strategy's scope is open.
            FastdistError: the modules differ between workers.
        """
        return Scope(self)

    @final
    def mirror(self, module: M) -> M:
        """Adopt a module made outside the scope, and return it. Every worker must call."""
        for extension in extensions:
            extension.adopt(self, [module])
        self._adopt([module], [])
        return module

    @abstractmethod
    def _adopt(self, roots: Sequence[nn.Module], made: Sequence[Any]) -> None:
        """Adopt modules, optimizers, schedulers and scalers."""

    # The leaves of batches are PerReplica. A collate_fn may make anything of a Dataset's examples.
    @overload
    def distribute_dataset(
        self, source: Array, **options: Unpack[DatasetOptions]
    ) -> DistributedDataset[PerReplica[torch.Tensor]]: ...
    @overload
    def distribute_dataset(
        self, source: tuple[Array, Array], **options: Unpack[DatasetOptions]
    ) -> DistributedDataset[tuple[PerReplica[torch.Tensor], PerReplica[torch.Tensor]]]: ...
    @overload
    def distribute_dataset(
        self, source: tuple[Array, ...], **options: Unpack[DatasetOptions]
    ) -> DistributedDataset[tuple[PerReplica[torch.Tensor], ...]]: ...
    @overload
    def distribute_dataset(
        self, source: Mapping[K, Array], **options: Unpack[DatasetOptions]
    ) -> DistributedDataset[dict[K, PerReplica[torch.Tensor]]]: ...
    @overload
    def distribute_dataset(
        self, source: Any, **options: Unpack[DatasetOptions]
    ) -> DistributedDataset[Any]: ...
    @final
    def distribute_dataset(
        self,
        source: Any,
        *misplaced: NoReturn,
        global_batch_size: int | None = None,
        shuffle: bool = False,
        seed: int = 0,
        drop_remainder: bool = False,
        auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        prefetch: int = 2,
        **unknown: NoReturn,
    ) -> DistributedDataset[Any]:
        """Cut a source into global batches, and each global batch into one part per replica.

        Corresponds to tf.distribute.Strategy.experimental_distribute_dataset, but the source holds
        examples, not batches. Every worker must call, with the same source and arguments. An empty
        source gives epochs without steps; a source with fewer examples than replicas gives some
        replicas batches of size zero.

        Args:
            source: the examples, as
                arrays: a tensor or numpy array, or a tuple, dict or dataclass of arrays of equal
                length in axis 0, whose rows are the examples; they are in memory, so num_workers is
                ignored;
                a map-style Dataset or any sequence, such as a list of examples: each worker loads
                only the examples of its replicas, and ever less often one more, to compare;
                an IterableDataset or any iterable of examples: each worker reads all examples;
                a DataLoader: its dataset, batch_size as global batch size, collate_fn, num_workers,
                drop_last and sampler are used (a RandomSampler becomes shuffle=True; any other
                sampler, and a batch_sampler, must give the same order on every worker). With
                batch_size=None and no global_batch_size, the items of its IterableDataset are
                global batches. Batches for a GPU are pinned, with or without pin_memory;
                `Files`.
            global_batch_size: examples per step of all replicas; required unless a DataLoader has
                it, or gives batches.
            shuffle: draw a new order in every epoch, from the seed and the epoch's number; the same
                for all numbers of replicas and workers (under OFF each worker draws its own).
            seed: a non-negative seed of the shuffle, and of what samplers, datasets and collate_fn
                draw from torch's default generator. What is drawn for an example of a map-style
                source depends on the seed, the epoch and the example's position alone.
            drop_remainder: leave out a last batch with fewer examples.
            auto_shard_policy: the way workers share the source.
            collate_fn: a function that makes a batch from a list of examples; None: torch's
                default_collate, extended to keep tuples and to accept dataclasses.
            num_workers: loader processes of this worker. An IterableDataset must divide its
                examples among them by `get_worker_info`. With 0, examples are loaded in the thread
                that reads ahead, where each operation of torch costs some microseconds more. It
                shares the generators of numpy and Python's `random` with the training step, and a
                dataset's `torch.manual_seed` seeds the step's generator.
            prefetch: steps to read ahead and copy to the devices in a thread; 0: no thread. Arrays
                that are sliced for CPUs use no thread either.

        Raises:
            TypeError: the source or an argument has an unsupported type.
            ValueError: arrays have different lengths, a number is out of range, or arguments
                contradict each other; the message names them.
        """
        if misplaced:
            got: Any = misplaced[0]
            hint = (
                f"global_batch_size={got}" if isinstance(got, int) else "several arrays as (x, y)"
            )
            raise TypeError(
                "distribute_dataset takes one argument without a name, the source, got "
                f"{1 + len(misplaced)}; write {hint}"
            )
        refuse_keywords("distribute_dataset", unknown)
        request = Request(
            source,
            global_batch_size,
            shuffle,
            seed,
            drop_remainder,
            auto_shard_policy,
            collate_fn,
            num_workers,
            prefetch,
        )
        made = build(checked(request), self._input_layout())
        self._datasets.add(made)
        if ("shuffle", True) in made.settings:
            data = source.dataset if isinstance(source, DataLoader) else source
            key: tuple[Any, ...] = made.settings
            if isinstance(made.pipeline, ArrayPipeline):  # arrays of equal rows are the same data
                data, key = self, (made.pipeline.sampled_rows, *key)
            with contextlib.suppress(TypeError):  # of a list, which may be an equal one's copy
                finished = self._finished_epochs.setdefault(data, {})
                made.finished_epochs = finished.setdefault(key, [0])
        return made

    @final
    def distribute_datasets_from_function(
        self, fn: Callable[[InputContext], Iterable[Any]], *, prefetch: int = 2
    ) -> DistributedDataset[Any]:
        """Take per-replica batches from an iterable that each worker makes itself.

        Corresponds to tf.distribute.Strategy.distribute_datasets_from_function. Each step takes one
        batch for each local replica, in order. A replica for which the iterable has no batch left
        gets a batch of size zero; the epoch ends when the iterables of all workers are exhausted.
        Every worker must call.

        Args:
            fn: a function that is called once, during this call, with the `InputContext`. It
                returns an iterable of per-replica batches, such as a DataLoader, which is iterated
                anew in every epoch. What it draws from torch's default generator in an epoch comes
                from a stream of its own, which `torch.manual_seed`, called before, and the epoch
                determine.
            prefetch: steps to read ahead and copy to the devices in a thread; 0: no thread.

        Raises:
            TypeError: fn returned an object that is not iterable.
            ValueError: prefetch is negative.
        """
        made = build_from_function(fn, self._input_layout(), prefetch)
        self._datasets.add(made)
        return made

    @final
    def _input_layout(self) -> InputLayout:
        return InputLayout(
            num_replicas=self.num_replicas_in_sync,
            local_replicas=self.local_replica_ids,
            num_workers=self._num_workers,
            worker=self._worker,
            devices=self.devices,
            all_gather_ints=self._all_gather_ints,
            make_copy=self._make_copy,
        )

    @final
    def _all_gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        with self.communicator() as workers:
            if workers is None:
                return [list(values)]
            table: list[list[int]] = workers.all_gather(np.array([values], np.int64)).tolist()
            return table

    @abstractmethod
    def communicator(self) -> contextlib.AbstractContextManager[Communicator | None]:
        """Return a context manager around communication outside `run`; None with one worker."""

    # --- running --------------------------------------------------------------------------------

    @overload
    def run(
        self,
        fn: Callable[..., None],
        args: Args = ...,
        kwargs: Kwargs = ...,
        *,
        weight: Weight = ...,
    ) -> None: ...
    @overload
    def run(
        self, fn: Callable[..., V], args: Args = ..., kwargs: Kwargs = ..., *, weight: Weight = ...
    ) -> PerReplica[V] | V: ...
    @overload
    def run(
        self,
        fn: Callable[..., Any],
        args: Args = ...,
        kwargs: Kwargs = ...,
        *,
        weight: Weight = ...,
    ) -> Any: ...
    @final
    def run(
        self,
        fn: Callable[..., Any],
        args: Args = (),
        kwargs: Kwargs = None,
        *,
        weight: Weight = None,
    ) -> Any:
        """Call `fn` once for each replica of this process, in replica context.

        Every worker must call. Gradients are weighted by the number of examples that each replica
        has in the first batch among the arguments, unless `weight` is given.

        Args:
            fn: the function of each replica.
            args: arguments of `fn`, a tuple or list; per-replica values inside become each
                replica's own.
            kwargs: keyword arguments of `fn`, treated like args.
            weight: what this replica's part counts in means over the global batch, of gradients
                and of results. A loss that is a mean over something else than examples needs it:
                the number of tokens that count, the sum of their classes' weights. A number, a
                tensor of one element, or such a value for each replica; one message of all
                replicas more, and on a GPU it waits for the tensor.

        Returns:
            The result of `fn`. If the job has several replicas, its tensors and numbers are
            `PerReplica` values, which carry the number of examples of each replica and `weight`.

        Raises:
            TypeError: `weight` is not a number.
            ValueError: args is not a tuple or list, a replica's `weight` is negative or not
                finite, or without `weight` two batches are divided in different proportions.
            UnsupportedError: `weight` is given on TPUs.
            RuntimeError: called inside another run, or in another strategy's scope.
            FastdistError: replicas have called different collectives.
            PeerFailureError: `fn` has failed on another replica, which the error names.
            BaseException: the exception that `fn` raised on this replica.
        """
        if not isinstance(args, (tuple, list)):
            raise ValueError(
                f"run: args must be a tuple or list, got {type(args).__name__}; write args=(batch,)"
            )
        if state.replica is not None:
            raise RuntimeError("run was called inside run; replicas cannot have replicas")
        if state.scopes and state.scopes[-1] is not self:
            raise RuntimeError(
                f"Mixing strategies: the scope of {state.scopes[-1]!r} is open, got run of {self!r}"
            )
        given = (tuple(args), kwargs or {})
        batch = _one_division(given) if weight is None else batch_of(given)
        try:
            with phase(Phase.FORWARD):
                return self._run(fn, given, batch, weight)
        except TypeError as error:
            if _takes_one(fn, *given):
                raise TypeError(f"{error}; to pass a batch, write args=(batch,)") from error
            raise

    @final
    def make_graphed(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function for `run` that replays `step` as a CUDA graph on GPUs.

        The first calls with arguments of one kind (shapes, dtypes, values of non-tensors) run
        `step` directly. Then the step is captured with its collectives, and every later call is one
        launch. Only GPU operations are repeated: Python code such as prints and counters runs only
        during the capture, and learning rates keep their captured values unless they are tensors.
        Optimizers that accept `capturable=True` must be made with it. Steps on uneven batches, and
        on other devices, run directly.

        Args:
            step: the function to pass to `run`; takes and returns structures of tensors.

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
    def _run(
        self, fn: Callable[..., Any], given: Any, batch: PerReplica[Any] | None, weight: Weight
    ) -> Any:
        """Implement `run` after its checks; `batch` is a value of the first batch in `given`."""

    @abstractmethod
    def _weigh(self, context: ReplicaContext, weight: Weight) -> None:
        """Implement `weight` of the replica context."""

    @contextlib.contextmanager
    def _cross_replica(self) -> Iterator[None]:
        """Return a context manager that puts the calling thread into cross-replica context."""
        replica, state.replica = state.replica, None
        state.scopes.append(self)
        try:
            yield
        finally:
            state.scopes.pop()
            state.replica = replica

    @abstractmethod
    def _merge(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Implement `merge_call`."""

    @final
    def _require_cross_replica(self, call: str) -> None:
        if state.replica is not None:
            instead = {"reduce": "all_reduce", "gather": "all_gather"}.get(call)
            hint = f"; use fastdist.get_replica_context().{instead}" if instead else ""
            raise RuntimeError(
                f"strategy.{call} was called inside run, but works only outside run{hint}, or call "
                "it in merge_call"
            )

    @abstractmethod
    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager: gradients of backward inside are not reduced yet.

        They accumulate in `.grad`, and are reduced together with the gradients of the next
        backward outside. It changes nothing under TPUStrategy.
        """

    # --- values of all replicas -----------------------------------------------------------------

    @overload
    def reduce(
        self,
        op: CrossReplicaOp,
        value: Mapping[Any, Any] | list[Any] | tuple[Any, ...],
        axis: Axes = ...,
    ) -> Any: ...
    @overload
    def reduce(
        self, op: CrossReplicaOp, value: PerReplica[Any] | torch.Tensor | float, axis: Axes = ...
    ) -> torch.Tensor: ...
    @overload
    def reduce(self, op: CrossReplicaOp, value: object, axis: Axes = ...) -> Any: ...
    @final
    def reduce(self, op: CrossReplicaOp, value: Any, axis: Axes = None) -> Any:
        """Reduce per-replica values over all replicas. Every worker must call.

        Args:
            op: "sum", "mean", "min" or "max". If the values are results of `run` for a batch of
                `distribute_dataset`, or of `fastdist.map` on these results, "mean" weights each
                replica by its number of examples.
            value: a result of `run`, or a structure of results.
            axis: also reduce along this axis or these axes of each value, in which lengths may
                differ.

        Raises:
            TypeError: a value is neither a tensor nor a number.
            ValueError: op is none of these, or an axis is out of range.
            RuntimeError: called inside `run`; use `get_replica_context().all_reduce` there.
        """
        self._require_cross_replica("reduce")
        if op not in get_args(CrossReplicaOp):
            raise ValueError(f"reduce: {unknown_op(op, get_args(CrossReplicaOp))}")
        return self._reduce(op, value, axis)

    @abstractmethod
    def _reduce(self, op: CrossReplicaOp, value: Any, axis: Axes) -> Any:
        """Implement `reduce`."""

    @final
    def reduce_to(self, op: CrossReplicaOp, value: Any, destination: Any) -> Any:
        """Reduce as `reduce` does, and put the result on a device. Every worker must call.

        Args:
            op: the reduction.
            value: per-replica values.
            destination: a device, or a tensor or `fastdist.Variable` on the device.
        """
        return self.reduce(op, value).to(_device_of(destination))

    @final
    def batch_reduce_to(self, op: CrossReplicaOp, pairs: Sequence[tuple[Any, Any]]) -> list[Any]:
        """Apply `reduce_to` to several (value, destination) pairs. Every worker must call."""
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
            fn: a function that changes the component, a tensor, with gradients disabled.
            args: arguments of `fn`; per-replica values inside become each replica's own.
            kwargs: keyword arguments of `fn`, treated like args.

        Returns:
            The result of `fn`; with several replicas, `PerReplica` values.
        """

    @final
    def gather(self, value: Any, axis: int = 0) -> Any:
        """Join the replicas' tensors along an axis, in replica order. Every worker must call.

        Raises:
            ValueError: a value is a scalar, or shapes differ in another dimension than `axis`.
            RuntimeError: called inside `run`; use `get_replica_context().all_gather` there.
        """
        self._require_cross_replica("gather")
        return self._gather(value, axis)

    @abstractmethod
    def _gather(self, value: Any, axis: int) -> Any:
        """Implement `gather`."""

    @abstractmethod
    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the values of this process's replicas, in order (experimental_local_results).

        Args:
            value: a result of `run`, or a `fastdist.Variable` of this strategy.
        """

    @final
    def distribute_values_from_function(self, fn: Callable[[ReplicaContext], Any]) -> Any:
        """Call `fn(context)` for each local replica in turn; return per-replica values."""
        replicas = range(len(self.devices))
        made = [fn(ReplicaContext(self, None, replica)) for replica in replicas]
        return made[0] if self.num_replicas_in_sync == 1 else wrap(made)

    @abstractmethod
    def check_in_sync(self) -> None:
        """Check that parameters and buffers are bitwise equal on all replicas.

        Every worker must call, in cross-replica context.

        Raises:
            FastdistError: tensors differ; the message names the first tensor and the replicas.
        """


def _takes_one(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if a function can be called with one argument, but not with these."""
    try:
        signature = inspect.signature(fn)
        signature.bind(args, **kwargs)
    except (TypeError, ValueError):
        return False
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return True
    return False


def batch_of(given: Any) -> PerReplica[Any] | None:
    """Return a value of the first batch among the arguments of `run`; None without a batch."""
    return next(_batches(given), None)


def _batches(given: Any) -> Iterator[PerReplica[Any]]:
    kind = type(given)
    if kind is PerReplica:
        if given.examples is not None:
            yield given
        return
    if kind is dict:
        given = given.values()
    elif not isinstance(given, (tuple, list)):
        if kind in _PLAIN:
            return
        inner = leaves(given)
        given = () if len(inner) == 1 and inner[0] is given else inner
    for part in given:
        yield from _batches(part)


def _one_division(given: Any) -> PerReplica[Any] | None:
    """Return a value of the first batch among the arguments of `run`."""
    first = None
    for batch in _batches(given):
        if first is None:
            first = batch
        is_other = batch.examples != first.examples and None not in (batch.origin, first.origin)
        if is_other and shares(batch.examples) != shares(first.examples):
            raise ValueError(
                "run got two batches that are divided among the replicas in different "
                f"proportions, {list(first.examples or ())} and {list(batch.examples or ())} "
                "examples, and gradients have one weight: compute on each in a run of its own, "
                "use drop_remainder=True, or give weight="
            )
    return first


def _device_of(destination: Any) -> torch.device:
    if isinstance(destination, Variable):
        return destination.component.device
    if isinstance(destination, torch.Tensor):
        return destination.device
    return torch.device(destination)
