"""The collectives of a process group, under the names that c10d's C++ and Python call."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import FrameType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from torch._C import _distributed_c10d as c10d
from torch.autograd import graph
from torch.distributed import DistBackendError, distributed_c10d
from torch.utils._pytree import tree_leaves

import fastdist._core as _core
from fastdist.collectives.communicator import Communicator
from fastdist.collectives.types import Compression
from fastdist.errors import FastdistError
from fastdist.integrations.torch_backend.name import NAME
from fastdist.integrations.torch_backend.overloads import FORMS, TIMED, normalize_arguments
from fastdist.integrations.torch_backend.reductions import (
    all_reduce_sparse,
    combined,
    reduction_of,
    scale_in_place,
    scaled,
)
from fastdist.integrations.torch_backend.tensors import (
    Finish,
    all_of,
    all_to_write,
    copying,
    joined,
    joined_to_write,
    numel,
    to_read,
    to_write,
)
from fastdist.integrations.torch_backend.work import Completer, Done, Pending

if TYPE_CHECKING:  # its methods have other signatures
    _ProcessGroup = object
else:
    _ProcessGroup = c10d.ProcessGroup

Tensors = list[torch.Tensor]

# The options of calls without any: the defaults of all of torch's.
_ASYNC = SimpleNamespace(
    asyncOp=True, reduceOp=c10d.ReduceOp(c10d.ReduceOp.SUM), rootRank=0, rootTensor=0
)
_SYNC = SimpleNamespace(asyncOp=False)

_is_profiling = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


class Left:
    """Takes the communicator's place while a group has none; every use raises an error."""

    def __init__(self, rank: int, world_size: int, why: str) -> None:
        self.rank = rank
        self.world_size = world_size
        self._why = why  # the end of a sentence about the communicator

    def __getattr__(self, name: str) -> NoReturn:
        raise DistBackendError(f"the communicator {self._why} on rank {self.rank}")

    def __call__(self, *_: Any) -> NoReturn:
        self.__getattr__("")


@contextlib.contextmanager
def backend_errors() -> Iterator[None]:
    """Raise fastdist's errors as torch's; hot calls do so without a context manager."""
    try:
        yield
    except FastdistError as error:
        raise DistBackendError(str(error)) from error


