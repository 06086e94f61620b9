"""Communication options of strategies (tf.distribute.experimental.CommunicationOptions)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from fastdist.collectives.communicator import Compression
from fastdist.training.contributions import GradientReduction

Implementation = Literal["auto", "all_reduce", "reduce_to_one_device"]


@dataclass(frozen=True, slots=True)
class CommunicationOptions:
    """Options of the collectives that a strategy calls.

    Attributes:
        bucket_bytes: maximum total size of gradients that are reduced together.
        timeout_s: seconds to wait for other replicas; None: the communicator's default.
        implementation: the algorithm that reduces gradients (tf.distribute's CrossDeviceOps).
            "all_reduce": all replicas at once, by the fastest transport.
            "reduce_to_one_device": on the first replica, which broadcasts the result. "auto":
            "all_reduce".
        compress: send gradients as "fp16", "bf16" or "fp8"; None: exact.
        overlap: True: reduce gradients during backward. False: in one call after backward, which is
            faster if replicas use all cores. "auto": True on GPUs, and on the CPU if every machine
            has more cores than replicas. The same on all replicas.
        gradient_reduction: "mean" over the examples of the global batch, so that replicas train
            as one device would, or "sum" over replicas (tf.distribute's convention; see
            `fastdist.nn.compute_average_loss`).

    Examples:
        >>> import fastdist as fd
        >>> options = fd.CommunicationOptions(compress="bf16", timeout_s=60)
        >>> strategy = fd.MirroredStrategy(["cpu:0"], options=options)
    """

    bucket_bytes: int = 8 << 20
    timeout_s: float | None = None
    implementation: Implementation = "auto"
    compress: Compression | None = None
    overlap: bool | Literal["auto"] = "auto"
    gradient_reduction: GradientReduction = "mean"

    def __post_init__(self) -> None:
        if self.bucket_bytes <= 0:
            raise ValueError(f"bucket_bytes must be positive, got {self.bucket_bytes}")
        if self.timeout_s is not None and not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be positive, got {self.timeout_s}")
        if self.compress not in (None, "fp16", "bf16", "fp8"):
            raise ValueError(f'compress must be None, "fp16", "bf16" or "fp8", got {self.compress}')
        if self.implementation not in get_args(Implementation):
            names = ", ".join(f'"{name}"' for name in get_args(Implementation))
            raise ValueError(f"implementation must be one of {names}, got {self.implementation!r}")
        if self.compress is not None and self.implementation == "reduce_to_one_device":
            raise ValueError('compress does not work with implementation="reduce_to_one_device"')
        if self.overlap not in (True, False, "auto"):
            raise ValueError(f'overlap must be True, False or "auto", got {self.overlap!r}')
        if self.gradient_reduction not in ("mean", "sum"):
            raise ValueError(
                f'gradient_reduction must be "mean" or "sum", got {self.gradient_reduction!r}'
            )
