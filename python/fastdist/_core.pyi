# The compiled module, as csrc/bindings/ defines it: one class or function per bind_<concept>.cpp.
# Arrays are numpy's, torch's, or anything with DLPack or the buffer protocol; where a call takes
# one array or a list of them, the parameter is called `arrays`.

from collections.abc import Sequence
from typing import Any

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
    spin_us: float
    def __init__(self) -> None: ...

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

# Every collective returns what it wrote or, when `async_op`, a Work whose `wait` returns that.
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
    def close(self, /) -> None: ...
    def empty(self, nbytes: int, /) -> npt.NDArray[np.uint8]: ...
    def all_reduce(
        self,
        arrays: Any,
        op: str,
        out: Any | None,
        compress: str | None,
        timeout_s: float,
        async_op: bool,
        /,
    ) -> Any: ...
    def reduce(
        self,
        arrays: Any,
        op: str,
        root: int,
        out: Any | None,
        timeout_s: float,
        async_op: bool,
        /,
    ) -> Any: ...
    def broadcast(self, arrays: Any, root: int, timeout_s: float, async_op: bool, /) -> Any: ...
    def all_gather(self, array: Any, out: Any, timeout_s: float, async_op: bool, /) -> Any: ...
    def gather(
        self, array: Any, root: int, out: Any | None, timeout_s: float, async_op: bool, /
    ) -> Any: ...
    def scatter(
        self, array: Any | None, root: int, out: Any, timeout_s: float, async_op: bool, /
    ) -> Any: ...
    def reduce_scatter(
        self, array: Any, op: str, out: Any, timeout_s: float, async_op: bool, /
    ) -> Any: ...
    def all_to_all(
        self,
        array: Any,
        out: Any,
        counts: Sequence[int],
        timeout_s: float,
        async_op: bool,
        /,
    ) -> Any: ...
    def send(self, array: Any, dst: int, timeout_s: float, async_op: bool, /) -> Any: ...
    def recv(self, array: Any, src: int, timeout_s: float, async_op: bool, /) -> Any: ...
    def barrier(self, timeout_s: float, async_op: bool, /) -> Any: ...
