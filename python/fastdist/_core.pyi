# Types of the compiled module, in the order of csrc/bindings/bind_<concept>.cpp.
# An array is a numpy array, a torch tensor, or any object with DLPack or the buffer protocol. A
# parameter called `arrays` takes one array or a list of arrays.

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

# bind_errors.cpp

# The module that composes messages: fastdist.collectives.hints, which is above this one.
def set_hints(module: ModuleType, /) -> None: ...

# bind_host.cpp

class Work:
    def is_done(self, /) -> bool: ...
    def wait(self, timeout: float | None = None) -> Any: ...

def instruction_set() -> str: ...

# the bytes at these addresses, which must be valid, one after another
def read_memory(addresses: list[int], sizes: list[int], /) -> bytes: ...
def stream_copy(dst: Any, src: Any, /) -> None: ...
def create_segment_file(ranks: int, tuning: Tuning, /) -> int: ...

# Opaque; made by tuning_for.
class Tuning: ...

def begin_exit() -> None: ...
def tuning_for(ranks: int, /) -> Tuning: ...

class Machine:
    @staticmethod
    def of_processes(fds: Sequence[int], self_rank: int, /) -> Machine: ...
    @staticmethod
    def of_threads(size: int, /) -> Machine: ...

class SharedBlock:
    def __init__(
        self, machine: Machine, machine_rank: int, ranks: int, tuning: Tuning, /
    ) -> None: ...
    @property
    def offset(self) -> int: ...

# Collectives bound to one engine, by name. They take the array or a list of arrays (scatter: read
# on the root only), and by keywords:
#
# op: the reduction, of all_reduce, reduce and reduce_scatter
# root: of reduce, broadcast, gather and scatter
# dst, src: of send and recv
# out: None for all_reduce, reduce and broadcast to work in place; gather: read on the root only
# compress: of all_reduce
# counts: of all_to_all, for each array, elements from each rank to each rank (empty: equal parts)
# bucket_bytes: of all_reduce on GPUs; "auto" lets the engine choose
# stream: the handle of a CUDA stream on which the arrays are ready
# timeout: in seconds; None for that of `calls`
# async_op: False if not given
#
# A collective returns the array it wrote or, if async_op, a Work or GpuWork whose `wait` returns
# it.
_Calls = Mapping[str, Callable[..., Any]]

class Communicator:
    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...
    # Compare a call that another engine makes, or that is made of others, in one sequence with this
    # engine's own. `list_word`: a hash of several arrays, or the shape of one.
    def compare(
        self,
        op: str,
        dtype: str,
        reduce_op: str,
        root: int,
        count: int,
        list_word: int | Sequence[int],
        timeout_s: float,
        /,
    ) -> None: ...
    # Wait until pending collectives and sends have ended, successfully or not.
    def finish(self, /) -> None: ...
    def close(self, /) -> None: ...
    # Raises again what has ended the communicator, if anything has.
    def check_usable(self, /) -> None: ...
    # Records its calls from now on. The key is the same on all ranks.
    def record(self, key: int, engine: str, /) -> None: ...
    def empty(self, nbytes: int, /) -> npt.NDArray[np.uint8]: ...
    def calls(self, timeout_s: float, /) -> _Calls: ...

class HostCommunicator(Communicator):
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
    # Returns a rank whose process has died in use of the communicator.
    def find_dead(self, /) -> int | None: ...
    @property
    def machine(self) -> Machine: ...
    @property
    def members(self) -> list[int]: ...
    @property
    def tuning(self) -> Tuning: ...

class NetCommunicator(Communicator):
    def __init__(
        self,
        inner: HostCommunicator,
        rank: int,
        # of each rank: number of its machine, and IP address
        places: Sequence[tuple[int, str]],
        # the connections to each rank: its descriptors `out`, `in` and `stream`, or -1
        connections: Sequence[Sequence[int]],
        # a communicator of more ranks, whose links are as fast, or None to measure them
        parent: NetCommunicator | None,
        # after which a silent machine is lost; 0: never
        silence_s: float,
        timeout_s: float,
        /,
    ) -> None: ...
    # Returns a rank that has died or failed.
    def find_lost(self, /) -> int | None: ...

# Sends back what comes over a connected socket, in a thread that needs no GIL, and that owns the
# descriptor from now on.
def echo(connected: int, /) -> None: ...

# bind_messages.cpp

class Receive:
    # the rank whose message it was; -1 before
    @property
    def source(self) -> int: ...

# Receives that tell their source, or that take smaller messages of other dtypes: array, source
# (None: any), tag, whether the message must have the array's size and dtype, timeout, async,
# whether it is of an object; returns a Receive.
def receive_of(
    communicator: Communicator, /
) -> Callable[[Any, int | None, int, bool, float, bool, bool], Any]: ...

# bind_recorder.cpp

# Begins to record this process's calls in a new file.
def start_recorder(
    path: str,
    *,
    rank: int,
    world_size: int,
    version: str,
    job: str,
    host: str,
    program: str,
    task: str,
) -> None: ...

# Says that this process is a rank of another job from now on.
def set_recorded_job(rank: int, world_size: int, job: str, /) -> None: ...

