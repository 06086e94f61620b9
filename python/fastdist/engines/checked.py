"""Engines written in Python: everything before bytes move.

`CheckedEngine` turns arguments into views of memory, runs calls in order in a thread of its own,
so that Ctrl-C gets through and calls may be asynchronous, and lets all ranks compare what they
call. Engines below it only move bytes, and need not check anything again.
"""

from __future__ import annotations

import functools
import math
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastdist.engines.engine import Calls, Engine
from fastdist.engines.queues import CallQueue
from fastdist.engines.signature import (
    OPS,
    RECORD_BYTES,
    REDUCE_OPS,
    Signature,
    mismatch,
    pack_site,
    split_signature,
    unpack_site,
)
from fastdist.engines.views import (
    View,
    check_apart,
    check_fits,
    check_reducible,
    row_major,
    view_of,
    views_of,
)
from fastdist.errors import (
    CollectiveMismatchError,
    FastdistError,
    PeerFailureError,
)

# Arrays up to this size travel with the signature, and the call is over in one step.
_PAYLOAD_BYTES = 512
_COMPRESSIONS = ("fp16", "bf16", "fp8")


@dataclass(frozen=True, slots=True)
class Call:
    """A collective whose arguments are in order on this rank.

    Attributes:
        signature: what all ranks compare.
        move: moves the bytes; takes the seconds that each of its steps may wait.
        result: what the user gets.
        payload: an array that travels with the signature where it is small; and what then takes
            the place of `move`, given every rank's.
    """

    signature: Signature
    move: Callable[[float], None]
    result: Any
    payload: View | None = None
    finish: Callable[[list[View]], None] | None = None


Run = Callable[[Call, float, bool], Any]


