"""One rank of a job on real or virtual GPUs, which calls `Communicator` on GPU and host arrays.

Started by test_communicator_gpu.py:

    gpu_communicator.py PART...              this process is a rank of a job
    gpu_communicator.py PART... --threads N  N ranks are threads of this process
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import repeat
from typing import Any

import fastdist as fd
import numpy as np
import pytest
from fastdist import Communicator
from fastdist.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    FastdistError,
    LostRankError,
    PeerFailureError,
    UnsupportedError,
)
from gpu_arrays import choose

TIMEOUT_S = 60.0
arrays = choose()


def floats(comm: Communicator, size: int = 1000) -> Any:
    return np.arange(size, dtype=np.float32) + comm.rank


def total(comm: Communicator, size: int = 1000) -> Any:
    n = comm.world_size
    return np.arange(size, dtype=np.float32) * n + n * (n - 1) / 2


def require(array: Any, expected: Any) -> None:
    np.testing.assert_allclose(arrays.numpy(array, "float32"), expected, rtol=1e-6)


def every_op(comm: Communicator) -> None:
    n, r = comm.world_size, comm.rank
    everyone = np.concatenate([np.arange(4, dtype=np.float32) + rank for rank in range(n)])
    mine = np.arange(4, dtype=np.float32) + r

    x = arrays.array(floats(comm))
    assert comm.all_reduce(x) is x
    require(x, total(comm))
    out = arrays.full(1000, -1)
    assert comm.all_reduce(arrays.array(floats(comm)), "mean", out=out) is out
    require(out, total(comm) / n)
    some = [arrays.array(floats(comm, size)) for size in (7, 70_000, 1)]
    comm.all_reduce(some, bucket_bytes=1 << 16)
    for one, size in zip(some, (7, 70_000, 1), strict=True):
        require(one, total(comm, size))
    comm.all_reduce(some, "mean", compress="bf16")
    np.testing.assert_allclose(arrays.numpy(some[0], "float32"), total(comm, 7), rtol=1e-2)

    x = arrays.array(mine)
    comm.reduce(x, "max", root=n - 1)
    require(x, mine if r != n - 1 else np.arange(4) + n - 1)
    x = arrays.array(mine)
    comm.broadcast(x, root=n - 1)
    require(x, np.arange(4) + n - 1)
    out = arrays.full(4 * n, -1)
    comm.all_gather(arrays.array(mine), out=out)
    require(out, everyone)
    comm.gather(arrays.array(mine), out=out)
    part = arrays.full(4, -1)
    comm.scatter(arrays.array(everyone) if r == 0 else None, out=part)
    require(part, mine)
    comm.reduce_scatter(arrays.array(everyone), out=part)
    require(part, mine * n)
    out = arrays.full(4 * n, -1)
    comm.all_to_all(arrays.array(np.repeat(np.float32(r), 4 * n)), out=out)
    require(out, np.repeat(np.arange(n), 4))
    rows = [(i + 1) % 3 for i in range(n)]
    joined = np.repeat(np.arange(n, dtype=np.float32), rows)
    out = arrays.full(len(joined), -1)
    assert comm.all_gather(arrays.full(rows[r], r), splits=rows, out=out) is out
    require(out, joined)
    part = arrays.full(rows[r], -1)
    work = comm.reduce_scatter(arrays.array(joined), "max", splits=rows, out=part, async_op=True)
    assert work.wait() is part
    require(part, np.full(rows[r], r))
    if n > 1 and r < 2:
        x = arrays.array(mine)
        if r == 0:
            comm.send(x, 1)
        else:
            comm.recv(x, 0)
            require(x, np.arange(4))
    comm.barrier()


def among_calls_on_the_host(comm: Communicator) -> None:
    """Calls on host and GPU arrays, asynchronous or not, run in one order."""
    pending = []
    for i in range(30):
        host = np.full(200_000 if i % 3 else 5, 1.0)
        pending.append((comm.all_reduce(host, async_op=True), host))
        x = arrays.array(floats(comm))
        work = comm.all_reduce(x, async_op=i % 2 == 0)
        if i % 2 == 0:
            assert work.wait(TIMEOUT_S) is x
            assert work.is_done()
        require(x, total(comm))
    for work, host in pending:
        work.wait()
        assert (host == comm.world_size).all()
    assert comm.all_gather_object(comm.rank) == list(range(comm.world_size))


def on_given_streams(comm: Communicator) -> None:
    stream = arrays.new_stream()
    handle = getattr(stream, "handle", None) or stream.cuda_stream
    with arrays.use_stream(stream):
        x = arrays.array(floats(comm))
    comm.all_reduce(x, stream=handle)
    with arrays.use_stream(stream):
        require(x, total(comm))
    # An array that only the call refers to is kept until the device has finished the call.
    out, ones = arrays.full(1000, 0), arrays.full(1000, 1)
    arrays.synchronize()
    comm.all_reduce(ones, out=out, stream=handle)
    del ones
    with arrays.use_stream(stream):
        assert arrays.is_full(out, comm.world_size)
    with pytest.raises(ValueError, match="stream is for arrays on GPUs"):
        comm.all_reduce(np.ones(3), stream=handle)
    with pytest.raises(TypeError, match="stream must be a stream of torch"):
        comm.all_reduce(x, stream="side")


def disagreement(comm: Communicator) -> None:
    """A mismatch is told with all lines, and ends the calls on GPUs, but not those on hosts."""

    def host_or_gpu(part: Communicator, rank: int) -> None:
        part.all_reduce(host if part.rank == rank else x)
        part.barrier()

    def sizes(part: Communicator) -> None:
        work: Any = part.all_reduce(arrays.full(8 + part.rank, 1), async_op=True)
        work.synchronize(TIMEOUT_S)

    def a_late_rank(part: Communicator) -> None:
        if part.rank == 0:
            time.sleep(0.3)
        work: Any = part.all_reduce(arrays.full(8 + part.rank, 1), async_op=True)
        work.wait()  # only makes the stream wait, but knows that the ranks agree

    def ops(part: Communicator) -> None:
        for _ in range(1000):  # one of them notices
            part.all_reduce(x, "sum" if part.rank == 0 else "max")
            time.sleep(0.01)

    def first(part: Communicator) -> None:
        host_or_gpu(part, 0)

    def second(part: Communicator) -> None:
        host_or_gpu(part, 1)

    for wrong in (first, second, sizes, a_late_rank, ops):
        part = comm.split(0)
        assert part is not None
        part.all_reduce(arrays.array(floats(part)))
        x, host = arrays.full(8, 1), np.ones(8, np.float32)
        with pytest.raises(CollectiveMismatchError) as error:
            wrong(part)
        assert "all_reduce(float32 × 8, on GPUs" in str(error.value)
        assert str(error.value).count("gpu_communicator.py") == comm.world_size
        part.all_reduce(host)
        assert set(host) == {comm.world_size}
        with pytest.raises(CollectiveMismatchError, match="gpu_communicator"):
            part.all_reduce(x)
        part.all_reduce(host)
        part.close()
        x = arrays.array(floats(comm))
        comm.all_reduce(x)
        require(x, total(comm))


def in_ranges(comm: Communicator) -> None:
    """A profiler sees each call as an NVTX range."""
    x = arrays.array(floats(comm))
    for call in (comm.all_reduce, comm.reduce):
        if arrays.are_virtual:
            import virtual_arrays

            ended = virtual_arrays.ranges(call.__name__)
            call(x)
            assert virtual_arrays.ranges(call.__name__) == ended + 1
        else:
            call(x)


def hosts_beside(comm: Communicator) -> None:
    """After calls on GPUs, calls on hosts fail as they do without GPUs."""
    part = comm.split(0)
    assert part is not None
    x, r = arrays.full(8, 1), part.rank
    part.all_reduce(x)
    calls = {0: lambda: part.send(np.ones(3), 1), 1: lambda: part.recv(np.ones(4), 0)}
    if r in calls:
        with pytest.raises(CollectiveMismatchError, match="send and recv do not match"):
            calls[r]()
    part.all_reduce(x)  # only two ranks have failed, and none on a GPU
    assert arrays.is_full(x, part.world_size**2)
    start = time.monotonic()
    # A deadlock is an error at once, but beside another Python thread, such as one that reports a
    # long wait, it ends by the timeout.
    short_s = TIMEOUT_S / 4
    waits: dict[bool, Any] = {
        True: lambda: part.recv(np.ones(4), 1, timeout=short_s),
        False: lambda: part.barrier(timeout=short_s),
    }
    with pytest.raises((CollectiveMismatchError, LostRankError)):
        waits[r == 0]()
    assert time.monotonic() - start < TIMEOUT_S / 2
    part.close()
    comm.barrier()


def out_of_memory(comm: Communicator) -> None:
    """A rank without memory for a bucket: all ranks raise, and go on."""
    if not arrays.are_virtual:
        pytest.skip("fills a virtual GPU")
    import virtual_arrays

    comm.all_reduce(arrays.full(4, 1))
    some = [arrays.full(size, 1) for size in (300_000, 400_000)]
    alone = arrays.full(7_000_000, 1)  # larger than a bucket
    arrays.synchronize()
    comm.barrier()
    filler = None
    if comm.rank == comm.world_size - 1:
        free = (4 << 30) - virtual_arrays.bytes_in_use(virtual_arrays.current_device())
        filler = ctypes.c_void_p()
        virtual_arrays.cuda.cudaMalloc(ctypes.byref(filler), ctypes.c_size_t(free - (1 << 20)))
    with pytest.raises(MemoryError, match="device memory could not be allocated"):
        comm.all_reduce([alone, *some])
    assert all(arrays.is_full(x, 1) for x in (alone, *some))
    with pytest.raises(MemoryError, match="device memory could not be allocated"):
        comm.broadcast([alone, *some], 0)
    comm.barrier()
    if filler is not None:
        virtual_arrays.cuda.cudaFree(filler)
    comm.all_reduce([alone, *some])
    assert all(arrays.is_full(x, comm.world_size) for x in (alone, *some))


def on_two_gpus(comm: Communicator) -> None:
    """Lists over two GPUs are refused before anything is sent."""
    x = arrays.full(4, 1)
    comm.all_reduce(x)
    own = comm.rank % arrays.device_count()
    arrays.set_device((own + 1) % arrays.device_count())
    y = arrays.full(4, 1)
    arrays.set_device(own)
    for wrong in (y, [x, y], [y, x]):
        with pytest.raises(ValueError, match=f"must be on cuda:{own}"):
            comm.all_reduce(wrong)
    comm.all_reduce(x)
    assert arrays.is_full(x, comm.world_size**2)
    assert arrays.is_full(y, 1)


def one_rank_without_a_gpu(comm: Communicator) -> None:
    """A rank that calls on the host instead gets an error with both lines, as the others do."""
    x = np.ones(4, np.float32) if comm.rank == 0 else arrays.full(4, 1)
    with pytest.raises(CollectiveMismatchError, match="gpu_communicator"):
        comm.all_reduce(x)
    y = np.ones(4)
    comm.all_reduce(y)
    assert set(y) == {comm.world_size}


def groups(comm: Communicator) -> None:
    half = comm.split(comm.rank % 2, key=-comm.rank)
    assert half is not None
    x = arrays.array(floats(half))
    half.all_reduce(x)
    require(x, total(half))
    pair = comm.subgroup([comm.world_size - 1, 0])
    if pair is not None:
        x = arrays.array(floats(pair))
        pair.broadcast(x)
        require(x, np.arange(1000))
        pair.close()
    half.close()
    x = arrays.array(floats(comm))
    comm.all_reduce(x)
    require(x, total(comm))


def shrinking(comm: Communicator) -> None:
    """Shrink without a failure; `a_killed_rank` shrinks after a failure."""
    last = comm.world_size - 1
    comm.all_reduce(arrays.full(4, 1))
    if comm.rank == last:
        return comm.close()
    comm = comm.shrink([last])
    x = arrays.array(floats(comm))
    comm.all_reduce(x)
    require(x, total(comm))


def aborting(comm: Communicator) -> None:
    """Abort ends a call that waits on the device, and the other ranks get an error."""
    comm.all_reduce(arrays.full(4, 1))
    x = arrays.full(4, comm.rank)
    if comm.rank == 0:
        comm.recv(x, 1)
        assert arrays.is_full(x, 1)
    elif comm.rank == 1:
        comm.send(x, 0)
    comm.barrier()
    if comm.rank == 0:
        comm.recv(x, 1)
        start = time.monotonic()
        comm.abort()
        arrays.synchronize()
        assert time.monotonic() - start < 5
        with pytest.raises(FastdistError, match="rank 0 has called abort"):
            comm.all_reduce(x)
    else:
        comm.all_reduce(x)
        with pytest.raises(PeerFailureError) as error:
            comm.barrier()
        assert error.value.ranks == (0,)


def bad_arrays(comm: Communicator) -> None:
    x = arrays.full(4, 1)
    with pytest.raises(ValueError, match="in host memory"):
        comm.all_reduce([x, np.ones(4, np.float32)])
    with pytest.raises((TypeError, ValueError)):
        comm.all_reduce([np.ones(4, np.float32), x])
    with pytest.raises((TypeError, ValueError)):
        comm.all_reduce(x, "median")
    with pytest.raises(ValueError, match="device must be a GPU"):
        comm.empty(3, device="cpu")
    empty = arrays.full(0, 1)
    items = [x, empty]
    work = comm.all_reduce(items, async_op=True)
    items.clear()
    work.wait()
    assert arrays.is_full(x, comm.world_size)


class WithBuffer(bytearray):
    """A virtual array with the methods of a buffer, as cupy's arrays have them."""

    def __init__(self, array: Any) -> None:
        super().__init__()
        self.array = array

    def __dlpack_device__(self) -> tuple[int, int]:
        device: tuple[int, int] = self.array.__dlpack_device__()
        return device

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)


