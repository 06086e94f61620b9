"""The devices of this machine."""

from __future__ import annotations

import torch


def every_device() -> list[torch.device]:
    """All GPUs; the CPU where there is none."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cuda", i) for i in range(gpus)] or [torch.device("cpu")]


def physical_device(device: torch.device) -> torch.device:
    """torch has one CPU, whatever its number."""
    return torch.device("cpu") if device.type == "cpu" else device