class CheckedEngine(Engine):
    """Base of the engines written in Python. Subclasses move bytes: the methods at the end."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._sequence = 0
        self._last: list[Signature | None] = [None] * size  # what each rank called last
        self._unusable = ""  # why, once it is closed or lost
        self._state = threading.Lock()
        self._queue = CallQueue(f"fastdist rank {rank}")

    def calls(self) -> Calls:
        """The collectives, in order and compared between ranks."""
        return {op: functools.partial(getattr(self, f"_call_{op}"), self._in_order) for op in OPS}

    def trusted_calls(self) -> Calls:
        """The collectives without a thread and without a comparison."""
        return {op: functools.partial(getattr(self, f"_call_{op}"), self._at_once) for op in OPS}

    def close(self) -> None:
        """Leave."""
        if self._become_unusable(f"the communicator is closed on rank {self.rank}"):
            self._leave(None)

    # --- what is called -------------------------------------------------------------------------

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
        ins, is_list = views_of(arrays, out is None, "array")
        outs = ins
        if out is not None:
            outs, out_is_list = views_of(out, True, "out")
            check_fits(ins, outs, is_list == out_is_list)
        check_reducible(op, ins)
        if compress is not None:
            _check_compression(compress, op, ins)
        signature = Signature.of("all_reduce", ins, is_list, op)
        signature = replace(signature, compress=compress)

        def move(step_s: float) -> None:
            self._all_reduce(ins, outs, op, compress, step_s)

        def finish(parts: list[View]) -> None:
            self._reduce_payloads(parts, outs[0], op)

        # Machines of different kinds may round a complex product differently: one does it.
        exact = compress is None and not (op == "prod" and signature.dtype.startswith("complex"))
        payload = ins[0] if exact and not is_list else None
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
        self._check_root(root)
        is_root = self.rank == root
        ins, is_list = views_of(arrays, is_root and out is None, "array")
        outs = ins
        if is_root and out is not None:
            outs, out_is_list = views_of(out, True, "out")
            check_fits(ins, outs, is_list == out_is_list)
        check_reducible(op, ins)

        def move(step_s: float) -> None:
            self._reduce(ins, outs if is_root else [], op, root, step_s)

        call = Call(
            Signature.of("reduce", ins, is_list, op, root), move, arrays if out is None else out
        )
        return run(call, timeout_s, async_op)

    def _call_broadcast(
        self, run: Run, arrays: Any, root: int, out: Any, timeout_s: float, async_op: bool
    ) -> Any:
        self._check_root(root)
        is_root = self.rank == root
        sources: list[View] = []
        if is_root:
            sources, is_list = views_of(arrays, False, "array")
        if is_root and out is None:
            targets = sources
        else:
            targets, is_list = views_of(
                *((arrays, True, "array") if out is None else (out, True, "out"))
            )
        if is_root and out is not None:
            check_fits(sources, targets, isinstance(arrays, (list, tuple)) == is_list)

        def move(step_s: float) -> None:
            for source, target in zip(sources, targets, strict=False):
                if source.address != target.address:
                    target.memory[:] = source.memory
            self._broadcast(targets, root, step_s)

        def finish(parts: list[View]) -> None:
            if targets is not sources:
                targets[0].memory[:] = parts[root].memory

        call = Call(
            Signature.of("broadcast", targets, is_list, root=root),
            move,
            arrays if out is None else out,
            None if is_list else (sources or targets)[0],
            finish,
        )
        return run(call, timeout_s, async_op)

    def _call_all_gather(
        self, run: Run, array: Any, out: Any, timeout_s: float, async_op: bool
    ) -> Any:
        source = row_major(_one(array, False, "array"))
        target = row_major(_one(out, True, "out"))
        _check_sizes(source, target, self.size, "all_gather: out must hold every rank's array")

        def move(step_s: float) -> None:
            self._all_gather(source, target, step_s)

        def finish(parts: list[View]) -> None:
            for rank, part in enumerate(parts):
                at = rank * source.nbytes
                target.memory[at : at + source.nbytes] = part.memory

        call = Call(Signature.of("all_gather", [source], False), move, out, source, finish)
        return run(call, timeout_s, async_op)

    def _call_gather(
        self, run: Run, array: Any, root: int, out: Any, timeout_s: float, async_op: bool
    ) -> Any:
        self._check_root(root)
        source = row_major(_one(array, False, "array"))
        target = None
        if self.rank == root:
            target = row_major(_one(out, True, "out"))
            _check_sizes(
                source, target, self.size, "gather: out must hold every rank's array on the root"
            )

        def move(step_s: float) -> None:
            self._gather(source, target, root, step_s)

        call = Call(Signature.of("gather", [source], False, root=root), move, out)
        return run(call, timeout_s, async_op)

    def _call_scatter(
        self, run: Run, array: Any, root: int, out: Any, timeout_s: float, async_op: bool
    ) -> Any:
        self._check_root(root)
        target = row_major(_one(out, True, "out"))
        source = None
        if self.rank == root:
            source = row_major(_one(array, False, "array"))
            _check_sizes(
                target,
                source,
                self.size,
                "scatter: the root's array must hold every rank's part",
            )

        def move(step_s: float) -> None:
            self._scatter(source, target, root, step_s)

        call = Call(Signature.of("scatter", [target], False, root=root), move, out)
        return run(call, timeout_s, async_op)

    def _call_reduce_scatter(
        self, run: Run, array: Any, op: str, out: Any, timeout_s: float, async_op: bool
    ) -> Any:
        _check_op(op)
        source = row_major(_one(array, False, "array"))
        target = row_major(_one(out, True, "out"))
        _check_sizes(
            target, source, self.size, "reduce_scatter: the array must hold one part per rank"
        )
        check_reducible(op, [source])

        def move(step_s: float) -> None:
            self._reduce_scatter(source, target, op, step_s)

        call = Call(Signature.of("reduce_scatter", [source], False, op), move, out)
        return run(call, timeout_s, async_op)

    def _call_all_to_all(
        self,
        run: Run,
        array: Any,
        out: Any,
        counts: Sequence[int],
        timeout_s: float,
        async_op: bool,
    ) -> Any:
        source = row_major(_one(array, False, "array"))
        target = row_major(_one(out, True, "out"))
        n = self.size
        signature = Signature.of("all_to_all", [source], False)
        if len(counts):
            if len(counts) != n * n:
                raise ValueError("counts must be a table n × n")
            table = [[int(counts[i * n + j]) for j in range(n)] for i in range(n)]
            signature = split_signature(source, list(counts))
        elif source.count % n:
            raise ValueError(
                f"all_to_all: {source.count} elements cannot be split among {n} ranks; pass splits="
            )
        else:
            table = [[source.count // n] * n for _ in range(n)]
        sent = sum(table[self.rank])
        received = sum(row[self.rank] for row in table)
        if source.dtype != target.dtype or (source.count, target.count) != (sent, received):
            raise ValueError(
                f"all_to_all: expected to send {sent} and receive {received} elements, got arrays "
                f"of {source.count} and {target.count}"
            )
        check_apart(source, target)

        def move(step_s: float) -> None:
            self._all_to_all(source, target, table, step_s)

        return run(Call(signature, move, out), timeout_s, async_op)

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

    # --- how it runs ----------------------------------------------------------------------------

    def _in_order(self, call: Call, timeout_s: float, async_op: bool) -> Any:
        site = source_line()
        return self._submit(
            self._queue,
            lambda: self._run_checked(call, site, timeout_s),
            call.result,
            timeout_s,
            async_op,
        )

    def _at_once(self, call: Call, timeout_s: float, async_op: bool) -> Any:
        _check_timeout(timeout_s)
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
        _check_timeout(timeout_s)
        self._check_usable()
        pending = calls.submit(task, result)
        if async_op:
            return pending
        try:
            return pending.wait()
        except KeyboardInterrupt:  # peers must not wait for what will not come
            self._lose(PeerFailureError(f"rank {self.rank} was interrupted", (self.rank,)))
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
            elif call.signature.op != "barrier":  # all have agreed: all are here
                call.move(timeout_s)

        self._guard(steps, call.signature)

    def _guard(self, steps: Callable[[], None], signature: Signature) -> None:
        """Run steps; what goes wrong half-way is the end of the communicator, on all ranks."""
        try:
            steps()
        except CollectiveMismatchError:
            raise
        except FastdistError as error:
            lost = self._explain(error, signature)
            self._lose(lost)
            raise lost from None
        except BaseException as error:
            self._lose(PeerFailureError(f"rank {self.rank} failed with {error!r}", (self.rank,)))
            raise

    def _agree(
        self, signature: Signature, site: str, payload: bytes, timeout_s: float
    ) -> list[bytes]:
        """Compare signatures; differing ones raise on every rank, before anything has moved.

        Returns:
            Every rank's payload.
        """
        self._sequence += 1
        self._last[self.rank] = signature
        own = signature.pack(self._sequence) + payload.ljust(_PAYLOAD_BYTES, b"\0")
        shared = self._share(own, timeout_s)
        records = [data[:RECORD_BYTES] for data in shared]
        self._last = [Signature.unpack(record)[1] for record in records]
        if records.count(records[0]) == len(records):
            return [data[RECORD_BYTES:] for data in shared]
        sites = self._share(pack_site(site), timeout_s)
        raise mismatch(self.rank, records, [unpack_site(text) for text in sites])

    def _explain(self, error: FastdistError, signature: Signature) -> FastdistError:
        """The error with what was called here, and what each rank called last."""
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

    def _lose(self, error: FastdistError) -> None:
        reason = (
            f"the communicator cannot be used any more on rank {self.rank}: an earlier call "
            "failed half-way; make a new one"
        )
        if self._become_unusable(reason):
            self._leave(error)

    def _become_unusable(self, reason: str) -> bool:
        with self._state:
            if self._unusable:
                return False
            self._unusable = reason
            return True

    def _check_usable(self) -> None:
        if self._unusable:
            raise FastdistError(self._unusable)

    def _check_root(self, root: int) -> None:
        if not 0 <= root < self.size:
            raise ValueError(f"root must be one of 0 to {self.size - 1}, got {root}")

    def _check_peer(self, peer: int) -> None:
        if not 0 <= peer < self.size or peer == self.rank:
            raise ValueError(
                f"the other rank must be one of 0 to {self.size - 1} and not this one, got {peer}"
            )

    # --- what subclasses do: move bytes. `step_s`: seconds that each step may wait --------------

    @abstractmethod
    def _share(self, record: bytes, step_s: float) -> list[bytes]:
        """Every rank's record, in rank order. All are as long as this one."""

    @abstractmethod
    def _reduce_payloads(self, parts: list[View], out: View, op: str) -> None:
        """Reduce every rank's array here, to the bits that `_all_reduce` would give."""

    @abstractmethod
    def _leave(self, error: FastdistError | None) -> None:
        """Let go of everything; tell the other ranks why, where it is an error."""

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
        """`table[i][j]`: elements from rank i to rank j."""

    def _barrier(self, step_s: float) -> None:
        self._share(b"\0", step_s)