def arrays_of_cupy(comm: Communicator) -> None:
    n, r = comm.world_size, comm.rank
    if arrays.are_virtual:
        import virtual_arrays

        x = virtual_arrays.array(floats(comm), dlpack=True)
        comm.all_reduce(WithBuffer(x))
        require(x, total(comm))
        return
    cupy = pytest.importorskip("cupy")
    cupy.cuda.Device(r % arrays.device_count()).use()
    x = cupy.asarray(floats(comm))
    assert comm.all_reduce(x) is x
    np.testing.assert_allclose(cupy.asnumpy(x), total(comm), rtol=1e-6)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        x = cupy.ones(1 << 22, "float32")
        x *= 3
        comm.all_reduce(x)
        x += 1
    stream.synchronize()
    assert (cupy.asnumpy(x) == 3 * n + 1).all()
    x = cupy.full(100_000, r, "float16")
    assert (cupy.asnumpy(comm.all_reduce(x, "max", async_op=True).wait()) == n - 1).all()
    everyone = comm.all_gather(cupy.full(7, r, "int64"))
    assert isinstance(everyone, cupy.ndarray)
    assert everyone.tolist() == np.repeat(np.arange(n), 7).tolist()
    some = [cupy.full(size, r, "float32") for size in (3, 70_000, 1)]
    comm.all_reduce(some, "mean")
    assert all((cupy.asnumpy(one) == (n - 1) / 2).all() for one in some)
    assert isinstance(comm.empty((4, 5), "float32", device="cuda:0"), cupy.ndarray)


