"""Converts torch.distributed's tensors into dense tensors that engines accept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from fastdist.recorder.signatures import DTYPES

Finish = Callable[[], None] | None  # copies results to the caller's tensors after the call

_DTYPES = frozenset(getattr(torch, name) for name in DTYPES)


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if the engines can use the tensor as it is."""
    return (
        tensor.is_contiguous()
        and tensor.dtype in _DTYPES
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def check_reducible(tensor: torch.Tensor, op: str) -> None:
    """Raise TypeError if the engines cannot apply a reduction to the tensor's elements."""
    if tensor.dtype is torch.complex32 and op not in ("sum", "mean"):
        raise TypeError(f"torch.complex32 can only be summed and averaged, got {op}")
    if tensor.dtype not in _DTYPES and tensor.dtype is not torch.complex32:
        raise TypeError(
            f"{tensor.dtype} can be sent, but not reduced; cast to one of {', '.join(DTYPES)}"
        )


def to_read(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor, or a copy that the engines can use."""
    if is_plain(tensor):
        return tensor
    return _known(tensor.detach().contiguous().resolve_conj().resolve_neg())


def to_write(tensor: torch.Tensor, always_copy: bool = False) -> tuple[torch.Tensor, Finish]:
    """Return the tensor, or one that engines can write and a function that copies it back."""
    if is_plain(tensor) and not always_copy:
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
    return _known(copy), lambda: _copy(tensor, copy)


def copying(source: torch.Tensor, target: torch.Tensor) -> Finish:
    """Return a function that copies the elements of a result of `to_read` to the target."""
    return lambda: _copy(target, source.view(target.dtype).view(target.shape))


def all_to_write(tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], Finish]:
    """Apply `to_write` to several tensors, some of which may be the same."""
    pairs: list[tuple[torch.Tensor, Finish]] = []
    places = set()
    for tensor in tensors:
        pairs.append(to_write(tensor, always_copy=tensor.data_ptr() in places))
        if tensor.numel() > 0:
            places.add(tensor.data_ptr())
    return [plain for plain, _ in pairs], all_of([finish for _, finish in pairs])


def all_of(finishes: Sequence[Finish]) -> Finish:
    """Return a function that calls all of these, or None if there are none."""
    some = [finish for finish in finishes if finish is not None]

    def finish_all() -> None:
        for finish in some:
            finish()

    return finish_all if some else None


def _known(tensor: torch.Tensor) -> torch.Tensor:
    """View a contiguous tensor as a dtype that the engines support."""
    if tensor.dtype in _DTYPES:
        return tensor
    if tensor.dtype is torch.complex32:
        return torch.view_as_real(tensor)
    return tensor.reshape(-1).view(torch.uint8)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if source.is_cuda:  # its memory must not be used again before this stream has read it
        source.record_stream(torch.cuda.current_stream(source.device))
    with torch.no_grad():
        target.copy_(source)


def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the elements of all tensors into one flat tensor."""
    whole = _as_one(tensors)
    if whole is not None:
        return whole
    with torch.no_grad():
        return torch.cat([to_read(t).reshape(-1) for t in tensors])


def joined_to_write(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Finish]:
    """Return a flat tensor for all elements, and a function that copies it to the tensors."""
    whole = _as_one(tensors)
    if whole is not None:
        return whole, None
    check_apart(tensors)
    sizes = [numel(t) for t in tensors]
    flat = torch.empty(sum(sizes), dtype=dtype_of(tensors[0]), device=tensors[0].device)

    def copy() -> None:
        for part, tensor in zip(torch.split(flat, sizes), tensors, strict=True):
            _copy(tensor, part.view(tensor.dtype).view(tensor.shape))

    return flat, copy


def check_apart(tensors: Sequence[torch.Tensor]) -> None:
    """Raise ValueError if tensors that are written share memory, such as `[x] * world_size`.

    Of tensors with gaps only the first element is compared: others may lie in the gaps.
    """
    ranges = []
    for i, tensor in enumerate(tensors):
        if tensor.numel() > 0:
            count = tensor.numel() if tensor.is_contiguous() else 1
            start = tensor.data_ptr()
            ranges.append((start, start + count * tensor.element_size(), i))
    ranges.sort()
    for (_, end, i), (start, _, j) in pairwise(ranges):
        if start < end:
            raise ValueError(
                f"outputs must not share memory, got outputs {min(i, j)} and {max(i, j)} that do; "
                "make a tensor for each, as in [torch.empty_like(x) for _ in range(world_size)]"
            )


def numel(tensor: torch.Tensor) -> int:
    """Return the number of elements that `to_read` of the tensor has."""
    return tensor.numel() * tensor.element_size() // dtype_of(tensor).itemsize


def dtype_of(tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype that `to_read` of the tensor has."""
    if tensor.dtype in _DTYPES:
        return tensor.dtype
    return torch.float16 if tensor.dtype is torch.complex32 else torch.uint8


def _as_one(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Return one view of all tensors if they are adjacent in memory."""
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
