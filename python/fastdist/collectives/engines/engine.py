"""What every engine gives to a communicator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Calls = Mapping[str, Callable[..., Any]]
"""The collectives of one engine by name; what each takes is said at `_Calls` in _core.pyi."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Engine(ABC):
    """One rank of a group, and the collectives between its ranks.

    Attributes:
        rank: this rank, from 0.
        size: the number of ranks.
        hosts: by what the engine for GPUs compares calls, as `_core.NcclCommunicator.connect`
            takes it; None where there is no place for arrays on GPUs.
    """

    rank: int
    size: int
    hosts: Any = None

    @abstractmethod
    def calls(self) -> Calls:
        """The collectives: arguments are positional, the last two are timeout_s and async_op."""

    @abstractmethod
    def trusted_calls(self) -> Calls:
        """The same for an engine above this one, which has compared what all ranks call.

        They run at once in the caller's thread, one at a time, and never asynchronously.
        """

    @abstractmethod
    def empty(self, nbytes: int) -> Bytes:
        """Memory that collectives use with the fewest copies."""

    @abstractmethod
    def subset(self, groups: Sequence[Sequence[int]], timeout_s: float) -> Engine | None:
        """An engine for each group of ranks. Every rank must call, with the same groups.

        Args:
            groups: disjoint; the order within a group numbers its ranks.
            timeout_s: seconds to wait for other ranks.

        Returns:
            The engine of the group that this rank is in, or None.
        """

    @abstractmethod
    def survivors(self, ranks: Sequence[int], timeout_s: float) -> Engine:
        """An engine of these ranks, all of which call; the others may be gone, and this one lost.

        Raises:
            UnsupportedError: this engine cannot go on without all of its ranks.
        """

    @abstractmethod
    def set_phase(self, phase: int) -> None:
        """Calls that begin from now on agree only with other ranks' calls of the same phase.

        Args:
            phase: of the caller's program, counted from 0.
        """

    @abstractmethod
    def close(self) -> None:
        """Leave. Ranks that still wait for this one get `PeerFailureError`."""
