"""Communication hooks of DistributedDataParallel that send gradients in fewer bits.

    model = DistributedDataParallel(model)  # in a process group of backend "fastdist"
    model.register_comm_hook(None, fastdist.integrations.ddp.bf16_hook)

Gradients are averaged as `all_reduce(op="mean", compress=…)` does: sums are formed in float32, and
gradients outside of the format's range become inf or NaN. PowerSGD is torch's own
(torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook), and works on this backend too.
"""

# No `from __future__ import annotations`: DDP compares the annotations of hooks with types.

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from fastdist.collectives.types import Compression
from fastdist.integrations.torch_backend.group import ProcessGroupFastdist

GradientFuture = torch.futures.Future[torch.Tensor]


def fp16_hook(group: dist.ProcessGroup | None, bucket: GradBucket) -> GradientFuture:
    """Average a bucket of float32 or float64 gradients, sent as float16.

    Args:
        group: the process group of the model; None for the default group.
        bucket: the gradients.

    Raises:
        TypeError: the group's backend is not fastdist.
    """
    return _average(group, bucket, "fp16")


def bf16_hook(group: dist.ProcessGroup | None, bucket: GradBucket) -> GradientFuture:
    """Average a bucket of gradients, sent as bfloat16; see `fp16_hook`."""
    return _average(group, bucket, "bf16")


def fp8_hook(group: dist.ProcessGroup | None, bucket: GradBucket) -> GradientFuture:
    """Average a bucket of gradients, on CPUs, sent as scaled float8_e4m3fn; see `fp16_hook`."""
    return _average(group, bucket, "fp8")


def _average(
    group: dist.ProcessGroup | None, bucket: GradBucket, compress: Compression
) -> GradientFuture:
    serving = dist.group.WORLD if group is None else group
    if not isinstance(serving, ProcessGroupFastdist):
        raise TypeError(
            'the hooks of fastdist need a process group of backend "fastdist", got '
            f"{type(serving).__name__}; torch's own are in "
            "torch.distributed.algorithms.ddp_comm_hooks"
        )
    return serving.average(bucket.buffer(), compress)
