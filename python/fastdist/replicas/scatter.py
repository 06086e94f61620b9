"""Changes some rows of a tensor (tf.IndexedSlices); updates of equal indices are combined."""

from __future__ import annotations

from typing import Any, Literal

import torch

from fastdist.collectives.autograd import as_tensor

ScatterOp = Literal["add", "sub", "mul", "div", "min", "max", "update"]


def to_rows(target: torch.Tensor, indices: Any, updates: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Check indices and updates of a tensor's rows.

    Returns:
        indices, int64 [n], and updates, [n, *target.shape[1:]], of the target's dtype and device.
    """
    rows = as_tensor(indices).detach()
    values = as_tensor(updates).detach()
    if target.dim() == 0:
        raise ValueError("scatter: the variable is a scalar, which has no rows")
    if rows.dim() != 1:
        raise ValueError(f"scatter: indices must have shape [n], got {tuple(rows.shape)}")
    if rows.numel() == 0:
        rows = rows.long()  # an empty list has torch's default dtype
    if rows.dtype.is_floating_point or rows.dtype.is_complex or rows.dtype == torch.bool:
        raise TypeError(f"scatter: indices must be integers, got {rows.dtype}")
    if not torch.can_cast(values.dtype, target.dtype):
        raise TypeError(f"scatter: a variable of {target.dtype} cannot hold {values.dtype}")
    if target.device.type != "xla" and rows.numel():
        low, high = int(rows.min()), int(rows.max())
        if low < 0 or high >= len(target):
            raise IndexError(
                f"scatter: index {low if low < 0 else high} of a variable that has "
                f"{len(target)} rows"
            )
    shape = (len(rows), *target.shape[1:])
    try:
        values = values.to(target).broadcast_to(shape)
    except RuntimeError:
        raise ValueError(
            f"scatter: updates must have shape {shape}, got {tuple(values.shape)}"
        ) from None
    return rows.to(target.device, torch.int64), values


def check_op(op: ScatterOp, target: torch.Tensor) -> None:
    """Raise TypeError if an operation is not defined for the target's dtype."""
    is_exact = not (target.is_floating_point() or target.is_complex())
    if (op == "div" and is_exact) or (op in ("min", "max") and target.is_complex()):
        raise TypeError(f"scatter_{op} is not defined for a variable of {target.dtype}")


@torch.no_grad()
def scatter(target: torch.Tensor, op: ScatterOp, rows: torch.Tensor, values: torch.Tensor) -> None:
    """Change rows of a tensor in place; "update" takes the last of updates with equal indices."""
    if op in ("add", "sub"):
        target.index_add_(0, rows, values, alpha=1 if op == "add" else -1)
        return
    wide = rows.reshape(-1, *[1] * (target.dim() - 1)).expand_as(values)
    if op == "mul":
        target.scatter_reduce_(0, wide, values, "prod")
    elif op == "div":
        target.div_(torch.ones_like(target).scatter_reduce_(0, wide, values, "prod"))
    elif op in ("min", "max"):
        target.scatter_reduce_(0, wide, values, f"a{op}")
    else:
        numbers = torch.arange(1, len(rows) + 1, device=rows.device)
        last = rows.new_zeros(len(target)).scatter_reduce_(0, rows, numbers, "amax")
        given = torch.cat([target[:1], values])[last]  # row 0 stands for rows that stay
        stays = (last == 0).reshape(-1, *[1] * (target.dim() - 1))
        target.copy_(torch.where(stays, target, given))
