"""Arrays on virtual GPUs, with the parts of CUDA that tests need: streams and graphs.

Importing this module loads the virtual NCCL before any other NCCL is searched. VIRTUAL_NCCL_VERSION
selects its version (22703, 22809 or 23004). With VIRTUAL_ARRAYS=exchanged arrays have DLPack's
table of C functions, as torch's have.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import fastdist._core as _core
import ml_dtypes
import numpy as np

FOLDER = Path(_core.__file__).parent
_CUDA_DEVICE = 2  # of DLPack
_HOST_TO_DEVICE, _DEVICE_TO_HOST, _DEVICE_TO_DEVICE = 1, 2, 3

# DLPack codes of dtypes that the CUDA array interface cannot name.
_ONLY_DLPACK = {"bfloat16": 4, "float8_e4m3fn": 10, "float8_e5m2": 12}


def are_built() -> bool:
    return (FOLDER / "libvirtual_cudart.so").exists()


class CudaError(RuntimeError):
    """A call of the virtual runtime that failed."""


class _Runtime:
    """The functions of the virtual runtime; they raise CudaError for error results."""

    def __init__(self) -> None:
        self._runtime = ctypes.CDLL(str(FOLDER / "libvirtual_cudart.so"))
        self._runtime.cudaGetErrorName.restype = ctypes.c_char_p
        version = os.environ.get("VIRTUAL_NCCL_VERSION", "23004")
        self.nccl = ctypes.CDLL(str(FOLDER / "nccl" / version / "libnccl.so.2"))

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._runtime, name)

        def call(*arguments: Any) -> None:
            error = function(*arguments)
            if error != 0:
                self._runtime.cudaGetLastError()
                text = self._runtime.cudaGetErrorName(error).decode()
                raise CudaError(f"{name}: {text}")

        return call


cuda = _Runtime() if are_built() else None
_current = threading.local()


def device_count() -> int:
    return len(_core.cuda_devices())


def set_device(device: int) -> None:
    cuda.cudaSetDevice(device)


def current_device() -> int:
    device = ctypes.c_int()
    cuda.cudaGetDevice(ctypes.byref(device))
    return device.value


@contextmanager
def on_device(device: int) -> Iterator[None]:
    before = current_device()
    set_device(device)
    try:
        yield
    finally:
        set_device(before)


def bytes_in_use(device: int) -> int:
    """Return the bytes that this process has allocated on a device."""
    return int(cuda._runtime.virtual_gpu_bytes_in_use(device))


def ranges(name: str) -> int:
    """Return how many NVTX ranges of a name this thread has ended; -1 if one has not ended."""
    return int(cuda._runtime.virtual_gpu_ranges(name.encode()))


def synchronize() -> None:
    """Block the host until the current device is idle."""
    cuda.cudaDeviceSynchronize()


class Stream:
    """A stream of the current device; a `blocking` one and the default stream synchronize."""

    def __init__(self, blocking: bool = False) -> None:
        handle = ctypes.c_void_p()
        self.device = current_device()
        cuda.cudaStreamCreateWithFlags(ctypes.byref(handle), 0 if blocking else 1)
        self.handle = handle.value or 0
        weakref.finalize(self, cuda.cudaStreamDestroy, handle).atexit = False

    def synchronize(self) -> None:
        cuda.cudaStreamSynchronize(ctypes.c_void_p(self.handle))


def current_stream() -> int:
    """Return the handle of the stream that this thread's work goes to; 0 is the default stream."""
    streams = getattr(_current, "streams", None)
    return streams[-1].handle if streams else 0


@contextmanager
def use_stream(stream: Stream) -> Iterator[None]:
    _current.__dict__.setdefault("streams", []).append(stream)
    try:
        yield
    finally:
        _current.streams.pop()


class _Memory:
    """Owner of device memory, reused as in torch: only by the stream that allocated it.

    Releasing it enqueues a fill with garbage on that stream and does not wait, so that an
    unsynchronized read on another stream is detected.
    """

    _free: ClassVar[dict[tuple[int, int, int], list[int]]] = {}

    def __init__(self, nbytes: int, device: int) -> None:
        self.key = (device, current_stream(), max(nbytes, 1))
        try:
            self.address = self._free.setdefault(self.key, []).pop()
        except IndexError:
            data = ctypes.c_void_p()
            with on_device(device):
                cuda.cudaMalloc(ctypes.byref(data), ctypes.c_size_t(self.key[2]))
            self.address = data.value or 0
        weakref.finalize(self, self._release, self.key, self.address).atexit = False

    @classmethod
    def _release(cls, key: tuple[int, int, int], address: int) -> None:
        device, stream, nbytes = key
        # The memory is not reused if the stream was destroyed or the device is lost.
        with suppress(CudaError), on_device(device):
            cuda.cudaMemsetAsync(
                ctypes.c_void_p(address), 0xDD, ctypes.c_size_t(nbytes), ctypes.c_void_p(stream)
            )
            cls._free[key].append(address)


