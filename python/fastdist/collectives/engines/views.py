"""Arrays of any library as flat memory, for engines written in Python.

The compiled engine reads arrays itself (csrc/bindings/array.cpp), by the same rules and with the
same messages.
"""

from __future__ import annotations

import ctypes
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastdist.collectives.arrays import DTYPES, NOT_IN_NUMPY
from fastdist.collectives.engines.engine import Bytes
from fastdist.collectives.hints import immutable, not_an_array
from fastdist.errors import UnsupportedError

SMALL_FLOATS = frozenset({"float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"})
_INTEGERS = frozenset(DTYPES[1:9])


@dataclass(frozen=True, slots=True)
class View:
    """A dense array as a flat sequence of elements, in memory order.

    Attributes:
        flat: one-dimensional numpy array, or torch tensor if numpy lacks the dtype.
        dtype: one of `DTYPES`.
        order: 0 for row-major order, else a hash of the order of the axes in memory.
    """

    flat: Any
    dtype: str
    order: int = 0

    @property
    def count(self) -> int:
        """The number of elements."""
        return int(self.flat.shape[0])

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return int(self.flat.nbytes)

    @property
    def address(self) -> int:
        """The address of the first byte."""
        if isinstance(self.flat, np.ndarray):
            return int(self.flat.__array_interface__["data"][0])
        return int(self.flat.data_ptr())

    @property
    def memory(self) -> Bytes:
        """The memory as bytes, writable even if the array is not.

        Code that writes has checked that the array is writable.
        """
        if isinstance(self.flat, np.ndarray):
            if self.flat.flags.writeable or self.nbytes == 0:
                return self.flat.view(np.uint8) if self.nbytes else np.empty(0, np.uint8)
            raw: Any = (ctypes.c_uint8 * self.nbytes).from_address(self.address)
            raw.owner = self.flat
            memory: Bytes = np.frombuffer(raw, np.uint8)
            return memory
        import torch

        memory = self.flat.view(torch.uint8).numpy()
        return memory

    def like(self, memory: Bytes) -> Any:
        """View other memory as an array of this library and dtype."""
        if isinstance(self.flat, np.ndarray):
            return memory.view(self.flat.dtype)
        import torch

        return torch.from_numpy(memory).view(self.flat.dtype)

    def at(self, data: bytearray) -> View:
        """View `data` as an array of this library and dtype."""
        return View(self.like(np.frombuffer(data, np.uint8)), self.dtype)

    def new(self, count: int) -> View:
        """Make an uninitialised array of this library and dtype."""
        item = self.flat.itemsize
        return View(self.like(np.empty(count * item, np.uint8)), self.dtype)

    def part(self, begin: int, end: int) -> View:
        """Return elements `begin` to `end`."""
        return View(self.flat[begin:end], self.dtype)


def view_of(array: Any, writable: bool, argument: str) -> View:
    """View one array as flat memory.

    Args:
        array: numpy array, torch tensor, or any object with DLPack or the buffer protocol.
        writable: True to refuse read-only arrays.
        argument: the parameter's name, for messages.

    Raises:
        TypeError: not an array in host memory, or of an unsupported dtype.
        ValueError: the array has gaps, or is read-only although `writable` is set.
    """
    if isinstance(array, np.ndarray):
        return _view_numpy(array, writable, argument)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(array, torch.Tensor):
        return _view_torch(torch, array, argument)
    if hasattr(array, "__dlpack__"):
        return _view_dlpack(array, writable, argument)
    try:
        seen = np.asarray(memoryview(array))
    except TypeError:
        raise TypeError(not_an_array(argument, array)) from None
    return _view_numpy(seen, writable, argument)


@dataclass(frozen=True, slots=True)
class Arrays:
    """One array or a list of arrays, as flat memory.

    Attributes:
        views: one view per array.
        is_list: True for a list, even of one array.
        argument: the parameter's name, for messages.
    """

    views: list[View]
    is_list: bool
    argument: str


