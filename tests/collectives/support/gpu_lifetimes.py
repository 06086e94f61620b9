"""Parts of gpu_rank.py: streams, graphs, wrong input, and communicators from beginning to end."""

from __future__ import annotations

import contextlib
import os
import time
import weakref
from typing import TYPE_CHECKING, Any

import fastdist
import numpy as np
import pytest
from fastdist import _core, errors

if TYPE_CHECKING:
    from gpu_rank import Rank


def streams(r: Rank) -> None:
    a = r.arrays
    stream = a.new_stream()
    with a.use_stream(stream):
        x, copy = a.full(1 << 20, 1), a.full(1 << 20, 0)
        for _ in range(3):
            a.fill(x, 1)
            work = r.call_async("all_reduce", x)
            assert work.wait(a.current_stream()) is x
            a.copy(copy, x)
            a.fill(x, 7)
        assert a.is_full(copy, r.size)
        assert a.is_full(x, 7)
    assert work.is_done()
    # A call keeps its arrays until it has ended, even if no other code refers to them.
    works = [r.call_async("all_reduce", a.full(1 << 16, 1)) for _ in range(20)]
    assert all(a.is_full(work.synchronize(), r.size) for work in works)
    # Also if the caller changes its list.
    for _ in range(5):
        items, outs = [a.full(n, 1) for n in (200_000, 100_000)], [a.full(200_000, 0), a.full(9, 0)]
        items[1] = a.full(9, 1)
        if r.rank == r.size - 1:
            time.sleep(0.01)
        work = r.call_async("all_reduce", items, out=outs)
        items.clear()
        others = [a.full(n, 7) for n in (200_000, 100_000, 9)]  # may get their memory
        work.wait(a.current_stream())
        assert all(a.is_full(out, r.size) for out in outs)
        del others


