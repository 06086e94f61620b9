"""The exceptions of fastdist. Wrong arguments raise TypeError and ValueError."""

from __future__ import annotations


class FastdistError(RuntimeError):
    """Base class of fastdist's exceptions.

    Attributes:
        ranks: the ranks that caused the error; empty if no rank did.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class CollectiveMismatchError(FastdistError):
    """Ranks called different collectives, or one collective with arguments that disagree.

    Raised on every rank. On hosts no data has moved then, and the communicator stays usable. On
    GPUs the calls may have begun, so the communicator's calls on GPUs have ended; its others go on.

    Examples:
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> import fastdist as fd, numpy as np
        >>> def call(comm):
        ...     try:
        ...         comm.all_reduce(np.zeros(comm.rank + 1))
        ...     except fd.errors.CollectiveMismatchError:
        ...         return "mismatch"
        >>> ranks = fd.local_group(2)
        >>> with ThreadPoolExecutor(2) as threads:
        ...     list(threads.map(call, ranks))
        ['mismatch', 'mismatch']
    """


class LostRankError(FastdistError):
    """A rank has failed, or did not come in time: base class of the two errors that say which."""


class PeerFailureError(LostRankError):
    """A rank died or left while others still needed it. The communicator is no longer usable."""


class CollectiveTimeoutError(LostRankError):
    """A rank did not arrive in time.

    The communicator is no longer usable, unless only a `Work.wait` timed out.

    Examples:
        >>> import fastdist as fd, numpy as np
        >>> first, second = fd.local_group(2)
        >>> try:
        ...     first.barrier(timeout=0.1)
        ... except fd.errors.CollectiveTimeoutError as error:
        ...     error.ranks
        (1,)
    """


class UnavailableError(FastdistError):
    """A parameter server or coordinator cannot be reached."""


class ClusterConfigError(FastdistError):
    """The launcher's variables or the cluster spec are invalid, or the rendezvous failed."""


class UnsupportedError(FastdistError):
    """This build, engine or machine does not support the operation."""


class DamagedCheckpointError(ValueError):
    """A checkpoint is not whole: bytes are missing or have changed, or it is no checkpoint."""