def views_of(arrays: Any, writable: bool, argument: str) -> Arrays:
    """View one array or a list of arrays as flat memory."""
    if not isinstance(arrays, (list, tuple)):
        return Arrays([view_of(arrays, writable, argument)], False, argument)
    views = [view_of(array, writable, argument) for array in arrays]
    if writable:
        _check_disjoint(
            views, [], f"{argument} holds arrays that share memory; pass each of them once"
        )
    return Arrays(views, True, argument)


def row_major_views_of(arrays: Any, writable: bool, argument: str) -> Arrays:
    """Like `views_of`, but raise ValueError unless all arrays are in row-major order."""
    seen = views_of(arrays, writable, argument)
    if any(view.order != 0 for view in seen.views):
        raise ValueError(
            f"{argument} must be in row-major order, since it is split or joined along axis 0; "
            "call numpy.ascontiguousarray(x) or x.contiguous() first"
        )
    return seen


def check_as_many(ins: Arrays, outs: Arrays) -> None:
    """Raise ValueError unless both are one array, or lists of equal length."""
    expected, got = (
        f"a list of {len(arrays.views)}" if arrays.is_list else "one array"
        for arrays in (ins, outs)
    )
    if expected != got:
        raise ValueError(
            f"{outs.argument} must be as many arrays as {ins.argument}: expected {expected}, "
            f"got {got}"
        )


def check_fits(ins: Arrays, outs: Arrays) -> None:
    """Raise ValueError unless each array of `outs` fits its input.

    It must have the input's dtype, size and axis order, and be the same memory or disjoint.
    """
    check_as_many(ins, outs)
    pairs = list(zip(ins.views, outs.views, strict=True))
    for a, b in pairs:
        if (a.count, a.dtype, a.order) != (b.count, b.dtype, b.order):
            raise ValueError(
                "out must have the dtype, size and axis order of the input: expected "
                f"{a.dtype} × {a.count}, got {b.dtype} × {b.count}"
            )
    others = [a for a, b in pairs if a.address != b.address]
    if others:
        _check_disjoint(
            outs.views,
            others,
            "out shares memory with the input or within itself; pass separate memory",
        )


def check_sizes(op: str, part: Arrays, whole: Arrays, ranks: int) -> None:
    """Raise ValueError unless `whole` is `ranks` times as large as `part`, and disjoint."""
    check_as_many(part, whole)
    for one, all_ in zip(part.views, whole.views, strict=True):
        if one.dtype != all_.dtype or one.count * ranks != all_.count:
            raise ValueError(
                f"{op}: {whole.argument} must hold every rank's {part.argument}: expected "
                f"{ranks} × {one.dtype} × {one.count}, got {all_.dtype} × {all_.count}"
            )
    check_apart(part, whole)


def check_apart(ins: Arrays, outs: Arrays) -> None:
    """Raise ValueError if `outs` shares memory with `ins` or within itself."""
    _check_disjoint(outs.views, ins.views, "out shares memory with the input; pass separate memory")


def check_reducible(op: str, views: Sequence[View]) -> None:
    """Raise TypeError if a reduction is not defined for a dtype."""
    for view in views:
        whole = view.dtype in _INTEGERS or view.dtype == "bool"
        if op == "mean":
            allowed = not whole
        elif op in ("min", "max"):
            allowed = not view.dtype.startswith("complex")
        elif op in ("and", "or", "xor"):
            allowed = whole
        else:
            allowed = True
        if not allowed:
            hint = '; cast to a floating dtype, or use op="sum"' if op == "mean" else ""
            raise TypeError(f'op="{op}" is not defined for dtype {view.dtype}{hint}')


