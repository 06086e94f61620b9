"""The reasons why a job does not go on."""

from enum import Enum


class Kind(Enum):
    """The reasons why a job does not go on; `UNKNOWN`: the cause is not on this machine."""

    DEAD = "dead"
    STOPPED = "stopped"
    USER = "never arrived, still in user code"
    OTHER_CALL = "other call or size"
    OTHER_ORDER = "other order of communicators"
    DATA = "waiting for data"
    FILES = "file system"
    MEMORY = "out of memory or swapping"
    THREADS = "deadlock of threads or of the GIL"
    LINK = "link down or lossy"
    GPU = "GPU work unfinished"
    SLOW = "slow, not stuck"
    UNKNOWN = "unknown"
