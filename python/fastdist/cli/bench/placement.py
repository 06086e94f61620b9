"""The GPUs of the ranks, and the links between GPUs."""

from __future__ import annotations

import re
from dataclasses import dataclass

import fastdist._core as _core
from fastdist.cli.bench.gpu import gpu_of_rank
from fastdist.cli.bench.machine import output_of

_NVLINK = re.compile(r"Link \d+: ([\d.]+) GB/s")
# GB/s of a lane in one direction, by generation, without the encoding overhead.
_PCIE_LANE_GB_PER_S = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}


@dataclass(frozen=True, slots=True)
class Placement:
    """The GPUs of a run on one machine.

    Attributes:
        names: Names of all GPUs.
        of_rank: GPU of each rank.
        link: Kind of the links between GPUs, for messages; empty if unknown.
        link_gb_per_s: Speed of a GPU's links in one direction; 0 if unknown.
    """

    names: tuple[str, ...]
    of_rank: tuple[int, ...]
    link: str = ""
    link_gb_per_s: float = 0.0

    @property
    def is_shared(self) -> bool:
        """True if two ranks have the same GPU."""
        return len(set(self.of_rank)) < len(self.of_rank)

    @property
    def sharing(self) -> str:
        """`2 ranks share GPU 0`, for every shared GPU; empty if each rank has its own GPU."""
        counts = {gpu: self.of_rank.count(gpu) for gpu in sorted(set(self.of_rank))}
        return ", ".join(f"{n} ranks share GPU {gpu}" for gpu, n in counts.items() if n > 1)

    def __str__(self) -> str:
        used = [self.names[gpu] for gpu in sorted(set(self.of_rank))]
        kinds = ", ".join(f"{used.count(name)} x {name}" for name in dict.fromkeys(used))
        return "; ".join(filter(None, (kinds, self.sharing)))


def place_ranks(ranks: int) -> Placement:
    """Return the GPUs of the ranks of a run.

    Raises:
        ValueError: No GPU can be used; the message has the reason.
    """
    devices = _core.cuda_devices()
    if not devices:
        raise ValueError(f"no GPU: {_core.why_no_cuda()}")
    of_rank = tuple(map(gpu_of_rank, range(ranks)))
    link, speed = ("", 0.0) if len(set(of_rank)) == 1 else _link(of_rank[0])
    return Placement(tuple(device.name for device in devices), of_rank, link, speed)


def _link(gpu: int) -> tuple[str, float]:
    # nvidia-smi numbers all GPUs, this process only its visible GPUs; UUIDs are unambiguous.
    uuid = _core.cuda_devices()[gpu].uuid
    nvlinks = output_of("nvidia-smi", "nvlink", "--status", "-i", uuid)
    speed = nvlink_gb_per_s(nvlinks)
    if speed:
        return f"{len(_NVLINK.findall(nvlinks))} NVLinks", speed
    query = "--query-gpu=pcie.link.gen.max,pcie.link.width.max"
    return pcie_link(output_of("nvidia-smi", query, "--format=csv,noheader", "-i", uuid))


def nvlink_gb_per_s(status: str) -> float:
    """Return the sum of a GPU's links in the output of `nvidia-smi nvlink --status`."""
    return sum(map(float, _NVLINK.findall(status)))


def pcie_link(line: str) -> tuple[str, float]:
    """Return the name and speed in GB/s of a PCIe link given as `5, 16`: generation, lanes."""
    match = re.fullmatch(r"\s*(\d+), *(\d+)\s*", line)
    if match is None or int(match[1]) not in _PCIE_LANE_GB_PER_S:
        return "", 0.0
    generation, lanes = int(match[1]), int(match[2])
    return f"PCIe {generation}.0 x{lanes}", lanes * _PCIE_LANE_GB_PER_S[generation]
