"""The engine for arrays on GPUs: NCCL, beside a host engine of the same ranks.

It connects at the first call with an array on a GPU, so that programs without GPU arrays pay
nothing. Ranks compare their calls over the host engine, in one sequence with the calls on host
arrays.
"""

from __future__ import annotations

import json
import os
import weakref
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np

import fastdist._core as _core
from fastdist.cluster.launch import detect_launch
from fastdist.collectives.arguments import to_rank
from fastdist.collectives.engines import nccl_library
from fastdist.collectives.engines.engine import Calls, Engine
from fastdist.collectives.engines.gpu_arrays import (
    SOME_GPU,
    current_stream,
    device_of,
    stream_handle,
)
from fastdist.collectives.engines.nccl_lanes import ID_BYTES, Lane, LaneWork
from fastdist.errors import FastdistError, UnsupportedError


def is_possible() -> bool:
    """Return True if this package was built with CUDA and the machine has a CUDA driver.

    Only the driver's version is read: children of a process that initialises CUDA cannot use it.
    """
    return _core.cuda_is_built() and _core.cuda_driver_version() != 0


class NcclEngine:
    """One rank's collectives on arrays of its GPU; calls on other arrays go to the host engine.

    The first GPU array of a call chooses the rank's GPU, which then stays the same.
    """

    def __init__(self, host_engine: Engine) -> None:
        self._host_engine = host_engine
        general = weakref.WeakMethod(self.call)
        self._router = _core.Router(host_engine.compiled, general, device_of, StreamWork)
        self._gpu: _core.NcclCommunicator | None = None
        self._on_gpus: Mapping[str, Callable[..., Any]] = {}
        self._lanes: dict[tuple[str, int], Lane] = {}
        self._mail: Engine | None = None  # by which lanes are connected

    def calls(self, timeout_s: float) -> Calls:
        """Return the collectives of the host engine, for arrays on the host or a GPU."""
        return Calls(**self._router.calls(timeout_s))

    def call(self, op: str, given: dict[str, Any]) -> Any:
        """Make a call on GPU arrays, given its arguments by name."""
        array, stream = given.get("array"), given.get("stream")
        if array is None:  # of a scatter, which has an input on the root
            array = given["out"]
        timeout_s, async_op = given["timeout"], given["async_op"]
        device, gpu = self._place_of(array, timeout_s)
        handle = current_stream(array, device) if stream is None else stream_handle(stream, device)
        keeper: Lane | _core.NcclCommunicator = gpu
        if op in ("send", "recv") and gpu.device == device:
            keeper = self._lane(op, given["dst" if op == "send" else "src"], timeout_s)
            result = keeper.call(array, handle, timeout_s, async_op)
        else:
            result = self._on_gpus[op](**given | {"stream": handle})
        if async_op:
            return StreamWork(result, array, device)
        if stream is not None:  # the arrays' library does not know that it is in use
            keeper.keep_for_last(handle, (array, given.get("out")))
        return result

    def run_group(self, group: _core.Group) -> None:
        """Make a group's calls on GPU arrays, on the stream of the first array's library."""
        arrays, timeout_s = group.on_gpu()
        if timeout_s is None:
            return
        device, gpu = self._place_of(arrays, timeout_s)
        group.run_on_gpu(gpu, current_stream(arrays[0], device), timeout_s)

    def empty(self, nbytes: int, device: int, timeout_s: float) -> _core.GpuMemory:
        """Allocate GPU memory registered with NCCL. Every rank must call, with equal `nbytes`."""
        gpu = self._gpu or self._connect(device, timeout_s)
        if gpu.device != device:
            raise ValueError(f"device must be cuda:{gpu.device}, this rank's, got cuda:{device}")
        return gpu.allocate(nbytes, timeout_s)

    def abort(self, why: str) -> None:
        """End the calls that run on the GPU, at once."""
        for lane in self._lanes.values():
            lane.abort(why)
        if self._gpu is not None:
            self._gpu.abort(why)

    def close(self) -> None:
        """Wait for the calls that were enqueued, and leave; see `Communicator.close`."""
        with ExitStack() as last:
            if self._gpu is not None:
                last.callback(self._gpu.close)
            if self._mail is not None:
                last.callback(self._mail.close)
            for lane in self._lanes.values():
                last.callback(lane.close)

    def _place_of(self, arrays: Any, timeout_s: float) -> tuple[int, _core.NcclCommunicator]:
        """Return the GPU of an array, or of a list, and the communicator of all ranks."""
        device = device_of(arrays)
        if device == SOME_GPU:
            if self._gpu is None:
                raise ValueError("the first array on a GPU must not be empty: it chooses the GPU")
            device = self._gpu.device
        assert device is not None
        return device, self._gpu or self._connect(device, timeout_s)

    def _lane(self, op: str, peer: Any, timeout_s: float) -> Lane:
        own, size = self._host_engine.rank, self._host_engine.size
        peer = to_rank(peer, "dst" if op == "send" else "src", size, own)
        if (op, peer) not in self._lanes:
            assert self._gpu is not None
            assert self._mail is not None
            ends = (own, peer) if op == "send" else (peer, own)
            connect = partial(self._new, device=self._gpu.device, timeout_s=timeout_s, ends=ends)
            mail = self._mail.calls(timeout_s)
            self._lanes[op, peer] = Lane(op, peer, self._gpu, connect, mail, timeout_s)
        return self._lanes[op, peer]

    def _connect(self, device: int, timeout_s: float) -> _core.NcclCommunicator:
        """Connect the ranks. Every rank calls this at its first array on a GPU."""
        records = self._exchange(_describe(device), timeout_s)
        rank, size = self._host_engine.rank, self._host_engine.size
        for other, record in enumerate(records):
            if "error" in record:
                where = "" if other == rank else f" (rank {other})"
                raise UnsupportedError(record["error"] + where, (other,))
        versions = [record["version"] for record in records]
        if len(set(versions)) > 1:
            told = ", ".join(f"{each} on rank {other}" for other, each in enumerate(versions))
            raise UnsupportedError(f"all ranks must have the same version of NCCL, got {told}")
        chips = [record["chip"] for record in records]  # which MIG instances share
        sharing = [other for other, chip in enumerate(chips) if chips.count(chip) > 1]
        _require_apart(records, sharing)
        if sharing or _may_share_elsewhere(records, rank):
            nccl_library.allow_sharing(nccl_library.load().version)
        gpu = self._new(self._share_id(timeout_s), device, timeout_s)
        self._mail = self._host_engine.subset([list(range(size))], timeout_s)
        self._on_gpus = gpu.calls(timeout_s)
        self._router.connect(gpu)
        self._gpu = gpu
        return gpu

    def _new(
        self, unique_id: bytes, device: int, timeout_s: float, ends: tuple[int, int] | None = None
    ) -> _core.NcclCommunicator:
        """Connect a communicator of NCCL: of all ranks, or of the two in `ends`."""
        return _core.NcclCommunicator.connect(
            unique_id,
            self._host_engine.rank,
            self._host_engine.size,
            device,
            # One rank's calls are compared with nobody.
            self._host_engine.compiled if self._host_engine.size > 1 else None,
            timeout_s,
            ends,
        )

    def _exchange(self, record: dict[str, Any], timeout_s: float) -> list[dict[str, Any]]:
        text = json.dumps(record).encode()
        longest = np.array([len(text)])
        self._host_engine.calls(timeout_s).all_reduce(longest, op="max")
        own = np.frombuffer(text.ljust(longest[0]), np.uint8)
        everyone = np.empty(self._host_engine.size * longest[0], np.uint8)
        self._host_engine.calls(timeout_s).all_gather(own, out=everyone)
        return [json.loads(row.tobytes()) for row in everyone.reshape(-1, longest[0])]

    def _share_id(self, timeout_s: float) -> bytes:
        """Broadcast the id that NCCL makes on rank 0; zeros mean that it failed there."""
        unique_id, failure = bytes(ID_BYTES), None
        if self._host_engine.rank == 0:
            try:
                unique_id = _core.new_nccl_id()
            except FastdistError as error:
                failure = error
        shared = np.frombuffer(unique_id, np.uint8).copy()
        self._host_engine.calls(timeout_s).broadcast(shared, root=0)
        if failure is not None:
            raise failure
        if not shared.any():
            raise FastdistError("NCCL on rank 0 could not begin to connect the ranks", (0,))
        return bytes(shared)


