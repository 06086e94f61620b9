"""Tensors as the engines take them, for tensors as torch.distributed takes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fastdist.collectives.arrays import DTYPES

Finish = Callable[[], None] | None
"""Copies results to the caller's tensors when the call has ended."""

_DTYPES = frozenset(getattr(torch, name) for name in DTYPES)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if the engines can use the tensor as it is."""
    return (
        tensor.is_contiguous()
        and tensor.dtype in _DTYPES
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def check_reducible(tensor: torch.Tensor) -> None:
    """Raise TypeError if the engines know the tensor's elements as bytes only."""
    if tensor.dtype not in _DTYPES:
        raise TypeError(
            f"{tensor.dtype} can be sent, but not reduced; cast to one of {', '.join(DTYPES)}"
        )


def to_read(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy that the engines can use."""
    if is_plain(tensor):
        return tensor
    plain = tensor.detach().contiguous().resolve_conj().resolve_neg()
    return plain if plain.dtype in _DTYPES else plain.reshape(-1).view(torch.uint8)


def to_write(tensor: torch.Tensor) -> tuple[torch.Tensor, Finish]:
    """Return the tensor, or one that the engines can write and what copies it back."""
    if is_plain(tensor):
        return tensor, None
    if torch._debug_has_internal_overlap(tensor) == 1:
        raise ValueError(
            f"a tensor that is written must not share memory within itself, got shape "
            f"{tuple(tensor.shape)} with strides {tensor.stride()}; call x.contiguous() first"
        )
    own = tensor.detach()
    copy = own.contiguous().resolve_conj().resolve_neg()
    if copy.data_ptr() == own.data_ptr():
        copy = copy.clone()
    if copy.dtype in _DTYPES:
        return copy, lambda: _copy(tensor, copy)
    return copy.reshape(-1).view(torch.uint8), lambda: _copy(tensor, copy)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if source.is_cuda:  # its memory must not be used again before this stream has read it
        source.record_stream(torch.cuda.current_stream(source.device))
    with torch.no_grad():
        target.copy_(source)


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the elements of all tensors, in order, as one flat tensor."""
    whole = _as_one(tensors)
    if whole is not None:
        return whole
    with torch.no_grad():
        return torch.cat([to_read(t).reshape(-1) for t in tensors])


def joined_to_write(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Finish]:
    """Return a flat tensor for the elements of all tensors, and what copies them to those."""
    whole = _as_one(tensors)
    if whole is not None:
        return whole, None
    sizes = [numel(t) for t in tensors]
    flat = torch.empty(sum(sizes), dtype=dtype_of(tensors[0]), device=tensors[0].device)

    def copy() -> None:
        for tensor, part in zip(tensors, torch.split(flat, sizes), strict=True):
            _copy(tensor, part.view(tensor.dtype).view(tensor.shape))

    return flat, copy


def numel(tensor: torch.Tensor) -> int:
    """Return the number of elements that `to_read` of the tensor has."""
    items = 1 if tensor.dtype in _DTYPES else tensor.element_size()
    return tensor.numel() * items


def dtype_of(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype that `to_read` of the tensor has."""
    return tensor.dtype if tensor.dtype in _DTYPES else torch.uint8


def _as_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return a view of all tensors if they follow one another in memory."""
    first = tensors[0]
    storage = first.untyped_storage().data_ptr()
    at = first.data_ptr()
    for tensor in tensors:
        if (
            tensor.dtype != first.dtype
            or tensor.untyped_storage().data_ptr() != storage
            or tensor.data_ptr() != at
            or not is_plain(tensor)
        ):
            return None
        at += tensor.numel() * tensor.element_size()
    size = sum(t.numel() for t in tensors)
    return first.detach().as_strided((size,), (1,), first.storage_offset())
