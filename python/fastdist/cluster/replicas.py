"""The place of a replica whose program a strategy has started once more, in the environment."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass

from fastdist.cluster.launch import (
    REPLICAS_VARIABLE,
    Launch,
    note_launch,
    rank_variables,
    require_own_place,
    without_rank,
)
from fastdist.processes.proc import start_ticks

try:
    INITIAL_DIRECTORY: str | None = os.getcwd()
except FileNotFoundError:  # it was removed
    INITIAL_DIRECTORY = None
"""The working directory when fastdist was imported; replicas are started in it."""


@dataclass(frozen=True, slots=True)
class StartedReplica:
    """One of the processes of a program that started itself for its other local replicas."""

    devices: tuple[str, ...]  # of the replicas of this machine's worker
    index: int  # of this process among them; 0 started the others
    worker: int  # its rank among `workers`
    workers: int  # processes that a launcher or TF_CONFIG has named
    coordinator: str  # "host:port" where rank 0 can be reached; "" where there is one worker
    job: str  # random, the same in all processes that the same process has started

    @property
    def rank(self) -> int:
        """Among the replicas of all workers."""
        return self.worker * len(self.devices) + self.index

    @property
    def world_size(self) -> int:
        """Replicas of all workers."""
        return self.workers * len(self.devices)

    def environment(self) -> dict[str, str]:
        """Return the environment of this replica's process."""
        place = (self.rank, self.world_size, self.index, len(self.devices))
        return rank_environment(*place, self.job) | {REPLICAS_VARIABLE: json.dumps(asdict(self))}

    def launch(self) -> Launch:
        """Return the launch that a launcher would have described."""
        local = len(self.devices)
        return Launch("this program", self.rank, self.world_size, self.index, local, self.job)


def rank_environment(
    rank: int, world_size: int, local_rank: int, local_world_size: int, job: str
) -> dict[str, str]:
    """Return the environment of a rank, as `fastdist run` would set it."""
    threads = max(1, len(os.sched_getaffinity(0)) // local_world_size)
    return {
        "OMP_NUM_THREADS": str(threads),
        **without_rank(os.environ),
        **rank_variables(rank, world_size, local_rank, local_world_size, job),
    }


class _Known:
    own: StartedReplica | None = None


def started_replica() -> StartedReplica | None:
    """Return this process's place; None if no strategy has started replicas.

    The place is taken out of the environment: programs that this process starts are no replicas.
    """
    text = os.environ.get(REPLICAS_VARIABLE)
    if text is not None and _Known.own is None:
        require_own_place()
        fields = json.loads(text)
        _Known.own = StartedReplica(**{**fields, "devices": tuple(fields["devices"])})
        note_launch(_Known.own.launch())
        for name in os.environ.keys() - without_rank(os.environ).keys():
            del os.environ[name]
    return _Known.own


def patience_s() -> float:
    """Return extra rendezvous seconds for replicas that rerun the program from its start.

    This process's whole life so far has gone into what they rerun.
    """
    if _Known.own is None:
        return 0.0
    started_s = start_ticks("self") / os.sysconf("SC_CLK_TCK")
    return 3.0 * max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)


def become_first(replica: StartedReplica) -> None:
    """Make this process replica 0, after it has started the others."""
    _Known.own = replica
    note_launch(replica.launch())
