"""Process groups of torch's own backends, for devices that fastdist does not serve."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d


def group_of_other_backend(
    name: str, device: str, store: Any, rank: int, size: int, timeout: timedelta
) -> Any:
    """Make a process group of torch's "nccl" or "gloo" for one type of device.

    Raises:
        ValueError: another backend is named.
    """
    store = c10d.PrefixStore(f"{device}/{name}/", store)
    backend: Any
    if name == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        backend = dist.ProcessGroupNCCL(store, rank, size, options)
        kind = dist.ProcessGroup.BackendType.NCCL
    elif name == "gloo":
        backend = dist.ProcessGroupGloo(store, rank, size, timeout)
        kind = dist.ProcessGroup.BackendType.GLOO
    else:
        raise ValueError(
            f'beside "fastdist", a process group takes "nccl" and "gloo", got "{name}" for {device}'
        )
    backend._set_sequence_number_for_group()
    group = dist.ProcessGroup(store, rank, size)
    group._set_default_backend(kind)
    group._register_backend(torch.device(device), kind, backend)
    return group
