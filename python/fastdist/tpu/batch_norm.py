"""Batch normalization in training, with torch's results on other devices.

torch_xla's own batch norm updates the running variance by the biased variance, and would include
padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fastdist.tpu.padding import Padding

_NAMES = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
_DEFAULTS = {"weight": None, "bias": None, "training": False, "momentum": 0.1, "eps": 1e-5}


def batch_norm(
    padding: Padding | None, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Compute `torch.nn.functional.batch_norm` over the rows that are examples."""
    given: dict[str, Any] = {**_DEFAULTS, **dict(zip(_NAMES, args, strict=False)), **kwargs}
    value: torch.Tensor = given["input"]
    place = None if padding is None else padding.place_in(value)
    if given["training"]:
        result = _normalized(padding, value, place, given)
    else:
        result = func(*args, **kwargs)
    if padding is not None and place is not None:
        padding.follow(result, *place)
    return result


def _normalized(
    padding: Padding | None,
    value: torch.Tensor,
    place: tuple[int, int] | None,
    given: dict[str, Any],
) -> torch.Tensor:
    axes = [axis for axis in range(value.dim()) if axis != 1]
    shape = (1, -1, *(1,) * (value.dim() - 2))
    each = value.numel() // max(1, value.shape[1])
    if padding is None or place is None:
        mean = value.mean(axes)
        variance = (value - mean.view(shape)).square().mean(axes)
        correction: Any = each / max(1, each - 1)
    else:
        mask = padding.mask_for(value, place)
        count = padding.count.clamp(min=1) * (each / padding.rows)
        zero = torch.zeros((), dtype=value.dtype, device=value.device)
        mean = torch.where(mask, value, zero).sum(axes) / count
        squares = torch.where(mask, (value - mean.view(shape)).square(), zero)
        variance = squares.sum(axes) / count
        correction = count / (count - 1).clamp(min=1)
    if given["running_mean"] is not None:
        rate = given["momentum"]
        with torch.no_grad():
            for name, new in (("running_mean", mean), ("running_var", variance * correction)):
                given[name].mul_(1 - rate).add_(new.detach().to(given[name].dtype) * rate)
    result = (value - mean.view(shape)) * torch.rsqrt(variance + given["eps"]).view(shape)
    if given["weight"] is not None:
        result = result * given["weight"].view(shape)
    if given["bias"] is not None:
        result = result + given["bias"].view(shape)
    return result.to(value.dtype)
