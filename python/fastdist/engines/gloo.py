"""CPU arrays between machines, by torch.distributed's Gloo.

Every collective is made of exchanges in which each rank sends a range of its memory to each other
rank (Gloo's all_to_all), all at once. With n ranks of N bytes:

| collective | steps after the comparison of signatures | bytes that each rank sends |
|---|---|---|
| all_reduce, broadcast, all_gather up to 512 B | none: travels with the signature | (n-1)·548 |
| all_reduce up to 16 KiB | everybody's array to everybody | (n-1)·N |
| all_reduce | slices to their owners; results to everybody | 2·N·(n-1)/n |
| reduce | slices to their owners; results to the root | at most 2·N·(n-1)/n |
| reduce_scatter | parts to their owners | N·(n-1)/n |
| all_gather | Gloo's ring | (n-1)·N |
| broadcast | Gloo's tree | up to log2(n)·N |
| gather, scatter, all_to_all | one | what the call says |

One rank reduces each slice, in rank order (reduction.py): results are the same bits on every rank
and run after run, for every dtype and reduction, of which Gloo itself has but a few.

The process group is made directly from a store and belongs to this engine; the user's own use of
torch.distributed is not touched.
"""

from __future__ import annotations

import ctypes
import datetime
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from fastdist.engines.c10d import c10d
from fastdist.engines.checked import CheckedEngine, Run, source_line
from fastdist.engines.departures import Cause, Departures, StoreLostError
from fastdist.engines.engine import Bytes
from fastdist.engines.queues import CallQueue
from fastdist.engines.reduction import narrow, reduce_in_order
from fastdist.engines.signature import (
    RECORD_BYTES,
    Signature,
    pack_site,
    unpack_site,
)
from fastdist.engines.views import View, view_of
from fastdist.errors import (
    ClusterConfigError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    FastdistError,
    PeerFailureError,
)

_SMALL_BYTES = 16 << 10
_BUCKET_BYTES = 32 << 20
_CHUNK_BYTES = 8 << 20
_LEAST_SLICE_BYTES = 1 << 20
_LONGEST_S = 1e8
# How long ranks whose call fails wait for each other's explanations.
_GRACE_S = 0.3
_POLL_S = 0.02
# Gloo's thread drops its references a moment after the end of an operation.
_RELEASE_S = 0.05
_PATROL_S = 0.5
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 20e-6, 2e-3
_ADDRESS = re.compile(r"\[([0-9a-fA-F.:%]+)\]:[0-9]+")
_WIRE = {"fp16": "float16", "bf16": "bfloat16", "fp8": "float8_e4m3fn"}
_LARGEST_FP8_SUM = 421.0  # stays finite although every rank rounds its part up