# Returns the number of a client of parameter servers in the records, for `begin_request`, which
# records that this process begins to wait for a server, and returns the number of that wait.
def open_requests(servers: int, /) -> int: ...
def close_requests(client: int, /) -> None: ...
def begin_request(client: int, server: int, op: int, nbytes: int, /) -> int: ...
def end_request(number: int, is_answered: bool, /) -> None: ...

# `stalled` is called in a thread of its own with the seconds that a call has waited, from the fifth
# on; `explain` says why a call has failed, and takes whether it did because a rank is late. What it
# raises takes the place of the call's error.
def set_speaker(stalled: Callable[[float], None], explain: Callable[[bool], str], /) -> None: ...

# Calls `answer` in a thread of its own whenever bytes come through the pipe at `path`; raises
# RuntimeError if it cannot be opened.
def answer_from_thread(path: str, answer: Callable[[], None], /) -> None: ...

# The job in whose name this process records; "" if it does not.
def recorded_job() -> str: ...

# The recorder's clock.
def ticks() -> int: ...

# Takes and returns a recorder.phases.Phase: the new one, and that before.
def set_phase(phase: int, /) -> int: ...

# Goes back to the phase before, unless another thread has begun one meanwhile.
def end_phase(phase: int, before: int, /) -> None: ...

# bind_table.cpp
#
# Ids are int64 or uint64 arrays and values are float32 arrays; only their sizes are checked, not
# their shapes. All methods are thread-safe.

class UpdateRule:
    # The name of a torch.optim class (SGD, Adagrad, Adam, AdamW, RMSprop) and its arguments, or
    # RowWiseAdagrad with Adagrad's.
    def __init__(
        self, name: str, /, **hyperparameters: float | bool | tuple[float, float]
    ) -> None: ...
    @property
    def slots(self) -> list[str]: ...