def between_two(comm: Communicator) -> None:
    """Sends and receives that are called in any order, alone and in groups."""
    n = comm.world_size
    after, before = (comm.rank + 1) % n, (comm.rank - 1) % n
    items = [arrays.full(1000, comm.rank), arrays.full(7, comm.rank)]
    sent = comm.send(items, after, async_op=True)  # connects; the caller may change its list
    items.clear()
    got = [arrays.full(1000, -1), arrays.full(7, -1)]
    comm.recv(got, before)
    assert all(arrays.is_full(array, before) for array in got)
    sent.synchronize()
    stream = arrays.new_stream()
    with arrays.use_stream(stream):
        ones = arrays.full(50_000, 1)
        handle = arrays.current_stream()
    comm.send(ones, after, stream=handle)
    del ones  # the call keeps it
    arrays.full(50_000, 7)
    comm.all_reduce(arrays.full(3, 1))
    ones = arrays.full(50_000, -1)
    comm.recv(ones, before)  # on another stream than what it might wait for
    assert arrays.is_full(ones, 1)
    for size in (1000, 300_000, 3):
        x, y, z = arrays.full(size, comm.rank), arrays.full(size, -1), arrays.full(10, 1)
        sent = comm.send(x, after, async_op=True)
        comm.recv(y, before, async_op=True).wait()
        sent.wait()
        assert arrays.is_full(y, before)
        received = comm.recv(x, after, async_op=True)
        comm.all_reduce(z)  # does not wait for what is sent after it
        assert arrays.is_full(z, n)
        comm.send(y, before)
        assert arrays.is_full(received.synchronize(), comm.rank)
    if comm.rank == 0:
        time.sleep(0.3)  # the others' calls wait until this rank connects
    works = [comm.send(arrays.full(9, i), after, async_op=True) for i in range(5)]
    outs = [arrays.full(9, -1) for _ in range(5)]
    for i, out in enumerate(outs):
        comm.recv(out, before)
        assert arrays.is_full(out, i)
    for work in works:
        work.synchronize()

    z, halves = arrays.full(10, 1), arrays.full(10, 1, "float16")
    many = [arrays.full(size, 1) for size in (3, 4)]
    host = np.full(5, comm.rank)
    with comm.group():
        comm.all_reduce(z)
        comm.send(arrays.full(9, comm.rank), after)
        comm.all_reduce(halves)
        comm.send(host, before)
        comm.all_reduce(many)
        assert comm.recv(outs[0], before) is outs[0]
        got = comm.recv(np.full(5, -1), after)
    assert arrays.is_full(outs[0], before)
    assert got.tolist() == [after] * 5
    assert all(arrays.is_full(array, n) for array in (z, *many))
    assert arrays.is_full(halves, n, "float16")

    def then(x: Any, **refused: Any) -> None:
        with comm.group():
            comm.all_reduce(z)
            comm.all_reduce(x, **refused)

    with pytest.raises(UnsupportedError, match='op="sum" of int16'):
        then(arrays.full(10, 1, "int16"))
    with pytest.raises(UnsupportedError, match='compress="fp8"'):
        then(arrays.full(10, 1), compress="fp8")
    assert arrays.is_full(z, n)  # no call was made
    refusal = "a call with stream or bucket_bytes cannot be in a group"
    with pytest.raises(ValueError, match=refusal), comm.group():
        comm.all_reduce(z, stream=arrays.current_stream())

    def with_gaps() -> None:
        with comm.group():
            comm.send(z, after)
            comm.recv(arrays.full(10, 1)[::2], before)

    with pytest.raises(ValueError, match="gaps"):
        with_gaps()
    comm.barrier()