class GlooEngine(CheckedEngine):
    """Ranks anywhere that a network connects.

    Args:
        store: torch's; with a prefix that only this communicator uses.
        rank: this rank.
        size: the number of ranks.
        address: of this machine, where the others can connect to.
        timeout_s: seconds to wait for the other ranks to connect.
        lanes_only: send, recv and subset are all that is ever called.
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
        self._departures = Departures(store, rank, size)
        self._in_flight = 0
        self._addresses: list[str] = []  # of all ranks
        self._group: Any = None if size == 1 or lanes_only else self._connect()
        self._lanes: dict[tuple[int, bool], _Lane] = {}
        self._lanes_lock = threading.Lock()

    def _connect(self) -> Any:
        gloo = c10d().ProcessGroupGloo
        device = gloo.create_device(hostname=self.address, lazy_init=False)
        options = gloo._Options()
        options._devices = [device]
        options._timeout = _duration(self._connect_s)
        options._threads = 2
        try:
            self._store.set(f"address/{self.rank}", self.address)
            store = c10d().PrefixStore("gloo", self._store)
            group = gloo(store, self.rank, self.size, options)
            keys = [f"address/{rank}" for rank in range(self.size)]
            self._addresses = [bytes(self._store.get(key)).decode() for key in keys]
            return group
        except RuntimeError as error:
            raise ClusterConfigError(
                f"rank {self.rank} of {self.size} could not connect to the other machines from "
                f"{self.address} within {self._connect_s:g} s: {_first_line(error)}"
            ) from None

    def empty(self, nbytes: int) -> Bytes:
        """Plain memory: Gloo sends from anywhere."""
        return np.empty(nbytes, np.uint8)

    def subset(self, groups: Sequence[Sequence[int]], timeout_s: float) -> GlooEngine | None:
        """Another process group, found through the same store."""
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

    # --- exchanges ------------------------------------------------------------------------------

    def _swap(
        self,
        incoming: Bytes,
        outgoing: Bytes,
        received: Sequence[int],
        sent: Sequence[int],
        step_s: float,
    ) -> None:
        """Send `sent[p]` bytes to each rank p and receive `received[p]`, one after the other."""
        self._finish(self._begin_swap(incoming, outgoing, received, sent, step_s), step_s)

    def _begin_swap(
        self,
        incoming: Bytes,
        outgoing: Bytes,
        received: Sequence[int],
        sent: Sequence[int],
        step_s: float,
    ) -> _Flight | None:
        """The same, in flight; ranks begin them in the same order."""
        if self.size == 1:
            incoming[:] = outgoing
            return None
        options = c10d().AllToAllOptions()
        options.timeout = _duration(step_s)
        tensors = [_tensor(incoming), _tensor(outgoing)]
        return self._begin(
            lambda group: group.alltoall_base(*tensors, list(received), list(sent), options),
            tensors,
            step_s,
        )

    def _share_bytes(self, own: Bytes, step_s: float) -> Bytes:
        """Every rank's bytes; all have as many."""
        n, length = self.size, own.nbytes
        everyone = np.empty(n * length, np.uint8)
        self._swap(everyone, np.tile(own, n), [length] * n, [length] * n, step_s)
        return everyone

    def _share(self, record: bytes, step_s: float) -> list[bytes]:
        rows = self._share_bytes(np.frombuffer(record, np.uint8), step_s)
        return [row.tobytes() for row in rows.reshape(self.size, len(record))]

    def _begin(
        self, start: Callable[[Any], Any], tensors: list[Any], step_s: float
    ) -> _Flight | None:
        group = self._group
        self._check_usable()
        try:
            return _Flight(start(group), group, tensors)
        except RuntimeError as error:
            raise self._blame(str(error), step_s) from None

    def _finish(self, flight: _Flight | None, step_s: float) -> None:
        if flight is None:
            return
        self._in_flight += 1
        try:
            flight.wait(self._patrol)
        except FastdistError:
            raise
        except RuntimeError as error:
            raise self._blame(str(error), step_s) from None
        finally:
            self._in_flight -= 1

    def _patrol(self) -> None:
        """Look around while a call waits: was the communicator given up, here or elsewhere?"""
        self._check_usable()
        try:
            causes = self._departures.causes()
        except StoreLostError:
            return  # Gloo notices by itself whom that concerns
        if causes:
            raise self._adopt(*min(causes.items()))

    # --- reductions -----------------------------------------------------------------------------

    def _all_reduce(
        self, ins: list[View], outs: list[View], op: str, compress: str | None, step_s: float
    ) -> None:
        if compress is not None:
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
        # Machines of different kinds may round a complex product differently: one does it.
        exact = op != "prod" or not source.dtype.startswith("complex")
        if source.nbytes <= _SMALL_BYTES and exact:
            everyone = self._share_bytes(source.memory, step_s)
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
        # The reduction of one chunk overlaps the transfer of the next, and two chunks' memory
        # serves all of them.
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
        """This rank's slice, reduced; and the bytes of every rank's slice."""
        n, counts = self.size, self.slice_bytes(source)
        staging = np.empty(n * counts[self.rank], np.uint8)
        self._swap(staging, source.memory, [counts[self.rank]] * n, counts, step_s)
        parts = self._parts(source, staging)
        reduce_in_order(parts, op, parts[0])
        return parts[0], counts

    def slice_bytes(self, source: View) -> list[int]:
        """How much of an array each rank reduces."""
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
        """Per array, the power of two that maps n times the largest magnitude into range."""
        largest = np.array([np.abs(v.flat).max(initial=0) for v in ins], np.float32)
        view = View(largest, "float32")
        self._reduce_everywhere(view, view, "max", step_s)
        most = largest * self.size
        with np.errstate(all="ignore"):
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
            self._swap(
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
        self._swap(staging, source.memory, [length] * n, [length] * n, step_s)
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
            self._broadcast_bytes(memory, root, step_s)
            if len(views) > 1 and self.rank != root:
                _unpack(memory, views)

    def _broadcast_bytes(self, memory: Bytes, root: int, step_s: float) -> None:
        if self.size == 1 or memory.nbytes == 0:
            return
        options = c10d().BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        options.timeout = _duration(step_s)
        tensors = [_tensor(memory)]
        flight = self._begin(lambda group: group.broadcast(tensors, options), tensors, step_s)
        self._finish(flight, step_s)

    def _all_gather(self, source: View, target: View, step_s: float) -> None:
        if self.size == 1 or source.count == 0:
            target.memory[:] = source.memory
            return
        options = c10d().AllgatherOptions()
        options.timeout = _duration(step_s)
        tensors = [_tensor(target.memory), _tensor(source.memory)]
        flight = self._begin(
            lambda group: group._allgather_base(*tensors, options), tensors, step_s
        )
        self._finish(flight, step_s)

    def _gather(self, source: View, target: View | None, root: int, step_s: float) -> None:
        if source.count == 0:
            return
        n, length = self.size, source.nbytes
        incoming = np.empty(0, np.uint8) if target is None else target.memory
        received = [0 if target is None else length] * n
        sent = [length if r == root else 0 for r in range(n)]
        self._swap(incoming, source.memory, received, sent, step_s)

    def _scatter(self, source: View | None, target: View, root: int, step_s: float) -> None:
        if target.count == 0:
            return
        n, length = self.size, target.nbytes
        outgoing = np.empty(0, np.uint8) if source is None else source.memory
        received = [length if r == root else 0 for r in range(n)]
        self._swap(target.memory, outgoing, received, [0 if source is None else length] * n, step_s)

    def _all_to_all(
        self, source: View, target: View, table: list[list[int]], step_s: float
    ) -> None:
        if not any(map(any, table)):
            return
        item = source.flat.itemsize
        received = [row[self.rank] * item for row in table]
        sent = [count * item for count in table[self.rank]]
        self._swap(target.memory, source.memory, received, sent, step_s)

    # --- send and recv: a group of two ranks for each direction, made when first used -----------

    def _call_send(self, run: Run, array: Any, dst: int, timeout_s: float, async_op: bool) -> Any:
        return self._call_transfer("send", array, dst, timeout_s, async_op)

    def _call_recv(self, run: Run, array: Any, src: int, timeout_s: float, async_op: bool) -> Any:
        return self._call_transfer("recv", array, src, timeout_s, async_op)

    def _call_transfer(
        self, op: str, array: Any, peer: int, timeout_s: float, async_op: bool
    ) -> Any:
        if isinstance(array, (list, tuple)):
            raise TypeError("expected one array, got a list")
        view = view_of(array, op == "recv", "array")
        self._check_peer(peer)
        with self._lanes_lock:
            lane = self._lanes.setdefault((peer, op == "send"), _Lane(self.rank, peer))
        signature = Signature.of(op, [view], False, root=peer)
        site = source_line()

        def transfer() -> None:
            self._check_usable()
            self._guard(lambda: self._transfer(lane, signature, site, view, timeout_s), signature)

        return self._submit(lane.queue, transfer, array, timeout_s, async_op)

    def _transfer(
        self, lane: _Lane, signature: Signature, site: str, view: View, step_s: float
    ) -> None:
        """Both compare what they call, then the bytes go."""
        sends = signature.op == "send"
        if lane.pair is None:
            lane.pair = self._meet(lane.peer, sends, step_s)
        lane.transfers += 1
        try:
            records = lane.pair._share(signature.pack(lane.transfers) + pack_site(site), step_s)
            theirs = records[1 if sends else 0]
            number, other = Signature.unpack(theirs[:RECORD_BYTES])
            if replace(other, op=signature.op, root=signature.root) != signature:
                raise self._transfer_mismatch(
                    lane.peer,
                    number,
                    (signature, site),
                    (other, unpack_site(theirs[RECORD_BYTES:])),
                )
            if view.nbytes == 0:
                return
            nothing = np.empty(0, np.uint8)
            if sends:
                lane.pair._swap(nothing, view.memory, [0, 0], [0, view.nbytes], step_s)
            else:
                lane.pair._swap(view.memory, nothing, [view.nbytes, 0], [0, 0], step_s)
        except CollectiveMismatchError:
            raise
        except FastdistError as error:
            self._patrol()  # says more, where the whole communicator is lost
            text = str(error).replace(f"rank {error.ranks[0]}", f"rank {lane.peer}", 1)
            raise type(error)(text, (lane.peer,)) from None

    def _meet(self, peer: int, sends: bool, step_s: float) -> GlooEngine:
        """The group of this rank and a peer; both wait here for the other, and can be stopped."""
        src, dst = (self.rank, peer) if sends else (peer, self.rank)
        store = c10d().PrefixStore(f"lane/{src}-{dst}", self._store)
        try:
            store.set(f"here/{self.rank}", b"1")
            began = patrolled = time.monotonic()
            while not store.check([f"here/{peer}"]):
                now = time.monotonic()
                if now - began > step_s:
                    raise CollectiveTimeoutError(
                        f"timed out after {step_s:.1f} s waiting for rank {peer}", (peer,)
                    )
                if now - patrolled > _PATROL_S:
                    patrolled = now
                    self._patrol()
                    if peer in self._departures.closed():
                        raise PeerFailureError(f"rank {peer} has closed the communicator", (peer,))
                time.sleep(_POLL_S)
        except FastdistError:
            raise
        except (RuntimeError, StoreLostError):
            raise PeerFailureError(f"rank {peer} cannot be reached", (peer,)) from None
        return GlooEngine(store, int(not sends), 2, self.address, self._connect_s)

    def _transfer_mismatch(
        self, peer: int, number: int, own: tuple[Signature, str], theirs: tuple[Signature, str]
    ) -> CollectiveMismatchError:
        lines = [
            f"\n  rank {rank}: {signature}" + (f" at {site}" if site else "")
            for rank, (signature, site) in ((self.rank, own), (peer, theirs))
        ]
        return CollectiveMismatchError(
            f"send and recv do not fit (transfer {number} between these ranks):" + "".join(lines),
            (peer,),
        )

    # --- failure --------------------------------------------------------------------------------

    def _blame(self, message: str, step_s: float) -> FastdistError:
        """Find out why Gloo gave up, and about whom."""
        timed_out = "timed out" in message.lower() or "timeout" in message.lower()
        suspect = self._rank_at(message)
        if self.size == 2:
            suspect = 1 - self.rank
        try:
            self._departures.notice("timeout" if timed_out else "closure")
            cause, missing = self._inquire(timed_out, suspect)
        except StoreLostError:  # and with it the rank that has it
            cause, missing = None, [0 if suspect is None else suspect]
        if cause is not None:
            return cause
        if timed_out:
            late = missing if suspect is None else [suspect]
            names = ", ".join(map(str, late))
            return CollectiveTimeoutError(
                f"timed out after {step_s:.1f} s waiting for rank {names}", tuple(late)
            )
        gone = missing if suspect is None else [suspect]
        names = ", ".join(map(str, gone)) or "of another machine"
        return PeerFailureError(f"rank {names} has died or cannot be reached", tuple(gone))

    def _inquire(
        self, timed_out: bool, suspect: int | None
    ) -> tuple[FastdistError | None, list[int]]:
        """What other ranks say; or the ranks that say nothing at all."""
        until = time.monotonic() + _GRACE_S
        while True:
            causes = self._departures.causes()
            if causes:
                return self._adopt(*min(causes.items())), []
            closed = self._departures.closed()
            if closed and not timed_out:
                text = f"rank {closed[0]} has closed the communicator"
                return PeerFailureError(text, (closed[0],)), []
            noticed = self._departures.noticed()
            silent = [r for r in range(self.size) if r != self.rank and r not in noticed]
            # A timeout needs the grace to tell those who are late from those who wait as we do.
            if not timed_out and suspect in silent:
                return None, silent
            if time.monotonic() > until:
                if timed_out and not silent:  # the late are those who found their peers gone
                    silent = [r for r, what in noticed.items() if what == "closure"]
                return None, silent
            time.sleep(_POLL_S)

    def _adopt(self, rank: int, cause: Cause) -> FastdistError:
        seen = "" if rank in cause.ranks else f" (noticed by rank {rank})"
        return replace(cause, text=cause.text + seen).error()

    def _rank_at(self, message: str) -> int | None:
        """The only rank at the address in one of Gloo's messages."""
        found = _ADDRESS.search(message)
        ranks = [r for r, address in enumerate(self._addresses) if found and address == found[1]]
        return ranks[0] if len(ranks) == 1 and ranks != [self.rank] else None

    def _leave(self, error: FastdistError | None) -> None:
        if self.size > 1:
            if error is None and not self._in_flight:
                self._departures.close()
            elif error is None:
                text = f"rank {self.rank} has closed the communicator"
                self._departures.post(Cause(False, (self.rank,), text))
            else:
                self._departures.post(Cause.of(error))
        self._group = None  # closes the connections, once no call uses them
        with self._lanes_lock:
            lanes = list(self._lanes.values())
        for lane in lanes:
            if lane.pair is not None:
                lane.pair.close()


class _Flight:
    """An operation of Gloo in flight; it holds the process group and the arrays until it ends."""

    def __init__(self, work: Any, group: Any, tensors: list[Any]) -> None:
        self._work = work
        self._group = group
        self._tensors = tensors

    def wait(self, patrol: Callable[[], None]) -> None:
        """Wait for the end.

        Gloo's own wait can neither be given up nor survives the end of the interpreter, so this
        looks again and again, ever less often, and now and then lets `patrol` look around.

        Raises:
            RuntimeError: the operation failed.
            FastdistError: what `patrol` raised; the operation is left to itself.
        """
        began = patrolled = time.monotonic()
        while not self._work.is_completed():
            now = time.monotonic()
            if now - patrolled > _PATROL_S:
                patrolled = now
                try:
                    patrol()
                except BaseException:
                    # For ever: who drops a process group waits for its operations.
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
                    raise
            time.sleep(min(max((now - began) / 16, _SHORTEST_SLEEP_S), _LONGEST_SLEEP_S))
        self._work.wait()
        self._work = None
        until = time.monotonic() + _RELEASE_S
        while any(t._use_count() > 1 for t in self._tensors) and time.monotonic() < until:
            time.sleep(0)
        self._tensors.clear()


class _Slices:
    """A chunk of an all_reduce: slices go to their owners, and results to everybody."""

    def __init__(self, engine: GlooEngine, source: View, target: View) -> None:
        self._engine = engine
        self._source = source
        self._target = target
        self._counts = engine.slice_bytes(source)
        self._own = self._counts[engine.rank]
        self._flight: _Flight | None = None
        self._staging = np.empty(0, np.uint8)

    def memory(self) -> Bytes:
        """What this chunk or a smaller one needs."""
        return np.empty(2 * self._engine.size * max(self._counts), np.uint8)

    def scatter(self, memory: Bytes, step_s: float) -> None:
        """Begin to send each slice to its owner."""
        n, own = self._engine.size, self._own
        half = memory.nbytes // 2
        self._staging, self._copies = memory[: n * own], memory[half : half + n * own]
        self._flight = self._engine._begin_swap(
            self._staging, self._source.memory, [own] * n, self._counts, step_s
        )

    def reduce_and_spread(self, op: str, step_s: float) -> None:
        """Reduce the own slice, and begin to send it to everybody."""
        n, own = self._engine.size, self._own
        self._engine._finish(self._flight, step_s)
        parts = self._engine._parts(self._source, self._staging)
        reduce_in_order(parts, op, parts[0])
        self._copies.reshape(n, own)[:] = parts[0].memory
        self._flight = self._engine._begin_swap(
            self._target.memory, self._copies, self._counts, [own] * n, step_s
        )

    def finish(self, step_s: float) -> None:
        """Wait for everybody's results."""
        self._engine._finish(self._flight, step_s)


class _Lane:
    """Transfers with one rank in one direction, in order."""

    def __init__(self, rank: int, peer: int) -> None:
        self.peer = peer
        self.transfers = 0
        self.pair: GlooEngine | None = None  # the sender is its rank 0
        self.queue = CallQueue(f"fastdist rank {rank} with {peer}")


def _duration(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=max(0.001, min(seconds, _LONGEST_S)))


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


def _tensor(memory: Bytes) -> Any:
    import torch

    return torch.from_numpy(memory)


def _buckets(views: Sequence[View]) -> Iterator[list[int]]:
    """Indices of arrays of one dtype that travel together: each dtype's in order."""
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