class _Dl(NamedTuple):
    """The structure that a DLPack capsule points to, with the objects that keep it valid."""

    managed: ctypes.Structure
    shape: ctypes.Array[ctypes.c_int64]
    strides: ctypes.Array[ctypes.c_int64]


class _DlManaged(ctypes.Structure):
    """`DLManagedTensor` of DLPack's C ABI."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Array:
    """Numbers in a virtual GPU's memory, in row-major order unless `strides` (in bytes) are given.

    Copies and fills are enqueued on the thread's current stream; reads wait for that stream.
    """

    def __init__(
        self,
        owner: Any,
        address: int,
        shape: tuple[int, ...],
        dtype: Any,
        device: int,
        strides: tuple[int, ...] | None = None,
    ) -> None:
        self._owner = owner
        self.address = address
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self.device = device
        self.strides = strides
        self._lent: list[_Dl] = []

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def fill(self, value: Any) -> Array:
        return self.set(np.full(self.shape, value, self.dtype))

    def set(self, values: Any) -> Array:
        host = np.ascontiguousarray(values, self.dtype)
        assert host.size == self.size
        assert self.strides is None
        with on_device(self.device):
            cuda.cudaMemcpyAsync(
                ctypes.c_void_p(self.address),
                host.ctypes.data_as(ctypes.c_void_p),
                ctypes.c_size_t(self.nbytes),
                _HOST_TO_DEVICE,
                ctypes.c_void_p(current_stream()),
            )
        return self

    def copy_from(self, source: Array) -> Array:
        assert source.nbytes == self.nbytes
        with on_device(self.device):
            cuda.cudaMemcpyAsync(
                ctypes.c_void_p(self.address),
                ctypes.c_void_p(source.address),
                ctypes.c_size_t(self.nbytes),
                _DEVICE_TO_DEVICE,
                ctypes.c_void_p(current_stream()),
            )
        return self

    def numpy(self) -> Any:
        """Return a copy; the host waits for the current stream."""
        assert self.strides is None
        host = np.empty(self.shape, self.dtype)
        with on_device(self.device):
            cuda.cudaMemcpyAsync(
                host.ctypes.data_as(ctypes.c_void_p),
                ctypes.c_void_p(self.address),
                ctypes.c_size_t(self.nbytes),
                _DEVICE_TO_HOST,
                ctypes.c_void_p(current_stream()),
            )
        return host

    def __getitem__(self, part: slice) -> Array:
        """Return a part of a one-dimensional array, in the same memory."""
        assert isinstance(part, slice)
        begin, end, step = part.indices(self.shape[0])
        item = self.dtype.itemsize
        strides = None if step == 1 else (step * item,)
        count = max(0, -(-(end - begin) // step))
        address = self.address + begin * item
        return Array(self._owner, address, (count,), self.dtype, self.device, strides)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.dtype.name in _ONLY_DLPACK:
            raise AttributeError("the CUDA array interface has no name for " + self.dtype.name)
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address if self.size else 0, False),
            "strides": self.strides,
            "stream": current_stream() or 1,
            "version": 3,
        }


class DlpackArray(Array):
    """An array exported through DLPack, which has a code for every dtype."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA_DEVICE, self.device

    def describe(self) -> ctypes.Structure:
        kinds = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
        code = _ONLY_DLPACK.get(self.dtype.name, kinds.get(self.dtype.kind))
        assert code is not None
        item = self.dtype.itemsize
        dims = len(self.shape)
        shape = (ctypes.c_int64 * dims)(*self.shape)
        strides = self.strides or np.empty(self.shape, self.dtype).strides
        steps = (ctypes.c_int64 * dims)(*(step // item for step in strides))
        managed = _DlManaged(
            self.address, _CUDA_DEVICE, self.device, dims, code, item * 8, 1, shape, steps, 0
        )
        self._lent.append(_Dl(managed, shape, steps))  # as long as the array
        return managed

    def __dlpack__(self, *, stream: int | None = None, **_: Any) -> Any:
        assert stream == -1, "fastdist orders streams by itself"
        return _new_capsule(ctypes.addressof(self.describe()), b"dltensor", None)

    def __getitem__(self, part: slice) -> Array:
        a = super().__getitem__(part)
        return type(self)(self._owner, a.address, a.shape, a.dtype, a.device, a.strides)


class ExchangedArray(DlpackArray):
    """An array that C code reads without calls of Python, by `__dlpack_c_exchange_api__`."""

    __dlpack_c_exchange_api__: ClassVar[Any]


_TENSOR_BYTES = _DlManaged.manager.offset  # DLTensor is the beginning of DLManagedTensor


@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
def _tensor_from_object(array: Any, tensor: int) -> int:
    ctypes.memmove(tensor, ctypes.addressof(array.describe()), _TENSOR_BYTES)
    return 0


@ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.POINTER(ctypes.c_void_p))
def _stream_of_device(kind: int, device: int, stream: Any) -> int:
    stream[0] = current_stream()
    return 0


class _ExchangeApi(ctypes.Structure):
    """`DLPackExchangeAPI` of DLPack's C ABI; functions that nobody uses are null."""

    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("unused", ctypes.c_void_p * 4),
        ("tensor_from_object", ctypes.c_void_p),
        ("current_stream", ctypes.c_void_p),
    ]