class StreamWork:
    """A call that runs on a stream of the communicator's own."""

    def __init__(self, work: _core.GpuWork | LaneWork, array: Any, device: int) -> None:
        self._work = work
        self._array = array[0] if isinstance(array, list) else array  # a list may change
        self._device = device

    def is_done(self) -> bool:
        """Return True if the device has finished the call."""
        return self._work.is_done()

    def is_enqueued(self) -> bool:
        """Return True unless the call waits for the other rank's first send or receive."""
        return self._work.is_enqueued()

    @property
    def stream(self) -> int:
        """The handle of the stream that the call runs on."""
        return self._work.stream

    def wait(self, timeout: float | None = None, *, compared: bool = True) -> Any:
        """Make the current stream of the arrays' library wait for the call.

        With a timeout in seconds, the host first waits for the call. If `compared`, it waits until
        the ranks have compared the call; otherwise the error comes from the next call.
        """
        if timeout is not None:
            self._work.synchronize(timeout)
        return self._work.wait(current_stream(self._array, self._device), compared=compared)

    def synchronize(self, timeout: float | None = None) -> Any:
        """Make the host wait for the end of the call; otherwise like `wait`."""
        return self._work.synchronize(timeout)


def _describe(device: int) -> dict[str, Any]:
    """Describe this rank to the others; "error" says what keeps it from connecting."""
    from fastdist.collectives.rendezvous.machines import machine_id  # imports slowly

    try:
        version = nccl_library.load().version_text
        gpus = _core.cuda_devices()
        own = gpus[device]
    except (FastdistError, IndexError) as error:
        return {"error": str(error)}
    return {
        "version": version,
        "uuid": own.uuid,
        "chip": f"{machine_id()}/{own.pci}",
        "visible": zlib.crc32(" ".join(gpu.uuid for gpu in gpus).encode()),
        "process": os.getpid(),
        "device": device,
    }


def _require_apart(records: Sequence[dict[str, Any]], sharing: Sequence[int]) -> None:
    places = [(records[r]["uuid"], records[r]["process"]) for r in sharing]
    if len(set(places)) != len(places):
        twice = next(r for r, place in zip(sharing, places, strict=True) if places.count(place) > 1)
        raise UnsupportedError(
            f"two ranks of one process have the same GPU, cuda:{records[twice]['device']}: NCCL "
            "needs a process for each rank of a GPU; start them by `fastdist run`",
            tuple(sharing),
        )


def _may_share_elsewhere(records: Sequence[dict[str, Any]], rank: int) -> bool:
    """Return True if other communicators of this process may share a GPU."""
    launch = detect_launch()
    if launch is None or launch.local_world_size <= len(_core.cuda_devices()):
        return False
    # False if a launcher gave each rank GPUs of its own and hides the others.
    visible = [record["visible"] for record in records]
    return len(records) == 1 or visible.count(visible[rank]) > 1
