# The compiled module, as csrc/bindings/ defines it: one class or function per bind_<concept>.cpp.
# Arrays are numpy's, torch's, or anything with DLPack or the buffer protocol; where a call takes
# one array or a list of them, the parameter is called `arrays`.

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import numpy as np
import numpy.typing as npt

# bind_kernels.cpp

def instruction_set() -> str: ...
def copy(dst: Any, src: Any, /) -> None: ...
def stream_copy(dst: Any, src: Any, /) -> None: ...

# bind_work.cpp

class Work:
    def is_done(self, /) -> bool: ...
    def wait(self, timeout: float | None = None) -> Any: ...

# bind_host.cpp

def create_segment_file(ranks: int, tuning: Tuning, /) -> int: ...

class Tuning:
    slot_bytes: int
    in_place_bytes: int
    chunk_bytes: int
    lane_bytes: int
    stream_bytes: int

def begin_exit() -> None: ...
def tuning_for(ranks: int, /) -> Tuning: ...

class Machine:
    @staticmethod
    def of_processes(fds: Sequence[int], self_rank: int, /) -> Machine: ...
    @staticmethod
    def of_threads(size: int, /) -> Machine: ...
    @property
    def size(self) -> int: ...

class SharedBlock:
    def __init__(
        self, machine: Machine, machine_rank: int, ranks: int, tuning: Tuning, /
    ) -> None: ...
    @property
    def offset(self) -> int: ...

# Builtins bound to one communicator; their arguments are positional, and the last two of each are
# timeout_s and async_op. Each returns what it wrote or, when async_op, a Work whose `wait` returns
# that.
class _Calls(TypedDict):
    # arrays, op, out or None to work in place, compress
    all_reduce: Callable[[Any, str, Any | None, str | None, float, bool], Any]
    # arrays, op, root, out or None to work in place
    reduce: Callable[[Any, str, int, Any | None, float, bool], Any]
    # arrays, root, out or None to work in place
    broadcast: Callable[[Any, int, Any | None, float, bool], Any]
    # array, out
    all_gather: Callable[[Any, Any, float, bool], Any]
    # array, root, out (read on the root only)
    gather: Callable[[Any, int, Any | None, float, bool], Any]
    # array (read on the root only), root, out
    scatter: Callable[[Any | None, int, Any, float, bool], Any]
    # array, op, out
    reduce_scatter: Callable[[Any, str, Any, float, bool], Any]
    # array, out, for each array elements from each rank to each rank (empty: equal parts)
    all_to_all: Callable[[Any, Any, Sequence[int], float, bool], Any]
    # array, destination
    send: Callable[[Any, int, float, bool], Any]
    # array, source
    recv: Callable[[Any, int, float, bool], Any]
    barrier: Callable[[float, bool], Any]

class HostCommunicator:
    def __init__(
        self,
        machine: Machine,
        members: Sequence[int],
        rank: int,
        offsets: Sequence[int],
        block: SharedBlock,
        tuning: Tuning,
        /,
    ) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def machine(self) -> Machine: ...
    @property
    def members(self) -> list[int]: ...
    @property
    def tuning(self) -> Tuning: ...
    def set_phase(self, phase: int, /) -> None: ...
    def close(self, /) -> None: ...
    def empty(self, nbytes: int, /) -> npt.NDArray[np.uint8]: ...
    def calls(self, /) -> _Calls: ...

# bind_table.cpp
#
# Ids are int64 or uint64 arrays, values float32 arrays; of their shapes only the size counts.
# Calls of any number of threads may overlap.

class UpdateRule:
    # The name of a class of torch.optim (SGD, Adagrad, Adam, AdamW, RMSprop) and its arguments.
    def __init__(
        self, name: str, /, **hyperparameters: float | bool | tuple[float, float]
    ) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def slots(self) -> list[str]: ...

