"""A parameter server: answers requests from any number of clients with a few threads."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import zmq
from zmq.auth.thread import ThreadAuthenticator

from fastdist import _core
from fastdist.ps.applied import Applied, Progress
from fastdist.ps.frames import floats_in, ids_in
from fastdist.ps.keys import Keys
from fastdist.ps.protocol import (
    CHANGES,
    FRAMES,
    MAX_META_BYTES,
    VERSION,
    Header,
    Op,
    ProtocolError,
    Status,
    VersionError,
    status_of,
)
from fastdist.ps.send_buffers import SendBuffers
from fastdist.ps.snapshot import Part, restore, save
from fastdist.ps.specs import DenseSpec, RowsSpec, Spec, from_json, to_json

_WORKERS = "inproc://workers"


class Server:
    """Keeps dense variables and tables of rows, and applies the gradients that clients push.

    Answers until it is closed; requests of different clients are served at once.

    Args:
        address: where to listen, as ZeroMQ names it; `*` is a free port.
        keys: of the job. Without, only processes of this machine may be let in.
        threads: that answer requests.
        max_message_bytes: connections that send more are dropped.

    Raises:
        ValueError: an address beyond this machine, and no keys.
        zmq.ZMQError: the address cannot be bound.
    """

    def __init__(
        self,
        address: str = "tcp://127.0.0.1:*",
        *,
        keys: Keys | None = None,
        threads: int = 2,
        max_message_bytes: int = 1 << 31,
    ) -> None:
        if keys is None and not _is_local(address):
            raise ValueError(
                f"{address} can be reached from other machines: give keys=Keys.make(), the same "
                "to all clients, or listen on tcp://127.0.0.1:*"
            )
        self._objects: list[tuple[Spec, Any]] = []
        self._numbers: dict[str, int] = {}
        self._creating = threading.Lock()
        self._applied = Applied()
        self._counts = {"requests": 0, "repeated": 0, "malformed": 0}
        self._counting = threading.Lock()
        self._began = time.monotonic()
        self._threads: list[threading.Thread] = []
        self._context = zmq.Context()
        self._authenticator: ThreadAuthenticator | None = None
        router = self._context.socket(zmq.ROUTER)
        router.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if keys is not None:
            self._authenticator = _admit(self._context, keys)
            router.curve_secretkey = keys.server_secret.encode()
            router.curve_publickey = keys.server_public.encode()
            router.curve_server = True
        try:
            router.bind(address)
        except zmq.ZMQError:
            router.close()
            self.close()
            raise
        self.address: str = router.getsockopt_string(zmq.LAST_ENDPOINT)
        dealer = self._context.socket(zmq.DEALER)
        dealer.bind(_WORKERS)
        self._threads = [
            threading.Thread(target=_pass_on, args=(router, dealer), daemon=True),
            *(threading.Thread(target=self._serve, daemon=True) for _ in range(threads)),
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop answering. What it kept is gone."""
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()
        for thread in self._threads:
            thread.join()

    def stats(self) -> dict[str, Any]:
        """How much it keeps and has done.

        Returns:
            requests, repeated, malformed: counts; uptime_s; objects: for each its name, kind,
            nbytes, steps (pushes), and rows of a table.
        """
        objects = []
        for spec, kept in list(self._objects):
            entry = {"name": spec.name, "kind": type(spec).__name__, "nbytes": kept.nbytes}
            entry["steps"] = kept.step
            if isinstance(spec, RowsSpec):
                entry["rows"] = len(kept)
            objects.append(entry)
        with self._counting:
            counts = dict(self._counts)
        return {**counts, "uptime_s": time.monotonic() - self._began, "objects": objects}

    # --- threads --------------------------------------------------------------------------------

    def _serve(self) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.connect(_WORKERS)
        buffers = SendBuffers()
        with socket:
            while True:
                try:
                    identity, *frames = socket.recv_multipart(copy=False)
                except zmq.ContextTerminated:
                    return
                answer = self._answer([frame.buffer for frame in frames], buffers)
                del frames
                if answer is None:
                    continue
                header, body = answer
                try:
                    socket.send(identity, zmq.SNDMORE, copy=False)
                    socket.send(header.pack(), zmq.SNDMORE if body is not None else 0)
                    if body is not None:
                        buffers.send(socket, body)
                except zmq.ContextTerminated:
                    return

    def _answer(
        self, frames: Sequence[memoryview], buffers: SendBuffers
    ) -> tuple[Header, Any] | None:
        """The reply's header and body; None where there is no reply (now)."""
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
                return _reply(header), self._read(op, header, frames[1:], buffers)
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
    ) -> Any:
        if op is Op.HELLO:
            objects = [json.loads(to_json(spec)) for spec, _ in list(self._objects)]
            return json.dumps({"version": VERSION, "objects": objects}).encode()
        if op is Op.STATS:
            return json.dumps(self.stats()).encode()
        if op is Op.CREATE:
            return json.dumps(self._create(frames)).encode()
        if op is Op.PULL:
            dense, variable = self._dense(header)
            out = buffers.take(4 * dense.size).view(np.float32)
            variable.pull(out)
            return out
        rows, table = self._rows(header)
        ids = ids_in(frames[0])
        out = buffers.take(4 * rows.dim * ids.size).view(np.float32)
        table.pull(ids, out.reshape(ids.size, rows.dim))
        return out

    def _change(self, op: Op, header: Header, frames: Sequence[memoryview]) -> bytes:
        reply = None
        try:
            if op in (Op.SAVE, Op.RESTORE):
                reply = self._move_files(op, header, frames[0])
            else:
                self._update(op, header, frames)
                reply = b""
        finally:
            self._applied.end(header.client, header.number, reply)
        return reply

    def _update(self, op: Op, header: Header, frames: Sequence[memoryview]) -> None:
        lr = None if math.isnan(header.lr) else header.lr
        if op in (Op.PUSH, Op.ASSIGN):
            dense, variable = self._dense(header)
            values = floats_in(frames[0], dense.shape)
            variable.push(values, lr) if op is Op.PUSH else variable.assign(values)
        else:
            spec, table = self._rows(header)
            ids = ids_in(frames[0])
            values = floats_in(frames[1], (ids.size, spec.dim))
            table.push(ids, values, lr) if op is Op.PUSH_ROWS else table.assign(ids, values)

    def _move_files(self, op: Op, header: Header, frame: memoryview) -> bytes:
        about = _json(frame)
        spec, kept = self._object(header, None)
        part = Part(**about["part"])
        if op is Op.SAVE:
            return json.dumps(save(spec, kept, part, Path(about["stem"]))).encode()
        files = [Path(file) for file in about["files"]]
        return json.dumps(restore(spec, kept, part, files)).encode()

    def _create(self, frames: Sequence[memoryview]) -> int:
        spec = from_json(_meta(frames[0]))
        with self._creating:
            number = self._numbers.get(spec.name)
            if number is not None:
                known = self._objects[number][0]
                if to_json(known) != to_json(spec):
                    raise ValueError(f"{spec.name!r} exists as {known}, got {spec}")
                return number
            kept: _core.DenseVariable | _core.RowTable
            if isinstance(spec, RowsSpec):
                kept = spec.make()
            elif len(frames) == 2:
                kept = spec.make(floats_in(frames[1], spec.shape))
            else:
                raise ValueError(f"{spec.name!r} does not exist, and no initial value is given")
            self._objects.append((spec, kept))
            self._numbers[spec.name] = len(self._objects) - 1
            return len(self._objects) - 1

    def _object(self, header: Header, kind: type[Spec] | None) -> tuple[Any, Any]:
        if header.object >= len(self._objects):
            raise ValueError(
                f"object {header.object} does not exist, there are {len(self._objects)}: the "
                "server may have been started again"
            )
        spec, kept = self._objects[header.object]
        if kind is not None and not isinstance(spec, kind):
            raise ValueError(
                f"{spec.name!r} is a {type(spec).__name__}, expected a {kind.__name__}"
            )
        return spec, kept

    def _dense(self, header: Header) -> tuple[DenseSpec, _core.DenseVariable]:
        return self._object(header, DenseSpec)

    def _rows(self, header: Header) -> tuple[RowsSpec, _core.RowTable]:
        return self._object(header, RowsSpec)


