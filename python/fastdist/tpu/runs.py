"""Runs on the devices of one XLA program: traced once for all devices, compiled and executed."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch

from fastdist.collectives.communicator import Communicator
from fastdist.errors import UnsupportedError
from fastdist.replicas.context import ReplicaContext, state
from fastdist.replicas.per_replica import PerReplica, leaves, map_structure
from fastdist.replicas.random_streams import draw_seed
from fastdist.strategies.base import Strategy
from fastdist.tpu.adopted import AdoptedModules
from fastdist.tpu.functions import ReplicaFunctions
from fastdist.tpu.gradients import TracedGradients
from fastdist.tpu.mesh import Mesh
from fastdist.tpu.metrics import DeferredUpdates
from fastdist.tpu.padding import Padding
from fastdist.tpu.stacked import Stacked, is_stacked, stack
from fastdist.training.patched import replaced

# A program contains all traces since the last program, of any thread: one run at a time.
_run_lock = threading.RLock()


class TracedRuns:
    """Traces functions for all devices of a mesh, and executes the programs.

    Args:
        communicator: the communicator of the replicas; None, as `gradients`, if there is one.
        steps: the number of runs in one program.
        to_host: copies values of all replicas to the CPU, as per-replica values.
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
        self._functions: ReplicaFunctions | None = None  # of the current trace
        self._traced = 0  # runs that wait for execution
        self._results: list[weakref.ref[torch.Tensor]] = []  # results of these runs
        self._counts: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def run(self, fn: Callable[..., Any], given: Any, examples: tuple[int, ...] | None) -> Any:
        """Trace `fn` with `given`, a pair of args and kwargs, and start the program."""
        # torch makes a thread per device at the first backward of a process. If that ran on the CPU
        # before XLA's device was known, there is no thread for XLA.
        with _run_lock, torch.autograd.set_multithreading_enabled(False):
            return self._run(fn, given, examples)

    def _run(self, fn: Callable[..., Any], given: Any, examples: tuple[int, ...] | None) -> Any:
        self._adopted.refresh()
        padded: list[Stacked] = []
        placed = map_structure(lambda leaf: self.place(leaf, padded), given)
        _require_alike(padded, examples)
        restore = self._adopted.snapshot()
        self._mesh.seed(draw_seed())
        outputs: list[torch.Tensor] = []

        def collected(leaf: Any) -> Any:
            stacked = self._left(leaf)
            if is_stacked(stacked):
                outputs.append(stacked.values[0].tensor)
                return PerReplica(stacked.values, examples)
            if isinstance(stacked, torch.Tensor) and stacked.device.type == "xla":
                outputs.append(stacked)
            return stacked

        self._adopted.enter()
        try:
            padding = self._padding(padded)
            if self._communicator is not None or padded or self._adopted.has_batch_norm:
                self._functions = ReplicaFunctions(self._mesh, padding)
            args, kwargs = placed
            if self._mesh.size > 1 or padded:
                args, kwargs = map_structure(lambda leaf: self._entered(leaf, padding), placed)
            state.replica = self._context(examples, padding)
            with contextlib.ExitStack() as tracers:
                if self._gradients is not None:
                    tracers.enter_context(self._gradients.tracing(padding))
                if self._functions is not None:
                    tracers.enter_context(self._functions)
                result = fn(*args, **kwargs)
            result = map_structure(collected, result)
        finally:
            state.replica = None
            made = self._adopted.leave()
            if self._functions is not None and self._gradients is not None:
                self._functions.release(self._adopted.tensor_ids())
            self._functions = None
            self._execute(fn, placed, [*outputs, *made], restore)
        return result

    def _context(self, examples: tuple[int, ...] | None, padding: Padding | None) -> ReplicaContext:
        context = ReplicaContext(self._strategy, self._communicator, 0, examples)
        if self._ids is not None:
            traced: Any = self._watched(self._mesh.enter(self._ids, True))
            context.replica_id_in_sync_group = traced
        if padding is not None:
            weight: Any = padding.weight
            context.relative_weight = weight
        return context

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
        try:
            self._mesh.step(self._take_results(tensors))
        except BaseException:
            restore()
            raise
        self.compilations.note(fn, given, self._mesh.compiles() - before)

    def synchronize(self) -> None:
        """Execute the runs that wait."""
        if self._traced:
            self._mesh.step(self._take_results([]))

    def _take_results(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return these tensors and the living results of runs that wait, each once."""
        waiting = [tensor for ref in self._results if (tensor := ref()) is not None]
        self._traced, self._results = 0, []
        return [*{id(tensor): tensor for tensor in (*tensors, *waiting)}.values()]

    def computed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Start the computation of a tensor, unless it joins a program that waits."""
        if tensor.device.type != "xla":
            return tensor
        tensor = self._mesh.shared(tensor)
        if self._traced:
            self._results.append(weakref.ref(tensor))
        else:
            self._mesh.sync([tensor])
        return tensor

    def merge(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Implement `merge_call`: call `fn` outside manual sharding."""
        outer = map_structure(self._left, (args, kwargs))
        with contextlib.ExitStack() as stack:
            for tracer in (self._functions, self._gradients):
                if tracer is not None:
                    stack.enter_context(replaced(tracer, "is_suspended", True))
            self._adopted.leave()
            stack.callback(self._adopted.enter)
            stack.enter_context(self._strategy._cross_replica())
            result = map_structure(self.place, fn(self._strategy, *outer[0], **outer[1]))
        return map_structure(lambda leaf: self._entered(leaf, None), result)

    # --- arguments and results ------------------------------------------------------------------

    def place(self, leaf: Any, padded: list[Stacked] | None = None) -> Any:
        """Copy an argument to the devices; append padded values to `padded`."""
        if type(leaf) is PerReplica:
            if self._communicator is None and not is_stacked(leaf):
                return self.place(leaf.values[0])
            placed = leaf if is_stacked(leaf) else stack(self._mesh, leaf)
            if padded is not None and placed.values[0].sizes is not None:
                padded.append(placed.values[0])
            return placed
        if isinstance(leaf, torch.Tensor) and leaf.device.type != "xla":
            return self._mesh.replicate(leaf)
        return leaf

    def _entered(self, leaf: Any, padding: Padding | None) -> Any:
        """Convert an argument to manual sharding."""
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

    def _left(self, leaf: Any) -> Any:
        """Convert a result of the replicas to one value."""
        if not isinstance(leaf, torch.Tensor) or leaf.device.type != "xla":
            return leaf
        sizes = None if self._functions is None else self._functions.sizes_of(leaf)
        if self._communicator is None and sizes is None:
            return self._mesh.leave(leaf)
        return PerReplica((Stacked(self._mesh.leave(leaf, True), sizes),))

    def _outside(self, given: Any) -> Any:
        """Convert arguments of a metric to values of all replicas, computed with the run."""
        left = map_structure(self._left, given)
        for leaf in leaves(left):
            tensor = leaf.values[0].tensor if is_stacked(leaf) else leaf
            if isinstance(tensor, torch.Tensor):
                self._results.append(weakref.ref(tensor))
        return left

    def _padding(self, padded: list[Stacked]) -> Padding | None:
        if not padded:
            return None
        sizes, rows = padded[0].sizes or (), padded[0].tensor.shape[1]
        # Each run of an execution has inputs of its own: sharing them would change the program.
        key = self._traced, sizes
        if key not in self._counts:
            counts = torch.tensor(sizes, dtype=torch.float32)
            weights = counts * (len(sizes) / max(1, sum(sizes)))
            stack, own = self._mesh.stack, self._mesh.own
            self._counts[key] = stack(own(counts)), stack(own(weights))
        count, weight = (self._mesh.enter(tensor, True) for tensor in self._counts[key])
        return Padding(rows, count, weight, sizes)


def _require_alike(padded: list[Stacked], examples: tuple[int, ...] | None) -> None:
    """Check that all padded batches of a run have the same numbers of examples."""
    kinds = {(value.sizes, value.tensor.shape[1]) for value in padded}
    if len(kinds) > 1 or (padded and padded[0].sizes != examples):
        found = sorted({str(list(sizes or ())) for sizes, _ in kinds} | {str(list(examples or ()))})
        raise UnsupportedError(
            f"run got padded batches of different numbers of examples, {' and '.join(found)}: use "
            "drop_remainder=True, or a run for each batch"
        )


class Compilations:
    """Counts the compilations of each function, and warns of repeated ones.

    A trace that differs from earlier traces is compiled, which takes seconds to minutes and should
    happen once for each function that is given to `run`.
    """

    def __init__(self) -> None:
        self.count = 0
        self.repeated = 0  # programs for functions that had one already
        self._shapes: dict[object, list[str]] = {}

    def note(self, fn: Callable[..., Any], given: Any, compiled: int) -> None:
        """Record the programs that a run of `fn` compiled; warn if it had a program already.

        The warning points at the line that called `run`, six calls up.
        """
        if not compiled:
            return
        shapes = shapes_of(given)
        known = self._shapes.setdefault(getattr(fn, "__code__", fn), [])
        self.count += compiled
        if known:
            self.repeated += compiled
            warnings.warn(
                f"run of {getattr(fn, '__qualname__', repr(fn))} was compiled again, for {shapes} "
                f"on each replica; before for {'; '.join(known)}. Use batches of one size, or "
                "distribute_dataset, which pads them. If the shapes are not new, a Python value "
                "has changed, or state was made the first time",
                stacklevel=7,
            )
        known.append(shapes)


def shapes_of(given: Any) -> str:
    """Describe the shapes and dtypes of the arguments of `run`."""
    shapes = []
    for leaf in leaves(given):
        tensor = leaf.values[0].tensor if is_stacked(leaf) else leaf
        if isinstance(tensor, torch.Tensor):
            shape = tensor.shape[1:] if is_stacked(leaf) else tensor.shape
            shapes.append(f"{str(tensor.dtype).removeprefix('torch.')}{list(shape)}")
    return ", ".join(shapes) or "nothing"
