"""What fastdist raises, besides TypeError and ValueError for wrong arguments."""

from __future__ import annotations


class FastdistError(RuntimeError):
    """Base of all errors that are not about a single argument.

    Attributes:
        ranks: the ranks that the error is about; empty where it is not about ranks.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class CollectiveMismatchError(FastdistError):
    """Ranks called different collectives, or the same with arguments that do not fit.

    Raised on every rank before any data moved; the communicator stays usable.
    """


class PeerFailureError(FastdistError):
    """A rank died or left while others still needed it. The communicator is lost."""


class CollectiveTimeoutError(FastdistError):
    """A rank did not arrive in time. The communicator is lost, unless only a `Work.wait` ended."""


class UnavailableError(FastdistError):
    """A parameter server or coordinator cannot be reached."""


class ClusterConfigError(FastdistError):
    """The launcher's variables or the cluster spec make no sense, or ranks did not meet."""


class UnsupportedError(FastdistError):
    """This build, engine or machine cannot do what was asked for."""
