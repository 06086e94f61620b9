"""The gradient of a table: torch's clipping knows no sparse ones."""

from __future__ import annotations

from typing import Any

import torch

from fastdist.errors import UnsupportedError
from fastdist.ps.model.rows import Rows


class RowsGradient(torch.Tensor):
    """A sparse tensor with norms and bounds, those of the dense tensor that it stands for.

    Copies of it are plain ones.

    Attributes:
        rows: the table.
    """

    rows: Rows

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        copy: torch.Tensor = memo.setdefault(id(self), self.detach().clone())
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _OF_EACH:
            return [_OF_EACH[function](one, *args[1:], **kwargs) for one in args[0]]
        with torch._C.DisableTorchFunctionSubclass():
            if function in _NORMS:
                values = args[0].rows.summed(args[0])._values()
                return function(values, *args[1:], **kwargs) if len(values) else values.sum()
            if function in _BOUNDS:
                return _bound(function, args[0], *args[1:], **kwargs)
            return function(*args, **kwargs)


def _bound(function: Any, gradient: RowsGradient, *args: Any, **kwargs: Any) -> RowsGradient:
    """Clamp sums, not the parts that there are of a row."""
    if float(function(torch.zeros(()), *args, **kwargs)) != 0:
        raise UnsupportedError(
            "a gradient of rows on parameter servers is bounded from below 0 to above 0: other "
            "bounds would change all rows"
        )
    bounded = gradient.rows.summed(gradient)
    function(bounded._values(), *args, **kwargs)
    gradient.data = bounded
    torch.autograd.graph.increment_version(gradient)
    return gradient


_NORMS = frozenset((torch.linalg.vector_norm, torch.norm, torch.Tensor.norm))
_BOUNDS = frozenset((torch.Tensor.clamp_, torch.Tensor.clamp_min_, torch.Tensor.clamp_max_))
_OF_EACH = {
    torch._foreach_norm: torch.linalg.vector_norm,
    torch._foreach_mul_: torch.Tensor.mul_,
    torch._foreach_clamp_min_: torch.Tensor.clamp_min_,
    torch._foreach_clamp_max_: torch.Tensor.clamp_max_,
}
