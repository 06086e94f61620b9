"""Runs on the devices of one XLA program: traced once for all of them, compiled, executed."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fastdist.collectives.communicator import Communicator
from fastdist.errors import UnsupportedError
from fastdist.replicas.context import ReplicaContext, state
from fastdist.replicas.per_replica import PerReplica, leaves, map_structure
from fastdist.replicas.random_streams import draw_seed
from fastdist.strategies.base import Strategy
from fastdist.tpu.adopted import AdoptedModules
from fastdist.tpu.compilations import Compilations
from fastdist.tpu.functions import ReplicaFunctions
from fastdist.tpu.gradients import TracedGradients
from fastdist.tpu.mesh import Mesh
from fastdist.tpu.metrics import DeferredUpdates
from fastdist.tpu.padding import Padding
from fastdist.tpu.stacked import Stacked, is_stacked, stack

# A program is what has been traced since the last, whichever thread did: one run at a time.
_turn = threading.RLock()
_nothing: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


class TracedRuns:
    """Traces functions for all devices of a mesh, and runs the programs that come of it.

    Args:
        strategy: whose replicas they are.
        mesh: their devices.
        adopted: whose tensors stand for what each device has while a function is traced.
        communicator: of the replicas; None where there is one.
        gradients: what reduces them; None where there is one replica.
        steps: how many runs become one program.
        to_host: values as per-replica values on the CPU, of all replicas.

    Attributes:
        compilations: the programs that were compiled.
        metrics: what waits until values can be read.
    """

    def __init__(
        self,
        strategy: Strategy,
        mesh: Mesh,
        adopted: AdoptedModules,
        communicator: Communicator | None,
        gradients: TracedGradients | None,
        steps: int,
        to_host: Callable[[Any], Any],
    ) -> None:
        self.compilations = Compilations()
        self.metrics = DeferredUpdates(self._outside, to_host)
        self._strategy = strategy
        self._mesh = mesh
        self._adopted = adopted
        self._communicator = communicator
        self._gradients = gradients
        self._steps = steps
        self._ids: torch.Tensor | None = None
        if communicator is not None:
            self._ids = mesh.stack(torch.tensor(adopted.local_replica_ids))
        self._functions: ReplicaFunctions | None = None  # of the run that is traced
        self._traced = 0  # runs that wait to be executed
        self._results: list[weakref.ref[torch.Tensor]] = []  # theirs
        self._counts: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def run(self, fn: Callable[..., Any], given: Any, examples: tuple[int, ...] | None) -> Any:
        """Trace `fn` with what it is given, a pair of args and kwargs, and start the program."""
        # Torch makes threads for backward at the first backward of a process, one for each device
        # that it knows by then: there is none for XLA's where that was on the CPU.
        with _turn, torch.autograd.set_multithreading_enabled(False):
            return self._run(fn, given, examples)

    def _run(self, fn: Callable[..., Any], given: Any, examples: tuple[int, ...] | None) -> Any:
        self._adopted.refresh()
        filled: list[Stacked] = []
        placed = map_structure(lambda leaf: self.place(leaf, filled), given)
        _require_alike(filled, examples)
        restore = self._adopted.snapshot()
        self._mesh.seed(draw_seed())
        outputs: list[torch.Tensor] = []

        def collected(leaf: Any) -> Any:
            stacked = self._left(leaf, functions)
            if is_stacked(stacked):
                outputs.append(stacked.values[0].tensor)
                return PerReplica(stacked.values, examples)
            if isinstance(stacked, torch.Tensor) and stacked.device.type == "xla":
                outputs.append(stacked)
            return stacked

        self._adopted.enter()
        made: list[torch.Tensor] = []
        try:
            padding = self._padding(filled)
            if self._communicator is not None or filled or self._adopted.has_batch_norm:
                self._functions = ReplicaFunctions(self._mesh, padding, self._communicator is None)
            functions = self._functions
            args, kwargs = placed
            if self._mesh.size > 1 or filled:
                args, kwargs = map_structure(lambda leaf: self._entered(leaf, padding), placed)
            state.replica = self._context(examples, padding)
            with self._tracers(padding):
                result = fn(*args, **kwargs)
            is_one = isinstance(result, torch.Tensor)
            result = collected(result) if is_one else map_structure(collected, result)
        finally:
            state.replica = None
            made = self._adopted.leave()
            if self._functions is not None and self._gradients is not None:
                self._functions.release(self._adopted.tensor_ids())
            self._functions = None
            self._execute(fn, placed, [*outputs, *made], restore)
        return result

    def _context(self, examples: tuple[int, ...] | None, padding: Padding | None) -> ReplicaContext:
        context = ReplicaContext(self._strategy, self._communicator, self.merge, 0, examples)
        if self._ids is not None:
            traced: Any = self._watched(self._mesh.enter(self._ids, True))
            context.replica_id_in_sync_group = traced
        if padding is not None:
            weight: Any = padding.weight
            context.weight = weight
        return context

    def _tracers(self, padding: Padding | None) -> contextlib.AbstractContextManager[Any]:
        if self._functions is None:
            return _nothing
        if self._gradients is None:
            return self._functions
        return _both(self._gradients.tracing(padding), self._functions)

    def _execute(
        self,
        fn: Callable[..., Any],
        given: Any,
        tensors: list[torch.Tensor],
        restore: Callable[[], None],
    ) -> None:
        self._traced += 1
        if self._traced < self._steps:
            self._results += map(weakref.ref, tensors)
            return
        self.metrics.finish()
        before = self._mesh.compiles()
        living = {id(tensor): tensor for tensor in tensors}
        if self._results:
            living |= {id(t): t for ref in self._results if (t := ref()) is not None}
        self._traced, self._results = 0, []
        try:
            self._mesh.step([*living.values()])
        except BaseException:
            restore()
            raise
        self.compilations.note(fn, given, self._mesh.compiles() - before)

    def synchronize(self) -> None:
        """Execute the runs that wait."""
        if not self._traced:
            return
        living = [tensor for ref in self._results if (tensor := ref()) is not None]
        self._traced, self._results = 0, []
        self._mesh.step(living)

    def computed(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor whose computation is started, unless it is to be part of a later one."""
        if tensor.device.type != "xla":
            return tensor
        tensor = self._mesh.shared(tensor)
        if self._traced:
            self._results.append(weakref.ref(tensor))
        else:
            self._mesh.sync([tensor])
        return tensor

    def merge(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What `merge_call` does: leaves the view of one replica while `fn` is called."""
        functions, gradients = self._functions, self._gradients
        outer = map_structure(lambda leaf: self._left(leaf, functions), (args, kwargs))
        with contextlib.ExitStack() as stack:
            for tracer in (functions, gradients):
                if tracer is not None:
                    tracer.is_suspended = True
                    stack.callback(setattr, tracer, "is_suspended", False)
            self._adopted.leave()
            stack.callback(self._adopted.enter)
            stack.enter_context(self._strategy._cross_replica())
            result = map_structure(self.place, fn(self._strategy, *outer[0], **outer[1]))
        return map_structure(lambda leaf: self._entered(leaf, None), result)

    # --- arguments and results ------------------------------------------------------------------

    def place(self, leaf: Any, filled: list[Stacked] | None = None) -> Any:
        """An argument, on the devices; values that are filled up are noted."""
        if type(leaf) is PerReplica:
            if self._communicator is None and not is_stacked(leaf):
                return self.place(leaf.values[0])
            placed = leaf if is_stacked(leaf) else stack(self._mesh, leaf)
            if filled is not None and placed.values[0].sizes is not None:
                filled.append(placed.values[0])
            return placed
        if isinstance(leaf, torch.Tensor) and leaf.device.type != "xla":
            return self._mesh.replicate(leaf)
        return leaf

    def _entered(self, leaf: Any, padding: Padding | None) -> Any:
        """An argument as the replica that runs has it."""
        if is_stacked(leaf):
            stacked = leaf.values[0]
            own = self._watched(self._mesh.enter(stacked.tensor, True))
            if padding is not None and stacked.sizes is not None:
                padding.follow(own)
            return own
        if isinstance(leaf, torch.Tensor) and leaf.device.type == "xla":
            return self._watched(self._mesh.enter(leaf))
        return leaf

    def _watched(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._functions is not None:
            self._functions.watch(tensor)
        return tensor

    def _left(self, leaf: Any, functions: ReplicaFunctions | None) -> Any:
        """What the replicas have returned, as one value."""
        if not isinstance(leaf, torch.Tensor) or leaf.device.type != "xla":
            return leaf
        sizes = None if functions is None else functions.sizes_of(leaf)
        if self._communicator is None and sizes is None:
            return self._mesh.leave(leaf)
        return PerReplica((Stacked(self._mesh.leave(leaf, True), sizes),))

    def _outside(self, given: Any) -> Any:
        """What a metric is given in a run, as values of all replicas, to be computed with it."""
        left = map_structure(lambda leaf: self._left(leaf, self._functions), given)
        for leaf in leaves(left):
            tensor = leaf.values[0].tensor if is_stacked(leaf) else leaf
            if isinstance(tensor, torch.Tensor):
                self._results.append(weakref.ref(tensor))
        return left

    def _padding(self, filled: list[Stacked]) -> Padding | None:
        if not filled:
            return None
        sizes, rows = filled[0].sizes or (), filled[0].tensor.shape[1]
        # Runs of one execution that shared an input would be another program than if they did not.
        key = self._traced, sizes
        if key not in self._counts:
            counts = torch.tensor(sizes, dtype=torch.float32)
            weights = counts * (len(sizes) / max(1, sum(sizes)))
            stack, own = self._mesh.stack, self._mesh.own
            self._counts[key] = stack(own(counts)), stack(own(weights))
        count, weight = (self._mesh.enter(tensor, True) for tensor in self._counts[key])
        return Padding(rows, count, weight, sizes)


@contextlib.contextmanager
def _both(
    outer: contextlib.AbstractContextManager[Any], inner: contextlib.AbstractContextManager[Any]
) -> Iterator[None]:
    with outer, inner:
        yield


def _require_alike(filled: list[Stacked], examples: tuple[int, ...] | None) -> None:
    """Check that batches that are filled up have the same examples, of which there is one number.

    Raises:
        UnsupportedError: they have not.
    """
    kinds = {(value.sizes, value.tensor.shape[1]) for value in filled}
    if len(kinds) > 1 or (filled and filled[0].sizes != examples):
        found = sorted({str(list(sizes or ())) for sizes, _ in kinds} | {str(list(examples or ()))})
        raise UnsupportedError(
            f"one run was given batches of different numbers of examples, {' and '.join(found)}, "
            "that are filled up: use drop_remainder=True, or give them to runs of their own"
        )