def alternating(r: Rank) -> None:
    """Calls on two streams share buckets, which must not be filled while they are in use."""
    a = r.arrays
    streams = [a.new_stream(), a.new_stream()]
    lists = []
    for i in range(10):
        with a.use_stream(streams[i % 2]):
            arrays = [a.full(n, i + r.rank) for n in (30_000, 17, 20_000)]
            r.call("all_reduce", arrays, bucket_bytes=(1 << 14) * (1 + i // 5))
            lists.append(arrays)
    for i, arrays in enumerate(lists):
        with a.use_stream(streams[i % 2]):
            expected = sum(i + k for k in range(r.size))
            assert all(a.is_full(x, expected) for x in arrays), f"list {i}"


def memory(r: Rank) -> None:
    lent = r.gpu.allocate(4096, 60.0)
    assert lent.nbytes == 4096
    y = r.arrays.view(lent, "float32")
    r.arrays.fill(y, 2)
    r.call("all_reduce", y)
    assert r.arrays.is_full(y, 2 * r.size)
    # Dropped while a call uses it, which begins late on one rank.
    result = r.arrays.full(1024, 0)
    r.arrays.synchronize()
    if r.rank == r.size - 1:
        time.sleep(0.3)
    r.call("all_reduce", y, out=result)
    del y, lent
    assert r.arrays.is_full(result, 2 * r.size**2)
    if r.size > 1:
        gpu = r.connect(r.new_id(), r.checker())
        for _ in range(2):
            with pytest.raises(
                errors.CollectiveMismatchError, match=r"empty\(uint8 × 64, on GPUs\)"
            ):
                gpu.allocate(64 + r.rank, 60.0)
        gpu.close()


def memory_of_one(r: Rank) -> None:
    """NCCL does not wait forever for all ranks to make a window."""
    if r.size == 1 or os.environ.get("VIRTUAL_NCCL_WINDOWS") == "0":
        return
    gpu = r.connect(r.new_id())
    if r.rank == 0:
        with pytest.raises(
            errors.CollectiveTimeoutError, match=r"empty\(uint8 × 64|WindowRegister"
        ):
            gpu.allocate(64, 1.0)
    r.host.barrier()
    gpu.close()


def graphs(r: Rank) -> None:
    a = r.arrays
    x = a.full(1000, 0)
    parts = [a.full(n, 0) for n in (5, 300, 77)]
    many = [a.full(n, 0) for n in (9_000, 300, 9_000)]
    # The first call connects, which NCCL cannot do during a capture.
    r.call("all_reduce", x)
    a.synchronize()
    r.host.barrier()  # work of other ranks, if they are threads, could invalidate the capture
    graph = a.graph()
    with graph.capture():
        r.call("all_reduce", x)
        r.call("all_reduce", parts, compress="bf16")
        r.call("all_reduce", many, op="mean", bucket_bytes=1 << 14)
        r.call_async("all_reduce", many, compress="bf16", bucket_bytes=1 << 14).wait(
            a.current_stream()
        )
    r.host.barrier()
    for value in (1.0, 3.0):
        for array in (x, *parts, *many):
            a.fill(array, value)
        a.synchronize()
        graph.launch()
        r.call("all_reduce", a.full(9, 1), op="max")
        a.synchronize()
        assert a.is_full(x, value * r.size)
        assert all(a.is_full(part, value * r.size) for part in parts)
        assert all(np.allclose(a.numpy(y, "float32"), value * r.size, 0.1) for y in many)
    del graph


def captured_temporaries(r: Rank) -> None:
    """A captured call keeps its arrays until the stream that made it waits."""
    a = r.arrays
    given, out, x = a.full(1000, 1), a.full(1000, 0), a.full(9, 1)
    r.call("all_reduce", x)
    a.synchronize()
    r.host.barrier()
    kept = weakref.ref(given)
    graph = a.graph()
    with graph.capture():
        work = r.call_async("all_reduce", given, out=out)
        del given
        later = r.call_async("all_reduce", x)
        assert kept() is not None
        work.wait(a.current_stream())
        assert kept() is None
        later.wait(a.current_stream())
    r.host.barrier()
    del graph


def graphs_on_two_streams(r: Rank) -> None:
    """Calls of one graph share buckets in order, and those of other graphs have others."""
    a = r.arrays
    lists = [[a.full(n, 0) for n in (9_000, 300, 9_000)] for _ in range(3)]
    for arrays in lists:
        r.call("all_reduce", arrays)
    a.synchronize()
    r.host.barrier()
    graph, other = a.graph(), a.graph()
    with graph.capture():
        work = r.call_async("all_reduce", lists[0])
        r.call("all_reduce", lists[1])
        work.wait(a.current_stream())
    with other.capture():
        r.call("all_reduce", lists[2])
    r.host.barrier()
    for _ in range(5):
        for value, arrays in enumerate(lists, 1):
            for x in arrays:
                a.fill(x, value)
        graph.launch()
        other.launch()
        a.synchronize()
        for value, arrays in enumerate(lists, 1):
            assert all(a.is_full(x, value * r.size) for x in arrays), f"list {value}"
    r.host.barrier()


def outlived(r: Rank) -> None:
    """A communicator ends promptly although graphs with its calls are still alive."""
    a = r.arrays
    for end in ("close", "abort"):
        gpu = r.connect(r.new_id())
        lists = [[a.full(n, 1) for n in (9_000, 300, 9_000)] for _ in range(2)]
        r.call("all_reduce", lists[0], bucket_bytes=1 << 14, gpu=gpu)
        a.synchronize()
        r.host.barrier()
        graph = a.graph()
        with graph.capture():
            r.call("all_reduce", lists[1], bucket_bytes=1 << 14, gpu=gpu)
        r.host.barrier()
        graph.launch()
        a.synchronize()
        assert all(a.is_full(x, r.size) for x in lists[1])
        r.host.barrier()
        start = time.monotonic()
        gpu.close() if end == "close" else gpu.abort("test ends it")
        assert time.monotonic() - start < 20
        with pytest.raises(errors.FastdistError, match=r"closed|test ends it"):
            r.call("all_reduce", lists[0], gpu=gpu)
        r.host.barrier()
        del gpu, graph


def meanwhile(r: Rank) -> None:
    """Odd ranks capture while even ranks connect, allocate and close: captures stay valid."""
    a = r.arrays
    alone = [_core.NcclCommunicator.connect(_core.new_nccl_id(), 0, 1, r.device, None, 60.0)]
    x = a.full(1000, 1)
    r.call("all_reduce", x, gpu=alone[0])
    a.synchronize()
    ready = [[a.full(n, 1) for n in (1 << k, 5)] for k in range(17, 20)]
    r.host.barrier()
    if r.rank % 2 == 1:
        for _ in range(20):
            graph = a.graph()
            with graph.capture():
                for _ in range(5):
                    time.sleep(0.002)
                    r.call("all_reduce", x, gpu=alone[0])
    else:
        for arrays in ready:
            work = r.call_async("all_reduce", arrays, gpu=alone[0])
            work.synchronize(60)
            r.call("all_reduce", arrays, compress="bf16", gpu=alone[0])
    r.host.barrier()
    alone[0].close()


def bad_input(r: Rank) -> None:
    a = r.arrays
    for wrong in (np.ones(3), a.in_memory_of_host(), [a.full(3, 1), a.in_memory_of_host()]):
        with pytest.raises(ValueError, match="must be on cuda:"):
            r.call("all_reduce", wrong)
    with pytest.raises(ValueError, match="must be dense"):
        r.call("all_reduce", a.full(10, 1)[::2])
    if r.size > 1:
        for x in (a.full(4 + r.rank, 1), [a.full(4 + r.rank, 1), a.full(3, 1)]):
            gpu = r.connect(r.new_id(), r.checker())
            r.host.barrier()  # a rank that still connects would be told of the failure instead
            with contextlib.suppress(errors.CollectiveMismatchError):  # it may be told here already
                r.call("all_reduce", x, gpu=gpu)
            with pytest.raises(errors.CollectiveMismatchError):
                r.call("barrier", gpu=gpu)
            gpu.close()
    r.call("barrier")


def ahead(r: Rank) -> None:
    """A call does not wait until the other ranks have called, unless it is far ahead of them."""
    a = r.arrays
    x = a.full(1000, 1)
    r.call("all_reduce", x, op="max")
    if r.rank != 0:
        r.host.barrier()
    for i in range(300):
        if r.rank == 0 and i == 50:
            r.host.barrier()
        r.call("all_reduce", x, op="max")
    r.call("all_reduce", x)
    assert a.is_full(x, r.size)


def late(r: Rank) -> None:
    """If a rank never arrives, no rank hangs and the process continues."""
    if r.size == 1:
        return
    a = r.arrays
    gpu = r.connect(r.new_id())
    x = a.full(1000, 1)
    r.call("all_reduce", x, gpu=gpu)
    a.synchronize()
    if r.rank == 0:
        work = r.call_async("all_reduce", x, gpu=gpu, timeout_s=2.0)
        r.call("all_reduce", a.full(0, 1), gpu=gpu)  # ends at once
        with pytest.raises(errors.CollectiveTimeoutError, match="within 2 s"):
            work.synchronize(60)
        with pytest.raises(errors.CollectiveTimeoutError):
            r.call("all_reduce", x, gpu=gpu)
    r.host.barrier()
    gpu.close()
    x = a.full(10, 1)
    r.call("all_reduce", x)
    assert a.is_full(x, r.size)


def absent(r: Rank) -> None:
    """If not all ranks connect, an error comes in time; the ranks can connect afterwards."""
    if r.rank == 0 and r.size > 1:
        with pytest.raises(errors.CollectiveTimeoutError, match="not connected"):
            _core.NcclCommunicator.connect(_core.new_nccl_id(), 0, r.size, r.device, None, 1.0)
    r.host.barrier()
    gpu = r.connect(r.new_id())
    r.call("barrier", gpu=gpu)
    gpu.close()
    with pytest.raises(errors.FastdistError, match="closed"):
        r.call("barrier", gpu=gpu)


def aborting(r: Rank) -> None:
    """Abort ends a running call; each later call raises the reason."""
    a = r.arrays
    gpu = r.connect(r.new_id())
    x = a.full(10, 1)
    r.call("all_reduce", x, gpu=gpu)  # NCCL's first call waits for the other ranks
    a.synchronize()
    if r.rank == 0:
        work = r.call_async("all_reduce", x, gpu=gpu) if r.size > 1 else None
        gpu.abort("test ends it")
        if work is not None:
            with pytest.raises(errors.FastdistError, match="test ends it"):
                work.synchronize(60)
        with pytest.raises(errors.FastdistError, match="test ends it"):
            r.call("all_reduce", x, gpu=gpu)
        a.synchronize()
    r.host.barrier()
    gpu.close()


def uncompared(r: Rank) -> None:
    """Without a checker, NCCL's own report of a failure reaches the caller."""
    if r.size == 1:
        return
    gpu = r.connect(r.new_id())
    r.host.barrier()  # or the failure reaches a rank that still connects
    x = r.arrays.full(10 + r.rank, 1)
    with pytest.raises(fastdist.errors.FastdistError, match=r"ranks disagree|rank has failed"):
        r.call_async("all_reduce", x, gpu=gpu, timeout_s=20.0).synchronize(60)
    r.host.barrier()
    gpu.close()


PARTS: tuple[Any, ...] = (
    streams,
    alternating,
    memory,
    graphs,
    captured_temporaries,
    graphs_on_two_streams,
    outlived,
    meanwhile,
    bad_input,
    ahead,
    late,
    absent,
    aborting,
)
VIRTUAL_PARTS = (uncompared, memory_of_one)
