"""The engine for CPU arrays between machines: torch.distributed's Gloo.

Collectives consist of exchanges, in which each rank sends a range of its memory to every other rank
at the same time (Gloo's all_to_all). With n ranks of N bytes:

| collective | steps after the comparison of signatures | bytes that each rank sends |
|---|---|---|
| all_reduce, broadcast, all_gather up to 512 B | none: travels with the signature | (n-1)·548 |
| all_reduce up to 16 KiB | all arrays to all ranks | (n-1)·N |
| all_reduce | slices to their owners; results to all ranks | 2·N·(n-1)/n |
| reduce | slices to their owners; results to the root | at most 2·N·(n-1)/n |
| reduce_scatter | parts to their owners | N·(n-1)/n |
| all_gather | Gloo's ring | (n-1)·N |
| broadcast | Gloo's tree | up to log2(n)·N |
| gather, scatter, all_to_all | one exchange | the arrays of the call |

One rank reduces each slice, in rank order (reduction.py), so that results are the same bits on
every rank and in every run. All dtypes and reductions work, although Gloo itself has only a few.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import numpy as np

from fastdist.collectives.engines.c10d import c10d
from fastdist.collectives.engines.checked import CheckedEngine, Run, source_line
from fastdist.collectives.engines.engine import Bytes
from fastdist.collectives.engines.failure_board import FailureBoard, StoreLostError
from fastdist.collectives.engines.gloo_group import GlooGroup, GlooOperation, error_from
from fastdist.collectives.engines.gloo_lane import GlooLane
from fastdist.collectives.engines.reduction import narrow, reduce_in_order
from fastdist.collectives.engines.signature import Signature
from fastdist.collectives.engines.views import Arrays, View, views_of
from fastdist.errors import FastdistError

_SMALL_BYTES = 16 << 10
_BUCKET_BYTES = 32 << 20
_CHUNK_BYTES = 8 << 20
_LEAST_SLICE_BYTES = 1 << 20
_WIRE = {"fp16": "float16", "bf16": "bfloat16", "fp8": "float8_e4m3fn"}
_LARGEST_FP8_SUM = 421.0  # stays finite although every rank rounds its part up


@final
class GlooEngine(CheckedEngine):
    """Ranks on any machines of one network.

    Args:
        store: torch's store, with a prefix that only this communicator uses.
        rank: this rank.
        size: the number of ranks.
        address: address of this machine, reachable from the others.
        timeout_s: seconds to wait for the other ranks to connect.
        lanes_only: True if only send, recv and subset will be called.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        address: str,
        timeout_s: float,
        lanes_only: bool = False,
    ) -> None:
        super().__init__(rank, size)
        self._store = store
        self.address = address
        self._connect_s = timeout_s
        self._lanes_only = lanes_only
        self._subsets = 0
        self._board = FailureBoard(store, rank, size)
        self._net = GlooGroup(
            store,
            rank,
            size,
            address,
            self._board,
            self._poll_failures,
            None if lanes_only else timeout_s,
        )
        self._watch: Callable[[], None] | None = None
        self._lanes: dict[tuple[int, bool], GlooLane] = {}
        self._lanes_lock = threading.Lock()

    def watch(self, poll: Callable[[], None] | None) -> None:
        """Set a function to call regularly while a call waits; its exception ends the wait."""
        self._watch = poll

    def empty(self, nbytes: int) -> Bytes:
        """Allocate plain memory: Gloo sends from any memory."""
        return np.empty(nbytes, np.uint8)

    def subset(self, groups: Sequence[Sequence[int]], timeout_s: float) -> GlooEngine | None:
        """Make another process group, which connects through the same store."""
        self._subsets += 1
        for group in groups:
            if self.rank in group:
                name = f"subset{self._subsets}/{'-'.join(map(str, group))}"
                store = c10d().PrefixStore(name, self._store)
                rank = list(group).index(self.rank)
                return GlooEngine(
                    store, rank, len(group), self.address, self._connect_s, self._lanes_only
                )
        return None

    # --- reductions -----------------------------------------------------------------------------

    def _all_reduce(
        self, ins: list[View], outs: list[View], op: str, compress: str | None, step_s: float
    ) -> None:
        if compress is not None:
            with np.errstate(all="ignore"):  # values outside the format's range become inf or NaN
                return self._all_reduce_compressed(ins, outs, op, _WIRE[compress], step_s)
        for parts in _buckets(ins):
            if len(parts) == 1:
                self._reduce_everywhere(ins[parts[0]], outs[parts[0]], op, step_s)
                continue
            bucket = ins[parts[0]].new(sum(ins[i].count for i in parts))
            _pack([ins[i] for i in parts], bucket.memory)
            self._reduce_everywhere(bucket, bucket, op, step_s)
            _unpack(bucket.memory, [outs[i] for i in parts])

    def _reduce_everywhere(self, source: View, target: View, op: str, step_s: float) -> None:
        if source.count == 0:
            return
        # CPUs of different kinds may round a complex product differently: one rank computes it.
        exact = op != "prod" or not source.dtype.startswith("complex")
        if source.nbytes <= _SMALL_BYTES and exact:
            everyone = self._net.all_gather_direct(source.memory, step_s)
            reduce_in_order(self._parts(source, everyone), op, target)
            return
        chunk = max(1, max(_CHUNK_BYTES, self.size * _LEAST_SLICE_BYTES) // source.flat.itemsize)
        starts = range(0, source.count, chunk)
        slices = [
            _Slices(
                self, source.part(at, min(at + chunk, source.count)), target.part(at, at + chunk)
            )
            for at in starts
        ]
        # The reduction of one chunk overlaps the transfer of the next chunk; the chunks take turns
        # in two pieces of memory.
        memory = [slices[0].memory() for _ in slices[:2]]
        slices[0].scatter(memory[0], step_s)
        for k, own in enumerate(slices):
            if k >= 1:
                slices[k - 1].finish(step_s)
            if k + 1 < len(slices):
                slices[k + 1].scatter(memory[(k + 1) % 2], step_s)
            own.reduce_and_spread(op, step_s)
        slices[-1].finish(step_s)

    def _reduce_payloads(self, parts: list[View], out: View, op: str) -> None:
        reduce_in_order(parts, op, out)

    def _reduce_slice(self, source: View, op: str, step_s: float) -> tuple[View, list[int]]:
        """Reduce this rank's slice; return it, and the number of bytes of every rank's slice."""
        n, counts = self.size, self.slice_bytes(source)
        staging = np.empty(n * counts[self.rank], np.uint8)
        self._net.exchange(staging, source.memory, [counts[self.rank]] * n, counts, step_s)
        parts = self._parts(source, staging)
        reduce_in_order(parts, op, parts[0])
        return parts[0], counts

    def slice_bytes(self, source: View) -> list[int]:
        """Return the number of bytes of an array that each rank reduces."""
        n, item = self.size, source.flat.itemsize
        return [(source.count // n + (r < source.count % n)) * item for r in range(n)]

    def _parts(self, kind: View, memory: Bytes) -> list[View]:
        rows = memory.reshape(self.size, -1)
        return [View(kind.like(row), kind.dtype) for row in rows]

    def _all_reduce_compressed(
        self, ins: list[View], outs: list[View], op: str, wire: str, step_s: float
    ) -> None:
        import torch

        scales = np.ones(len(ins), np.float32)
        if wire == "float8_e4m3fn":
            scales = self._agree_on_scales(ins, step_s)
        kind = getattr(torch, wire)
        for part in _buckets([View(view.flat, "float32") for view in ins]):
            flat = torch.empty(sum(ins[i].count for i in part), dtype=kind)
            bucket = View(flat.numpy() if wire == "float16" else flat, wire)
            at = 0
            for i in part:
                scaled = (ins[i].flat * ins[i].flat.dtype.type(scales[i])).astype(np.float32)
                narrow(scaled, bucket.part(at, at + ins[i].count))
                at += ins[i].count
            self._reduce_everywhere(bucket, bucket, op, step_s)
            at = 0
            for i in part:
                got = flat[at : at + outs[i].count].to(torch.float32).numpy()
                np.multiply(got, 1 / scales[i], out=outs[i].flat, dtype=outs[i].flat.dtype)
                at += outs[i].count

    def _agree_on_scales(self, ins: list[View], step_s: float) -> np.ndarray[Any, Any]:
        """Return, per array, the power of two that maps n × its largest magnitude into range."""
        largest = np.array([np.abs(v.flat).max(initial=0) for v in ins], np.float32)
        view = View(largest, "float32")
        self._reduce_everywhere(view, view, "max", step_s)
        most = largest * self.size
        scales = np.exp2(np.floor(np.log2(np.float32(_LARGEST_FP8_SUM) / most)))
        scales = np.where(np.isfinite(most) & (most > 0), scales, 1).astype(np.float32)
        clipped: np.ndarray[Any, Any] = np.clip(scales, np.float32(2.0**-126), np.float32(2.0**126))
        return clipped

    def _reduce(self, ins: list[View], outs: list[View], op: str, root: int, step_s: float) -> None:
        n = self.size
        for parts in _buckets(ins):
            views = [ins[i] for i in parts]
            bucket = views[0]
            if len(parts) > 1:
                bucket = views[0].new(sum(view.count for view in views))
                _pack(views, bucket.memory)
            if bucket.count == 0:
                continue
            own, counts = self._reduce_slice(bucket, op, step_s)
            sent = [own.nbytes if r == root else 0 for r in range(n)]
            is_root = self.rank == root
            whole = np.empty(bucket.nbytes if is_root else 0, np.uint8)
            self._net.exchange(
                whole,
                own.memory if own.nbytes else whole[:0],
                counts if is_root else [0] * n,
                sent,
                step_s,
            )
            if is_root:
                _unpack(whole, [outs[i] for i in parts])

    def _reduce_scatter(self, source: View, target: View, op: str, step_s: float) -> None:
        if source.count == 0:
            return
        n, length = self.size, target.nbytes
        staging = np.empty(n * length, np.uint8)
        self._net.exchange(staging, source.memory, [length] * n, [length] * n, step_s)
        reduce_in_order(self._parts(source, staging), op, target)

    # --- movement -------------------------------------------------------------------------------

    def _broadcast(self, arrays: list[View], root: int, step_s: float) -> None:
        for parts in _buckets([View(view.memory, "uint8") for view in arrays]):
            views = [arrays[i] for i in parts]
            memory = views[0].memory
            if len(views) > 1:
                memory = np.empty(sum(view.nbytes for view in views), np.uint8)
                if self.rank == root:
                    _pack(views, memory)
            self._net.broadcast(memory, root, step_s)
            if len(views) > 1 and self.rank != root:
                _unpack(memory, views)

    def _all_gather(self, source: View, target: View, step_s: float) -> None:
        self._net.all_gather(source.memory, target.memory, step_s)

    def _gather(self, source: View, target: View | None, root: int, step_s: float) -> None:
        if source.count == 0:
            return
        n, length = self.size, source.nbytes
        incoming = np.empty(0, np.uint8) if target is None else target.memory
        received = [0 if target is None else length] * n
        sent = [length if r == root else 0 for r in range(n)]
        self._net.exchange(incoming, source.memory, received, sent, step_s)

    def _scatter(self, source: View | None, target: View, root: int, step_s: float) -> None:
        if target.count == 0:
            return
        n, length = self.size, target.nbytes
        outgoing = np.empty(0, np.uint8) if source is None else source.memory
        received = [length if r == root else 0 for r in range(n)]
        self._net.exchange(
            target.memory, outgoing, received, [0 if source is None else length] * n, step_s
        )

    def _all_to_all(
        self, source: View, target: View, table: list[list[int]], step_s: float
    ) -> None:
        if not any(map(any, table)):
            return
        item = source.flat.itemsize
        received = [row[self.rank] * item for row in table]
        sent = [count * item for count in table[self.rank]]
        self._net.exchange(target.memory, source.memory, received, sent, step_s)

    # --- comparison, send and recv, failure -----------------------------------------------------

    def _all_gather_records(self, record: bytes, step_s: float) -> list[bytes]:
        rows = self._net.all_gather_direct(np.frombuffer(record, np.uint8), step_s)
        return [row.tobytes() for row in rows.reshape(self.size, len(record))]

    def _call_send(self, run: Run, array: Any, dst: int, timeout_s: float, async_op: bool) -> Any:
        return self._call_transfer("send", array, dst, timeout_s, async_op)

    def _call_recv(self, run: Run, array: Any, src: int, timeout_s: float, async_op: bool) -> Any:
        return self._call_transfer("recv", array, src, timeout_s, async_op)

    def _call_transfer(
        self, op: str, array: Any, peer: int, timeout_s: float, async_op: bool
    ) -> Any:
        peer = self._peer(peer, op)
        views = views_of(array, op == "recv", "array").views
        lane = self._lane(peer, op == "send")
        site = source_line()

        def transfer(signature: Signature, view: View) -> None:
            self._check_usable()
            self._guard(lambda: lane.transfer(signature, site, view, timeout_s), signature)

        def transfer_all() -> None:
            for view in views:
                transfer(Signature.of(op, Arrays([view], False, "array"), root=peer), view)

        return self._submit(lane.queue, transfer_all, array, timeout_s, async_op)

    def _lane(self, peer: int, sends: bool) -> GlooLane:
        with self._lanes_lock:
            if (peer, sends) not in self._lanes:
                self._lanes[peer, sends] = GlooLane(
                    self._store,
                    self.rank,
                    peer,
                    sends,
                    self.address,
                    self._board,
                    self._poll_failures,
                    self._connect_s,
                )
            return self._lanes[peer, sends]

    def _poll_failures(self) -> None:
        """Raise if the communicator was lost here or on another rank, while a call waits."""
        self._check_usable()
        if self._watch is not None:
            self._watch()
        try:
            causes = self._board.causes()
        except StoreLostError:
            return  # Gloo itself reports the ranks that are lost with the store
        if causes:
            raise error_from(causes)

    def _disconnect(self, error: FastdistError | None) -> None:
        self._net.close(error)
        with self._lanes_lock:
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.close()


class _Slices:
    """A chunk of an all_reduce: slices go to their owners, results go to all ranks."""

    def __init__(self, engine: GlooEngine, source: View, target: View) -> None:
        self._net = engine._net
        self._parts = engine._parts
        self._source = source
        self._target = target
        self._counts = engine.slice_bytes(source)
        self._own = self._counts[engine.rank]
        self._operation: GlooOperation | None = None
        self._staging = np.empty(0, np.uint8)

    def memory(self) -> Bytes:
        """Allocate the memory that this chunk or a smaller one needs."""
        return np.empty(2 * self._net.size * max(self._counts), np.uint8)

    def scatter(self, memory: Bytes, step_s: float) -> None:
        """Begin to send each slice to its owner."""
        n, own = self._net.size, self._own
        half = memory.nbytes // 2
        self._staging, self._copies = memory[: n * own], memory[half : half + n * own]
        self._operation = self._net.begin_exchange(
            self._staging, self._source.memory, [own] * n, self._counts, step_s
        )

    def reduce_and_spread(self, op: str, step_s: float) -> None:
        """Reduce this rank's slice, and begin to send it to all ranks."""
        n, own = self._net.size, self._own
        self._net.finish(self._operation, step_s)
        parts = self._parts(self._source, self._staging)
        reduce_in_order(parts, op, parts[0])
        self._copies.reshape(n, own)[:] = parts[0].memory
        self._operation = self._net.begin_exchange(
            self._target.memory, self._copies, self._counts, [own] * n, step_s
        )

    def finish(self, step_s: float) -> None:
        """Wait for the results of all ranks."""
        self._net.finish(self._operation, step_s)


def _buckets(views: Sequence[View]) -> Iterator[list[int]]:
    """Yield buckets: indices of arrays of one dtype that are sent together, in order."""
    open_buckets: dict[str, tuple[list[int], int]] = {}
    for i, view in enumerate(views):
        indices, nbytes = open_buckets.get(view.dtype, ([], 0))
        if indices and nbytes + view.nbytes > _BUCKET_BYTES:
            yield indices
            indices, nbytes = [], 0
        open_buckets[view.dtype] = ([*indices, i], nbytes + view.nbytes)
    yield from (indices for indices, _ in open_buckets.values())


def _pack(views: Sequence[View], memory: Bytes) -> None:
    at = 0
    for view in views:
        memory[at : at + view.nbytes] = view.memory
        at += view.nbytes


def _unpack(memory: Bytes, views: Sequence[View]) -> None:
    at = 0
    for view in views:
        view.memory[:] = memory[at : at + view.nbytes]
        at += view.nbytes