def _view_numpy(array: np.ndarray[Any, Any], writable: bool, argument: str) -> View:
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(
            f"{argument} must not be a masked array, got a mask that collectives would ignore; "
            "pass x.filled(value), or x.data and x.mask"
        )
    name = array.dtype.name
    if name not in DTYPES or not array.dtype.isnative:
        raise TypeError(
            f"{argument} has dtype {array.dtype}, which collectives do not support; expected a "
            "bool, integer, float or complex dtype in native byte order"
        )
    if writable and not array.flags.writeable:
        raise ValueError(
            f"{argument} must be writable, got a read-only array; pass out= or copy it"
        )
    if not array.flags.aligned:
        raise ValueError(f"{argument} is not aligned to its dtype; copy it")
    array = array.view(np.ndarray)
    if array.flags.c_contiguous:
        return View(array.reshape(-1), name)
    axes = _axes_in_memory(array.shape, array.strides)
    turned = array.transpose(axes)
    if not turned.flags.c_contiguous:
        _refuse_gaps(argument, "numpy.ascontiguousarray(x)")
    return View(turned.reshape(-1), name, _order_of(axes, array.shape))


def _view_torch(torch: Any, tensor: Any, argument: str) -> View:
    if tensor.layout is not torch.strided:
        raise TypeError(
            f"{argument} cannot be read in place ({type(tensor).__name__}): layout {tensor.layout}"
        )
    if tensor.device.type != "cpu":
        raise UnsupportedError(
            f"{argument} is on a device ({tensor.device}) that this build has no engine for; see "
            "`fastdist doctor`"
        )
    tensor = tensor.detach()
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise TypeError(f"{argument} has a dtype that collectives do not support ({tensor.dtype})")
    if tensor.numel() != 0 and tensor.data_ptr() == 0:
        raise ValueError(
            f"{argument} has no memory: its data pointer is null ({type(tensor).__name__} of "
            f"{tensor.numel()} elements)"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(
            f"{argument} is a lazily conjugated or negated torch view; call "
            "x.resolve_conj().resolve_neg() first"
        )
    order = 0
    if not tensor.is_contiguous():
        axes = _axes_in_memory(tuple(tensor.shape), tensor.stride())
        order = _order_of(axes, tuple(tensor.shape))
        tensor = tensor.permute(axes)
        if not tensor.is_contiguous():
            _refuse_gaps(argument, "x.contiguous()")
    flat = tensor.view(-1)
    return View(flat if name in NOT_IN_NUMPY else flat.numpy(), name, order)


def _view_dlpack(array: Any, writable: bool, argument: str) -> View:
    if writable and (message := immutable(argument, array)):
        raise TypeError(message)
    try:
        import torch.utils.dlpack
    except ImportError:
        return _view_numpy(np.from_dlpack(array), writable, argument)
    try:
        tensor = torch.utils.dlpack.from_dlpack(array)
    except RuntimeError as error:
        raise ValueError(f"{argument} is no valid array: {error}") from None
    return _view_torch(torch, tensor, argument)


def _axes_in_memory(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """Return the axes from the largest stride to the smallest; axes of length 1 do not move."""
    long = [axis for axis in range(len(shape)) if shape[axis] != 1]
    by_stride = iter(sorted(long, key=lambda axis: -strides[axis]))
    return [next(by_stride) if shape[axis] != 1 else axis for axis in range(len(shape))]


def _order_of(axes: Sequence[int], shape: Sequence[int]) -> int:
    long = [axis for axis in axes if shape[axis] != 1]
    if long == sorted(long):
        return 0
    return (zlib.crc32(bytes(long)) & 0xFFFF) | 1


def _refuse_gaps(argument: str, remedy: str) -> None:
    raise ValueError(
        f"{argument} must be dense, got a view with gaps or overlaps; call {remedy} first"
    )


def _check_disjoint(written: Sequence[View], read: Sequence[View], message: str) -> None:
    extents = sorted(
        (view.address, view.address + view.nbytes, is_written)
        for views, is_written in ((written, True), (read, False))
        for view in views
        if view.nbytes
    )
    written_until = used_until = 0
    for begin, end, is_written in extents:
        if begin < (used_until if is_written else written_until):
            raise ValueError(message)
        if is_written:
            written_until = max(written_until, end)
        used_until = max(used_until, end)
