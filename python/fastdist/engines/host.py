"""The engine for the ranks of one machine: the compiled one, as it is."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastdist import _core
from fastdist.engines.engine import Bytes, Calls, Engine


class HostEngine(Engine):
    """Ranks that share memory. Its calls are the builtins of `_core`, with nothing in between."""

    def __init__(self, host: _core.HostCommunicator) -> None:
        self._host = host
        self.hosts = host
        self.rank = host.rank
        self.size = host.size

    @classmethod
    def of_processes(cls, fds: list[int], rank: int, tuning: _core.Tuning) -> HostEngine:
        """Ranks as processes that have met: `fds` are the descriptors of their memory."""
        machine = _core.Machine.of_processes(fds, rank)
        block = _core.SharedBlock(machine, rank, len(fds), tuning)
        ranks = list(range(len(fds)))
        offsets = [block.offset] * len(fds)  # the first block of every segment
        return cls(_core.HostCommunicator(machine, ranks, rank, offsets, block, tuning))

    @classmethod
    def of_threads(cls, size: int) -> list[HostEngine]:
        """Ranks as threads of this process, one engine for each."""
        machine = _core.Machine.of_threads(size)
        tuning = _core.tuning_for(size)
        blocks = [_core.SharedBlock(machine, rank, size, tuning) for rank in range(size)]
        offsets = [block.offset for block in blocks]
        ranks = list(range(size))
        return [
            cls(_core.HostCommunicator(machine, ranks, rank, offsets, blocks[rank], tuning))
            for rank in ranks
        ]

    def calls(self) -> Calls:
        """The builtins of the compiled engine."""
        calls: Calls = self._host.calls()  # type: ignore[assignment]
        return calls

    def trusted_calls(self) -> Calls:
        """The builtins too: their check costs nothing."""
        return self.calls()

    def empty(self, nbytes: int) -> Bytes:
        """Shared memory."""
        return self._host.empty(nbytes)

    def subset(self, groups: Sequence[Sequence[int]], timeout_s: float) -> HostEngine | None:
        """Another engine over the same memory."""
        host = self._host
        own = next((group for group in groups if self.rank in group), None)
        block = None
        if own is not None:
            machine_rank = host.members[self.rank]
            block = _core.SharedBlock(host.machine, machine_rank, len(own), host.tuning)
        offsets = np.empty(self.size, np.int64)
        offset = np.array([block.offset if block is not None else 0], np.int64)
        host.calls()["all_gather"](offset, offsets, timeout_s, False)
        if own is None or block is None:
            return None
        members = [host.members[rank] for rank in own]
        chosen = [int(offsets[rank]) for rank in own]
        made = _core.HostCommunicator(
            host.machine, members, list(own).index(self.rank), chosen, block, host.tuning
        )
        return HostEngine(made)

    def set_phase(self, phase: int) -> None:
        """For calls that begin from now on."""
        self._host.set_phase(phase)

    def close(self) -> None:
        """Leave."""
        self._host.close()
