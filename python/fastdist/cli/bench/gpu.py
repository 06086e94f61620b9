"""The GPUs of the ranks of a run."""

from __future__ import annotations

from dataclasses import dataclass

import fastdist._core as _core


def gpu_of_rank(rank: int) -> int:
    """Return the GPU of a rank: ranks take GPUs in turn, and share GPUs if there are too few."""
    return rank % len(_core.cuda_devices())


@dataclass(frozen=True, slots=True)
class Placement:
    """The GPUs of a run on one machine."""

    names: tuple[str, ...]  # of all GPUs
    of_rank: tuple[int, ...]  # GPU of each rank

    @property
    def is_shared(self) -> bool:
        """True if two ranks have the same GPU."""
        return bool(self.sharing)

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
    """Return the GPUs of the ranks of a run."""
    devices = _core.cuda_devices()
    if not devices:
        raise ValueError(f"no GPU: {_core.why_no_cuda()}")
    of_rank = tuple(map(gpu_of_rank, range(ranks)))
    return Placement(tuple(device.name for device in devices), of_rank)