def call_again_and_again(comm: Communicator) -> None:
    """Call until an error arrives: the first call only waits on the device."""
    for _ in range(100):
        comm.all_reduce(arrays.full(4, 1))
        time.sleep(0.05)


def a_late_rank(comm: Communicator) -> None:
    comm.all_reduce(arrays.full(4, 1))
    if comm.rank == 0:
        comm.all_reduce(arrays.full(4, 1), timeout=1)
        with pytest.raises(CollectiveTimeoutError, match="on GPUs"):
            comm.barrier()
    else:
        time.sleep(2)
        with pytest.raises((CollectiveTimeoutError, PeerFailureError)):
            call_again_and_again(comm)


class Freed:
    """An array that may stop being one."""

    def __init__(self, array: Any) -> None:
        self._array = array
        self.is_freed = False

    @property
    def __cuda_array_interface__(self) -> Any:
        if self.is_freed:
            raise AttributeError
        return self._array.__cuda_array_interface__


def a_group_that_raises(comm: Communicator) -> None:
    """NCCL launches its calls before the exception; they are watched like all others."""
    comm.all_reduce(arrays.full(4, 1))
    if comm.rank == 0:

        def calls() -> None:
            freed = Freed(arrays.full(3, 1))
            with comm.group():
                comm.send(arrays.full(5_000_000, 1), 1, timeout=1.0)
                comm.send(freed, 1, timeout=1.0)
                freed.is_freed = True

        with pytest.raises(TypeError, match="got Freed"):
            calls()
        time.sleep(1.5)
        with pytest.raises(CollectiveTimeoutError):
            comm.all_reduce(arrays.full(4, 1))
    else:
        time.sleep(3)


