"""What a parameter server does with requests, whoever brings them."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import fastdist._core as _core
from fastdist.ps.server.deduplication import Applied, Progress
from fastdist.ps.server.registry import Objects
from fastdist.ps.server.rounds import APPLIED, DISCARDED, Rounds
from fastdist.ps.server.send_buffers import SendBuffers
from fastdist.ps.server.staleness import Staleness
from fastdist.ps.wire.batches import PUSHED, joined, values_in
from fastdist.ps.wire.frames import Array, floats_in, ids_in
from fastdist.ps.wire.parts import OpenPushes, extent, extents, parts_of
from fastdist.ps.wire.protocol import (
    CHANGES,
    FRAMES,
    MAX_LONG_META_BYTES,
    MAX_META_BYTES,
    UNKNOWN_STEP,
    VERSION,
    Header,
    Op,
    ProtocolError,
    Status,
    VersionError,
    status_of,
)
from fastdist.ps.wire.snapshot import Part, restore, save
from fastdist.ps.wire.specs import RowsSpec, Spec, from_json, to_json

_MAX_LR = float(np.finfo(np.float32).max)


class Service:
    """Keeps variables and tables, and answers requests. Safe for several threads.

    Args:
        max_staged_bytes: of gradients that wait for their round.
    """

    def __init__(self, max_staged_bytes: int) -> None:
        self._objects = Objects()
        self.ended = threading.Event()
        self._max_staged_bytes = max_staged_bytes
        self._rounds = Rounds(max_staged_bytes)
        self._applied = Applied()
        self._pushes = OpenPushes()
        self._staleness = Staleness()
        self._counts = {"requests": 0, "repeated": 0, "malformed": 0}
        self._nonfinite: dict[int, int] = {}
        self._counting = threading.Lock()
        self._began = time.monotonic()

    def stats(self) -> dict[str, Any]:
        """How much it keeps and has done.

        Returns:
            requests, repeated, malformed: counts; uptime_s; staleness: of pushes, by how many
            others came between the pull and them ("0", "1", "2-3", "4-7", …); rounds: open, nbytes;
            objects: for each its name, kind, nbytes, steps (pushes), nonfinite (elements of
            gradients that were NaN or infinite), and rows of a table.
        """
        objects = []
        for number, spec, kept in self._objects.all():
            entry = {"name": spec.name, "kind": type(spec).__name__, "nbytes": kept.nbytes}
            entry["steps"] = kept.step
            entry["nonfinite"] = self._nonfinite.get(number, 0)
            if isinstance(spec, RowsSpec):
                entry["rows"] = len(kept)
            objects.append(entry)
        with self._counting:
            counts = dict(self._counts)
        return {
            **counts,
            "uptime_s": time.monotonic() - self._began,
            "staleness": self._staleness.histogram(),
            "rounds": self._rounds.stats(),
            "objects": objects,
        }

    def answer(
        self, frames: Sequence[memoryview], buffers: SendBuffers
    ) -> tuple[Header, Any] | None:
        """Do what a request says.

        Args:
            frames: of the message.
            buffers: of the thread, for the reply.

        Returns:
            The reply's header and body; None where there is no reply (now).
        """
        self._count("requests")
        try:
            header = Header.unpack(frames[0] if frames else b"")
            op = Op(header.kind)
            if len(frames) - 1 not in FRAMES[op]:
                raise ProtocolError(f"{op.name} with {len(frames) - 1} frames")
        except VersionError as error:
            return _reply(error.header, Status.OTHER_VERSION), str(error).encode()
        except (ProtocolError, ValueError):
            self._count("malformed")
            return None
        try:
            if op not in CHANGES:
                return self._read(op, header, frames[1:], buffers)
            progress = self._applied.begin(header.client, header.number, header.floor)
            if progress is Progress.NEW:
                progress = self._change(op, header, frames[1:])
            else:
                self._count("repeated")
            # While it runs, the reply is that of the one that runs.
            return (_reply(header), progress or None) if isinstance(progress, bytes) else None
        except Exception as error:
            return _reply(header, status_of(error)), (str(error) or repr(error)).encode()

    def _count(self, what: str) -> None:
        with self._counting:
            self._counts[what] += 1

    # --- requests -------------------------------------------------------------------------------

    def _read(
        self, op: Op, header: Header, frames: Sequence[memoryview], buffers: SendBuffers
    ) -> tuple[Header, Any]:
        if op is Op.PULL or op is Op.PULL_ROWS:
            return self._pull(op, header, frames, buffers)
        if op is Op.PULL_MANY:
            return _reply(header), self._pull_many(frames[0], buffers)
        answer: Any
        if op is Op.HELLO:
            objects = [json.loads(to_json(spec)) for _, spec, _ in self._objects.all()]
            answer = {"version": VERSION, "objects": objects}
        elif op is Op.STATS:
            answer = self.stats()
        elif op is Op.CREATE:
            answer = self._create(frames)
        elif op is Op.END:
            self.ended.set()
            answer = {}
        else:
            self._rounds.discard([int(round_) for round_ in _json(frames[0], list)])
            answer = {}
        return _reply(header), json.dumps(answer).encode()

    def _pull(
        self, op: Op, header: Header, frames: Sequence[memoryview], buffers: SendBuffers
    ) -> tuple[Header, Any]:
        """The step is read before the values: these may be newer, and are not older."""
        if op is Op.PULL:
            dense, variable = self._objects.dense(header.object)
            step = variable.step
            part = extent(header.part, dense.size)
            wire = dense.wire_format()
            out, reply = _room(buffers, (part.stop - part.start,), wire)
            variable.pull_part(out, part.start)
        else:
            rows, table = self._objects.rows(header.object)
            step = table.step
            ids = ids_in(frames[0])
            wire = rows.wire_format()
            out, reply = _room(buffers, (ids.size, rows.dim), wire)
            table.pull(ids, out)
        if wire is not None:
            wire.encode(out, reply)
        return _reply(header, step=step), reply

    def _pull_many(self, frame: memoryview, buffers: SendBuffers) -> Array:
        found = self._objects.small(ids_in(frame))
        steps = np.array([variable.step for _, variable in found], np.uint64).view(np.uint8)
        values = []
        for spec, variable in found:
            values.append(np.empty(spec.size, np.float32))
            variable.pull_part(values[-1], 0)
        body = joined(values, [(spec.shape, spec.wire_format()) for spec, _ in found])
        reply = buffers.take(steps.size + body.size)
        np.concatenate((steps, body), out=reply)
        return reply

    def _change(self, op: Op, header: Header, frames: Sequence[memoryview]) -> bytes:
        reply = None
        try:
            if op in (Op.SAVE, Op.RESTORE):
                reply = self._move_files(op, header, frames[0])
            elif op is Op.COMMIT:
                reply = self._commit(header, frames[0])
            elif op is Op.RESET:
                self._reset()
                reply = b""
            else:
                reply = self._update(op, header, frames)
        finally:
            self._applied.end(header.client, header.number, reply)
        return reply

    def _reset(self) -> None:
        """In this order, a request of the job before finds either its rounds or no objects."""
        self._objects.clear()
        self._rounds = Rounds(self._max_staged_bytes)
        self._staleness = Staleness()

    def _update(self, op: Op, header: Header, frames: Sequence[memoryview]) -> bytes:
        if op is Op.PUSH:
            return self._push(header, frames[0])
        if op is Op.PUSH_MANY:
            return self._push_many(header, *frames)
        if op is Op.ASSIGN:
            dense, variable = self._objects.dense(header.object)
            variable.assign(floats_in(frames[0], dense.shape))
            return b""
        spec, table = self._objects.rows(header.object)
        ids = ids_in(frames[0])
        if op is Op.ASSIGN_ROWS:
            table.assign(ids, floats_in(frames[1], (ids.size, spec.dim)))
            return b""
        values = floats_in(frames[1], (ids.size, spec.dim), spec.wire_format())
        self._check_finite(header.object, spec, values)
        self._staleness.count(table.step, header.step)
        if header.round:
            self._rounds.stage(header.round, [(header.object, (ids, values))])
        else:
            table.push(ids, values, _lr(header.lr))
        return b""

    def _push(self, header: Header, frame: memoryview) -> bytes:
        dense, variable = self._objects.dense(header.object)
        part = extent(header.part, dense.size)
        gradient = floats_in(frame, (part.stop - part.start,), dense.wire_format())
        self._check_finite(header.object, dense, gradient)
        if header.round:
            if header.part <= 1:
                self._staleness.count(variable.step, header.step)
            begin = part.start
            pieces = extents(dense.size) if header.part == 0 else [part]
            staged = [(p.start, gradient[p.start - begin : p.stop - begin]) for p in pieces]
            self._rounds.stage(header.round, [(header.object, piece) for piece in staged])
            return b""
        if header.part == 0:
            self._staleness.count(variable.step, header.step)
            variable.push(gradient, _lr(header.lr))
            return b""
        push = (header.client, header.number - header.part)
        parts = len(parts_of(dense.size))
        step, is_first = self._pushes.step(push, parts, variable.begin_step)
        if is_first:
            self._staleness.count(step - 1, header.step)
        variable.push_part(gradient, part.start, step, _lr(header.lr))
        return b""

    def _push_many(self, header: Header, about: memoryview, frame: memoryview) -> bytes:
        """What may be wrong is found before anything is changed."""
        if about.nbytes % PUSHED.itemsize:
            raise ValueError(f"{about.nbytes} bytes, not a multiple of {PUSHED.itemsize}")
        pushed = np.frombuffer(about, PUSHED)
        found = self._objects.small(pushed["object"])
        numbers = pushed["object"].tolist()
        lrs = [_checked(_lr(lr)) for lr in pushed["lr"].tolist()]
        kinds = [((spec.size,), spec.wire_format()) for spec, _ in found]
        gradients = list(values_in(frame, kinds))
        for number, (spec, _), gradient in zip(numbers, found, gradients, strict=True):
            self._check_finite(number, spec, gradient)
        for (_, variable), seen in zip(found, pushed["step"].tolist(), strict=True):
            self._staleness.count(variable.step, seen)
        if header.round:
            staged = zip(numbers, ((0, gradient) for gradient in gradients), strict=True)
            self._rounds.stage(header.round, list(staged))
            return b""
        for (_, variable), gradient, lr in zip(found, gradients, lrs, strict=True):
            variable.push(gradient, lr)
        return b""

    def _check_finite(self, number: int, spec: Spec, gradient: Array) -> None:
        """Count what is not finite, and refuse it where that is wanted."""
        found = _core.count_nonfinite(gradient)
        if not found:
            return
        with self._counting:
            self._nonfinite[number] = self._nonfinite.get(number, 0) + found
        if spec.refuse_nonfinite:
            raise ValueError(
                f"{spec.name!r}: {found} of {gradient.size} elements of the gradient are NaN or "
                "infinite; nothing has been changed"
            )

    def _commit(self, header: Header, frame: memoryview) -> bytes:
        rounds = self._rounds
        about = _json(frame, dict, MAX_LONG_META_BYTES)
        weight = float(about["weight"])
        if not 0 < weight < math.inf:
            raise ValueError(f"a commit with the weight {weight}")
        lrs = {int(number): _checked(lr) for number, lr in about["objects"]}
        for number in lrs:
            self._objects.find(number)
        done = rounds.commit(header.round, weight, lrs)
        if isinstance(done, str):
            return _state(done)
        state = DISCARDED
        try:
            for change in done:
                spec, kept = self._objects.find(change.number)
                if isinstance(spec, RowsSpec):
                    kept.push(*change.rows(), change.lr)
                    continue
                step = kept.begin_step()
                for begin, gradient in change.parts():
                    kept.push_part(gradient, begin, step, change.lr)
            state = APPLIED
        finally:
            rounds.finish(header.round, state)
        return _state(state)

    def _move_files(self, op: Op, header: Header, frame: memoryview) -> bytes:
        about = _json(frame, dict, MAX_LONG_META_BYTES)
        spec, kept = self._objects.find(header.object)
        part = Part(**about["part"])
        if op is Op.SAVE:
            return json.dumps(save(spec, kept, part, Path(about["stem"]))).encode()
        paths = [Path(about["directory"], name) for name in about["files"]]
        return json.dumps(restore(spec, kept, part, paths)).encode()

    def _create(self, frames: Sequence[memoryview]) -> int:
        spec = from_json(_meta(frames[0]))

        def make() -> _core.DenseVariable | _core.RowTable:
            if isinstance(spec, RowsSpec):
                return spec.make()
            if len(frames) < 2:
                raise ValueError(f"{spec.name!r} does not exist, and no initial value is given")
            return spec.make(floats_in(frames[1], spec.shape))

        return self._objects.create(spec, make)


def _reply(request: Header, status: Status = Status.OK, step: int = UNKNOWN_STEP) -> Header:
    return Header(status, request.number, request.client, request.object, step=step)


def _room(
    buffers: SendBuffers, shape: tuple[int, ...], wire: _core.WireFormat | None
) -> tuple[Array, Array]:
    """Where values are to be written, and the body of the reply, which may be the same."""
    size = math.prod(shape)
    if wire is None:
        out = buffers.take(4 * size).view(np.float32).reshape(shape)
        return out, out
    return np.empty(shape, np.float32), buffers.take(wire.nbytes(size))


def _lr(sent: float) -> float | None:
    return None if math.isnan(sent) else sent


def _checked(lr: float | None) -> float | None:
    if lr is not None and not 0 <= lr <= _MAX_LR:
        raise ValueError(f"lr must be a finite number, 0 or more, got {lr}")
    return lr


def _state(state: str) -> bytes:
    return json.dumps({"state": state}).encode()


def _meta(frame: memoryview, limit: int = MAX_META_BYTES) -> bytes:
    if frame.nbytes > limit:
        raise ValueError(f"{frame.nbytes} bytes of JSON, allowed are {limit}")
    return bytes(frame)


def _json(frame: memoryview, kind: type[Any], limit: int = MAX_META_BYTES) -> Any:
    read = json.loads(_meta(frame, limit))
    if not isinstance(read, kind):
        raise ValueError(f"expected a JSON {kind.__name__}, got a {type(read).__name__}")
    return read