class RowTable:
    def __init__(
        self,
        dim: int,
        rule: UpdateRule,
        *,
        # ids are 0 … rows - 1; without, any 64 bits
        rows: int | None = None,
        # ("constant", value, 0), ("uniform", low, high) or ("normal", mean, standard deviation)
        initializer: tuple[str, float, float] = ("constant", 0.0, 0.0),
        seed: int = 0,
        # "float32", "bfloat16" or "int8"
        storage: str = "float32",
        # of the results of steps, in narrow storage: "nearest" or "stochastic"
        rounding: str = "nearest",
        max_rows: int | None = None,
        # in pushes
        max_age: int | None = None,
    ) -> None: ...
    # out: [ids, dim]
    def pull(self, ids: Any, out: Any) -> None: ...
    # gradients: [ids, dim]
    def push(self, ids: Any, gradients: Any, lr: float | None = None) -> None: ...
    # values: [ids, dim]; slots: [ids, slots, dim]
    def assign(self, ids: Any, values: Any, slots: Any | None = None) -> None: ...
    # out: [ids, slots, dim]
    def read_slots(self, ids: Any, out: Any) -> None: ...
    def contains(self, ids: Any) -> npt.NDArray[np.bool_]: ...
    # Returns how many of the ids there were.
    def erase(self, ids: Any) -> int: ...
    # Returns how many rows were over max_age.
    def evict(self) -> int: ...
    def snapshot(self, piece_rows: int = 65536) -> RowSnapshot: ...
    def __len__(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def slots(self) -> list[str]: ...
    @property
    def nbytes(self) -> int: ...
    # How many pushes there were.
    step: int

# Yields ids, values [ids, dim] and slots [ids, slots × dim].
class RowSnapshot:
    def __iter__(self) -> RowSnapshot: ...
    def __next__(
        self,
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32], npt.NDArray[np.float32]]: ...

# Of ids: of ranges that begin so and end so, or of a part of their hashes each.
class Owners:
    def __init__(self, count: int, begins: list[int] = ..., end: int = 0) -> None: ...
    # Ids by owner, local ones; how many each has; for each of these ids, where it was given. None:
    # as they were given.
    def route(
        self, ids: Any
    ) -> tuple[npt.NDArray[np.uint64], list[int], npt.NDArray[np.int64] | None]: ...
    # The same, equal ids once; for each id that was given, where it is now.
    def route_distinct(
        self, ids: Any
    ) -> tuple[npt.NDArray[np.uint64], list[int], npt.NDArray[np.int64] | None]: ...

# Values as messages carry them: "float32", "bfloat16", "float16", or "int8" with a scale for every
# dim values.
class WireFormat:
    def __init__(self, name: str, dim: int) -> None: ...
    def nbytes(self, values: int) -> int: ...
    # message: uint8
    def encode(self, values: Any, message: Any) -> None: ...
    def decode(self, message: Any, out: Any) -> None: ...

# NaN and infinities among float32 values.
def count_nonfinite(values: Any) -> int: ...

class DenseVariable:
    # storage: "float32" or "bfloat16"; rounding as of RowTable
    def __init__(
        self, initial: Any, rule: UpdateRule, storage: str = "float32", rounding: str = "nearest"
    ) -> None: ...
    def pull(self, out: Any) -> None: ...
    def pull_part(self, out: Any, begin: int) -> None: ...
    def push(self, gradient: Any, lr: float | None = None) -> None: ...
    def begin_step(self) -> int: ...
    # step: what begin_step gave; each element is pushed once
    def push_part(self, gradient: Any, begin: int, step: int, lr: float | None = None) -> None: ...
    # slots: [slots, …the variable's shape]
    def assign(self, values: Any, slots: Any | None = None) -> None: ...
    # each element's of one moment; the last step that any of them has seen
    def read_state(self, values: Any, slots: Any) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    step: int

# bind_cuda.cpp

class Device:
    @property
    def name(self) -> str: ...
    @property
    def uuid(self) -> str: ...
    @property
    def major(self) -> int: ...
    @property
    def minor(self) -> int: ...
    @property
    def multiprocessors(self) -> int: ...
    @property
    def bytes(self) -> int: ...

def cuda_is_built() -> bool: ...

# 1000 · major + 10 · minor; 0: not built, or no driver
def cuda_runtime_version() -> int: ...
def cuda_driver_version() -> int: ...

