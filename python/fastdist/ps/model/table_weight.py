"""The parameter that stands for a table of rows on servers, and its gradient."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fastdist.errors import UnsupportedError
from fastdist.ps.model.table import ServedTable

_LEAVING = (
    "To save or export the trained model, call strategy.save(directory), and load it into a plain "
    "torch module with fastdist.ps.load(module, directory)"
)


class TableWeight(nn.Parameter):
    """A parameter of any size with the memory of one element, and without values.

    It has shape, dtype, gradients and hooks. Its copies are of the same class; tensors made like it
    (as optimizers make for their state) share one element.
    """

    table: ServedTable | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> TableWeight:
        return self._copy(self.dtype, self.device, self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to pickle; what goes to workers is made anew there."""
        raise UnsupportedError(
            f"the weight {_name_of(self)} cannot be pickled, because its rows are on parameter "
            f"servers, not in this process. {_LEAVING}"
        )

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
        """Allow operations that need no values; operations like zeros_like make one element."""
        kwargs = kwargs or {}
        weight = args[0] if args and isinstance(args[0], TableWeight) else None
        with torch._C.DisableTorchFunctionSubclass():
            if weight is not None and (function in _COPYING or function in _ALIKE):
                element = function(torch.Tensor.detach(weight)[:1, :1], *args[1:], **kwargs)
                if function in _ALIKE:
                    return element.expand(weight.shape)
                return weight._copy(element.dtype, element.device)
            if function == _GRAD and weight is not None:
                gradient, table = weight.grad, weight.table
                if type(gradient) is torch.Tensor and gradient.is_sparse and table is not None:
                    gradient.__class__ = RowsGradient
                    gradient.__dict__["table"] = table
                return gradient
            # Moving a module replaces the data of its parameters by copies.
            is_moved = function == _SET_DATA and isinstance(args[1], TableWeight)
            if function in _METADATA or is_moved:
                return function(*args, **kwargs)
        leaves = pytree.tree_leaves((args, kwargs))
        name = _name_of(next((leaf for leaf in leaves if isinstance(leaf, TableWeight)), None))
        operation = getattr(function, "__name__", repr(function))
        if operation in ("__get__", "__set__"):
            operation = function.__self__.__name__
        raise UnsupportedError(
            f"{operation} needs the values of the weight {name}, whose rows are on parameter "
            "servers, not in this process. Call the layer with the ids of the rows that are "
            "needed. If all are needed, keep them dense: in a subclass of nn.Embedding, or as a "
            f"weight that two modules share. {_LEAVING}"
        )


def table_weight(
    rows: int, dim: int, dtype: torch.dtype = torch.float32, device: torch.device | None = None
) -> TableWeight:
    """Create the weight of an embedding whose rows are on servers."""
    return TableWeight(torch.zeros((), dtype=dtype, device=device).expand(rows, dim))


def convert_weight(table: ServedTable) -> None:
    """Move the values of a table's weight to the servers; the weight keeps none."""
    weight = table.weight
    if not isinstance(weight, TableWeight):
        table.assign(weight)
        rows, dim = weight.shape
        weight.data = table_weight(rows, dim, weight.dtype, weight.device).data
        weight.__class__ = TableWeight


def _name_of(weight: TableWeight | None) -> str:
    table = None if weight is None else weight.table
    return "of an embedding" if table is None else table.name


def _methods(names: str) -> Iterator[Any]:
    return (getattr(torch.Tensor, name) for name in names.split())


_COPYING = frozenset(
    (
        *_methods("bfloat16 clone cpu cuda detach float half to"),
        torch.Tensor.data.__get__,  # type: ignore[attr-defined]
        torch.clone,
        torch.detach,
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
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_METADATA = frozenset(
    (
        *(field.__get__ for field in _FIELDS),
        *(field.__set__ for field in _FIELDS),
        *(field.__delete__ for field in _FIELDS),
        *_methods(
            "data_ptr dim element_size get_device is_complex is_contiguous is_floating_point "
            "is_inference is_same_size is_shared is_signed ndimension nelement numel register_hook "
            "register_post_accumulate_grad_hook requires_grad_ retain_grad size storage_offset "
            "stride __hash__ __len__"
        ),
        torch._has_compatible_shallow_copy_type,
        torch.is_complex,
        torch.is_floating_point,
        torch.is_same_size,
        torch.numel,
    )
)


class RowsGradient(torch.Tensor):
    """A sparse gradient with the norms and bounds of the dense gradient that it stands for.

    torch's gradient clipping does not support sparse tensors. Copies are plain sparse tensors.
    """

    table: ServedTable

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _FOREACH:
            return [_FOREACH[function](one, *args[1:], **kwargs) for one in args[0]]
        with torch._C.DisableTorchFunctionSubclass():
            if function in _NORMS:
                values = args[0].table.coalesce(args[0])._values()
                return function(values, *args[1:], **kwargs) if len(values) else values.sum()
            if function in _BOUNDS:
                return _bound(function, args[0], *args[1:], **kwargs)
            return function(*args, **kwargs)


def _bound(function: Any, gradient: RowsGradient, *args: Any, **kwargs: Any) -> RowsGradient:
    """Clamp each row's sum instead of its addends."""
    if float(function(torch.zeros(()), *args, **kwargs)) != 0:
        raise UnsupportedError(
            "bounds for a gradient of rows on parameter servers must include 0: other bounds would "
            "change all rows"
        )
    bounded = gradient.table.coalesce(gradient)
    function(bounded._values(), *args, **kwargs)
    gradient.data = bounded
    torch.autograd.graph.increment_version(gradient)
    return gradient


_NORMS = frozenset((torch.linalg.vector_norm, torch.norm, torch.Tensor.norm))
_BOUNDS = frozenset((torch.Tensor.clamp_, torch.Tensor.clamp_min_, torch.Tensor.clamp_max_))
_FOREACH = {
    torch._foreach_norm: torch.linalg.vector_norm,
    torch._foreach_mul_: torch.Tensor.mul_,
    torch._foreach_clamp_min_: torch.Tensor.clamp_min_,
    torch._foreach_clamp_max_: torch.Tensor.clamp_max_,
}