def _reply(request: Header, status: Status = Status.OK) -> Header:
    return Header(status, request.number, request.client, request.object)


def _meta(frame: memoryview) -> bytes:
    if frame.nbytes > MAX_META_BYTES:
        raise ValueError(f"{frame.nbytes} bytes of JSON, allowed are {MAX_META_BYTES}")
    return bytes(frame)


def _json(frame: memoryview) -> dict[str, Any]:
    read = json.loads(_meta(frame))
    if not isinstance(read, dict):
        raise ValueError(f"expected a JSON object, got a {type(read).__name__}")
    return read


def _pass_on(router: zmq.Socket[bytes], dealer: zmq.Socket[bytes]) -> None:
    """Between clients and the threads that answer, until the context ends."""
    with router, dealer, contextlib.suppress(zmq.ContextTerminated):
        zmq.proxy(router, dealer)


def _admit(context: zmq.Context[Any], keys: Keys) -> ThreadAuthenticator:
    """Let in who has the client's key, and nobody else."""

    class OnlyOurs:
        def callback(self, domain: str, key: bytes) -> bool:
            del domain
            return key.decode() == keys.client_public

    authenticator = ThreadAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain="*", credentials_provider=OnlyOurs())
    return authenticator


def _is_local(address: str) -> bool:
    parts = urlsplit(address.replace("*", "0") if address.endswith("*") else address)
    if parts.scheme in ("ipc", "inproc"):
        return True
    host = parts.hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
