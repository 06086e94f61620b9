"""A rank's membership in an elastic job, whose ranks come and go."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from fastdist.cluster.rank_door import Line
from fastdist.cluster.roster import RosterPlace
from fastdist.collectives.rendezvous.local import check_while_waiting
from fastdist.errors import ClusterConfigError
from fastdist.link.peer import is_own_user


class BrokenWorldError(Exception):
    """A rank has left or joined during the rendezvous of a new world."""


class Member:
    """This process's connection to the roster of its job (`fastdist.cluster.roster`).

    In a world it is an mpi4py communicator as far as `fastdist.init` needs one.

    Attributes:
        world: the number of the world of which this process is a rank; 0 before the first.
        progress: this process's number of commits; the ranks with most are first in the next world.
        has_run: True once `fastdist.Elastic.run` was called.
    """

    def __init__(self, place: RosterPlace) -> None:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(f"\0{place.name}")
            if not is_own_user(connection):
                raise PermissionError
        except OSError:
            connection.close()
            raise ClusterConfigError(
                "the launcher of this elastic job has ended; start it by fastdist run --min"
            ) from None
        self._line = Line(connection)
        self._slot = place.slot
        self._is_over = False  # the present world
        self._is_in_rendezvous = False
        self._rank, self._size = 0, 1
        self.world = 0
        self.progress = 0
        self.has_run = False
        os.register_at_fork(after_in_child=self.close)
        check_while_waiting(self._check)

    def must_join(self) -> bool:
        """Return True if this process must join the next world. Does not block."""
        self._line.connection.setblocking(False)
        with suppress(EOFError):  # the launcher is gone, and the kernel ends this process
            self._is_over |= any(kind == "anew" for kind, _ in self._line.receive())
        return self._is_over or not self.world

    @contextmanager
    def rendezvous(self) -> Iterator[None]:
        """Return a context manager: inside, waiting raises BrokenWorldError if its world ends."""
        self._is_in_rendezvous = True
        try:
            yield
        finally:
            self._is_in_rendezvous = False

    def _check(self) -> None:
        if self._is_in_rendezvous and self.must_join():
            raise BrokenWorldError

    def report(self, late: Sequence[int]) -> None:
        """Say which ranks have not come to a call; if they do not join either, they are killed."""
        self._line.send(late=list(late))

    def join(self, timeout_s: float) -> None:
        """Wait for a place in the next world, as long as there are too few for one.

        The ranks of this world have `timeout_s` to come. If the job has done its work, SystemExit
        is raised.
        """
        self._line.send(join=[self.progress, timeout_s, self._slot])
        kind, value = self._await(("place", "ended"))
        if kind == "ended":
            raise SystemExit(0)
        self.world, self._rank, self._size = value

    def finish(self) -> None:
        """Tell the roster that the job has done its work."""
        with suppress(OSError):  # the launcher is gone
            self._line.send(finished=True)

    def close(self) -> None:
        """Leave the job."""
        self._line.connection.close()

    def Get_rank(self) -> int:
        """Return the rank in the present world."""
        return self._rank

    def Get_size(self) -> int:
        """Return the number of ranks of the present world."""
        return self._size

    def allgather(self, obj: Any) -> list[Any]:
        """Return the objects of all ranks, made of lists, strings and numbers.

        BrokenWorldError is raised if a rank has left, or another has joined.
        """
        self._check()
        self._line.send(gather=obj)
        kind, values = self._await(("gathered", "anew"))
        if kind == "anew":
            raise BrokenWorldError
        return list(values)

    def _await(self, kinds: tuple[str, ...]) -> tuple[str, Any]:
        """Return the next message of one of these kinds; drop others."""
        self._line.connection.settimeout(None)
        while True:
            try:
                messages = self._line.receive()
            except EOFError:
                raise ClusterConfigError("the launcher of this elastic job has ended") from None
            found = None
            for message in messages:
                if message[0] in kinds:
                    found = message
                if message[0] in ("anew", "place"):  # "anew" before a place: the old world
                    self._is_over = message[0] == "anew"
            if found is not None:
                return found
