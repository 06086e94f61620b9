"""The engine for the ranks of one machine: the compiled host engine."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import final

import numpy as np

import fastdist._core as _core
from fastdist.collectives.engines.engine import CompiledEngine
from fastdist.collectives.rendezvous.local import exchange_memory
from fastdist.errors import UnsupportedError

_groups_of_threads = itertools.count()


@final
class HostEngine(CompiledEngine):
    """Ranks that share memory."""

    compiled: _core.HostCommunicator

    def __init__(self, host: _core.HostCommunicator, key: str, *, in_threads: bool) -> None:
        self.compiled = host
        self.key = key
        self._in_threads = in_threads
        self.rank = host.rank
        self.size = host.size

    @classmethod
    def of_processes(cls, key: str, rank: int, size: int, timeout_s: float) -> HostEngine:
        """Connect processes of one machine. Every rank must call, with a key like a job's."""
        tuning = _core.tuning_for(size)
        own_fd = _core.create_segment_file(size, tuning)
        try:
            fds = exchange_memory(key, rank, size, own_fd, timeout_s)
        except BaseException:
            os.close(own_fd)
            raise
        memory = os.fstat(fds[0]).st_ino  # tells this job from others at the same address
        machine = _core.Machine.of_processes(fds, rank)
        block = _core.SharedBlock(machine, rank, size, tuning)
        offsets = [block.offset] * size  # the first block of every segment
        host = _core.HostCommunicator(machine, list(range(size)), rank, offsets, block, tuning)
        return cls(host, f"{key}|{memory}", in_threads=False)

    @classmethod
    def of_threads(cls, size: int) -> list[HostEngine]:
        """Make one engine for each of `size` ranks that are threads of this process."""
        machine = _core.Machine.of_threads(size)
        tuning = _core.tuning_for(size)
        blocks = [_core.SharedBlock(machine, rank, size, tuning) for rank in range(size)]
        offsets = [block.offset for block in blocks]
        ranks = list(range(size))
        key = f"threads of {os.getpid()}/{next(_groups_of_threads)}"
        made = (
            _core.HostCommunicator(machine, ranks, rank, offsets, block, tuning)
            for rank, block in enumerate(blocks)
        )
        return [cls(host, key, in_threads=True) for host in made]

    def subset(self, groups: Sequence[Sequence[int]], timeout_s: float) -> HostEngine | None:
        """Make another engine over the same memory."""
        host = self.compiled
        self._groups += 1
        own = next((group for group in groups if self.rank in group), None)
        block = None
        if own is not None:
            machine_rank = host.members[self.rank]
            block = _core.SharedBlock(host.machine, machine_rank, len(own), host.tuning)
        offsets = np.empty(self.size, np.int64)
        offset = np.array([block.offset if block is not None else 0], np.int64)
        self.calls(timeout_s).all_gather(offset, out=offsets)
        if own is None or block is None:
            return None
        members = [host.members[rank] for rank in own]
        chosen = [int(offsets[rank]) for rank in own]
        made = _core.HostCommunicator(
            host.machine, members, list(own).index(self.rank), chosen, block, host.tuning
        )
        return HostEngine(made, self._key_of(own), in_threads=self._in_threads)

    def survivors(self, ranks: Sequence[int], timeout_s: float) -> HostEngine:
        """Make an engine over new memory, by a rendezvous of the survivors alone."""
        if self._in_threads:
            raise UnsupportedError("shrink is for processes; make another fastdist.local_group")
        self._groups += 1
        key = self._key_of(ranks)
        return HostEngine.of_processes(key, ranks.index(self.rank), len(ranks), timeout_s)
