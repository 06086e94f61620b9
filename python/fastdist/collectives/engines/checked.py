"""The front half of engines written in Python: everything that happens before bytes move.

`CheckedEngine` turns arguments into views of memory, runs calls in order in a thread of its own
(so that Ctrl-C interrupts the caller and calls can be asynchronous), and compares the calls of all
ranks. Subclasses only move bytes and check nothing again.
"""

from __future__ import annotations

import functools
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from fastdist.collectives.arguments import REDUCE_OPS, check_timeout, to_rank
from fastdist.collectives.engines.engine import Calls, Engine
from fastdist.collectives.engines.queues import CallQueue
from fastdist.collectives.engines.signature import (
    OPS,
    RECORD_BYTES,
    Signature,
    mismatch,
    pack_site,
    split_signature,
    unpack_site,
)
from fastdist.collectives.engines.views import (
    View,
    check_apart,
    check_as_many,
    check_fits,
    check_reducible,
    check_sizes,
    row_major_views_of,
    views_of,
)
from fastdist.collectives.hints import unknown_op
from fastdist.errors import (
    CollectiveMismatchError,
    FastdistError,
    PeerFailureError,
    UnsupportedError,
)

# Arrays up to this size travel with the signature, so that the call ends in one step.
_PAYLOAD_BYTES = 512
_COMPRESSIONS = ("fp16", "bf16", "fp8")


@dataclass(frozen=True, slots=True)
class Call:
    """A collective whose arguments have passed the checks on this rank.

    Attributes:
        signature: compared between all ranks.
        move: moves the bytes; takes the seconds that each of its steps may wait.
        result: the call's return value.
        payload: an array that travels with the signature if it is small.
        finish: replaces `move` if the payload has traveled; takes every rank's payload.
    """

    signature: Signature
    move: Callable[[float], None]
    result: Any
    payload: View | None = None
    finish: Callable[[list[View]], None] | None = None


Run = Callable[[Call, float, bool], Any]


