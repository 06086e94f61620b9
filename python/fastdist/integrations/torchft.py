"""The process group of torchft, which trains on while replica groups come and go.

    from fastdist.integrations.torchft import ProcessGroupFastdist

    manager = torchft.Manager(pg=ProcessGroupFastdist(timeout=timedelta(seconds=5)), ...)

torchft configures it anew for each quorum. It serves releases of torchft with `configure` and with
`reconfigure`.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from fastdist.integrations.torch_backend import group as torch_backend

try:
    from torchft import process_group
except ImportError:
    raise ImportError("fastdist.integrations.torchft needs torchft: pip install torchft") from None


class ProcessGroupFastdist(process_group.ProcessGroupWrapper):  # type: ignore[misc]
    """torchft's process group on fastdist's collectives: shared memory, TCP between machines.

    If a rank dies or aborts, the calls of all others raise an error within a fraction of a second,
    and torchft's manager skips the step.

    Args:
        timeout: a timedelta, the limit for a quorum's rendezvous, and for each call; 60 s by
            default.
    """

    _pg: torch_backend.ProcessGroupFastdist | None

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        """Make the group of a quorum; torchft has aborted the one before."""
        seconds = self._timeout.total_seconds()
        group = torch_backend.ProcessGroupFastdist
        return group.of_store(store, rank, world_size, seconds, self.getBackendName())

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return "torchft-fastdist"

    def errored(self) -> Exception | None:
        """Return the error since which all calls fail, until the next quorum; None without one."""
        return None if self._pg is None else self._pg.failure()

    def abort(self, errored: bool = True) -> None:
        """Leave the ranks immediately: running calls end with an error, here and on other ranks.

        Args:
            errored: False if torchft aborts to configure the group anew, and logs no error.
        """
        aborted = self._pg
        super().abort(errored)
        self._pg = aborted  # whose calls raise the reason

    def shutdown(self) -> None:
        """Wait for this rank's asynchronous calls, then leave the ranks."""
        if self._pg is not None:
            self._pg.shutdown()
        super().shutdown()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long calls from now on, and the ranks of later quorums, may take."""
        super().set_timeout(timeout)
        if self._pg is not None:
            self._pg.set_timeout(timeout)
