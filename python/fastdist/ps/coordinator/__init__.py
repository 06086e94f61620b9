"""Functions that run on the workers of a parameter-server job."""

try:
    import cloudpickle  # type: ignore[import-untyped]  # noqa: F401
except ImportError:
    raise ImportError(
        "fastdist.ps.coordinator needs cloudpickle: pip install cloudpickle", name="cloudpickle"
    ) from None

from fastdist.ps.coordinator.cluster_coordinator import ClusterCoordinator
from fastdist.ps.coordinator.per_worker import (
    PerWorkerDataset,
    PerWorkerIterator,
    PerWorkerValues,
    get_worker_index,
)
from fastdist.ps.coordinator.remote_value import RemoteValue

__all__ = [
    "ClusterCoordinator",
    "PerWorkerDataset",
    "PerWorkerIterator",
    "PerWorkerValues",
    "RemoteValue",
    "get_worker_index",
]