_exchange_api = _ExchangeApi(
    1,
    2,
    (ctypes.c_void_p * 4)(),
    ctypes.cast(_tensor_from_object, ctypes.c_void_p),
    ctypes.cast(_stream_of_device, ctypes.c_void_p),
)
_API_NAME = b"dlpack_exchange_api"  # to which the capsule points
ExchangedArray.__dlpack_c_exchange_api__ = _new_capsule(
    ctypes.addressof(_exchange_api), _API_NAME, None
)


def empty(shape: int | tuple[int, ...], dtype: Any = "float32", device: int | None = None) -> Array:
    """Return an uninitialized array; its memory is filled with garbage on purpose."""
    shape = (shape,) if isinstance(shape, int) else shape
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype) if isinstance(dtype, str) else dtype)
    device = current_device() if device is None else device
    memory = _Memory(int(np.prod(shape, dtype=np.int64)) * kind.itemsize, device)
    lent_as = DlpackArray if kind.name in _ONLY_DLPACK else Array
    if os.environ.get("VIRTUAL_ARRAYS") == "exchanged":
        lent_as = ExchangedArray
    return lent_as(memory, memory.address, shape, kind, device)


def array(values: Any, device: int | None = None, dlpack: bool | None = None) -> Array:
    """Return a copy of a numpy array. `dlpack`: export it through DLPack, whatever its dtype."""
    host = np.asarray(values)
    made = empty(host.shape, host.dtype, device)
    if dlpack:
        made = DlpackArray(made._owner, made.address, made.shape, made.dtype, made.device)
    return made.set(host)


def zeros(shape: int | tuple[int, ...], dtype: Any = "float32", device: int | None = None) -> Array:
    return empty(shape, dtype, device).fill(0)


def view(lender: Any, dtype: Any, device: int | None = None) -> Array:
    """View the memory of an object with a CUDA array interface as a one-dimensional array."""
    interface = lender.__cuda_array_interface__
    nbytes = int(np.prod(interface["shape"])) * np.dtype(interface["typestr"]).itemsize
    count = nbytes // np.dtype(dtype).itemsize
    device = current_device() if device is None else device
    return Array(lender, interface["data"][0], (count,), dtype, device)


GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2


class Graph:
    """A graph of the work that a stream is given while `capture` is open."""

    def __init__(self) -> None:
        self._exec = ctypes.c_void_p()

    @contextmanager
    def capture(self, mode: int = GLOBAL) -> Iterator[Stream]:
        """Make a new stream the current stream and capture it."""
        stream = Stream()
        handle = ctypes.c_void_p(stream.handle)
        graph = ctypes.c_void_p()
        with use_stream(stream):
            cuda.cudaStreamBeginCapture(handle, mode)
            try:
                yield stream
            except BaseException:
                with suppress(CudaError):
                    cuda.cudaStreamEndCapture(handle, ctypes.byref(graph))
                raise
            cuda.cudaStreamEndCapture(handle, ctypes.byref(graph))
        cuda.cudaGraphInstantiate(ctypes.byref(self._exec), graph, ctypes.c_ulonglong(0))
        cuda.cudaGraphDestroy(graph)
        weakref.finalize(self, cuda.cudaGraphExecDestroy, self._exec).atexit = False

    def launch(self) -> None:
        """Launch the graph on the current stream."""
        cuda.cudaGraphLaunch(self._exec, ctypes.c_void_p(current_stream()))
