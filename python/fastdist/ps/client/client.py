"""Talks to parameter servers. A change is applied once, however often it has to be sent."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import zmq

import fastdist._core as _core
from fastdist.errors import UnavailableError
from fastdist.ps.client.connection import Connection
from fastdist.ps.client.ticket import Ticket
from fastdist.ps.wire.frames import (
    Array,
    encoded,
    fill,
    floats_frame,
    floats_in,
    ids_frame,
    keep_freed_memory,
)
from fastdist.ps.wire.keys import Keys
from fastdist.ps.wire.parts import extent, parts_of
from fastdist.ps.wire.protocol import (
    UNKNOWN_STEP,
    Header,
    Op,
    ProtocolError,
    Status,
    VersionError,
    error_of,
    message_bytes,
)
from fastdist.ps.wire.specs import Spec, to_json

_SLOWEST_BYTES_PER_S = 20e6  # a message takes its time, after which it counts as lost


class Client:
    """Connections to all servers of a job. For one thread.

    Args:
        servers: their addresses.
        keys: of the job, where the servers have keys.
        timeout_s: a server that has not answered for so long is unavailable.
        grace_s: so is one whose connection has broken and is not there again after so long.
        retry_s: a request without a reply is sent again after so long.
        window: requests under way to one server; a further one waits.

    Attributes:
        servers: their addresses.
    """

    def __init__(
        self,
        servers: Sequence[str],
        *,
        keys: Keys | None = None,
        timeout_s: float = 30.0,
        grace_s: float = 3.0,
        retry_s: float = 2.0,
        window: int = 32,
    ) -> None:
        if not servers:
            raise ValueError("servers must name at least one address")
        keep_freed_memory()
        self.servers = tuple(servers)
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._retry_s = retry_s
        self._window = window
        self._id = uuid.uuid4().bytes
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._numbers = [0] * len(servers)
        self._under_way: list[dict[int, Ticket]] = [{} for _ in servers]
        self._connections = [Connection(self._context, address, keys) for address in servers]
        self._calls: dict[zmq.Socket[bytes], Callable[[], None]] = {}
        for server, connection in enumerate(self._connections):
            self._listen(connection.socket, partial(self._take, server))
            self._listen(connection.monitor, partial(self._take_events, server))

    def _listen(self, socket: zmq.Socket[bytes], call: Callable[[], None]) -> None:
        self._poller.register(socket, zmq.POLLIN)
        self._calls[socket] = call

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect; requests under way may or may not be applied."""
        for connection in self._connections:
            connection.close()
        self._context.term()

    # --- requests -------------------------------------------------------------------------------

    def submit(
        self,
        server: int,
        op: Op,
        number: int = 0,
        frames: Sequence[Any] = (),
        lr: float | None = None,
        timeout_s: float | None = None,
        *,
        round: int = 0,
        step: int = UNKNOWN_STEP,
        part: int = 0,
        take: Callable[[memoryview], None] | None = None,
    ) -> Ticket:
        """Send a request; several may be under way, to all servers.

        Args:
            server: its number among `servers`.
            op: what to do.
            number: of the variable or table.
            frames: bytes or contiguous arrays.
            lr: learning rate of a push; None for the update rule's own.
            timeout_s: of what takes longer than the client's own.
            round: that a push waits for, 0 for none; or that the request is about.
            step: of the value that the gradient of a push was computed from.
            part: of a dense value.
            take: is given the reply's body when it comes; a ValueError is what `wait` raises.

        Returns:
            What `wait` takes. What frames refer to must not change before that.

        Raises:
            UnavailableError: the server answers none of the requests before it.
            ValueError: a frame is larger than servers take.
        """
        nbytes = message_bytes(op, frames)
        under_way = self._under_way[server]
        while len(under_way) >= self._window:
            self._progress(next(iter(under_way.values())))
        self._numbers[server] += 1
        now = time.monotonic()
        header = Header(
            op,
            self._numbers[server],
            self._id,
            number,
            min(under_way, default=self._numbers[server]),
            float("nan") if lr is None else lr,
            round,
            step,
            part,
        )
        slack_s = nbytes / _SLOWEST_BYTES_PER_S
        limit_s = (self._timeout_s if timeout_s is None else timeout_s) + slack_s
        retry_s = self._retry_s + slack_s
        times = limit_s, retry_s, now + limit_s, now + retry_s
        ticket = Ticket(server, op, header, frames, *times, take)
        under_way[header.number] = ticket
        self._send(ticket)
        return ticket

    def wait(self, ticket: Ticket) -> memoryview:
        """The reply's body, without a copy.

        Raises:
            UnavailableError: the server has not answered in time, is gone, or is another one since.
            Exception: what the server raised.
        """
        while not ticket.is_done:
            self._progress(ticket)
        if ticket.error is not None:
            raise ticket.error
        return ticket.reply if ticket.reply is not None else memoryview(b"")

    def settle(self, server: int, round: int) -> None:
        """Wait until a server has all that was sent to it for a round.

        Raises:
            Exception: what `wait` of one of these requests raises.
        """
        for ticket in list(self._under_way[server].values()):
            if ticket.header.round == round:
                self.wait(ticket)

    def _send(self, ticket: Ticket) -> None:
        self._connections[ticket.server].send(ticket.header.pack(), ticket.frames)

    def _progress(self, ticket: Ticket) -> None:
        """Take replies until there is one, or until this request must be sent again."""
        now = time.monotonic()
        wait_s = min(ticket.deadline, ticket.resend_at, self._gone_at(ticket)) - now
        events = self._poller.poll(int(max(0.0, wait_s) * 1000) + 1)
        for socket, _ in events:
            self._calls[socket]()
        if events:
            return
        now = time.monotonic()
        if now >= min(ticket.deadline, self._gone_at(ticket)):
            self._give_up(ticket.server, now)
            assert ticket.error is not None
            raise ticket.error
        if now >= ticket.resend_at:
            self._send_again(ticket)

    def _give_up(self, server: int, now: float) -> None:
        """All requests whose time is over: none is sent again when a server comes back."""
        for number, ticket in list(self._under_way[server].items()):
            if now >= min(ticket.deadline, self._gone_at(ticket)):
                del self._under_way[server][number]
                ticket.is_done = True
                ticket.error = self._unavailable(ticket, now >= ticket.deadline)

    def _gone_at(self, ticket: Ticket) -> float:
        """When a request is given up since there is no connection."""
        lost_at = self._connections[ticket.server].lost_at
        if lost_at is None:
            return ticket.deadline
        return max(lost_at, ticket.began) + self._grace_s

    def _unavailable(self, ticket: Ticket, is_late: bool) -> UnavailableError:
        what = (
            f"has not answered {ticket.op.name} for {ticket.timeout_s:g} s; it was sent "
            f"{ticket.sent} times. Is the server running, and has this client its keys?"
            if is_late
            else f"is gone: the connection broke during or before {ticket.op.name}, and there was "
            f"none again for {self._grace_s:g} s"
            if self._connections[ticket.server].was_there
            else f"has not let this client in for {self._grace_s:g} s: it has other keys, or is no "
            "parameter server of fastdist"
        )
        server = ticket.server
        return UnavailableError(f"server {server} at {self.servers[server]} {what}", (server,))

    def _send_again(self, ticket: Ticket) -> None:
        ticket.sent += 1
        ticket.resend_at = time.monotonic() + ticket.retry_s
        self._send(ticket)

    def _take_events(self, server: int) -> None:
        if self._connections[server].take_events():
            for ticket in self._under_way[server].values():
                self._send_again(ticket)

    def _take(self, server: int) -> None:
        header_frame, *bodies = self._connections[server].socket.recv_multipart(copy=False)
        try:
            header = Header.unpack(header_frame.buffer)
        except VersionError as error:
            header = error.header
            bodies = []
        except ProtocolError:
            return
        ticket = self._under_way[server].pop(header.number, None)
        if ticket is None:  # answered before
            return
        ticket.is_done = True
        ticket.step = header.step
        ticket.reply = bodies[0].buffer if bodies else None
        if header.kind != Status.OK:
            text = bytes(ticket.reply).decode(errors="replace") if ticket.reply is not None else ""
            text = f"{text} (server {server} at {self.servers[server]}, {ticket.op.name})"
            ticket.error = error_of(header.kind, text, server)
        elif ticket.take is not None:
            try:
                ticket.take(ticket.reply if ticket.reply is not None else memoryview(b""))
            except ValueError as error:
                ticket.error = error
            ticket.reply = None

    # --- variables and tables -------------------------------------------------------------------

    def create(self, server: int, spec: Spec, initial: Any = None) -> int:
        """Make a variable or table, or find the one of this name.

        Args:
            server: where.
            spec: what; the same as that of one that exists.
            initial: of a dense variable that may not exist yet.

        Returns:
            Its number on this server.

        Raises:
            ValueError: it exists otherwise, or makes no sense.
        """
        frames: list[Any] = [to_json(spec)]
        if initial is not None:
            frames.append(floats_frame(initial))
        return int(json.loads(bytes(self.wait(self.submit(server, Op.CREATE, 0, frames)))))

    def hello(self, server: int) -> dict[str, Any]:
        """The version that a server speaks, and the specs of what it keeps."""
        answer: dict[str, Any] = json.loads(bytes(self.wait(self.submit(server, Op.HELLO))))
        return answer

    def stats(self, server: int) -> dict[str, Any]:
        """As `Server.stats`."""
        answer: dict[str, Any] = json.loads(bytes(self.wait(self.submit(server, Op.STATS))))
        return answer

    def reset(self, server: int, timeout_s: float | None = None) -> None:
        """Let a server drop everything that it keeps; who uses it still gets UnavailableError."""
        self.wait(self.submit(server, Op.RESET, timeout_s=timeout_s))

    def end(self, server: int, timeout_s: float | None = None) -> None:
        """Tell a server that the job is over."""
        self.wait(self.submit(server, Op.END, timeout_s=timeout_s))

    def pull(self, server: int, number: int, shape: Sequence[int]) -> Array:
        """A dense variable's value: float32."""
        out = np.empty(shape, np.float32)
        for ticket in self.begin_pull(server, number, out):
            self.wait(ticket)
        return out

    def push(self, server: int, number: int, gradient: Any, lr: float | None = None) -> None:
        """Apply a gradient, float32, to a dense variable."""
        for ticket in self.begin_push(server, number, floats_frame(gradient), lr):
            self.wait(ticket)

    def begin_pull(
        self, server: int, number: int, out: Array, wire: _core.WireFormat | None = None
    ) -> list[Ticket]:
        """Ask for a dense variable's value.

        Args:
            server: where it is.
            number: of it.
            out: contiguous float32, where the value will be when all tickets have been waited for.
            wire: how the variable's values travel; None for float32.
        """
        flat = out.reshape(-1)
        tickets = []
        for part in parts_of(flat.size):
            take = partial(fill, flat[extent(part, flat.size)], wire=wire)
            tickets.append(self.submit(server, Op.PULL, number, part=part, take=take))
        return tickets

    def begin_push(
        self,
        server: int,
        number: int,
        gradient: Array,
        lr: float | None = None,
        *,
        round: int = 0,
        step: int = UNKNOWN_STEP,
        wire: _core.WireFormat | None = None,
        in_parts: bool = True,
    ) -> list[Ticket]:
        """Send a gradient to a dense variable.

        Args:
            server: where it is.
            number: of it.
            gradient: contiguous float32.
            lr, round, step: as of `submit`.
            wire: how the variable's gradients travel; None for float32.
            in_parts: if it is large; otherwise it is applied as a whole or not at all.
        """
        flat = gradient.reshape(-1)
        tickets = []
        for part in parts_of(flat.size) if in_parts else (0,):
            frames = [encoded(flat[extent(part, flat.size)], wire)]
            ticket = self.submit(
                server, Op.PUSH, number, frames, lr, round=round, step=step, part=part
            )
            tickets.append(ticket)
        return tickets

    def assign(self, server: int, number: int, value: Any) -> None:
        """Set a dense variable."""
        frame = floats_frame(value)
        self.wait(self.submit(server, Op.ASSIGN, number, [frame]))

    def pull_rows(self, server: int, number: int, ids: Any, dim: int) -> Array:
        """Rows of a table: float32 [ids, dim], read-only."""
        frame = ids_frame(ids)
        body = self.wait(self.submit(server, Op.PULL_ROWS, number, [frame]))
        return floats_in(body, (frame.size, dim))

    def push_rows(
        self, server: int, number: int, ids: Any, gradients: Any, lr: float | None = None
    ) -> None:
        """Apply gradients, float32 [ids, dim], to rows; those of equal ids are added up."""
        frames = [ids_frame(ids), floats_frame(gradients)]
        self.wait(self.submit(server, Op.PUSH_ROWS, number, frames, lr))

    def assign_rows(self, server: int, number: int, ids: Any, values: Any) -> None:
        """Set rows."""
        frames = [ids_frame(ids), floats_frame(values)]
        self.wait(self.submit(server, Op.ASSIGN_ROWS, number, frames))
