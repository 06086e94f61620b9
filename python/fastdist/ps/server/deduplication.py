"""Which changes a server has applied already, so that a request sent again changes nothing."""

from __future__ import annotations

import enum
import threading
from collections import OrderedDict
from dataclasses import dataclass, field

# A client has fewer requests under way, and jobs have fewer clients.
MAX_REQUESTS = 1024
_MAX_CLIENTS = 1 << 16


class Progress(enum.Enum):
    """How far a change is that has not been replied to."""

    NEW = enum.auto()
    RUNNING = enum.auto()


@dataclass(slots=True)
class _Client:
    floor: int = 0
    progress: dict[int, Progress | bytes] = field(default_factory=dict)


class Applied:
    """The changes of each client that it may still send again. Safe for several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._clients: OrderedDict[bytes, _Client] = OrderedDict()

    def begin(self, client: bytes, number: int, floor: int) -> Progress | bytes:
        """Note that a change is to be applied now, if it is new.

        Args:
            client: who sent it.
            number: of the change.
            floor: the client sends none below this again.

        Returns:
            How far it was before; of one that is applied, the body of the reply.

        Raises:
            ValueError: the client has far too many requests under way.
        """
        with self._lock:
            known = self._clients.setdefault(client, _Client())
            self._clients.move_to_end(client)
            while len(self._clients) > _MAX_CLIENTS:
                self._clients.popitem(last=False)
            if floor > known.floor:
                known.floor = floor
                for old in [n for n in known.progress if n < floor]:
                    del known.progress[old]
            if number < known.floor:
                return b""
            progress = known.progress.get(number, Progress.NEW)
            if progress is Progress.NEW:
                if len(known.progress) >= MAX_REQUESTS:
                    raise ValueError(f"over {MAX_REQUESTS} changes without a reply")
                known.progress[number] = Progress.RUNNING
            return progress

    def end(self, client: bytes, number: int, reply: bytes | None) -> None:
        """A change that was new has been applied; or, None, has failed and may be tried again."""
        with self._lock:
            known = self._clients.get(client)
            if known is None or number not in known.progress:
                return
            if reply is None:
                del known.progress[number]
            else:
                known.progress[number] = reply