def source_line() -> str:
    """The line of the user's source that made the call."""
    frame = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module != "fastdist" and not module.startswith("fastdist."):
            code = frame.f_code
            return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def _one(array: Any, writable: bool, argument: str) -> View:
    if isinstance(array, (list, tuple)):
        raise TypeError("expected one array, got a list")
    return view_of(array, writable, argument)


def _check_timeout(timeout_s: float) -> None:
    if math.isnan(timeout_s) or timeout_s <= 0:
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout_s:f}")


def _check_op(op: str) -> None:
    if op not in REDUCE_OPS:
        raise ValueError(f"op must be sum, mean, prod, min, max, and, or or xor, got {op!r}")


def _check_compression(compress: str, op: str, views: list[View]) -> None:
    if compress not in _COMPRESSIONS:
        raise ValueError(f"compress must be None, fp16, bf16 or fp8, got {compress}")
    if op not in ("sum", "mean"):
        raise ValueError(f'compress works with op="sum" or "mean", got op="{op}"')
    for view in views:
        if view.dtype not in ("float32", "float64"):
            raise TypeError(f"compress works on float32 and float64 arrays, got {view.dtype}")


def _check_sizes(small: View, large: View, ranks: int, rule: str) -> None:
    if small.dtype == large.dtype and small.count * ranks == large.count:
        return check_apart(small, large)
    raise ValueError(
        f"{rule} with {ranks} ranks, got {small.dtype} × {small.count} and "
        f"{large.dtype} × {large.count}"
    )
