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
    """


class PeerFailureError(FastdistError):
    """A rank died or left while others still needed it. The communicator is no longer usable."""


class CollectiveTimeoutError(FastdistError):
    """A rank did not arrive in time.

    The communicator is no longer usable, unless only a `Work.wait` timed out.
    """


class UnavailableError(FastdistError):
    """A parameter server or coordinator cannot be reached."""


class ClusterConfigError(FastdistError):
    """The launcher's variables or the cluster spec are invalid, or the rendezvous failed."""


class UnsupportedError(FastdistError):
    """This build, engine or machine does not support the operation."""


class DamagedCheckpointError(ValueError):
    """A checkpoint is not whole: bytes are missing or have changed, or it is no checkpoint."""
