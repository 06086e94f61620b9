"""Finds the devices of a TPU and the hosts of its slice; or says what was looked for."""

from __future__ import annotations

import dataclasses
import os

from fastdist.cluster.tpu import TPUClusterResolver
from fastdist.collectives.communicator import Communicator
from fastdist.collectives.init import init
from fastdist.errors import ClusterConfigError, UnsupportedError
from fastdist.tpu.mesh import XlaDevices, XlaMesh, start_runtime


@dataclasses.dataclass(frozen=True, slots=True)
class Slice:
    """The devices of a TPU slice.

    Attributes:
        mesh: all of them.
        hosts: one rank for each host; None where there is one host.
    """

    mesh: XlaMesh
    hosts: Communicator | None


def find_slice(resolver: TPUClusterResolver | None, is_manual: bool) -> Slice:
    """The devices that PJRT finds. Every host of a slice must call.

    Args:
        resolver: says who the hosts are; None asks the environment where there are several.
        is_manual: as for `XlaMesh`.

    Raises:
        ImportError: torch_xla is not installed.
        UnsupportedError: no TPU can be initialised.
        ClusterConfigError: the hosts that are named are not those whose devices PJRT finds.
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
    if resolver is None or resolver.num_hosts == 1:
        if not is_whole:
            raise ClusterConfigError(_other_hosts(devices, resolver))
        return Slice(XlaMesh(is_manual), None)
    if is_whole:
        raise ClusterConfigError(_other_hosts(devices, resolver))
    hosts = init(cluster=resolver)
    everyone: list[tuple[int, ...]] = hosts.all_gather_object(devices.own)
    if len({len(own) for own in everyone}) > 1:
        counts = ", ".join(f"{len(own)} on host {host}" for host, own in enumerate(everyone))
        raise ClusterConfigError(f"all hosts must have as many devices, got {counts}")
    return Slice(XlaMesh(is_manual, everyone), hosts)


def _other_hosts(devices: XlaDevices, resolver: TPUClusterResolver | None) -> str:
    named = "nothing names others" if resolver is None else f"{resolver.source} names them"
    count = 1 if resolver is None else resolver.num_hosts
    return (
        f"PJRT finds {devices.count} {devices.kind} devices, of which {len(devices.own)} are this "
        f"host's; expected such of {count} hosts, {named}. Start the program on every host of the "
        "slice, with the environment that its TPU VM has"
    )


def _not_found(asked: str | None, resolver: TPUClusterResolver | None, why: str) -> str:
    devices = [path for path in ("/dev/accel0", "/dev/vfio/0") if os.path.exists(path)]
    said = "" if resolver is None else f", {resolver.source}"
    return (
        f"no TPU could be initialised: {why}. Looked for PJRT_DEVICE (found {asked!r}), "
        f"the device files of TPUs (found {devices or 'none'}){said}. On a TPU VM: pip install "
        "torch==2.9.* 'torch_xla[tpu]==2.9.*' and PJRT_DEVICE=TPU. Without a TPU use "
        "fd.MirroredStrategy() instead, or virtual devices: PJRT_DEVICE=CPU CPU_NUM_DEVICES=4"
    )