def an_error_that_was_caught(comm: Communicator) -> None:
    """An error that the program has caught is not told again."""
    x = arrays.full(4, 1)
    comm.all_reduce(x)
    if comm.rank > 0:
        time.sleep(3)
        with suppress(FastdistError):
            comm.close()
        return
    work: Any = comm.all_reduce(x, timeout=1, async_op=True)
    with pytest.raises(CollectiveTimeoutError):
        work.synchronize(TIMEOUT_S)
    time.sleep(0.5)
    comm.close()


def a_silent_peer(comm: Communicator) -> None:
    """A peer that ends instead of calling its part, and one that never calls it."""
    x = arrays.full(4, 1)
    comm.all_reduce(x)
    last = comm.world_size - 1
    if comm.rank > 0:
        comm.barrier()
        if comm.rank == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return
    comm.barrier()
    start = time.monotonic()
    for call in (comm.recv, comm.send):
        with pytest.raises(PeerFailureError) as failure:
            call(x, last)
        assert failure.value.ranks == (last,)
    assert time.monotonic() - start < 5


def a_peer_that_does_not_call(comm: Communicator) -> None:
    x = arrays.full(4, 1)
    comm.all_reduce(x)
    if comm.rank == 0:
        work = comm.recv(x, 1, timeout=0.5, async_op=True)
        assert not work.is_done()
        with pytest.raises(CollectiveTimeoutError, match=r"has not begun after 0\.1 s"):
            work.synchronize(0.1)
        with pytest.raises(CollectiveTimeoutError, match="rank 1 has not called its part"):
            work.wait()
        assert work.is_done()
        with pytest.raises(CollectiveTimeoutError, match="rank 1 has not called its part"):
            comm.recv(x, 1)
        with pytest.raises(FastdistError, match="rank 1 has not called its part"):
            comm.all_reduce(x)  # nothing is right after a call that failed
    comm.barrier()


