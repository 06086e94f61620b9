"""Reduces gradients over replicas while backward runs.

Parameters are divided into buckets in reverse order, the order in which backward reaches them. When
a hook on each parameter has recorded the gradients of a bucket, and all earlier buckets have been
sent, one fused, asynchronous all_reduce sends them. The end of backward sends the rest and waits:
when `backward()` returns, `.grad` equals the gradient that one device would compute on the global
batch. If the replicas use all cores, a progress thread would only slow backward down; then all
buckets are sent in one call at the end of backward.

Gradients are reduced in place, without packing (docs/decisions/0006). A parameter that this replica
did not use contributes zeros. Each bucket carries the number of replicas that used each parameter,
so that a parameter that no replica used keeps `grad` None. On GPUs the host would have to wait for
these numbers, so the replicas exchange them on their hosts at the end of backward. A strategy with
several models does the same, and sends only buckets with a gradient on some replica: a step of a
GAN's discriminator does not send the generator's gradients.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch._compile import _disable_dynamo
from torch.autograd.graph import _engine_run_backward
from torch.autograd.variable import Variable

from fastdist.collectives.types import Work
from fastdist.errors import CollectiveMismatchError, FastdistError, LostRankError
from fastdist.recorder.phases import Phase, enter
from fastdist.replicas.context import state
from fastdist.replicas.per_replica import shares
from fastdist.training.buffers import BufferSync
from fastdist.training.communicators import CommunicationOptions, ReplicaCommunicators
from fastdist.training.contributions import (
    Accumulation,
    Contributions,
    GradientHook,
    ReducedParameter,
    call_weakly,
)
from fastdist.training.first_runs import FirstRuns
from fastdist.training.modules import is_materialized
from fastdist.training.step_record import StepRecord, hash_bits

_BACKWARD = _engine_run_backward.__code__


@dataclass(slots=True)
class _Bucket:
    """Parameters whose gradients are reduced together."""

    indices: list[int]
    used: torch.Tensor  # per parameter: the number of replicas that used it
    waiting: int = 0  # number of gradients that have not arrived
    sent: list[torch.Tensor] = field(default_factory=list)  # empty until the bucket is sent
    work: Work | None = None  # the reduction under way; None if it was synchronous


class GradientSync:
    """Keeps the gradients of one replica's parameters equal to those of all other replicas.

    Of the communicators, `gradients` carries gradients and buffers, `replicas` carries questions.
    The records of steps and first runs travel with the first gradients, and buffers that were
    written are averaged at the end of backward.
    """

    def __init__(
        self,
        communicators: ReplicaCommunicators,
        options: CommunicationOptions,
        parameters: Sequence[ReducedParameter],
        places: int,
        has_several_models: bool,
        accumulation: Accumulation,
        buffers: BufferSync,
        steps: StepRecord,
        first_runs: FirstRuns,
    ) -> None:
        self._options = options
        self._accumulation = accumulation
        self._communicator = communicators.gradients
        self._contributions = Contributions(
            parameters, communicators.gradients, accumulation, options.gradient_reduction
        )
        self._questions = communicators.replicas
        self._has_several_models = has_several_models  # or has had them
        self._is_on_gpu = False
        self._parameters = parameters
        self._places = places  # of parameters, including released ones
        self._sparse = [i for i, parameter in enumerate(parameters) if parameter.is_sparse]
        self._buffer_sync = buffers
        self._steps = steps
        self._first_runs = first_runs
        self._record: torch.Tensor | None = None  # of steps and first runs; None until it is sent
        self._overlaps = communicators.overlaps
        self._device = torch.device("cpu")
        self._is_running = False
        self._task = -1  # id of the backward under way
        self._trainable: list[bool] = []
        self._buckets: list[_Bucket] = []
        self._bucket_of: dict[int, _Bucket] = {}
        self._next = 0  # next bucket to send
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] = {}
        self.watch()

    def watch(self) -> None:
        """Register hooks on trainable parameters without a hook, such as newly unfrozen ones."""
        for i, parameter in self._unhooked():
            after = GradientHook(call_weakly, weakref.WeakMethod(self._on_gradient), i)
            self._hooks[i] = parameter.register_post_accumulate_grad_hook(after)  # type: ignore[no-untyped-call]
            self._contributions.watch(i)

    def _unhooked(self) -> Iterator[tuple[int, torch.nn.Parameter]]:
        """Yield the trainable parameters without a hook, with their indices."""
        if len(self._hooks) == len(self._parameters):
            return
        for i, reduced in enumerate(self._parameters):
            parameter = None if i in self._hooks else reduced.ref()
            if parameter is not None and _is_trainable(parameter):
                yield i, parameter

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Return a context manager whose gradients are sent by the next backward outside."""
        accumulation = self._accumulation  # another sync may take over while this is open
        self._contributions.hold(sorted(self._hooks))
        accumulation.is_held = accumulation.was_held = True
        try:
            yield
        finally:
            accumulation.is_held = False

    @contextlib.contextmanager
    def step(
        self, examples: tuple[int, ...] | None, weights: tuple[float, ...] | None
    ) -> Iterator[None]:
        """Return a context manager around the computation on a replica's part of a batch.

        Every replica must call. Buffers are averaged by examples, gradients by weights; None: all
        replicas have the same. A replica without examples keeps its buffers unchanged.
        """
        if shares(examples) != shares(self._buffer_sync.examples):
            self.average_buffers()  # what earlier runs have written has the weights of their batch
        self._contributions.weights = weights
        if examples is None or any(examples):
            self._buffer_sync.examples = examples
        self.watch()
        if examples is not None and examples[self._communicator.rank] == 0:
            self._buffer_sync.keep()
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False
            self._buffer_sync.restore()
            self._contributions.weights = None

    def weigh(self, weights: tuple[float, ...] | None) -> None:
        """Weight the gradients that the step computes from now on. Every replica must call."""
        self._contributions.weights = weights

    def average_buffers(self) -> None:
        """Average the buffers that forward has written since the last backward. A collective.

        Its dtype is not that of a backward: a replica that skipped its own gets a mismatch error.
        """
        if not self._buffer_sync.places:
            return
        written = self._buffer_sync.weights(self._communicator.rank).double()
        self._questions.all_reduce(written)
        with self._explaining():
            work = self._buffer_sync.send(self._communicator, written)
            if work is not None:
                work.wait()
        self._buffer_sync.compare()

    @property
    def is_reducing(self) -> bool:
        """True if the calling thread is in a backward whose gradients are not reduced yet."""
        return self._task != -1 and self._task == torch._C._current_graph_task_id()

    def close(self) -> None:
        """Remove the hooks."""
        self._contributions.close()
        for hook in self._hooks.values():
            hook.remove()

    def require_reduced(self) -> None:
        """Check that every gradient belongs to a parameter with a hook."""
        for i, parameter in self._unhooked():
            if parameter.grad is not None:
                name = self._parameters[i].name
                raise FastdistError(
                    f"{name} was unfrozen in the middle of run, so its gradient was not "
                    "reduced over replicas; call requires_grad_() before run"
                )

    def _on_gradient(self, i: int, parameter: object) -> None:
        if not self._is_running:
            other = state.replica
            if other is not None and other.communicator is not self._questions:
                raise RuntimeError(
                    f"backward has reached {self._parameters[i].name}, which belongs to another "
                    f"strategy than {other.strategy!r}, which runs: train each module by the "
                    "strategy in whose scope it was made"
                )
            raise RuntimeError(
                f"backward has reached {self._parameters[i].name} outside run, where every replica "
                "works on the same batch: call the step by strategy.run(train_step, "
                "args=(batch,)), with batches of strategy.distribute_dataset. A loop as for "
                "DistributedDataParallel, where each process loads its own batches, needs "
                'torch.distributed.init_process_group("fastdist") instead of a strategy; gradients '
                "for other ends come from torch.autograd.grad"
            )
        if self._accumulation.is_held:
            self._accumulation.held.add(self._parameters[i].place)
            return
        task = torch._C._current_graph_task_id()
        if task != self._task:
            self._begin(task)
        self._contributions.arrive(i)
        bucket = self._bucket_of.get(i)
        if bucket is None:
            return  # sparse gradients are reduced at the end
        bucket.waiting -= 1
        while self._next < len(self._buckets) and self._buckets[self._next].waiting <= 0:
            if not self._overlaps:
                return  # all buckets are sent at the end
            with self._explaining():
                self._send([self._buckets[self._next]])
            self._next += 1

    def _begin(self, task: int) -> None:
        Variable._execution_engine.queue_callback(self._finish)
        is_inside = self._task != -1 and _is_inside_another()
        self._task = task
        if is_inside:  # it also sends what has arrived in the other one
            return
        self._abandon()  # drop what an earlier backward left when it raised
        enter(Phase.BACKWARD)
        self._contributions.arrived = [False] * len(self._parameters)
        self._next = 0
        self._record = None
        before = self._trainable or [True] * len(self._parameters)
        trainable = [  # a released parameter stays as it was: other replicas may still have theirs
            was if (parameter := reduced.ref()) is None else _is_trainable(parameter)
            for reduced, was in zip(self._parameters, before, strict=True)
        ]
        if trainable != self._trainable:
            self._make_buckets(trainable)
        for bucket in self._buckets:
            bucket.waiting = len(bucket.indices)

    def _abandon(self) -> None:
        for bucket in self._buckets:
            if bucket.work is not None:  # its gradients are sums over replicas
                with contextlib.suppress(FastdistError):
                    self._receive(bucket, [True] * len(self._parameters))
            bucket.work = None
            bucket.sent = []

    def _send(self, buckets: Sequence[_Bucket]) -> None:
        """Reduce buckets in one fused call, synchronously or by the progress thread."""
        op, compress = self._options.gradient_reduction, self._options.compress
        contributions = self._contributions
        weight = contributions.weight() if op == "mean" else None
        sent: list[torch.Tensor] = []
        for bucket in buckets:
            arrived = [contributions.is_there(i) for i in bucket.indices]
            bucket.sent = [contributions.take(i, self._device) for i in bucket.indices]
            if all(arrived):  # as usual; a tensor of a list takes many times as long
                bucket.used.fill_(1)
            else:
                bucket.used.copy_(torch.tensor(arrived))
            if weight is not None:
                contributions.weigh(bucket.sent, weight)
            if self._steps.digests is not None:
                self._steps.digests.note_own(bucket.sent)
            sent += bucket.sent if self._is_on_gpu else [*bucket.sent, bucket.used]
        if self._record is None and not self._is_on_gpu:
            self._record = self._take_record()
            sent.append(self._record)
        if weight is not None:
            op = "sum"
        work = None
        if self._overlaps:
            work = self._communicator.all_reduce(sent, op, compress=compress, async_op=True)
        else:
            self._communicator.all_reduce(sent, op, compress=compress)
        for bucket in buckets:
            bucket.work = work

    @contextlib.contextmanager
    def _explaining(self) -> Iterator[None]:
        """Return a context manager: if calls differ, tell what differs in the replicas."""
        try:
            yield
        except CollectiveMismatchError as error:
            if "ranks wait for each other" not in str(error):  # else not all replicas are here
                with contextlib.suppress(CollectiveMismatchError, LostRankError):
                    self._steps.explain(self._contributions.weights)
            raise

    @_disable_dynamo
    def _finish(self) -> None:
        if self._task == -1:  # a backward inside has sent all
            return
        used, written = self._ask()
        with self._explaining():
            self._reduce_rest(used, written)
        self._steps.note_backward()
        self._accumulation.held.clear()
        self._accumulation.was_held = False
        self.watch()  # parameters that were unfrozen since this run began
        enter(Phase.FORWARD)
        if self._record is not None:
            steps, first_runs = torch.split(self._record, len(self._record) // 2)
            self._first_runs.compare(first_runs, float(steps[0]))
            self._steps.require_equal(steps, self._contributions.weights)

    def _reduce_rest(self, used: list[bool] | None, written: torch.Tensor) -> None:
        """Reduce what is left at the end of backward, and wait for all."""
        left = [b for b in self._buckets[self._next :] if self._is_wanted(b.indices, used)]
        if self._overlaps:
            for bucket in left:
                self._send([bucket])
        elif left:
            self._send(left)
        self._next = len(self._buckets)
        self._task = -1
        work = None
        if self._buffer_sync.places:
            work = self._buffer_sync.send(self._communicator, written)
        for bucket in self._buckets:
            if bucket.sent:
                self._receive(bucket, used)
        for i in self._sparse:
            if self._trainable[i] and self._is_wanted([i], used):
                self._reduce_sparse(i)
        if work is not None:
            work.wait()
        self._buffer_sync.compare()

    def _take_record(self) -> torch.Tensor:
        return hash_bits(self._steps.take(self._contributions.weights), self._first_runs.take())

    def _ask(self) -> tuple[list[bool] | None, torch.Tensor]:
        """Exchange which parameters any replica has gradients for, and which buffers were written.

        The first result is None if the buckets carry it; the other is the argument of
        `BufferSync.send`.
        """
        asks = self._has_several_models or self._is_on_gpu
        if not asks and not self._buffer_sync.places:
            return None, torch.zeros(0)
        used = torch.zeros(self._places if asks else 0)
        if asks:
            for i, reduced in enumerate(self._parameters):
                if self._contributions.is_there(i):
                    used[reduced.place] = 1.0
        record = torch.zeros(0)
        if self._is_on_gpu:
            self._record = record = self._take_record()
        written = self._buffer_sync.weights(self._communicator.rank)
        whole = torch.cat([record, used, written.flatten()])
        self._questions.all_reduce(whole)
        parts = torch.split(whole, [len(record), len(used), written.numel()])
        record.copy_(parts[0])
        used, written = parts[1], parts[2].view(2, -1)
        if not asks:
            return None, written
        by_anyone = used.tolist()
        return [by_anyone[reduced.place] > 0.0 for reduced in self._parameters], written

    def _is_wanted(self, indices: Sequence[int], used: list[bool] | None) -> bool:
        """Return True if the gradients of these parameters must be reduced."""
        return used is None or not self._has_several_models or any(used[i] for i in indices)

    def _receive(self, bucket: _Bucket, used: list[bool] | None) -> None:
        if bucket.work is not None:
            bucket.work.wait()
        for place, i in enumerate(bucket.indices):
            parameter = self._parameters[i].ref()
            if parameter is None:
                continue
            is_used = bucket.used[place] > 0 if used is None else used[i]
            if parameter.grad is None and is_used:
                parameter.grad = bucket.sent[place]
            self._contributions.note_sum(i, parameter)
        bucket.work = None
        bucket.sent = []

    def _reduce_sparse(self, i: int) -> None:
        """Gather the rows of all replicas, and add up rows with equal indices."""
        parameter = self._parameters[i].ref()
        rows = self._contributions.take_sparse(i)
        parts = [part for part in self._communicator.all_gather_object(rows) if part is not None]
        if not parts or parameter is None:
            return
        indices = torch.cat([part[0] for part in parts], 1).to(parameter.device)
        values = torch.cat([part[1] for part in parts]).to(parameter.device)
        size = parameter.shape
        grad = torch.sparse_coo_tensor(indices, values, size, check_invariants=False)
        parameter.grad = grad.coalesce()
        self._contributions.note_sum(i, parameter)

    def _make_buckets(self, trainable: list[bool]) -> None:
        self._trainable = trainable
        parameters = [reduced.ref() for reduced in self._parameters]
        alive = [parameter for parameter in parameters if parameter is not None]
        self._is_on_gpu = any(parameter.is_cuda for parameter in alive)
        self._device = alive[0].device if alive else torch.device("cpu")
        groups: list[list[int]] = []
        size = 0
        for i in reversed(range(len(self._parameters))):
            reduced, parameter = self._parameters[i], parameters[i]
            if not trainable[i] or i in self._sparse:
                continue
            shape = reduced.shape if parameter is None else parameter.shape
            bytes_ = shape.numel() * reduced.dtype.itemsize
            model = reduced.model
            is_other = bool(groups) and model != self._parameters[groups[-1][0]].model
            if not groups or is_other or size + bytes_ > self._options.bucket_bytes:
                groups.append([])
                size = 0
            groups[-1].append(i)
            size += bytes_
        self._buckets = [_Bucket(group, torch.ones(len(group))) for group in groups]
        self._bucket_of = {i: bucket for bucket in self._buckets for i in bucket.indices}


def _is_inside_another() -> bool:
    """Return True in a backward that another one has called, as of reentrant checkpoints."""
    frames = traceback.walk_stack(sys._getframe())
    return sum(frame.f_code is _BACKWARD for frame, _ in frames) > 1


def _is_trainable(parameter: torch.nn.Parameter) -> bool:
    return parameter.requires_grad and is_materialized(parameter)
