"""What stands for the weight of an embedding whose rows are on servers."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from fastdist.errors import UnsupportedError
from fastdist.ps.model.rows import Rows
from fastdist.ps.model.rows_gradient import RowsGradient


class TableWeight(nn.Parameter):
    """A parameter of any size that has the memory of one element, and holds nothing.

    It says what it is (shape, dtype, …), and has gradients and hooks. Copies of it are of its kind;
    of a tensor like it (an optimizer may make such for its state) all elements are one.

    Attributes:
        rows: the table, as soon as it is known.

    Raises:
        UnsupportedError: something would read or write its values.
    """

    rows: Rows

    def __deepcopy__(self, memo: dict[int, Any]) -> TableWeight:
        if id(self) not in memo:
            memo[id(self)] = self._copy(self.dtype, self.device, self.requires_grad)
        copied: TableWeight = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return table_weight, (*self.shape, self.dtype, self.device)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"TableWeight of shape {tuple(self.shape)}, {self.dtype}: rows on parameter servers"

    def _copy(
        self, dtype: torch.dtype, device: torch.device, requires_grad: bool = False
    ) -> TableWeight:
        rows, dim = self.shape
        copy = table_weight(rows, dim, dtype, device)
        copy.__dict__.update(self.__dict__)
        copy.requires_grad_(requires_grad)
        return copy

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Let what asks for no values pass; what makes a tensor of its size makes one element."""
        kwargs = kwargs or {}
        weight = args[0] if args and isinstance(args[0], TableWeight) else None
        with torch._C.DisableTorchFunctionSubclass():
            if weight is not None and function in _COPIES:
                one = function(torch.Tensor.detach(weight)[:1, :1], *args[1:], **kwargs)
                return weight._copy(one.dtype, one.device)
            if weight is not None and function in _ALIKE:
                one = function(torch.Tensor.detach(weight)[:1, :1], *args[1:], **kwargs)
                return one.expand(weight.shape)
            if function == _GRAD and weight is not None:
                return _gradient(weight)
            if function in _ABOUT or _takes_over(function, args):
                return function(*args, **kwargs)
        _refuse(function, [*args, *kwargs.values()])


def table_weight(
    rows: int, dim: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> TableWeight:
    """The weight of an embedding whose rows are on servers."""
    return TableWeight(torch.zeros((), dtype=dtype, device=device).expand(rows, dim))


def _rows_of(weight: TableWeight) -> Rows | None:
    return weight.__dict__.get("rows")


def _gradient(weight: TableWeight) -> torch.Tensor | None:
    gradient, rows = weight.grad, _rows_of(weight)
    if type(gradient) is torch.Tensor and gradient.is_sparse and rows is not None:
        gradient.__class__ = RowsGradient
        gradient.__dict__["rows"] = rows
    return gradient


def _takes_over(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether it is `weight.data = copy`, as of modules that are moved."""
    return function == torch.Tensor.data.__set__ and isinstance(args[1], TableWeight)  # type: ignore[attr-defined]


def _refuse(function: Any, given: list[Any]) -> NoReturn:
    weight = next(_weights(given), None)
    rows = None if weight is None else _rows_of(weight)
    table = "of an embedding" if rows is None else rows.name
    name = getattr(function, "__name__", repr(function))
    if name in ("__get__", "__set__"):
        name = function.__self__.__name__
    raise UnsupportedError(
        f"{name} needs the values of the weight {table}, whose rows are on parameter servers: none "
        "of them is here. Call the layer, with the ids of rows that are needed. Where all are, "
        "keep them dense: in a subclass of nn.Embedding, or as a weight that two modules share"
    )


def _weights(given: Any) -> Iterator[TableWeight]:
    for one in given:
        if isinstance(one, TableWeight):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _weights(one)


_COPIES = frozenset(
    (
        torch.clone,
        torch.Tensor.clone,
        torch.Tensor.to,
        torch.Tensor.cpu,
        torch.Tensor.cuda,
        torch.Tensor.float,
        torch.Tensor.half,
        torch.Tensor.bfloat16,
        torch.Tensor.detach,
        torch.detach,
        torch.Tensor.data.__get__,  # type: ignore[attr-defined]
    )
)
_ALIKE = frozenset((torch.empty_like, torch.full_like, torch.ones_like, torch.zeros_like))
_VALUES = ("H", "T", "data", "imag", "mH", "mT", "real")
_FIELDS = [
    field
    for name, field in vars(torch._C.TensorBase).items()
    if isinstance(field, types.GetSetDescriptorType) and name not in _VALUES
]
_GRAD = torch.Tensor.grad.__get__  # type: ignore[union-attr]
_ABOUT = frozenset(
    (
        *(field.__get__ for field in _FIELDS),
        *(field.__set__ for field in _FIELDS),
        *(field.__delete__ for field in _FIELDS),
        torch.Tensor.data_ptr,
        torch.Tensor.dim,
        torch.Tensor.element_size,
        torch.Tensor.get_device,
        torch.Tensor.is_complex,
        torch.Tensor.is_contiguous,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_inference,
        torch.Tensor.is_same_size,
        torch.Tensor.is_shared,
        torch.Tensor.is_signed,
        torch.Tensor.ndimension,
        torch.Tensor.nelement,
        torch.Tensor.numel,
        torch.Tensor.register_hook,
        torch.Tensor.register_post_accumulate_grad_hook,
        torch.Tensor.requires_grad_,
        torch.Tensor.retain_grad,
        torch.Tensor.size,
        torch.Tensor.storage_offset,
        torch.Tensor.stride,
        torch.Tensor.__hash__,
        torch.Tensor.__len__,
        torch._has_compatible_shallow_copy_type,
        torch.is_complex,
        torch.is_floating_point,
        torch.is_same_size,
        torch.numel,
    )
)
