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
