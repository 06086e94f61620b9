"""A client of parameter servers. Servers apply each change once, however often it is sent."""

from __future__ import annotations

import json
import math
import os
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import fastdist._core as _core
from fastdist.errors import FastdistError, UnavailableError
from fastdist.link.connections import Connections
from fastdist.link.stream import NO_MEMORY
from fastdist.ps.client.items import Item, Ticket, fill, memory_of, messages_of, names_of, values_of
from fastdist.ps.wire.process import keep_freed_memory
from fastdist.ps.wire.protocol import Header, Op, Status, error_of, message_bytes
from fastdist.ps.wire.specs import Spec, to_json
from fastdist.recorder.recording import open_requests, report_wait
from fastdist.recorder.ring import FIRST_REPORT_S


class Client:
    """Connections to all servers of a job. For one thread.

    Args:
        servers: their addresses; see `Server` for the secret that TCP needs.
        timeout_s: a server that neither answers nor moves bytes for this long is unavailable.
        grace_s: seconds after which a server with a broken connection is unavailable too.
        retry_s: a request that the server was too busy for is sent again after this time, or as
            soon as another reply arrives.
        window: the limit for requests in flight to one server; a further request waits.

    Attributes:
        servers: their addresses.
        lock: to be taken by threads that share a client.
    """

    def __init__(
        self,
        servers: Sequence[str],
        *,
        timeout_s: float = 30.0,
        grace_s: float = 3.0,
        retry_s: float = 0.25,
        window: int = 32,
    ) -> None:
        if not servers:
            raise ValueError("servers must name at least one address")
        keep_freed_memory()
        self.servers = tuple(servers)
        self.lock = threading.RLock()
        self._timeout_s = timeout_s
        self._grace_s = grace_s
        self._retry_s = retry_s
        self._window = window
        self._id = uuid.uuid4().bytes
        self._numbers = [0] * len(servers)
        self._in_flight: list[dict[int, Ticket]] = [{} for _ in servers]
        self._refused: list[deque[Ticket]] = [deque() for _ in servers]  # by a busy server
        self._heard_at = [-math.inf] * len(servers)
        self._connections = Connections(servers, place=self._place)
        self._new: set[int] = set()  # servers to which a connection was made
        self._waits_since = 0.0
        self._process = os.getpid()
        self._recorded = open_requests(len(servers))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Disconnect. Requests in flight may or may not be applied."""
        self._connections.close()
        _core.close_requests(self._recorded)

    # --- requests -------------------------------------------------------------------------------

    def submit(
        self,
        server: int,
        op: Op,
        number: int = 0,
        frames: Sequence[Any] = (),
        timeout_s: float | None = None,
        *,
        round: int = 0,
        place: int = 0,
        destination: Sequence[Item] | None = None,
    ) -> Ticket:
        """Send a request; several may be in flight, to all servers.

        Args:
            server: its number among `servers`.
            op: the operation.
            number: the number of the variable or table, if the operation is about one.
            frames: bytes or contiguous arrays, unchanged until the ticket has been waited for.
            timeout_s: the timeout of slow requests; None for the client's own.
            round: the round that a push waits for, or that the request names; 0 for none.
            place: the push's place in the sum of its round.
            destination: the items that take the values of the reply; if its size is wrong, `wait`
                raises ValueError.

        Returns:
            A ticket for `wait`.

        Raises:
            UnavailableError: the server answers none of the earlier requests.
            FastdistError: the client was made by another process, which has forked this one.
            ValueError: a frame is larger than servers accept.
        """
        self._require_own_process()
        nbytes = message_bytes(op, frames)
        in_flight = self._in_flight[server]
        if len(in_flight) >= self._window:
            self._poll_until(next(iter(in_flight.values())), lambda: len(in_flight) < self._window)
        own = self._numbers[server] = self._numbers[server] + 1
        header = Header(op, own, self._id, number, min(in_flight, default=own), round, place)
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        ticket = Ticket(server, op, header, frames, nbytes, limit_s, time.monotonic(), destination)
        in_flight[own] = ticket
        self._send(ticket)
        return ticket

    def wait(self, ticket: Ticket) -> memoryview:
        """Return the body of the reply, without a copy.

        Raises:
            UnavailableError: the server has not answered in time, is gone, or was restarted.
            FastdistError: the client was made by another process, which has forked this one.
            Exception: the server raised it.
        """
        if not ticket.is_done:
            self._require_own_process()
            self._poll_until(ticket, lambda: ticket.is_done)
        if ticket.error is not None:
            raise ticket.error
        return memoryview(b"") if ticket.reply is None else ticket.reply

    def wait_all(self, tickets: Sequence[Ticket]) -> list[memoryview]:
        """Return the bodies of all replies.

        If a server fails, replies that arrive later are not written to the caller's arrays.

        Raises:
            Exception: see `wait`.
        """
        try:
            return [self.wait(ticket) for ticket in tickets]
        except Exception:
            for ticket in tickets:
                ticket.abandon()
            raise

    def _require_own_process(self) -> None:
        if os.getpid() != self._process:
            raise FastdistError("this client is another process's: make one after the fork")

    def _send(self, ticket: Ticket) -> None:
        connection = self._connections[ticket.server]
        connection.send(ticket.header.pack(), ticket.frames)
        ticket.sendings += connection.is_connected
        ticket.resend_at = math.inf
        ticket.arrives_at = None

    def _poll_until(self, ticket: Ticket, is_over: Callable[[], bool]) -> None:
        """Wait, which is recorded as a wait for the reply to a request."""
        self._waits_since = time.monotonic()
        told_s = FIRST_REPORT_S
        waiting = _core.begin_request(self._recorded, ticket.server, ticket.op, ticket.nbytes)
        try:
            while not is_over():
                self._poll_once(ticket)
                if (waited_s := time.monotonic() - self._waits_since) > told_s:
                    told_s = 1.5 * waited_s
                    report_wait(waited_s)
        finally:
            _core.end_request(waiting, ticket.error is None)

    def _poll_once(self, ticket: Ticket) -> None:
        """Handle replies; send the request again, or give it up, when its time has come."""
        now = time.monotonic()
        next_at = min(deadline := self._deadline(ticket), ticket.resend_at)
        if not ticket.asked_anew and self._connections[ticket.server].is_connected:
            halfway = deadline - ticket.timeout_s / 2
            if now >= halfway:  # a proxy or NAT may have forgotten one direction of the connection
                ticket.asked_anew = True
                self._connections.renew(ticket.server)
            else:
                next_at = min(next_at, halfway)
        news = self._connections.poll(next_at - now)
        self._new |= {server for server, has_changed in news if has_changed}
        for server, _ in news:
            for frames in self._connections[server].receive():
                self._handle_reply(server, *frames)
        while self._new:  # requests or replies may be lost: all go over the new connection
            server = next(iter(self._new))
            self._refused[server].clear()
            for sent in self._in_flight[server].values():
                self._send(sent)
            self._new.discard(server)
        if news:
            return
        now = time.monotonic()
        if now >= self._deadline(ticket):
            in_flight = self._in_flight[ticket.server]
            for number, late in list(in_flight.items()):  # none of them is sent again later
                if now >= self._deadline(late):
                    late.abandon()
                    late.error = self._unavailable(late, now)
                    late.is_done = True
                    del in_flight[number]
            assert ticket.error is not None
            raise ticket.error
        if now >= ticket.resend_at:
            self._send(ticket)

    def _deadline(self, ticket: Ticket) -> float:
        """Return the time at which a request fails if nothing happens until then."""
        connection = self._connections[ticket.server]
        began = max(ticket.began, self._heard_at[ticket.server], self._waits_since)
        if not ticket.was_busy:
            began = max(began, connection.received_at)
        if ticket.sendings == 1:  # later ones may be in vain, too
            began = max(began, connection.sent_at)
        deadline = began + ticket.timeout_s
        if connection.lost_at is None:
            return deadline
        return min(deadline, max(ticket.began, connection.lost_at) + self._grace_s)

    def _unavailable(self, ticket: Ticket, now: float) -> UnavailableError:
        connection, server = self._connections[ticket.server], ticket.server
        silence = f"has not answered {ticket.op.name} for {ticket.timeout_s:g} s"
        if connection.was_refused:
            what = (
                "has not let this client in: does this client have its secret, and is it a "
                "fastdist parameter server of this user?"
            )
        elif not connection.was_connected:
            what = f"{silence}, nor let this client in: is it running, or is it overloaded?"
        elif connection.lost_at is None:
            what = f"{silence}, but the connection holds: the server is overloaded, or hangs"
        elif now - connection.lost_at < self._grace_s:
            what = f"{silence}, and the connection is broken"
        else:
            what = f"is gone: the connection broke during or before {ticket.op.name}"
        return UnavailableError(f"server {server} at {self.servers[server]} {what}", (server,))

    def _place(self, server: int, header_frame: memoryview, nbytes: int) -> list[memoryview] | None:
        """Return where the body of a reply that is arriving is to be received, if it may be."""
        try:
            header = Header.unpack(header_frame)
        except ValueError:
            return None
        ticket = self._in_flight[server].get(header.number)
        if ticket is None or ticket.destination is None or header.kind != Status.OK:
            return None
        memory = memory_of(ticket.destination, nbytes)
        if memory is not None:
            ticket.arrives_at = self._connections[server]
        return memory

    def _handle_reply(self, server: int, header_frame: memoryview, *bodies: memoryview) -> None:
        try:
            header = Header.unpack(header_frame)
        except ValueError:
            return
        ticket = self._in_flight[server].get(header.number)
        if ticket is None:  # answered already
            return
        if header.kind == Status.BUSY:
            ticket.was_busy = True
            ticket.resend_at = time.monotonic() + self._retry_s
            self._refused[server].append(ticket)
            return
        self._heard_at[server] = time.monotonic()
        while self._refused[server]:  # there is room for one of them now
            waiting = self._refused[server].popleft()
            if not waiting.is_done and waiting.resend_at < math.inf:
                self._send(waiting)
                break
        body = bodies[0] if bodies else memoryview(b"")
        if header.kind != Status.OK:
            text = bytes(body).decode(errors="replace")
            text = f"{text} (server {server} at {self.servers[server]}, {ticket.op.name})"
            ticket.error = error_of(header.kind, text, server)
        elif body is NO_MEMORY:
            what = f"server {server} at {self.servers[server]}, {ticket.op.name}"
            ticket.error = MemoryError(f"no memory for the reply of {what}")
        elif ticket.destination is None:
            ticket.reply = body
        elif bodies or ticket.arrives_at is None:  # else it is in its place already
            try:
                fill(ticket.destination, body)
            except ValueError as error:
                ticket.error = error
        ticket.is_done = True
        del self._in_flight[server][header.number]

    # --- variables and tables -------------------------------------------------------------------

    def create(self, server: int, spec: Spec, initial: Any = None) -> int:
        """Create a variable or table, or find the existing one of this name.

        Args:
            server: its number among `servers`.
            spec: the spec of the variable or table; must equal the spec of an existing one.
            initial: value of a dense variable; None if it exists already.

        Returns:
            Its number on this server.

        Raises:
            ValueError: it exists with another spec, or the spec is invalid.
        """
        frames: list[Any] = [to_json(spec)]
        if initial is not None:
            frames.append(np.ascontiguousarray(initial, np.float32))
        return int(self._ask(server, Op.CREATE, frames))

    def stats(self, server: int) -> dict[str, Any]:
        """See `Server.stats`."""
        return dict(self._ask(server, Op.STATS))

    def _ask(self, server: int, op: Op, frames: Sequence[Any] = ()) -> Any:
        return json.loads(bytes(self.wait(self.submit(server, op, 0, frames))))

    def reset(self, server: int, timeout_s: float | None = None) -> None:
        """Make a server drop everything; clients that use its objects get UnavailableError."""
        self.wait(self.submit(server, Op.RESET, timeout_s=timeout_s))

    def end(self, server: int, timeout_s: float | None = None) -> None:
        """Tell a server that the job is over."""
        self.wait(self.submit(server, Op.END, timeout_s=timeout_s))

    def begin_read(self, items: Sequence[Item]) -> list[Ticket]:
        """Request values, which the items hold once all tickets have been waited for."""
        return self.begin_change([], then_read=items)

    def begin_change(
        self,
        items: Sequence[Item],
        round: int = 0,
        place: int = 0,
        *,
        op: Op = Op.CHANGE,
        then_read: Sequence[Item] = (),
    ) -> list[Ticket]:
        """Send gradients. A server applies each message as a whole, or not at all.

        Args:
            items: the gradients, which must not change until all tickets have been waited for. A
                busy server may drop a client that does not wait for large ones within 10 s; they
                are sent again then.
            round: that of `submit`.
            place: likewise.
            op: ASSIGN sets values instead, which must be items without a wire.
            then_read: values to read after the gradients are applied, in the same messages as
                far as possible; the items hold them once all tickets have been waited for.
        """
        changes = messages_of(items)
        last = {group[0].server: group for group in changes}
        first: dict[int, list[Item]] = {}
        rest = []
        for group in messages_of(then_read):
            server = group[0].server
            if server not in last or first.setdefault(server, group) is not group:
                rest.append(group)
        tickets = []
        for group in changes:
            server = group[0].server
            frames, to = [names_of(group), values_of(group)], None
            if group is last[server] and server in first:
                to = first[server]
                frames.append(names_of(to))
            ticket = self.submit(server, op, 0, frames, round=round, place=place, destination=to)
            tickets.append(ticket)
        for group in rest:  # a server answers in the order in which messages come
            server, names = group[0].server, names_of(group)
            tickets.append(self.submit(server, Op.READ, 0, [names], destination=group))
        return tickets