def _collective(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a collective: forward other devices to their backend, and record it for profilers."""
    name = method.__name__
    form = FORMS[name]
    takes_lists, others = form.depths[0] > 0, form.others

    @functools.wraps(method)
    def call(self: Any, given: Any = None, *rest: Any, **named: Any) -> Any:
        if (
            named
            or (takes_lists and type(given) is not list)
            or (rest and type(rest[-1]) in others)
        ):
            positional = [] if given is None else [given, *rest]
            given, *rest = normalize_arguments(name, positional, named)  # type: ignore[assignment]
        tensor = given
        while type(tensor) is list:
            tensor = tensor[0] if tensor else _first_tensor(rest, name)
        if tensor.is_cpu and not _is_profiling():
            return method(self, given, *rest)
        other = self._other_group(tensor.device)
        if other is not None:
            return getattr(other, name)(given, *rest)
        if _is_profiling():
            return _profiled(name, given, lambda: method(self, given, *rest))
        return method(self, given, *rest)

    return call


def _first_tensor(arguments: Sequence[Any], name: str) -> torch.Tensor:
    """Return the first tensor; on ranks that only send, an empty list comes before it."""
    for item in tree_leaves(list(arguments)):
        if isinstance(item, torch.Tensor):
            return item
    raise ValueError(f"{name} needs at least one tensor, got empty lists")


def _profiled(name: str, tensors: Any, call: Callable[[], Any]) -> Any:
    """Make a call inside a profiler event that ends when the call returns.

    An event that ended in another thread, after the profiler had stopped, would crash.
    """
    given = [t for t in tree_leaves(tensors) if isinstance(t, torch.Tensor)]
    title = f"{NAME}:{_TITLES.get(name, name)}"
    event = torch.autograd._record_function_with_args_enter(title, *given)  # type: ignore[attr-defined]
    try:
        return call()
    finally:
        torch.autograd._record_function_with_args_exit(event)  # type: ignore[attr-defined]


_TITLES = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "recv_anysource": "recvAnySource",
}


class Calls(_ProcessGroup):
    """The collectives of one rank. The process group inherits this, and defines `_other_group`."""

    _most_ranks_here = 0  # of all groups, on this machine

    def __init__(self, rank: int, size: int, timeout_s: float) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._timeout_s = timeout_s
        self._made = 0  # collectives
        self._completers: dict[tuple[Any, ...], Completer] = {}
        # The communicator, and its messages.
        self._comm: Any = Left(rank, size, "is not connected: call reconfigure first")
        self._recv: Any = self._comm

    def _begin(self, comm: Communicator, ranks_here: int) -> None:
        """Use this communicator from now on; `ranks_here` of its ranks are on this machine."""
        assert comm.engine.compiled is not None
        Calls._most_ranks_here = max(Calls._most_ranks_here, ranks_here)
        self._made = 0
        self._completers = {}
        self._comm, self._recv = comm, _core.receive_of(comm.engine.compiled)

    @property
    def communicator(self) -> Communicator:
        found: Communicator = self._comm
        return found

    def rank(self) -> int:
        return int(self._comm.rank)

    def size(self) -> int:
        return int(self._comm.world_size)

    getRank, getSize = rank, size  # what C++ calls

    def _completer(self, *lane: Any) -> Completer:
        """Return the thread that completes futures of collectives, or of messages with one rank."""
        return self._completers.get(lane) or self._completers.setdefault(lane, Completer())

    def _make(
        self,
        opts: Any,
        written: Sequence[torch.Tensor],
        finish: Finish,
        call: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Done | Pending | None:
        """Make a call, and return a work unless torch has no use for one.

        `written` are the caller's tensors for the results; `finish` copies them there, if they are
        elsewhere.
        """
        seconds = opts.timeout.total_seconds() if type(opts) in TIMED else self._timeout_s
        self._made += 1
        try:
            if opts.asyncOp and self._may_wait(written):
                work = call(*args, **kwargs, timeout=seconds, async_op=True)
                completer = self._completers.get(()) or self._completer()
                return Pending(work, written, finish, completer)
            call(*args, **kwargs, timeout=seconds)
        except FastdistError as error:
            raise DistBackendError(str(error)) from error
        if finish is not None:
            finish()
        return Done(written) if opts.asyncOp else None

    @staticmethod
    def _may_wait(written: Sequence[torch.Tensor]) -> bool:
        """Return True if an asynchronous call may run in another thread.

        If torch's C++ makes the call during backward, as DDP does, and no core is idle, another
        thread would only take time from this one.
        """
        if not written or not written[0].is_cpu:
            return True
        return _caller().f_code is not _BACKWARD or Calls._has_idle_cores()

    @staticmethod
    def _has_idle_cores() -> bool:
        """Return True if this machine has more cores than its ranks use."""
        cores = len(os.sched_getaffinity(0))
        return cores > Calls._most_ranks_here * torch.get_num_threads()

    @_collective
    def allreduce(self, tensors: Tensors, opts: Any = _ASYNC) -> Any:
        """Reduce a tensor in place over all ranks; treat each of several as another rank's."""
        if len(tensors) > 1:
            return self._all_reduce_several(tensors, opts)
        tensor = _one(tensors)
        if tensor.layout is not torch.strided:
            with backend_errors():
                all_reduce_sparse(self._comm, tensor, opts.reduceOp, self._timeout_s)
            return Done([tensor])
        plain, finish = to_write(tensor)
        op, factor, finish = reduction_of(opts, tensors, [plain], finish, self._comm.world_size)
        scale_in_place([plain], factor)
        return self._make(opts, tensors, finish, self._comm.all_reduce, plain, op)

    def _all_reduce_several(self, tensors: Tensors, opts: Any) -> Any:
        given, count = [to_read(t.detach()) for t in tensors], len(tensors)
        total, size = torch.empty_like(given[0]), self._comm.world_size * count
        op, factor, finish = reduction_of(opts, tensors, [total], None, size)
        total.copy_(combined(given, op))
        scale_in_place([total], 1 / count if op == "mean" else factor)
        finish = all_of([finish, *(copying(total, tensor) for tensor in tensors)])
        return self._make(opts, tensors, finish, self._comm.all_reduce, total, op)

    @_collective
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = _ASYNC) -> Any:
        plain, finish = all_to_write(tensors)
        op, factor, finish = reduction_of(opts, tensors, plain, finish, self._comm.world_size)
        scale_in_place(plain, factor)
        return self._make(opts, tensors, finish, self._comm.all_reduce, plain, op)

    @_collective
    def reduce(self, tensors: Tensors, opts: Any = _ASYNC) -> Any:
        tensor = _one(tensors)
        plain, finish = to_write(tensor)
        op, factor, finish = reduction_of(opts, tensors, [plain], finish, self._comm.world_size)
        root = opts.rootRank
        if self._comm.rank == root:
            scale_in_place([plain], factor)
        else:
            plain, finish = scaled(plain, factor), None
        return self._make(opts, tensors, finish, self._comm.reduce, plain, op, root)

    @_collective
    def broadcast(self, tensors: Tensors, opts: Any = _ASYNC) -> Any:
        """Copy one of the root's tensors to all tensors of all ranks."""
        plain, finish = to_write(tensors[opts.rootTensor])
        if len(tensors) > 1:
            source = tensors[opts.rootTensor]
            others = (copying(source, tensor) for tensor in tensors if tensor is not source)
            finish = all_of([finish, *others])
        return self._make(opts, tensors, finish, self._comm.broadcast, plain, opts.rootRank)

    @_collective
    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = _ASYNC) -> Any:
        """Copy the tensors of all ranks, which may differ in size, into a list on every rank."""
        if len(inputs) > 1:
            return self._all_gather_several(outputs, inputs, opts)
        given, received = _one(inputs), self._one_each(_one(outputs), "outputs")
        flat, finish = joined_to_write(received)
        sizes = [numel(t) for t in received]
        splits = None if len(set(sizes)) == 1 else sizes
        plain = to_read(given).reshape(-1)
        return self._make(
            opts, received, finish, self._comm.all_gather, plain, out=flat, splits=splits
        )

    def _all_gather_several(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Any:
        size, first = self._comm.world_size, outputs[0]
        lengths = {len(received) for received in outputs}
        if len(outputs) != len(inputs) or lengths != {size * len(inputs)}:
            raise ValueError(
                f"outputs must be {len(inputs)} lists of {size * len(inputs)} tensors, got "
                f"{len(outputs)} of {sorted(lengths)} on rank {self._comm.rank}"
            )
        flat, finish = joined_to_write(first)
        others = [copying(*pair) for more in outputs[1:] for pair in zip(first, more, strict=True)]
        finish = all_of([finish, *others])
        received = [tensor for each in outputs for tensor in each]
        return self._make(opts, received, finish, self._comm.all_gather, joined(inputs), out=flat)

    @_collective
    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: Any = _ASYNC
    ) -> Any:
        """Do `allgather` for several tensors; outputs[i] has the tensors of rank i."""
        pairs = [joined_to_write([of_rank[i] for of_rank in outputs]) for i in range(len(inputs))]
        given = [to_read(t).reshape(-1) for t in inputs]
        received = [t for of_rank in outputs for t in of_rank]
        flat, finish = [flat for flat, _ in pairs], all_of([finish for _, finish in pairs])
        return self._make(opts, received, finish, self._comm.all_gather, given, out=flat)

    @_collective
    def all_gather_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = _ASYNC
    ) -> Any:
        plain, finish = to_write(output)
        return self._make(opts, [output], finish, self._comm.all_gather, to_read(given), out=plain)

    _allgather_base = all_gather_single  # the name before torch 2.13

    @_collective
    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = _ASYNC
    ) -> Any:
        plain, finish = all_to_write(outputs)
        given = [to_read(t) for t in inputs]
        return self._make(opts, outputs, finish, self._comm.all_gather, given, out=plain)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @_collective
    def gather(self, outputs: list[Tensors], inputs: Tensors, opts: Any = _ASYNC) -> Any:
        plain = to_read(_one(inputs)).reshape(-1)
        root = opts.rootRank
        if self._comm.rank != root:
            return self._make(opts, inputs, None, self._comm.gather, plain, root)
        received = self._one_each(_one(outputs), "outputs")
        flat, finish = joined_to_write(received)
        return self._make(opts, received, finish, self._comm.gather, plain, root, out=flat)

    @_collective
    def scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = _ASYNC) -> Any:
        plain, finish = to_write(_one(outputs))
        root = opts.rootRank
        given = None
        if self._comm.rank == root:
            given = joined(self._one_each(_one(inputs), "inputs"))
        return self._make(
            opts, outputs, finish, self._comm.scatter, given, root, out=plain.view(-1)
        )

    @_collective
    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any = _ASYNC) -> Any:
        """Reduce a list of tensors, which may differ in size, and give each rank its own."""
        given = self._one_each(_one(inputs), "inputs")
        sizes = [numel(t) for t in given]
        splits = None if len(set(sizes)) == 1 else sizes
        plain, finish = to_write(_one(outputs))
        return self._reduce_scatter(opts, outputs, [plain], finish, [joined(given)], splits)

    def _reduce_scatter(
        self,
        opts: Any,
        outputs: Tensors,
        plain: Tensors,
        finish: Finish,
        given: Tensors,
        splits: Sequence[int] | None = None,
    ) -> Any:
        op, factor, finish = reduction_of(opts, outputs, plain, finish, self._comm.world_size)
        flat: Any = [scaled(t.view(-1), factor) for t in given]
        out: Any = [t.view(-1) for t in plain]
        if len(flat) == 1:  # errors then name a tensor, not a list
            flat, out = flat[0], out[0]
        call = self._comm.reduce_scatter
        return self._make(opts, outputs, finish, call, flat, op, out=out, splits=splits)

    @_collective
    def reduce_scatter_single(
        self, output: torch.Tensor, given: torch.Tensor, opts: Any = _ASYNC
    ) -> Any:
        plain, finish = to_write(output)
        return self._reduce_scatter(opts, [output], [plain], finish, [to_read(given)])

    _reduce_scatter_base = reduce_scatter_single

    @_collective
    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = _ASYNC
    ) -> Any:
        plain, finish = all_to_write(outputs)
        return self._reduce_scatter(opts, outputs, plain, finish, [to_read(t) for t in inputs])

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @_collective
    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
        opts: Any = _ASYNC,
    ) -> Any:
        """Send part i of a tensor to rank i; splits may give the number of rows of each part."""
        plain, finish = to_write(output)
        splits = None
        if output_splits or input_splits:
            splits = self._splits(given, input_splits, "input")
            self._splits(output, output_splits, "output")
        return self._make(
            opts, [output], finish, self._comm.all_to_all, to_read(given), out=plain, splits=splits
        )

    alltoall_base = all_to_all_single

    @_collective
    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = _ASYNC) -> Any:
        given = self._one_each(inputs, "inputs")
        received = self._one_each(outputs, "outputs")
        flat, finish = joined_to_write(received)
        splits = [numel(t) for t in given]
        return self._make(
            opts, received, finish, self._comm.all_to_all, joined(given), out=flat, splits=splits
        )

    def average(self, tensor: torch.Tensor, compress: Compression) -> Any:
        """Average a tensor in place over all ranks, compressed; return its future."""
        options = _ASYNC if not tensor.is_cpu or self._has_idle_cores() else _SYNC
        call = self._comm.all_reduce
        work = self._make(options, [tensor], None, call, tensor, "mean", compress=compress)
        future = (work or Done([tensor])).get_future()
        return future.then(lambda future: future.value()[0])

    def barrier(self, opts: Any = _ASYNC, timeout: timedelta | None = None) -> Any:
        if timeout is not None or type(opts) is timedelta:
            (opts,) = normalize_arguments("barrier", [], {"timeout": timeout or opts})
        return self._make(opts, (), None, self._comm.barrier)

    # Messages. On GPUs they have no tags, since NCCL has none.

    @_collective
    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> Any:
        plain = to_read(_one(tensors))
        if plain.is_cpu:
            call = functools.partial(self._comm.send, plain, dst, tag=tag, timeout=self._timeout_s)
            return self._message(call, "send", dst, tag, tensors, None)
        return self._make(_ASYNC, tensors, None, self._comm.send, plain, dst)

    @_collective
    def recv(self, tensors: Tensors, src: int, tag: int = 0) -> Any:
        plain, finish = to_write(_one(tensors))
        if plain.is_cpu:
            return self._message(self._receiver(plain, src, tag), "recv", src, tag, tensors, finish)
        return self._make(_ASYNC, tensors, finish, self._comm.recv, plain, src)

    @_collective
    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Any:
        """Receive a tensor from the rank that sends first."""
        plain, finish = to_write(_one(tensors))
        if not plain.is_cpu:
            raise ValueError("on GPUs, recv must name the source")
        return self._message(self._receiver(plain, None, tag), "recv", None, tag, tensors, finish)

    def _receiver(self, plain: torch.Tensor, src: int | None, tag: int) -> Callable[..., Any]:
        """Return a function that receives a message, which may be smaller."""
        return lambda async_op: self._recv(plain, src, tag, False, self._timeout_s, async_op, False)

    def _message(
        self,
        call: Callable[..., Any],
        name: str,
        peer: int | None,
        tag: int,
        tensors: Tensors,
        finish: Finish,
    ) -> Done | Pending:
        if tag < 0:
            raise ValueError(f"tag must not be negative, got {tag}")
        # torch waits for `send` and `recv` immediately, so they need no thread.
        waits = _caller().f_code in _BLOCKING
        try:
            work = call(async_op=not waits)
        except FastdistError as error:
            raise DistBackendError(str(error)) from error
        if not waits:
            return Pending(work, tensors, finish, self._completer(name, peer))
        if finish is not None:
            finish()
        return Done(tensors, getattr(work, "source", -1))

    def _one_each(self, tensors: Tensors, name: str) -> Tensors:
        if len(tensors) != self._comm.world_size:
            raise ValueError(
                f"{name} must be one tensor for each of the {self._comm.world_size} ranks, got "
                f"{len(tensors)} on rank {self._comm.rank}"
            )
        return tensors

    def _splits(
        self, tensor: torch.Tensor, splits: Sequence[int] | None, name: str
    ) -> Sequence[int]:
        rows, size = tensor.shape[0], self._comm.world_size
        if not splits:
            if rows % size != 0:
                raise ValueError(
                    f"the {rows} rows of the {name} tensor cannot be split evenly among {size} "
                    f"ranks; pass {name}_split_sizes"
                )
            return [rows // size] * size
        if len(splits) != size or sum(splits) != rows:
            raise ValueError(
                f"{name}_split_sizes must be {size} numbers that add up to the {rows} rows of the "
                f"{name} tensor, got {list(splits)} on rank {self._comm.rank}"
            )
        return splits


def _caller() -> FrameType:
    """Return the innermost frame that is not of this file."""
    frame = sys._getframe(2)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame


_BACKWARD = graph._engine_run_backward.__code__
_BLOCKING = {
    inspect.unwrap(call).__code__ for call in (distributed_c10d.send, distributed_c10d.recv)
}
T = TypeVar("T")


def _one(items: list[T]) -> T:
    if len(items) != 1:
        raise ValueError(f"expected one tensor or list of tensors, got {len(items)}")
    return items[0]
