"""Copies of tensors in memory that is kept from one time to the next."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import torch

_COPY_THREADS = 4  # one thread does not reach the memory's bandwidth


class Staging:
    """Copies the tensors of a checkpoint's parts to the CPU. Allocating memory anew is slow."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], torch.Tensor] = {}

    def copy(self, part: str, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return copies of a part's tensors, which the next call for this part overwrites."""
        staged = {}
        for name, tensor in tensors.items():
            kept = self._kept.get((part, name))
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                kept = torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda"
                )
                self._kept[part, name] = kept
            staged[name] = kept
        with ThreadPoolExecutor(_COPY_THREADS) as pool:
            list(pool.map(torch.Tensor.copy_, staged.values(), tensors.values()))
        return staged

    def clear(self) -> None:
        """Release the memory."""
        self._kept.clear()