class RowTable:
    def __init__(
        self,
        dim: int,
        rule: UpdateRule,
        *,
        # ids are 0 to rows - 1; None: any 64-bit ids
        rows: int | None = None,
        # refuses rows of a fixed table that need more; None: allows them
        memory_bytes: int | None = None,
        # ("constant", value, 0), ("uniform", low, high) or ("normal", mean, standard deviation)
        initializer: tuple[str, float, float] = ("constant", 0.0, 0.0),
        seed: int = 0,
        # added to ids for initial values
        first_id: int = 0,
        # "float32", "bfloat16" or "int8"
        storage: str = "float32",
        # the rows touched the longest ago are dropped above this number
        max_rows: int | None = None,
        # rows that more than this many pushes have not touched are dropped
        max_age: int | None = None,
    ) -> None: ...
    # out: [ids, dim]
    def pull(self, ids: Any, out: Any, /) -> None: ...
    # gradients: [ids, dim]
    def push(self, ids: Any, gradients: Any, lr: float | None = None) -> None: ...
    # values: [ids, dim]; slots: [ids, slot_floats], slot after slot
    def assign(self, ids: Any, values: Any, slots: Any | None = None) -> None: ...
    # ids, values [ids, dim] and slots [ids, slot_floats] of the rows that parts from this one on
    # have now, until they are `enough`; and the number of the next part
    def read_parts(
        self, part: int, enough: int, /
    ) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float32], npt.NDArray[np.float32], int]: ...
    # removes all rows: a pull returns their initial values again
    def clear(self) -> None: ...
    # number of rows that a push or assign has created
    def __len__(self) -> int: ...
    @property
    def parts(self) -> int: ...
    @property
    def dim(self) -> int: ...
    @property
    def slots(self) -> list[str]: ...
    @property
    def slot_floats(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    # number of pushes so far
    step: int
    # of the initial values of rows that have not been created
    seed: int

# Maps ids to owners: by ranges of ids (`begins` and the `end` of the last range) or, without
# `begins`, by equal parts of the hashes.
class Owners:
    def __init__(self, count: int, begins: list[int] = ..., end: int = 0) -> None: ...
    # Returns the owner of each id, from 0.
    def owners_of(self, ids: Any, /) -> npt.NDArray[np.int64]: ...
    # Returns the owners' local ids grouped by owner, the number of ids per owner, and the position
    # of each id in `ids` (None: the order is unchanged).
    def route(
        self, ids: Any, /
    ) -> tuple[npt.NDArray[np.uint64], list[int], npt.NDArray[np.int64] | None]: ...

# Encoding of values in messages: "bfloat16", "float16", or "int8" with one scale per `dim` values.
class WireFormat:
    def __init__(self, name: str, dim: int, /) -> None: ...
    def nbytes(self, values: int, /) -> int: ...
    # message: uint8
    def encode(self, values: Any, message: Any, /) -> None: ...
    def decode(self, message: Any, out: Any, /) -> None: ...

# Counts NaN and infinite float32 values.
def count_nonfinite(values: Any, /) -> int: ...

class DenseVariable:
    def __init__(self, initial: Any, rule: UpdateRule, /) -> None: ...
    def pull(self, begin: int, out: Any, /) -> None: ...
    # begin: a multiple of 16384
    def push(self, begin: int, gradient: Any, lr: float | None = None) -> None: ...
    # slots: [slots, *shape of the values]
    def assign(self, begin: int, values: Any, slots: Any | None = None) -> None: ...
    # reads each element's value and slots at one instant; returns the last step of any element
    def read_state(self, values: Any, slots: Any, /) -> int: ...
    # the values themselves, which must not be read while another thread changes them
    @property
    def values(self) -> Any: ...
    @property
    def size(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    step: int

# bind_gpus.cpp

class Device:
    @property
    def name(self) -> str: ...
    @property
    def uuid(self) -> str: ...
    # the address of the GPU on its machine, which its MIG instances share
    @property
    def pci(self) -> str: ...
    @property
    def major(self) -> int: ...
    @property
    def minor(self) -> int: ...
    @property
    def multiprocessors(self) -> int: ...
    @property
    def bytes(self) -> int: ...

def cuda_is_built() -> bool: ...

# 1000 · major + 10 · minor; 0 if built without CUDA or if there is no driver
def cuda_runtime_version() -> int: ...
def cuda_driver_version() -> int: ...

# the reason why no GPU can be used, or ""
def why_no_cuda() -> str: ...
def cuda_devices() -> list[Device]: ...

# the GPU whose memory contains this address; None for host memory
def cuda_device_of(address: int, /) -> int | None: ...

class NcclLibrary:
    @property
    def path(self) -> str: ...
    # 10000 · major + 100 · minor + patch
    @property
    def version(self) -> int: ...
    @property
    def version_text(self) -> str: ...

# `candidates`: paths to try if the process has not loaded NCCL; only the first call loads
def load_nccl(candidates: Sequence[str], /) -> NcclLibrary: ...

# environment variables for ranks that share a GPU; `version` of NCCL, `process` unique per process
def nccl_settings_for_sharing(version: int, process: int, /) -> dict[str, str]: ...
def new_nccl_id() -> bytes: ...

# An asynchronous call on the communicator's own stream.
class GpuWork:
    def is_done(self, /) -> bool: ...
    def is_enqueued(self, /) -> bool: ...
    @property
    def stream(self) -> int: ...
    # makes a stream wait; the host waits for the comparison alone
    def wait(self, stream: int, *, compared: bool = True) -> Any: ...
    # blocks the host
    def synchronize(self, timeout: float | None = None) -> Any: ...

class GpuMemory:
    @property
    def nbytes(self) -> int: ...
    @property
    def device(self) -> int: ...
    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...

# the point that a stream had reached
class GpuMark: ...

# Sends calls on arrays of a GPU to `general()`, a function (op, arguments by name), or straight to
# the connected engine, and all others to the host engine. `device_of` returns the GPU of an array
# whose library has no C function for that.
class Router:
    def __init__(
        self,
        hosts: Communicator | None,
        general: Any,
        device_of: Callable[[Any], int | None],
        work_of: Callable[[GpuWork, Any, int], Any],
        /,
    ) -> None: ...
    # calls on arrays of its GPU go straight to this engine
    def connect(self, engine: NcclCommunicator, /) -> None: ...
    def calls(self, timeout_s: float, /) -> _Calls: ...

# Records calls, and makes them together. `device_of` as for Router; None: no array is on a GPU.
class Group:
    def __init__(self, hosts: Communicator, device_of: Any, /) -> None: ...
    def calls(self, timeout_s: float, /) -> _Calls: ...
    # the first array of each call on a GPU, and the longest of their timeouts
    def on_gpu(self, /) -> tuple[list[Any], float | None]: ...
    # as at most two launches on this stream
    def run_on_gpu(self, gpu: NcclCommunicator, stream: int, timeout_s: float, /) -> None: ...
    # at the same time; raises the first error, when all calls have ended
    def run_on_hosts(self, /) -> None: ...

# the handle of the current stream of the arrays' library, if the library has a C function for it
def current_stream(arrays: Any, device: int, /) -> int | None: ...

class NcclCommunicator:
    # `hosts` compares the calls: a HostCommunicator of the same ranks; None: nothing does
    @staticmethod
    def connect(
        id: bytes,
        rank: int,
        size: int,
        device: int,
        hosts: Any,
        timeout: float,
        lane: tuple[int, int] | None = None,  # the only ranks, of which the first sends
        /,
    ) -> NcclCommunicator: ...
    @property
    def own_stream(self) -> int: ...
    def record(self, stream: int, /) -> GpuMark: ...
    # makes the own stream wait
    def follow(self, point: GpuMark, /) -> None: ...
    # from now on a failure of one is a failure of both
    def share_failures(self, other: NcclCommunicator, /) -> None: ...
    @property
    def device(self) -> int: ...
    def calls(self, timeout_s: float, /) -> _Calls: ...
    # keeps arrays alive until the last call, which was made on this stream, has finished
    def keep_for_last(self, stream: int, arrays: Any, /) -> None: ...
    # every rank must call
    def allocate(self, nbytes: int, timeout: float, /) -> GpuMemory: ...
    def abort(self, why: str, /) -> None: ...
    def close(self, /) -> None: ...
