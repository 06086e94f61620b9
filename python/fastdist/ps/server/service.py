"""The requests that a parameter server answers, independent of the transport."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import fastdist._core as _core
from fastdist.link.stream import require_whole
from fastdist.ps.server.changes import APPLIED, DISCARDED, Deduplicator, Rounds, sums_of
from fastdist.ps.server.registry import Registry
from fastdist.ps.server.send_buffers import SendBuffers
from fastdist.ps.wire.protocol import (
    APPLIED_ONCE,
    MAX_JSON_BYTES,
    PART_SIZE,
    VERSION,
    Array,
    BusyError,
    Entry,
    Header,
    Kinds,
    Op,
    Place,
    Status,
    extents_of,
    padded,
    status_of,
    unpack_names,
    unpack_values,
)
from fastdist.ps.wire.snapshot import Part, require_checksums, restore, save
from fastdist.ps.wire.specs import RowsSpec, Spec, from_json

_LENT_BYTES = 1 << 18
_MAX_LR = float(np.finfo(np.float32).max)
_OTHER_VERSION = (
    f"the server speaks version {VERSION} of the protocol, the client version {{}}; use the same "
    "version of fastdist"
)
_Wanted = tuple[Sequence[tuple[Spec, Any]], Sequence[Place], Kinds]


class Service:
    """Keeps variables and tables, and answers requests. Thread-safe."""

    def __init__(self, max_staged_bytes: int) -> None:
        self._registry = Registry()
        self.ended = threading.Event()
        self._max_staged_bytes = max_staged_bytes
        self._rounds = Rounds(max_staged_bytes)
        self._deduplicator = Deduplicator()
        self._counts = {"requests": 0, "repeated": 0, "malformed": 0}
        self._nonfinite: Counter[int] = Counter()  # of elements, by the number of their object
        self._counts_lock = threading.Lock()
        self._started = time.monotonic()

    def stats(self) -> dict[str, Any]:
        """Return what the server keeps and has done.

        Returns:
            requests, repeated, malformed: counts; uptime_s; rounds: open, nbytes; objects: for each
            its name, kind, nbytes, steps (pushes), nonfinite (elements of gradients that were NaN
            or infinite), and for tables rows.
        """
        objects = []
        for number, spec, stored in self._registry.all():
            entry = {"name": spec.name, "kind": type(spec).__name__, "nbytes": stored.nbytes}
            entry["steps"] = stored.step
            entry["nonfinite"] = self._nonfinite[number]
            if isinstance(spec, RowsSpec):
                entry["rows"] = len(stored)
            objects.append(entry)
        with self._counts_lock:
            counts = dict(self._counts)
        return {
            **counts,
            "uptime_s": time.monotonic() - self._started,
            "rounds": self._rounds.stats(),
            "objects": objects,
        }

    def answer(
        self, frames: Sequence[memoryview], buffers: SendBuffers
    ) -> tuple[Header, Any] | None:
        """Return the header and body of the reply to a message; None if it gets no reply."""
        self._increment("requests")
        try:
            header = Header.unpack(frames[0] if frames else b"")
            if header.version != VERSION:
                return _reply(header, Status.FAILED), _OTHER_VERSION.format(header.version).encode()
            op = Op(header.kind)
            if len(frames) - 1 not in op.frames:
                raise ValueError(f"{op.name} with {len(frames) - 1} frames")
        except ValueError:
            self._increment("malformed")
            return None
        try:
            require_whole(frames, op.name)
            if op not in APPLIED_ONCE:
                return self._read(op, header, frames[1:], buffers)
            wanted = None
            if len(frames) > 3:
                wanted = found, places, _ = self._wanted(frames[3])
                _check_ids(found, places)
            is_new, reply = self._deduplicator.begin(header.client, header.number, header.floor)
            if is_new:
                reply = self._change(op, header, frames[1:3])
            else:
                self._increment("repeated")
            if reply is None:
                raise BusyError(f"{op.name} is being applied")
            if wanted is not None:
                try:
                    return _reply(header), self._read_values(header, wanted, buffers)
                except MemoryError as error:  # it was applied, and may only be asked for again
                    raise BusyError(str(error)) from error
            return _reply(header), reply or None
        except Exception as error:
            return _reply(header, status_of(error)), (str(error) or repr(error)).encode()

    def _increment(self, what: str) -> None:
        with self._counts_lock:
            self._counts[what] += 1

    # --- requests -------------------------------------------------------------------------------

    def _read(
        self, op: Op, header: Header, frames: Sequence[memoryview], buffers: SendBuffers
    ) -> tuple[Header, Any]:
        if op is Op.READ:
            return _reply(header), self._read_values(header, self._wanted(frames[0]), buffers)
        answer: Any = {}
        if op is Op.STATS:
            answer = self.stats()
        elif op is Op.CREATE:
            answer = self._create(frames)
        elif op is Op.END:
            self.ended.set()
        else:
            self._rounds.discard([int(round_) for round_ in _json(frames[0], list)])
        return _reply(header), json.dumps(answer).encode()

    def _wanted(self, names: memoryview) -> _Wanted:
        """Return what a message reads: the objects, the places in them, and the values' kinds."""
        entries, places = unpack_names(names)
        found = self._registry.of_message(entries, PART_SIZE)
        return found, places, _kinds(found, entries)

    @staticmethod
    def _read_values(header: Header, wanted: _Wanted, buffers: SendBuffers) -> Array:
        """Return values; a large part of a dense variable is its own memory, if it may be lent."""
        found, places, kinds = wanted
        extents, size = extents_of(kinds)
        begin, wire = (places[0], kinds[0][1]) if len(kinds) == 1 else (None, None)
        if buffers.may_lend and isinstance(begin, int) and size >= _LENT_BYTES and wire is None:
            buffers.require_room(size, header.client)
            values: Array = found[0][1].values[begin : begin + size // 4]
            return values
        body = buffers.take(size, header.client)
        for (_, stored), at, extent, (shape, wire) in zip(
            found, places, extents, kinds, strict=True
        ):
            if wire is None:
                stored.pull(at, body[extent].view(np.float32).reshape(shape))
            else:
                values = np.empty(shape, np.float32)
                stored.pull(at, values)
                wire.encode(values, body[extent])
            body[extent.stop : padded(extent.stop)] = 0  # of freed memory
        return body

    def _change(self, op: Op, header: Header, frames: Sequence[memoryview]) -> bytes:
        reply = None
        try:
            if op in (Op.SAVE, Op.RESTORE):
                reply = self._move_files(op, header, frames[0])
            elif op is Op.COMMIT:
                reply = self._commit(header, frames[0])
            elif op is Op.RESET:
                # In this order, a late request of the previous job finds its rounds, or no objects.
                self._registry.clear()
                self._rounds = Rounds(self._max_staged_bytes)
                reply = b""
            else:
                reply = self._change_values(op, header, *frames)
        finally:
            self._deduplicator.end(header.client, header.number, reply)
        return reply

    def _change_values(self, op: Op, header: Header, names: memoryview, frame: memoryview) -> bytes:
        """Validate the whole message before anything changes."""
        entries, places = unpack_names(names)
        found = self._registry.of_message(entries, math.inf)
        values = unpack_values(frame, _kinds(found, entries, is_plain=op is Op.ASSIGN))
        if len(found) > 1 or header.round:  # one table alone checks its own when it changes
            _check_ids(found, places)
        if op is Op.ASSIGN:
            for (_, stored), at, value in zip(found, places, values, strict=True):
                stored.assign(at, value)
            return b""
        lrs = [_checked_lr(None if math.isnan(entry.lr) else entry.lr) for entry in entries]
        for entry, (spec, _), gradient in zip(entries, found, values, strict=True):
            self._check_finite(entry.object, spec, gradient)
        if header.round:
            staged = zip(entries, places, values, strict=True)
            gradients = [(e.object, part) for e, at, own in staged for part in _parts(at, own)]
            self._rounds.stage(header.round, gradients, header.place)
            return b""
        for (_, stored), at, gradient, lr in zip(found, places, values, lrs, strict=True):
            stored.push(at, gradient, lr)
        return b""

    def _check_finite(self, number: int, spec: Spec, gradient: Array) -> None:
        """Count NaN and infinities in a gradient; reject it if its spec says so."""
        found = _core.count_nonfinite(gradient)
        if not found:
            return
        with self._counts_lock:
            self._nonfinite[number] += found
        if spec.refuse_nonfinite:
            raise ValueError(
                f"{spec.name!r}: {found} of {gradient.size} elements of the gradient are NaN or "
                "infinite; nothing was changed"
            )

    def _commit(self, header: Header, frame: memoryview) -> bytes:
        rounds = self._rounds
        request = _json(frame, dict)
        weight = float(request["weight"])
        if not 0 < weight < math.inf:
            raise ValueError(f"a commit with the weight {weight}")
        lrs = {int(number): _checked_lr(lr) for number, lr in request["objects"]}
        for number in lrs:
            self._registry.find(number)
        scale = np.float32(1.0 / weight)
        staged = rounds.commit(header.round)
        if isinstance(staged, str):
            state = staged
        else:
            state = DISCARDED
            try:
                for number, lr in lrs.items():
                    _, stored = self._registry.find(number)
                    for at, gradient in sums_of(staged.get(number, ()), scale):
                        stored.push(at, gradient, lr)
                state = APPLIED
            finally:
                rounds.finish(header.round, state)
        return json.dumps({"state": state}).encode()

    def _move_files(self, op: Op, header: Header, frame: memoryview) -> bytes:
        request = _json(frame, dict)
        spec, stored = self._registry.find(header.object)
        part = Part(**request["part"])
        if op is Op.SAVE:
            return json.dumps(save(spec, stored, part, Path(request["stem"]))).encode()
        sums = {Path(request["directory"], name): sum_ for name, sum_ in request["files"].items()}
        if request["only_check"]:
            require_checksums(sums)
            return b""
        restored = restore(spec, stored, part, list(sums))
        if isinstance(spec, RowsSpec):
            stored.seed = request["seed"]  # of rows that the checkpoint does not have
        return json.dumps(restored).encode()

    def _create(self, frames: Sequence[memoryview]) -> int:
        spec = from_json(_json_bytes(frames[0]))

        def make() -> _core.DenseVariable | _core.RowTable:
            if isinstance(spec, RowsSpec):
                return spec.make()
            if len(frames) < 2:
                raise ValueError(f"{spec.name!r} does not exist, and no initial value is given")
            return spec.make(unpack_values(frames[1], [(spec.shape, None)])[0])

        return self._registry.create(spec, make)


def _reply(request: Header, status: Status = Status.OK) -> Header:
    return Header(status, request.number, request.client, request.object)


def _kinds(
    found: Sequence[tuple[Spec, Any]], entries: Sequence[Entry], *, is_plain: bool = False
) -> Kinds:
    """Return the shapes and encodings of the values of a message."""
    return [
        (
            (entry.size, spec.dim) if isinstance(spec, RowsSpec) else (entry.size,),
            None if is_plain else spec.wire_format(),
        )
        for (spec, _), entry in zip(found, entries, strict=True)
    ]


def _parts(at: Place, gradient: Array) -> Iterator[tuple[Place, Array]]:
    """Yield what a round keeps: ids and gradients, or the ranges that all clients cut alike."""
    if not isinstance(at, int):
        yield at, gradient
        return
    for begin in range(0, max(1, gradient.size), PART_SIZE):
        yield at + begin, gradient[begin : begin + PART_SIZE]


def _check_ids(found: Sequence[tuple[Spec, Any]], places: Sequence[Place]) -> None:
    for (spec, _), at in zip(found, places, strict=True):
        if isinstance(spec, RowsSpec) and spec.rows is not None and np.any(at >= spec.rows):
            raise IndexError(f"{spec.name!r}: id {np.max(at)}, the table has {spec.rows} rows")


def _checked_lr(lr: float | None) -> float | None:
    if lr is not None and not 0 <= lr <= _MAX_LR:
        raise ValueError(f"lr must be a finite number, 0 or more, got {lr}")
    return lr


def _json_bytes(frame: memoryview) -> bytes:
    if frame.nbytes > MAX_JSON_BYTES:
        raise ValueError(f"{frame.nbytes} bytes of JSON, the limit is {MAX_JSON_BYTES}")
    return bytes(frame)


def _json(frame: memoryview, kind: type[Any]) -> Any:
    read = json.loads(_json_bytes(frame))
    if not isinstance(read, kind):
        raise ValueError(f"expected a JSON {kind.__name__}, got a {type(read).__name__}")
    return read