class CheckedEngine(Engine):
    """Base of the engines written in Python. Subclasses implement the methods that move bytes."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._sequence = 0
        self._last: list[Signature | None] = [None] * size  # the last call of each rank
        self._unusable = ""  # the reason, once the engine is closed or lost
        self._state = threading.Lock()
        self._queue = CallQueue(f"fastdist rank {rank}")

    @final
    def calls(self) -> Calls:
        """Return collectives that run in order and are compared between ranks."""
        return {op: functools.partial(getattr(self, f"_call_{op}"), self._run_queued) for op in OPS}

    @final
    def trusted_calls(self) -> Calls:
        """Return collectives that use no thread and no comparison."""
        return {
            op: functools.partial(getattr(self, f"_call_{op}"), self._run_unchecked) for op in OPS
        }

    @final
    @property
    def call_checker(self) -> Any:
        """This engine, by its method `agree`."""
        return self

    @final
    def agree(self, words: tuple[int, int, int], flag: bool, site: str, timeout_s: float) -> bool:
        """Compare a call of the engine for GPUs, in one sequence with the calls of this engine.

        Args:
            words: signature of the call, in the compiled module's encoding.
            flag: this rank's contribution to the returned value.
            site: the line of the user's source that made the call.
            timeout_s: seconds to wait for other ranks.

        Returns:
            True if every rank has set `flag`.

        Raises:
            CollectiveMismatchError: ranks called different collectives.
        """
        signature = Signature.of_words(words)
        flags: list[bytes] = []

        def steps() -> None:
            flags.extend(self._agree(signature, site, bytes([flag]), timeout_s))

        def task() -> None:
            self._check_usable()
            self._guard(steps, signature)

        self._submit(self._queue, task, None, timeout_s, False)
        return all(data[0] for data in flags)

    @final
    @final
    def survivors(self, ranks: Sequence[int], timeout_s: float) -> Engine:
        """Raise UnsupportedError: the excluded ranks may be those that connect the machines."""
        del ranks, timeout_s
        raise UnsupportedError(
            "shrink works between the ranks of one machine only; restart the job without the "
            "excluded ranks"
        )

    @final
    def close(self) -> None:
        """Leave; peers that wait for this rank get `PeerFailureError`."""
        if self._become_unusable(f"the communicator is closed on rank {self.rank}"):
            self._disconnect(None)

    # --- the collectives ------------------------------------------------------------------------

    def _call_all_reduce(
        self,
        run: Run,
        arrays: Any,
        op: str,
        out: Any,
        compress: str | None,
        timeout_s: float,
        async_op: bool,
    ) -> Any:
        _check_op(op)
        ins = views_of(arrays, out is None, "array")
        outs = ins
        if out is not None:
            outs = views_of(out, True, "out")
            check_fits(ins, outs)
        check_reducible(op, ins.views)
        if compress is not None:
            _check_compression(compress, op, ins.views)
        signature = replace(Signature.of("all_reduce", ins, op), compress=compress)

        def move(step_s: float) -> None:
            self._all_reduce(ins.views, outs.views, op, compress, step_s)

        def finish(parts: list[View]) -> None:
            self._reduce_payloads(parts, outs.views[0], op)

        # CPUs of different kinds may round a complex product differently: one rank computes it.
        exact = compress is None and not (op == "prod" and signature.dtype.startswith("complex"))
        payload = ins.views[0] if exact and not ins.is_list else None
        call = Call(signature, move, arrays if out is None else out, payload, finish)
        return run(call, timeout_s, async_op)

    def _call_reduce(
        self,
        run: Run,
        arrays: Any,
        op: str,
        root: int,
        out: Any,
        timeout_s: float,
        async_op: bool,
    ) -> Any:
        _check_op(op)
        root = to_rank(root, "root", self.size)
        is_root = self.rank == root
        ins = views_of(arrays, is_root and out is None, "array")
        outs = ins
        if is_root and out is not None:
            outs = views_of(out, True, "out")
            check_fits(ins, outs)
        check_reducible(op, ins.views)

        def move(step_s: float) -> None:
            self._reduce(ins.views, outs.views if is_root else [], op, root, step_s)

        call = Call(Signature.of("reduce", ins, op, root), move, arrays if out is None else out)
        return run(call, timeout_s, async_op)

    def _call_broadcast(
        self, run: Run, arrays: Any, root: int, out: Any, timeout_s: float, async_op: bool
    ) -> Any:
        root = to_rank(root, "root", self.size)
        is_root = self.rank == root
        if is_root and out is None:
            source = target = views_of(arrays, False, "array")
        else:
            target = views_of(*((arrays, True, "array") if out is None else (out, True, "out")))
            source = views_of(arrays, False, "array") if is_root else target
        if source is not target:
            check_fits(source, target)
        sources, targets = source.views, target.views

        def move(step_s: float) -> None:
            for one, other in zip(sources, targets, strict=True):
                if one.address != other.address:
                    other.memory[:] = one.memory
            self._broadcast(targets, root, step_s)

        def finish(parts: list[View]) -> None:
            if not is_root or out is not None:
                targets[0].memory[:] = parts[root].memory

        call = Call(
            Signature.of("broadcast", target, root=root),
            move,
            arrays if out is None else out,
            None if target.is_list else sources[0],
            finish,
        )
        return run(call, timeout_s, async_op)

    def _call_all_gather(
        self, run: Run, array: Any, out: Any, timeout_s: float, async_op: bool
    ) -> Any:
        ins = row_major_views_of(array, False, "array")
        outs = row_major_views_of(out, True, "out")
        check_sizes("all_gather", ins, outs, self.size)

        def move(step_s: float) -> None:
            for source, target in zip(ins.views, outs.views, strict=True):
                self._all_gather(source, target, step_s)

        def finish(parts: list[View]) -> None:
            for rank, part in enumerate(parts):
                at = rank * part.nbytes
                outs.views[0].memory[at : at + part.nbytes] = part.memory

        payload = None if ins.is_list else ins.views[0]
        call = Call(Signature.of("all_gather", ins), move, out, payload, finish)
        return run(call, timeout_s, async_op)

    def _call_gather(
        self, run: Run, array: Any, root: int, out: Any, timeout_s: float, async_op: bool
    ) -> Any:
        root = to_rank(root, "root", self.size)
        ins = row_major_views_of(array, False, "array")
        targets: list[View | None] = [None] * len(ins.views)
        if self.rank == root:
            outs = row_major_views_of(out, True, "out")
            check_sizes("gather", ins, outs, self.size)
            targets = [*outs.views]

        def move(step_s: float) -> None:
            for source, target in zip(ins.views, targets, strict=True):
                self._gather(source, target, root, step_s)

        return run(Call(Signature.of("gather", ins, root=root), move, out), timeout_s, async_op)

    def _call_scatter(
        self, run: Run, array: Any, root: int, out: Any, timeout_s: float, async_op: bool
    ) -> Any:
        root = to_rank(root, "root", self.size)
        ins = row_major_views_of(array, False, "array") if self.rank == root else None
        outs = row_major_views_of(out, True, "out")
        sources: list[View | None] = [None] * len(outs.views)
        if ins is not None:
            check_sizes("scatter", outs, ins, self.size)
            sources = [*ins.views]

        def move(step_s: float) -> None:
            for source, target in zip(sources, outs.views, strict=True):
                self._scatter(source, target, root, step_s)

        return run(Call(Signature.of("scatter", outs, root=root), move, out), timeout_s, async_op)

    def _call_reduce_scatter(
        self, run: Run, array: Any, op: str, out: Any, timeout_s: float, async_op: bool
    ) -> Any:
        _check_op(op)
        ins = row_major_views_of(array, False, "array")
        outs = row_major_views_of(out, True, "out")
        check_sizes("reduce_scatter", outs, ins, self.size)
        check_reducible(op, ins.views)

        def move(step_s: float) -> None:
            for source, target in zip(ins.views, outs.views, strict=True):
                self._reduce_scatter(source, target, op, step_s)

        return run(Call(Signature.of("reduce_scatter", ins, op), move, out), timeout_s, async_op)

    def _call_all_to_all(
        self,
        run: Run,
        array: Any,
        out: Any,
        counts: Sequence[int],
        timeout_s: float,
        async_op: bool,
    ) -> Any:
        ins = row_major_views_of(array, False, "array")
        outs = row_major_views_of(out, True, "out")
        check_as_many(ins, outs)
        tables = self._tables(ins.views, counts)
        for source, target, table in zip(ins.views, outs.views, tables, strict=True):
            sent = sum(table[self.rank])
            received = sum(row[self.rank] for row in table)
            if source.dtype != target.dtype or (source.count, target.count) != (sent, received):
                raise ValueError(
                    f"all_to_all: array must hold the {sent} elements to send, and out, in its "
                    f"dtype, the {received} to receive; got {source.dtype} × {source.count} and "
                    f"{target.dtype} × {target.count}"
                )
        check_apart(ins, outs)
        even = not len(counts)
        signature = Signature.of("all_to_all", ins) if even else split_signature(ins, tables)

        def move(step_s: float) -> None:
            for source, target, table in zip(ins.views, outs.views, tables, strict=True):
                self._all_to_all(source, target, table, step_s)

        return run(Call(signature, move, out), timeout_s, async_op)

    def _tables(self, views: Sequence[View], counts: Sequence[int]) -> list[list[list[int]]]:
        """Return, for each array, the number of elements from each rank to each rank."""
        n = self.size
        if len(counts):
            if len(counts) != len(views) * n * n:
                raise ValueError("counts must be a table n × n for each array")
            return np.asarray(counts).reshape(len(views), n, n).tolist()
        for view in views:
            if view.count % n:
                raise ValueError(
                    f"all_to_all: {view.count} elements cannot be split among {n} ranks; pass "
                    "splits="
                )
        return [[[view.count // n] * n for _ in range(n)] for view in views]

    def _call_barrier(self, run: Run, timeout_s: float, async_op: bool) -> Any:
        return run(Call(Signature("barrier"), self._barrier, None), timeout_s, async_op)

    @abstractmethod
    def _call_send(
        self, run: Run, array: Any, dst: int, timeout_s: float, async_op: bool
    ) -> Any: ...

    @abstractmethod
    def _call_recv(
        self, run: Run, array: Any, src: int, timeout_s: float, async_op: bool
    ) -> Any: ...

    # --- running a call -------------------------------------------------------------------------

    def _run_queued(self, call: Call, timeout_s: float, async_op: bool) -> Any:
        site = source_line()
        return self._submit(
            self._queue,
            lambda: self._run_checked(call, site, timeout_s),
            call.result,
            timeout_s,
            async_op,
        )

    def _run_unchecked(self, call: Call, timeout_s: float, async_op: bool) -> Any:
        check_timeout(timeout_s)
        self._check_usable()
        self._guard(lambda: call.move(timeout_s), call.signature)
        return call.result

    def _submit(
        self,
        calls: CallQueue,
        task: Callable[[], None],
        result: Any,
        timeout_s: float,
        async_op: bool,
    ) -> Any:
        check_timeout(timeout_s)
        self._check_usable()
        pending = calls.submit(task, result)
        if async_op:
            return pending
        try:
            return pending.wait()
        except KeyboardInterrupt:  # peers must not wait for this rank
            self._abandon(PeerFailureError(f"rank {self.rank} was interrupted", (self.rank,)))
            raise

    def _run_checked(self, call: Call, site: str, timeout_s: float) -> None:
        self._check_usable()

        def steps() -> None:
            payload = call.payload
            if payload is not None and payload.nbytes > _PAYLOAD_BYTES:
                payload = None
            data = b"" if payload is None else payload.memory.tobytes()
            others = self._agree(call.signature, site, data, timeout_s)
            if payload is not None and call.finish is not None:
                call.finish([payload.at(bytearray(other[: payload.nbytes])) for other in others])
            elif call.signature.op != "barrier":  # the comparison was the barrier
                call.move(timeout_s)

        self._guard(steps, call.signature)

    def _guard(self, steps: Callable[[], None], signature: Signature) -> None:
        """Run `steps`; any error but a mismatch ends the communicator on all ranks."""
        try:
            steps()
        except CollectiveMismatchError:
            raise
        except FastdistError as error:
            lost = self._explain(error, signature)
            self._abandon(lost)
            raise lost from None
        except BaseException as error:
            self._abandon(PeerFailureError(f"rank {self.rank} failed with {error!r}", (self.rank,)))
            raise

    def _agree(
        self, signature: Signature, site: str, payload: bytes, timeout_s: float
    ) -> list[bytes]:
        """Compare the signatures of all ranks before any array moves.

        Returns:
            Every rank's payload.

        Raises:
            CollectiveMismatchError: the signatures differ; raised on every rank.
        """
        self._sequence += 1
        self._last[self.rank] = signature
        own = signature.pack(self._sequence) + payload.ljust(_PAYLOAD_BYTES, b"\0")
        shared = self._all_gather_records(own, timeout_s)
        records = [data[:RECORD_BYTES] for data in shared]
        self._last = [Signature.unpack(record)[1] for record in records]
        if records.count(records[0]) == len(records):
            return [data[RECORD_BYTES:] for data in shared]
        sites = self._all_gather_records(pack_site(site), timeout_s)
        raise mismatch(self.rank, records, [unpack_site(text) for text in sites])

    def _explain(self, error: FastdistError, signature: Signature) -> FastdistError:
        """Add this rank's call and the last call of each rank to an error."""
        names = [
            f"\n  rank {r}: " + (f"call {self._sequence_of(r)}, {last}" if last else "none")
            for r, last in enumerate(self._last)
        ]
        return type(error)(
            f"{signature} on rank {self.rank}: {error}; last collective of each rank:"
            + "".join(names),
            error.ranks,
        )

    def _sequence_of(self, rank: int) -> int:
        return max(1, self._sequence - (rank != self.rank))

    def _abandon(self, error: FastdistError) -> None:
        reason = (
            f"the communicator cannot be used any more on rank {self.rank}: an earlier call "
            "failed half-way; make a new one"
        )
        if self._become_unusable(reason):
            self._disconnect(error)

    def _become_unusable(self, reason: str) -> bool:
        with self._state:
            if self._unusable:
                return False
            self._unusable = reason
            return True

    def _check_usable(self) -> None:
        if self._unusable:
            raise FastdistError(self._unusable)

    def _peer(self, peer: int, op: str) -> int:
        return to_rank(peer, "dst" if op == "send" else "src", self.size, self.rank)

    # --- moving bytes, by subclasses; `step_s` is the seconds that each step may wait -----------

    @abstractmethod
    def _all_gather_records(self, record: bytes, step_s: float) -> list[bytes]:
        """Return every rank's record, in rank order. Records of all ranks have equal length."""

    @abstractmethod
    def _reduce_payloads(self, parts: list[View], out: View, op: str) -> None:
        """Reduce the arrays of all ranks locally, to the same bits as `_all_reduce`."""

    @abstractmethod
    def _disconnect(self, error: FastdistError | None) -> None:
        """Release all resources; if `error` is given, tell the other ranks."""

    @abstractmethod
    def _all_reduce(
        self, ins: list[View], outs: list[View], op: str, compress: str | None, step_s: float
    ) -> None: ...

    @abstractmethod
    def _reduce(
        self, ins: list[View], outs: list[View], op: str, root: int, step_s: float
    ) -> None: ...

    @abstractmethod
    def _broadcast(self, arrays: list[View], root: int, step_s: float) -> None: ...

    @abstractmethod
    def _all_gather(self, source: View, target: View, step_s: float) -> None: ...

    @abstractmethod
    def _gather(self, source: View, target: View | None, root: int, step_s: float) -> None: ...

    @abstractmethod
    def _scatter(self, source: View | None, target: View, root: int, step_s: float) -> None: ...

    @abstractmethod
    def _reduce_scatter(self, source: View, target: View, op: str, step_s: float) -> None: ...

    @abstractmethod
    def _all_to_all(
        self, source: View, target: View, table: list[list[int]], step_s: float
    ) -> None:
        """Move `table[i][j]` elements from rank i to rank j."""

    def _barrier(self, step_s: float) -> None:
        self._all_gather_records(b"\0", step_s)


def source_line() -> str:
    """Return the line of the user's source that made the call: outside fastdist and torch."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in ("fastdist", "torch"):
            code = frame.f_code
            return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _check_op(op: str) -> None:
    if op not in REDUCE_OPS:
        raise ValueError(unknown_op(op))


def _check_compression(compress: str, op: str, views: list[View]) -> None:
    if compress not in _COMPRESSIONS:
        raise ValueError(f"compress must be None, fp16, bf16 or fp8, got {compress!r}")
    if op not in ("sum", "mean"):
        raise ValueError(f'compress works with op="sum" or "mean", got op="{op}"')
    for view in views:
        if view.dtype not in ("float32", "float64"):
            raise TypeError(f"compress works on float32 and float64 arrays, got {view.dtype}")
