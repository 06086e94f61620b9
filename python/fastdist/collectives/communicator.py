"""Collectives between ranks, on any array."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, overload

import fastdist._core as _core
from fastdist.collectives import hints, membership, scans, uneven
from fastdist.collectives.arguments import to_rank
from fastdist.collectives.arrays import (
    check_parts,
    empty_like,
    joined_like,
    part_like,
    to_gpu,
    to_layout,
    view_bytes,
    view_gpu_bytes,
)
from fastdist.collectives.engines.engine import Calls, Engine
from fastdist.collectives.engines.gpu_arrays import device_of
from fastdist.collectives.engines.nccl import NcclEngine, is_possible
from fastdist.collectives.joining import Joining
from fastdist.collectives.objects import ObjectCalls
from fastdist.collectives.types import Array, Arrays, Compression, ReduceOp, Work
from fastdist.errors import FastdistError, UnsupportedError
from fastdist.recorder.recording import record

if TYPE_CHECKING:
    from typing import Unpack

    from fastdist.collectives.types import (
        Async,
        AsyncMessage,
        AsyncRows,
        Direct,
        DirectMessage,
        DirectRows,
    )

A = TypeVar("A")  # one array, or a list of them


class Communicator(ObjectCalls):
    """The ranks of a job, and the collectives between them.

    Made by `fastdist.init`, `fastdist.local_group`, `split` and `subgroup`. Arrays are numpy
    arrays, torch tensors, cupy arrays, or objects with DLPack, the CUDA array interface or the
    buffer protocol. They must be dense, with a dtype of bool, int8 to int64, uint8 to uint64,
    float16, bfloat16, float8_e4m3fn, float8_e5m2, float32, float64, complex64 or complex128. A list
    of arrays is treated as one array.

    Every rank must call every collective, in the same order, with matching arguments. Collectives
    take `timeout` (seconds to wait for other ranks before `CollectiveTimeoutError`; the
    communicator's if None), `async_op` (return a `Work` at once; calls still run in the order in
    which they were made). Some take `out` (the arrays for the result; new ones if None, which are
    returned) and `splits` (the rows of each rank's part, the same list on all ranks; equal if
    None). They raise `CollectiveMismatchError` if ranks disagree (no data has moved then),
    `PeerFailureError` if a rank has died, and TypeError or ValueError for wrong arguments.

    Calls on GPU arrays are enqueued on the array library's current stream, or on `stream`, a CUDA
    stream of any library or its handle, on which the arrays are ready; they return at once. With
    `async_op` they run on a stream of the communicator, which first waits for the current stream;
    `work.wait()` makes the stream that is current then wait, not the host. A rank uses one GPU
    only. Calls can be captured in CUDA graphs.

    A communicator must be used by one thread at a time; give each thread its own (`split`). Calls
    that overlap raise FastdistError.

    Autograd does not record that a collective writes into a torch tensor. Do not write into a
    tensor that a later backward needs.

    docs/api/collectives.md shows the result of each call on two ranks.

    Attributes:
        rank: this rank, from 0.
        world_size: the number of ranks.
        timeout_s: seconds that calls wait for other ranks, unless they are given another time.
        engine, calls: the engine that moves the bytes, and its collectives; for other parts of
            fastdist.

    Examples:
        >>> import fastdist as fd
        >>> with fd.init() as comm:  # alone: a world of one
        ...     comm.rank, comm.world_size
        (0, 1)
    """

    def __init__(
        self,
        engine: Engine,
        timeout_s: float,
        on_end: Callable[[Communicator, Communicator | None], None] | None = None,
        regroup: Callable[[Communicator, float], Communicator] | None = None,
    ) -> None:
        self.engine: Engine = engine
        self._on_end = on_end  # called with the communicator that takes this one's place
        self._regroup = regroup  # makes the next communicator of an elastic job
        self.timeout_s = timeout_s
        self._inside: str | None = None  # the block whose calls are not made as they stand
        self._recv_any: Callable[..., Any] | None = None
        self._gpus = NcclEngine(engine) if engine.compiled is not None and is_possible() else None
        self.calls = (self._gpus or engine).calls(timeout_s)
        self.rank: int = engine.rank
        self.world_size: int = engine.size
        if engine.compiled is not None and engine.size > 1:
            engines = engine.compiled, engine.key, type(engine).__name__
            record(*engines, engine.machines, is_job=on_end is not None)

    def __dir__(self) -> list[str]:
        """Leave out the names of other libraries."""
        return [name for name in super().__dir__() if name not in _OTHER_NAMES]

    def __repr__(self) -> str:
        return f"<fastdist.Communicator rank {self.rank} of {self.world_size}>"

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave. Ranks that still wait for this rank get `PeerFailureError`.

        Raises:
            FastdistError: a call on GPUs has failed, and no call since has raised its error.
        """
        if self._on_end is not None:
            self._on_end(self, None)
        try:
            if self._gpus is not None:
                self._gpus.close()
        finally:
            self.engine.close()

    def abort(self) -> None:
        """Leave at once: end the calls that are enqueued on GPUs instead of waiting for them."""
        if self._gpus is not None:
            self._gpus.abort(f"rank {self.rank} has called abort")
        with suppress(FastdistError):
            self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Communicator cannot be copied or pickled: it is one rank of a job; make another "
            "communicator by split(), or call fastdist.init() in the other process"
        )

    @overload
    def all_reduce(
        self,
        array: A,
        op: ReduceOp = ...,
        *,
        compress: Compression | None = ...,
        bucket_bytes: int | Literal["auto"] = ...,
        **keywords: Unpack[Direct],
    ) -> A: ...

    @overload
    def all_reduce(
        self,
        array: A,
        op: ReduceOp = ...,
        *,
        compress: Compression | None = ...,
        bucket_bytes: int | Literal["auto"] = ...,
        **keywords: Unpack[Async],
    ) -> Work: ...

    def all_reduce(
        self,
        array: Arrays,
        op: ReduceOp = "sum",
        *,
        out: Arrays | None = None,
        compress: Compression | None = None,
        bucket_bytes: int | Literal["auto"] = "auto",
        stream: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Reduce element by element over all ranks; every rank gets the result.

        Every rank must call. The result has the same bits on every rank, for all sizes and on
        whichever machines the ranks run: values are reduced by one binary tree over the ranks'
        numbers. Exceptions are `compress` between machines, and NCCL.

        Args:
            array: the input, and the output unless `out` is given; the same size on all ranks.
            op: the reduction. mean is defined for floats and complex numbers; and, or, xor for
                integers and bools; min and max for all but complex numbers. 16-bit and 8-bit floats
                are accumulated in float32. On GPUs, what NCCL lacks is an UnsupportedError: and, or
                and xor of integers, xor of bools, products of complex numbers, 16-bit integers and
                8-bit floats.
            out: the output, with the sizes, dtypes and axis order of `array`.
            compress: send float32 and float64 in fewer bits; for op sum and mean only. Values and
                sums outside the format's range become inf or NaN: above 65504 for fp16, above
                float32's range for bf16 and fp8, for float64 arrays too. fp8 is not for GPUs.
            bucket_bytes: bytes to send at a time; "auto" lets the engine choose. Ignored by the
                host engine, which never copies into buckets.

        Returns:
            `out` if it is given, else `array`; for arrays that cannot be changed (jax's), a new
            numpy array.

        Examples:
            >>> import fastdist as fd, numpy as np
            >>> first, second = fd.local_group(2)  # two ranks of this process
            >>> work = first.all_reduce(np.array([1, 2]), async_op=True)
            >>> second.all_reduce(np.array([3, 4]))
            array([4, 6])
            >>> work.wait()
            array([4, 6])
        """
        call = self.calls.all_reduce
        while True:
            try:
                return call(
                    array,
                    op=op,
                    out=out,
                    compress=compress,
                    bucket_bytes=bucket_bytes,
                    stream=stream,
                    timeout=timeout,
                    async_op=async_op,
                )
            except TypeError:
                out = _new_for_immutable(array, out)

    @overload
    def reduce(
        self, array: A, op: ReduceOp = ..., root: int = ..., **keywords: Unpack[Direct]
    ) -> A: ...

    @overload
    def reduce(
        self, array: A, op: ReduceOp = ..., root: int = ..., **keywords: Unpack[Async]
    ) -> Work: ...

    def reduce(
        self,
        array: Arrays,
        op: ReduceOp = "sum",
        root: int = 0,
        *,
        out: Arrays | None = None,
        stream: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
        **unknown: Any,
    ) -> Any:
        """Reduce like `all_reduce`, but only the root gets the result. Every rank must call.

        On other ranks, `array` is not changed and `out` is not written.
        """
        if unknown:
            hints.refuse_keywords("reduce", unknown)
        call = self.calls.reduce
        while True:
            try:
                return call(
                    array,
                    op=op,
                    root=root,
                    out=out,
                    stream=stream,
                    timeout=timeout,
                    async_op=async_op,
                )
            except TypeError:
                out = _new_for_immutable(array, out)

    @overload
    def broadcast(self, array: A, root: int = ..., **keywords: Unpack[Direct]) -> A: ...

    @overload
    def broadcast(self, array: A, root: int = ..., **keywords: Unpack[Async]) -> Work: ...

    def broadcast(
        self,
        array: Arrays,
        root: int = 0,
        *,
        out: Arrays | None = None,
        stream: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
        **unknown: Any,
    ) -> Any:
        """Copy the root's array into the array of every other rank. Every rank must call.

        If `out` is given, the copy goes to `out` on every rank, and `array` is read on the root
        only.
        """
        if unknown:
            hints.refuse_keywords("broadcast", unknown)
        call = self.calls.broadcast
        while True:
            try:
                return call(
                    array, root=root, out=out, stream=stream, timeout=timeout, async_op=async_op
                )
            except TypeError:
                out = _new_for_immutable(array, out)

    @overload
    def all_gather(self, array: A, **keywords: Unpack[DirectRows]) -> A: ...

    @overload
    def all_gather(self, array: A, **keywords: Unpack[AsyncRows]) -> Work: ...

    def all_gather(
        self,
        array: Arrays,
        *,
        splits: Sequence[int] | None = None,
        out: Arrays | None = None,
        stream: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Join the arrays of all ranks along axis 0, in rank order. Every rank must call.

        Args:
            array: shape (rows, …); a scalar counts as one row. May be this rank's rows of `out`.
            out: shape (rows of all ranks, …).
        """
        if splits is not None:
            keywords = {"stream": stream, "async_op": async_op, "timeout": timeout}
            return uneven.all_gather(self, array, splits, out, keywords)
        if out is None:
            out = joined_like(array, self.world_size)
        return self.calls.all_gather(
            array, out=out, stream=stream, timeout=timeout, async_op=async_op
        )

    @overload
    def gather(self, array: A, root: int = ..., **keywords: Unpack[DirectRows]) -> A | Any: ...

    @overload
    def gather(self, array: A, root: int = ..., **keywords: Unpack[Async]) -> Work: ...

    def gather(
        self,
        array: Arrays,
        root: int = 0,
        *,
        splits: Sequence[int] | None = None,
        out: Arrays | None = None,
        stream: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
        **unknown: Any,
    ) -> Any:
        """Join the arrays of all ranks on the root, like `all_gather`. Every rank must call.

        Args:
            array: shape (rows, …); a scalar counts as one row.
            out: shape (rows of all ranks, …); ignored on other ranks than the root.

        Returns:
            `out` or a new array on the root, None on the other ranks.
        """
        if unknown:
            hints.refuse_keywords("gather", unknown)
        if splits is not None:
            uneven.refuse("gather", stream, async_op)
            return uneven.gather(self, array, root, splits, out, timeout)
        if self.rank != root:
            out = None
        elif out is None:
            out = joined_like(array, self.world_size)
        return self.calls.gather(
            array, root=root, out=out, stream=stream, timeout=timeout, async_op=async_op
        )

    @overload
    def scatter(
        self,
        array: A | None,
        root: int = ...,
        *,
        splits: Sequence[int] | None = ...,
        out: A | None = ...,
        **keywords: Unpack[DirectMessage],
    ) -> A: ...

    @overload
    def scatter(
        self,
        array: A | None,
        root: int = ...,
        *,
        out: A | None = ...,
        **keywords: Unpack[AsyncMessage],
    ) -> Work: ...

    def scatter(
        self,
        array: Arrays | None,
        root: int = 0,
        *,
        splits: Sequence[int] | None = None,
        out: Arrays | None = None,
        stream: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
        **unknown: Any,
    ) -> Any:
        """Cut the root's array along axis 0 and give each rank its part. Every rank must call.

        Args:
            array: shape (rows of all ranks, …) on the root; ignored on other ranks, pass None.
            out: shape (rows, …); required on all ranks but the root.
        """
        if unknown:
            hints.refuse_keywords("scatter", unknown)
        is_root = to_rank(root, "root", self.world_size) == self.rank
        if out is None and not (is_root and array is not None):
            raise ValueError(f"scatter: rank {self.rank} needs out=, only the root knows the shape")
        if splits is not None:
            uneven.refuse("scatter", stream, async_op)
            return uneven.scatter(self, array, root, splits, out, timeout)
        if is_root and array is not None:
            check_parts(array, self.world_size)
        if out is None:
            out = part_like(array, self.world_size)
        return self.calls.scatter(
            array, root=root, out=out, stream=stream, timeout=timeout, async_op=async_op
        )

    @overload
    def reduce_scatter(self, array: A, op: ReduceOp = ..., **keywords: Unpack[DirectRows]) -> A: ...

    @overload
    def reduce_scatter(
        self, array: A, op: ReduceOp = ..., **keywords: Unpack[AsyncRows]
    ) -> Work: ...

    def reduce_scatter(
        self,
        array: Arrays,
        op: ReduceOp = "sum",
        *,
        splits: Sequence[int] | None = None,
        out: Arrays | None = None,
        stream: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Reduce over all ranks and give each rank its part along axis 0. Every rank must call.

        Args:
            array: shape (rows of all ranks, …), the same on all ranks; not changed.
            op: the reduction, as for `all_reduce`.
            out: shape (rows of this rank, …). May be this rank's rows of `array`.
        """
        if splits is not None:
            keywords = {"stream": stream, "async_op": async_op, "timeout": timeout}
            return uneven.reduce_scatter(self, array, op, splits, out, keywords)
        check_parts(array, self.world_size)
        if out is None:
            out = part_like(array, self.world_size)
        return self.calls.reduce_scatter(
            array, op=op, out=out, stream=stream, timeout=timeout, async_op=async_op
        )

    @overload
    def all_to_all(self, array: A, **keywords: Unpack[DirectRows]) -> A: ...

    @overload
    def all_to_all(self, array: A, **keywords: Unpack[AsyncRows]) -> Work: ...

    def all_to_all(
        self,
        array: Arrays,
        *,
        splits: Sequence[int] | None = None,
        out: Arrays | None = None,
        stream: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
    ) -> Any:
        """Cut the array along axis 0 and send part i to rank i. Every rank must call.

        Args:
            array: shape (rows, …).
            splits: rows for each rank; may differ from rank to rank. Equal parts if None.
            out: the parts from all ranks, in rank order; shape (rows received, …).
        """
        counts: list[int] = []
        if splits is not None:
            out, counts = uneven.exchange_counts(self, array, splits, out, timeout)
        else:
            check_parts(array, self.world_size)
            out = empty_like(array) if out is None else out
        return self.calls.all_to_all(
            array, out=out, counts=counts, stream=stream, timeout=timeout, async_op=async_op
        )

    @overload
    def send(
        self, array: A, dst: int, *, tag: int = ..., **keywords: Unpack[DirectMessage]
    ) -> A: ...

    @overload
    def send(
        self, array: A, dst: int, *, tag: int = ..., **keywords: Unpack[AsyncMessage]
    ) -> Work: ...

    def send(
        self,
        array: Arrays,
        dst: int = -1,
        *,
        tag: int = 0,
        stream: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
        **unknown: Any,
    ) -> Any:
        """Send to one rank, which must call `recv`. Return when the data has been received.

        On GPUs the two arrays' sizes and dtypes are not compared, as they are on hosts.

        Calls with the same peer, direction and tag are matched in order. With `async_op`, and in a
        `group`, calls with different peers or directions do not wait for each other. A message of a
        rank to itself is copied; on GPUs it must be in a group. Messages on GPUs have no tags.
        """
        if unknown:
            hints.refuse_keywords("send", unknown)
        return self.calls.send(
            array, dst=dst, tag=tag, stream=stream, timeout=timeout, async_op=async_op
        )

    @overload
    def recv(
        self, array: A, src: int, *, tag: int = ..., **keywords: Unpack[DirectMessage]
    ) -> A: ...

    @overload
    def recv(
        self, array: A, src: int, *, tag: int = ..., **keywords: Unpack[AsyncMessage]
    ) -> Work: ...

    def recv(
        self,
        array: Arrays = None,
        src: int = -1,
        *,
        tag: int = 0,
        stream: Any = None,
        async_op: bool = False,
        timeout: float | None = None,
        **unknown: Any,
    ) -> Any:
        """Receive from rank `src`, which must call `send`, into `array`. Return `array`.

        A message with another tag is kept until a receive asks for it.
        """
        if unknown:
            hints.refuse_keywords("recv", unknown)
        if array is None:
            raise TypeError("recv needs the array to write into; recv_object returns an object")
        return self.calls.recv(
            array, src=src, tag=tag, stream=stream, timeout=timeout, async_op=async_op
        )

    @overload
    def recv_any(
        self,
        array: Array,
        *,
        tag: int = ...,
        async_op: Literal[False] = ...,
        timeout: float | None = ...,
    ) -> int: ...

    @overload
    def recv_any(
        self,
        array: Array,
        *,
        tag: int = ...,
        async_op: Literal[True],
        timeout: float | None = ...,
    ) -> Work: ...

    def recv_any(
        self, array: Array, *, tag: int = 0, async_op: bool = False, timeout: float | None = None
    ) -> Any:
        """Receive from whichever rank sends first, into an array on the host. Return that rank."""
        self._refuse_inside("recv_any")
        compiled = self.engine.compiled
        if compiled is None or (self._gpus is not None and device_of(array) is not None):
            raise UnsupportedError("recv_any is for arrays on hosts; on GPUs recv names its source")
        if self._recv_any is None:
            self._recv_any = _core.receive_of(compiled)
        seconds = self.timeout_s if timeout is None else timeout
        received = self._recv_any(array, None, tag, True, seconds, async_op, False)
        if async_op:
            return uneven.Works([received], lambda messages: messages[0].source)
        return received.source

    @overload
    def barrier(self, *, async_op: Literal[False] = ..., timeout: float | None = ...) -> None: ...

    @overload
    def barrier(self, *, async_op: Literal[True], timeout: float | None = ...) -> Work: ...

    def barrier(self, *, async_op: bool = False, timeout: float | None = None) -> Any:
        """Wait until every rank has called."""
        return self.calls.barrier(timeout=timeout, async_op=async_op)

    def scan(
        self,
        array: A,
        op: str = "sum",
        *,
        exclusive: bool = False,
        out: A | None = None,
        timeout: float | None = None,
    ) -> A:
        """Reduce the arrays of the ranks up to this one. Every rank must call.

        Args:
            array: any shape, the same on all ranks; is not changed.
            op: "sum", "prod", "min", "max", "and", "or" or "xor". float16 and bfloat16 are computed
                in float32.
            exclusive: leave out this rank's own array. Rank 0 gets zeros, or ones of "prod"; "min",
                "max" and "and" are an error.
            out: the shape and dtype of `array`; may be `array`.
        """
        self._refuse_inside("scan")
        result: A = scans.scan(self, array, op, out, timeout, exclusive=exclusive)
        return result

    @contextmanager
    def group(self) -> Iterator[None]:
        """Return a context manager: the calls inside are made together, when it ends.

        Sends and receives in a group do not wait for each other, so that a ring is

            with comm.group():
                comm.send(x, (comm.rank + 1) % comm.world_size)
                comm.recv(y, (comm.rank - 1) % comm.world_size)

        On GPUs the calls are one launch. Results are there when the group has ended; on GPUs, as
        after any call, in the order of the stream. A send in a group on GPUs is received by a recv
        in a group. If the block raises, no call is made. No call may read what another one of the
        group writes. A message to oneself stays until it is received, by a later call too.

        Raises:
            ValueError: a barrier, an object, `async_op`, `splits`, `stream` or `bucket_bytes` in a
                group.
            UnsupportedError: the ranks are hosts of a TPU.
        """
        self._refuse_inside("group")
        if self.engine.compiled is None:
            raise UnsupportedError("calls of a TPU cannot be grouped: its program launches them")
        group = _core.Group(self.engine.compiled, device_of if self._gpus else None)
        with self._calling(Calls(**group.calls(self.timeout_s)), "group"):
            yield
        if self._gpus is not None:
            self._gpus.run_group(group)
        group.run_on_hosts()

    @contextmanager
    def join(self) -> Iterator[Joining]:
        """Return a context manager for loops of different lengths. Every rank must enter it.

        A rank that leaves the block takes part in the collectives that the others still make in
        theirs, with zeros (ones for "prod", and what does not count for "min", "max" and "and"),
        until all have left it. A mean is divided by the number of all ranks.

        The block has `all_reduce`, `reduce`, `reduce_scatter`, `broadcast`, `barrier`, `send` and
        `recv` of arrays on the host. Calls cost nothing more until a rank has joined; then each is
        preceded by an exchange of what to call.

        Returns:
            An object with `last_rank`, which is set when all ranks have joined: the lowest of those
            that joined last.

        Raises:
            UnsupportedError: a call needs the data of a rank that has joined.
        """
        self._refuse_inside("join")
        if self.engine.compiled is None:
            raise UnsupportedError("ranks of a TPU cannot join: its program launches their calls")
        joining = Joining(self)
        with self._calling(joining.calls(), "join"):
            yield joining
        joining.take_part()

    @contextmanager
    def _calling(self, calls: Calls, inside: str | None) -> Iterator[None]:
        before = self.calls, self._inside
        self.calls, self._inside = calls, inside
        try:
            yield
        finally:
            self.calls, self._inside = before

    def _refuse_inside(self, what: str) -> None:
        if self._inside:
            raise ValueError(
                f"{what} cannot be in a {self._inside}: leave the {self._inside} first"
            )

    def split(
        self, color: int | None, key: int = 0, *, timeout: float | None = None
    ) -> Communicator | None:
        """Make a communicator for each color. Every rank must call.

        Args:
            color: ranks with equal colors share a communicator; a rank with None gets None.
            key: number that orders the ranks of a color; ranks with equal keys keep their order.
        """
        self._refuse_inside("split")
        return self._make(membership.by_color(self, color, key, timeout), timeout)

    def subgroup(
        self, ranks: Sequence[int], *, timeout: float | None = None
    ) -> Communicator | None:
        """Make a communicator of these ranks, in this order. Every rank must call, in it or not.

        Ranks that are not in it get None.
        """
        return self._make([membership.agreed(self, ranks, timeout)], timeout)

    def shrink(self, exclude: Sequence[int], *, timeout: float | None = None) -> Communicator:
        """Continue without some ranks, which may have failed.

        Every remaining rank must call, with the same `exclude`. Works between processes of
        one machine only. The result replaces this communicator, which may be lost already and is
        closed.

        Args:
            exclude: the ranks to leave out, for example `PeerFailureError.ranks`.
            timeout: seconds to wait for the remaining ranks.

        Returns:
            A communicator of the remaining ranks, in the same order.

        Raises:
            ClusterConfigError: a remaining rank did not arrive, or excludes other ranks.
            UnsupportedError: the ranks are threads, or on several machines.
        """
        self._refuse_inside("shrink")
        left = membership.remaining(self, exclude)
        seconds = self.timeout_s if timeout is None else timeout
        engine = self.engine.survivors(left, seconds)
        made = Communicator(engine, self.timeout_s, self._on_end)
        if self._on_end is not None:
            self._on_end(self, made)
        with suppress(FastdistError):
            self.close()
        return made

    def regroup(self, *, timeout: float | None = None) -> Communicator:
        """Go on with the ranks that an elastic job has now. Every rank must call, between steps.

        For `fastdist.init(elastic=True)`. Ranks that have come since are waiting for this call, and
        after `PeerFailureError` it leaves out the ranks that have failed. The ranks that have been
        there longest come first: broadcast from rank 0 what new ranks need. `fastdist.Elastic`
        does so for strategies.

        Args:
            timeout: seconds that the other ranks have to come; those that do not are killed.

        Returns:
            This communicator if nobody has come or gone, which costs a small all_reduce; otherwise
            its successor, which `fastdist.default_communicator` returns too.

        Raises:
            ClusterConfigError: the launcher has ended.
            FastdistError: the job is not elastic.
            SystemExit: the job has done its work, and this rank comes too late.
        """
        self._refuse_inside("regroup")
        if self._regroup is None:
            raise FastdistError(
                "regroup works on the communicator of fastdist.init(elastic=True); the number of "
                "ranks of this one is fixed"
            )
        return self._regroup(self, self.timeout_s if timeout is None else timeout)

    def empty(
        self,
        shape: int | Sequence[int],
        dtype: Any = "float32",
        device: Any = None,
        *,
        timeout: float | None = None,
    ) -> Any:
        """Make an uninitialised array in memory that collectives use without a copy.

        Args:
            shape: the shape.
            dtype: a dtype of the collectives; a numpy dtype makes a numpy array, a torch dtype
                makes a torch tensor.
            device: None for host memory, or a GPU such as "cuda:0". For a GPU, every rank must
                call, for its own GPU; the array is a torch tensor, or a cupy array for a numpy
                dtype; and calls must use the same part of it on all ranks.
            timeout: seconds to wait for other ranks, for a GPU.
        """
        shape, dtype, nbytes = to_layout(shape, dtype)
        if device is not None:
            seconds = self.timeout_s if timeout is None else timeout
            gpu = to_gpu(device)
            if self._gpus is None:
                raise UnsupportedError(f"no GPU can be used: {_core.why_no_cuda()}")
            memory = self._gpus.empty(max(nbytes, 1), gpu, seconds)
            return view_gpu_bytes(memory, nbytes, shape, dtype)
        return view_bytes(self.engine.empty(nbytes), shape, dtype)

    def _make(self, groups: list[list[int]], timeout: float | None) -> Communicator | None:
        engine = self.engine.subset(groups, self.timeout_s if timeout is None else timeout)
        return None if engine is None else Communicator(engine, self.timeout_s)


def _new_for_immutable(arrays: Arrays, out: Arrays | None) -> Arrays:
    """Make outputs for inputs that cannot be changed; raise the present error for other calls."""
    if out is not None or not hints.is_immutable(arrays):
        raise
    return empty_like(arrays)


_OTHER_NAMES = hints.refuse_other_names(Communicator)