# why no GPU can be used; "": one can
def why_no_cuda() -> str: ...
def cuda_devices() -> list[Device]: ...

# the GPU whose memory is at this address; None: no GPU's
def cuda_device_of(address: int, /) -> int | None: ...

# bind_nccl.cpp

NCCL_BUCKET_BYTES: int

class NcclLibrary:
    @property
    def path(self) -> str: ...
    # 10000 · major + 100 · minor + patch
    @property
    def version(self) -> int: ...
    @property
    def version_text(self) -> str: ...
    # optional functions that it has
    @property
    def has(self) -> list[str]: ...
    # further libraries of NCCL in this process, left alone
    @property
    def others(self) -> list[str]: ...

# paths to try where the process has loaded none; the first call decides
def load_nccl(candidates: Sequence[str], /) -> NcclLibrary: ...

# environment for ranks that share a GPU: version of NCCL, a number that no other process has
def nccl_settings_for_sharing(version: int, process: int, /) -> dict[str, str]: ...
def new_nccl_id() -> bytes: ...

# A call on the communicator's own stream.
class GpuWork:
    def is_done(self, /) -> bool: ...
    # makes a stream wait, and not the host
    def wait(self, stream: int, /) -> Any: ...
    # the host waits
    def synchronize(self, timeout: float | None = None) -> Any: ...

class GpuMemory:
    @property
    def nbytes(self) -> int: ...
    @property
    def device(self) -> int: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

# As `_Calls`, with a stream before timeout_s and async_op: a CUDA stream's handle, on which the
# arrays are ready. An async call returns a GpuWork.
class _GpuCalls(TypedDict):
    # arrays, op, out or None to work in place, compress, bucket bytes (0: the default)
    all_reduce: Callable[[Any, str, Any | None, str | None, int, int, float, bool], Any]
    reduce: Callable[[Any, str, int, Any | None, int, float, bool], Any]
    broadcast: Callable[[Any, int, Any | None, int, float, bool], Any]
    all_gather: Callable[[Any, Any, int, float, bool], Any]
    gather: Callable[[Any, int, Any | None, int, float, bool], Any]
    scatter: Callable[[Any | None, int, Any, int, float, bool], Any]
    reduce_scatter: Callable[[Any, str, Any, int, float, bool], Any]
    all_to_all: Callable[[Any, Any, Sequence[int], int, float, bool], Any]
    send: Callable[[Any, int, int, float, bool], Any]
    recv: Callable[[Any, int, int, float, bool], Any]
    barrier: Callable[[int, float, bool], Any]

class NcclCommunicator:
    # `hosts`: by what calls are compared: a HostCommunicator of the same ranks, or an object with
    # `size` and `agree(words, flag, site, timeout_s)`; None: they are not
    @staticmethod
    def connect(
        id: bytes,
        rank: int,
        size: int,
        device: int,
        blocking: bool,
        hosts: Any,
        timeout: float,
        /,
    ) -> NcclCommunicator: ...
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def device(self) -> int: ...
    def check_usable(self, /) -> None: ...
    def calls(self, /) -> _GpuCalls: ...
    # keeps arrays until the last call, made on this stream, has ended
    def keep_for_last(self, stream: int, arrays: Any, /) -> None: ...
    # collective
    def allocate(self, nbytes: int, timeout: float, /) -> GpuMemory: ...
    def abort(self, why: str, /) -> None: ...
    def close(self, /) -> None: ...

# bind_pack.cpp

# A list of arrays of one dtype on a GPU, and buckets of its own, which hold all of it.
class PackedList:
    # `compress`: what float32 and float64 arrays are cast to
    def __init__(
        self, arrays: Any, device: int, compress: str | None, bucket_bytes: int, /
    ) -> None: ...
    # each is a launch
    @property
    def bucket_count(self) -> int: ...
    # of all buckets
    @property
    def nbytes(self) -> int: ...
    # enqueued on a CUDA stream
    def pack(self, stream: int, /) -> None: ...
    def unpack(self, stream: int, /) -> None: ...