def a_receive_in_vain(comm: Communicator) -> None:
    """A call that fails between connected ranks is told by the next one too."""
    comm.all_reduce(arrays.full(1, 1))
    x = arrays.full(4, comm.rank)
    if comm.rank == 1:
        comm.send(x, 0)
    if comm.rank == 0:
        comm.recv(x, 1)
        assert arrays.is_full(x, 1)
        work = comm.recv(x, 1, timeout=0.5, async_op=True)
        time.sleep(1.5)
        with pytest.raises(CollectiveTimeoutError, match=r"within 0\.5 s"):
            comm.recv(x, 1, stream=0)
        with pytest.raises(CollectiveTimeoutError, match=r"within 0\.5 s"):
            comm.all_reduce(x)
        with pytest.raises(CollectiveTimeoutError):
            work.synchronize()
    comm.barrier()


def a_killed_rank(comm: Communicator) -> None:
    comm.all_reduce(arrays.full(4, 1))
    comm.barrier()
    if comm.rank == comm.world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(PeerFailureError) as error:
        call_again_and_again(comm)
    assert time.monotonic() - start < 5
    assert error.value.ranks == (comm.world_size - 1,)
    comm = comm.shrink(error.value.ranks)
    x = arrays.array(floats(comm))
    comm.all_reduce(x)
    require(x, total(comm))


def one_gpu_twice(comm: Communicator) -> None:
    """Threads of one process on the same GPU are refused; calls on the host still work."""
    arrays.set_device(0)
    with pytest.raises(UnsupportedError, match="two ranks of one process have the same GPU"):
        comm.all_reduce(arrays.full(4, 1))
    assert comm.all_gather_object(comm.rank) == list(range(comm.world_size))


def run(world: Communicator, parts: Sequence[str]) -> None:
    """Run each part on a communicator of its own."""
    arrays.set_device(world.rank % arrays.device_count())
    for part in parts:
        if world.rank == 0:
            print(part, flush=True)
        comm = world.split(0)
        assert comm is not None
        try:
            globals()[part](comm)
        except pytest.skip.Exception as skipped:
            print(f"{part} is skipped: {skipped}", flush=True)
        with suppress(FastdistError):  # that a part has caught
            comm.close()


if __name__ == "__main__":
    words = argparse.ArgumentParser()
    words.add_argument("parts", nargs="+")
    words.add_argument("--threads", type=int)
    given = words.parse_args()
    if given.threads is None:
        run(fd.init(timeout=TIMEOUT_S), given.parts)
    else:
        worlds = fd.local_group(given.threads, timeout=TIMEOUT_S)
        with ThreadPoolExecutor(given.threads) as pool:
            list(pool.map(run, worlds, repeat(given.parts), timeout=150))
    print("passed")
