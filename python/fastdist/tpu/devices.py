"""Finds the devices of a TPU and the hosts of its slice."""

from __future__ import annotations

import os

from fastdist.cluster.tpu import TPUClusterResolver
from fastdist.collectives.communicator import Communicator
from fastdist.collectives.init import init
from fastdist.errors import ClusterConfigError, UnsupportedError
from fastdist.tpu.mesh import Mesh, start_runtime


def find_slice(resolver: TPUClusterResolver | None) -> tuple[Mesh, Communicator | None]:
    """Find the devices of PJRT. Every host of a slice must call.

    Args:
        resolver: names the hosts; None reads the environment if there are several hosts.

    Returns:
        All devices, and a communicator with one rank per host; None if there is one host.

    Raises:
        ImportError: torch_xla is not installed.
        UnsupportedError: no TPU can be initialised.
        ClusterConfigError: the resolver names other hosts than PJRT finds.
    """
    asked = os.environ.get("PJRT_DEVICE")
    try:
        devices = start_runtime()
    except UnsupportedError as error:
        raise UnsupportedError(_not_found(asked, resolver, str(error))) from error
    if devices.kind == "CPU" and not asked:
        raise UnsupportedError(_not_found(asked, resolver, "PJRT fell back to the CPU"))
    is_whole = len(devices.own) == devices.count
    if resolver is None and not is_whole:
        resolver = TPUClusterResolver()
    if resolver is not None and is_whole != (resolver.num_hosts == 1):
        raise ClusterConfigError(
            f"PJRT finds {devices.count} {devices.kind} devices, {len(devices.own)} of them on "
            f"this host; expected devices of {resolver.num_hosts} hosts, which {resolver.source} "
            "names. Start the program on every host of the slice, in the environment of its TPU VM"
        )
    if is_whole:
        return Mesh(), None
    hosts = init(cluster=resolver)
    everyone: list[tuple[int, ...]] = hosts.all_gather_object(devices.own)
    if len({len(own) for own in everyone}) > 1:
        counts = ", ".join(f"{len(own)} on host {host}" for host, own in enumerate(everyone))
        raise ClusterConfigError(f"all hosts must have equally many devices, got {counts}")
    return Mesh(everyone), hosts


def _not_found(asked: str | None, resolver: TPUClusterResolver | None, why: str) -> str:
    devices = [path for path in ("/dev/accel0", "/dev/vfio/0") if os.path.exists(path)]
    said = "" if resolver is None else f", {resolver.source}"
    return (
        f"no TPU could be initialised: {why}. Looked for PJRT_DEVICE (found {asked!r}), "
        f"the device files of TPUs (found {devices or 'none'}){said}. On a TPU VM: pip install "
        "torch==2.9.* 'torch_xla[tpu]==2.9.*' and PJRT_DEVICE=TPU. Without a TPU use "
        "fd.MirroredStrategy() instead, or virtual devices: PJRT_DEVICE=CPU CPU_NUM_DEVICES=4"
    )
