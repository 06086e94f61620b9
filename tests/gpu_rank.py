"""One rank of a job on GPUs, which tests/test_nccl_gpu.py starts: every collective once through.

Ranks share GPU 0 where there are fewer GPUs than ranks.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import fastdist
import ml_dtypes
import numpy as np
import pytest
import torch
from fastdist import _core
from fastdist.engines import nccl_library
from reference import DTYPES, REDUCE_OPS, is_defined, numpy_dtype, reduced, sample, small_complex

TIMEOUT_S = 60.0
SIZES = [0, 1, 7, 1000, 65_537]
RELATIVE = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5, "complex64": 1e-4}


def to_gpu(array: Any) -> torch.Tensor:
    raw = torch.from_numpy(np.ascontiguousarray(array).view(np.uint8).reshape(-1).copy()).cuda()
    return raw.view(getattr(torch, array.dtype.name))


def to_numpy(tensor: torch.Tensor, dtype: str) -> Any:
    return tensor.view(torch.uint8).cpu().numpy().view(numpy_dtype(dtype))


def check(got: Any, expected: Any, what: str) -> None:
    dtype = expected.dtype.name
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    if expected.dtype.kind in "biu" or dtype.startswith("float8"):
        assert np.array_equal(got.view(np.uint8), expected.view(np.uint8)), what
        return
    scale = float(np.abs(expected.astype(wide)).max(initial=1.0))
    tolerance = RELATIVE.get(dtype, 1e-12)
    np.testing.assert_allclose(
        got.astype(wide), expected.astype(wide), tolerance, tolerance * scale, err_msg=what
    )


class Rank:
    """This process, its communicator between hosts, and the one between GPUs."""

    def __init__(self) -> None:
        self.host = fastdist.init()
        rank, size = self.host.rank, self.host.world_size
        library = nccl_library.load()
        device = rank % torch.cuda.device_count()
        if size > torch.cuda.device_count():
            os.environ.update(_core.nccl_settings_for_sharing(library.version, rank))
        torch.cuda.set_device(device)
        unique_id = self.host.broadcast_object(_core.new_nccl_id() if rank == 0 else b"")
        checker = self.host.subgroup(range(size))
        assert checker is not None
        self.checker = checker
        self.gpu = _core.NcclCommunicator.connect(
            unique_id, rank, size, device, True, checker.engine._host, TIMEOUT_S
        )
        self.calls = self.gpu.calls()
        self.rank, self.size = rank, size

    def call(self, name: str, *arguments: Any) -> Any:
        stream = torch.cuda.current_stream().cuda_stream
        return self.calls[name](*arguments, stream, TIMEOUT_S, False)

    def inputs(self, dtype: str, size: int, op: str = "sum") -> list[Any]:
        make = small_complex if op == "prod" and dtype.startswith("complex") else sample
        return [make(dtype, size, 3, rank) for rank in range(self.size)]


def reductions(r: Rank) -> None:
    for dtype in DTYPES:
        for op in REDUCE_OPS:
            if not is_defined(op, dtype):
                continue
            for size in SIZES:
                what = f"{op} of {dtype} × {size}"
                inputs = r.inputs(dtype, size, op)
                expected = reduced(inputs, op)
                x = to_gpu(inputs[r.rank])
                r.call("all_reduce", x, op, None, None, 0)
                check(to_numpy(x, dtype), expected, f"all_reduce: {what}")
                x = to_gpu(inputs[r.rank])
                r.call("reduce", x, op, 0, None)
                wanted = expected if r.rank == 0 else inputs[r.rank]
                check(to_numpy(x, dtype), wanted, f"reduce: {what}")
                wide = r.inputs(dtype, size * r.size, op)
                out = to_gpu(inputs[0])
                r.call("reduce_scatter", to_gpu(wide[r.rank]), op, out)
                part = reduced(wide, op)[r.rank * size : (r.rank + 1) * size]
                check(to_numpy(out, dtype), part, f"reduce_scatter: {what}")


def moves(r: Rank) -> None:
    for dtype in DTYPES:
        for size in SIZES:
            inputs = r.inputs(dtype, size)
            everyone = np.concatenate(inputs)
            mine = to_gpu(inputs[r.rank])
            out = to_gpu(np.zeros_like(everyone))
            r.call("all_gather", mine, out)
            check(to_numpy(out, dtype), everyone, f"all_gather {dtype} {size}")
            out = to_gpu(np.zeros_like(everyone))
            r.call("gather", mine, r.size - 1, out if r.rank == r.size - 1 else None)
            if r.rank == r.size - 1:
                check(to_numpy(out, dtype), everyone, f"gather {dtype} {size}")
            part = to_gpu(np.zeros_like(inputs[0]))
            r.call("scatter", to_gpu(everyone) if r.rank == 0 else None, 0, part)
            check(to_numpy(part, dtype), inputs[r.rank], f"scatter {dtype} {size}")
            x = to_gpu(inputs[r.rank])
            r.call("broadcast", x, 0, None)
            check(to_numpy(x, dtype), inputs[0], f"broadcast {dtype} {size}")
            wide = [np.concatenate([inputs[(k + p) % r.size] for p in range(r.size)])
                    for k in range(r.size)]  # fmt: skip
            out = to_gpu(np.zeros_like(wide[0]))
            r.call("all_to_all", to_gpu(wide[r.rank]), out, [])
            expected = np.concatenate([inputs[(k + r.rank) % r.size] for k in range(r.size)])
            check(to_numpy(out, dtype), expected, f"all_to_all {dtype} {size}")


def lists(r: Rank) -> None:
    rng = np.random.default_rng(11)
    sizes = [int(n) for n in rng.integers(0, 30_000, 300)]
    dtypes = [str(d) for d in rng.choice(["float32", "float16", "int64", "bool", "int16"], 300)]
    inputs = [[sample(d, n, 5, k) for d, n in zip(dtypes, sizes, strict=True)]
              for k in range(r.size)]  # fmt: skip
    for bucket_bytes in (0, 1 << 16):
        arrays = [to_gpu(x) for x in inputs[r.rank]]
        r.call("all_reduce", arrays, "sum", None, None, bucket_bytes)
        for i, x in enumerate(arrays):
            expected = reduced([inputs[k][i] for k in range(r.size)], "sum")
            check(to_numpy(x, dtypes[i]), expected, f"list of {bucket_bytes}: array {i}")
    arrays = [to_gpu(x) for x in inputs[r.rank]]
    r.call("broadcast", arrays, 0, None)
    for i, x in enumerate(arrays):
        check(to_numpy(x, dtypes[i]), inputs[0][i], f"broadcast of a list: array {i}")
    flat = to_gpu(sample("float32", 50_000, 7, r.rank))
    r.call("all_reduce", [flat[:10_000], flat[10_000:10_001], flat[10_001:]], "sum", None, None, 0)
    expected = reduced([sample("float32", 50_000, 7, k) for k in range(r.size)], "sum")
    check(to_numpy(flat, "float32"), expected, "a list that lies in one piece")


def compression(r: Rank) -> None:
    inputs = [[sample("float32", n, 9, k) for n in (3, 40_000, 1, 0, 777)] for k in range(r.size)]
    for wire, tolerance in (("fp16", 4e-3), ("bf16", 4e-2), ("fp8", 0.3)):
        arrays = [to_gpu(x) for x in inputs[r.rank]]
        r.call("all_reduce", arrays, "mean", None, wire, 0)
        for i, x in enumerate(arrays):
            expected = reduced([inputs[k][i] for k in range(r.size)], "mean")
            error = np.abs(to_numpy(x, "float32") - expected).max(initial=0.0)
            limit = tolerance * max(np.abs(expected).max(initial=0.0), 1.0)
            assert error <= limit, f"{wire}, array {i}: off by {error}"


def streams(r: Rank) -> None:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x = torch.ones(1 << 20, device="cuda")
        work = r.calls["all_reduce"](
            x, "sum", None, None, 0, stream.cuda_stream, TIMEOUT_S, True
        )  # fmt: skip
        assert work.wait(stream.cuda_stream) is x
        x += 1
    stream.synchronize()
    assert work.is_done()
    assert bool((x == r.size + 1).all())
    memory = r.gpu.allocate(4096, True, TIMEOUT_S)
    y = torch.as_tensor(memory, device="cuda").view(torch.float32)
    y.fill_(2)
    r.call("all_reduce", y, "sum", None, None, 0)
    assert bool((y == 2 * r.size).all())


def graphs(r: Rank) -> None:
    x = torch.zeros(1000, device="cuda")
    parts = [torch.zeros(n, device="cuda") for n in (5, 300, 77)]
    r.call("all_reduce", x, "sum", None, None, 0)  # connects: NCCL cannot do that in a capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        r.call("all_reduce", x, "sum", None, None, 0)
        r.call("all_reduce", parts, "sum", None, "bf16", 0)
    for value in (1.0, 3.0):
        x.fill_(value)
        for part in parts:
            part.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert bool((x == value * r.size).all())
        assert all(bool((part == value * r.size).all()) for part in parts)
        reductions_between = torch.ones(9, device="cuda")
        r.call("all_reduce", reductions_between, "max", None, None, 0)


def bad_input(r: Rank) -> None:
    for wrong in (np.ones(3), torch.ones(3), [torch.ones(3, device="cuda"), torch.ones(3)]):
        with pytest.raises(ValueError, match="must lie on cuda:"):
            r.call("all_reduce", wrong, "sum", None, None, 0)
    if r.size > 1:
        x = torch.ones(4 + r.rank, device="cuda")
        with pytest.raises(fastdist.errors.CollectiveMismatchError):
            r.call("all_reduce", x, "sum", None, None, 0)
        assert bool((x == 1).all())
    r.call("barrier")


def late(r: Rank) -> None:
    """A rank that never comes: nobody hangs, and the process goes on."""
    if r.size == 1:
        return
    unique_id = r.host.broadcast_object(_core.new_nccl_id() if r.rank == 0 else b"")
    device = torch.cuda.current_device()
    gpu = _core.NcclCommunicator.connect(unique_id, r.rank, r.size, device, True, None, TIMEOUT_S)
    stream = torch.cuda.current_stream().cuda_stream
    x = torch.ones(1000, device="cuda")
    gpu.calls()["all_reduce"](x, "sum", None, None, 0, stream, TIMEOUT_S, False)
    torch.cuda.synchronize()
    if r.rank == 0:
        work = gpu.calls()["all_reduce"](x, "sum", None, None, 0, stream, 2.0, True)
        with pytest.raises(fastdist.errors.CollectiveTimeoutError, match="within 2 s"):
            work.synchronize(60)
        with pytest.raises(fastdist.errors.CollectiveTimeoutError):
            gpu.check_usable()
    r.host.barrier()
    gpu.close()
    x = torch.ones(10, device="cuda")
    r.call("all_reduce", x, "sum", None, None, 0)
    assert bool((x == r.size).all())


def groups(r: Rank) -> None:
    stream = torch.cuda.current_stream().cuda_stream
    half = r.gpu.split(r.rank % 2, -r.rank, None, stream, TIMEOUT_S)
    assert half is not None
    x = torch.full((10,), float(r.rank), device="cuda")
    half.calls()["all_reduce"](x, "sum", None, None, 0, stream, TIMEOUT_S, False)
    assert bool((x == sum(range(r.rank % 2, r.size, 2))).all())
    half.close()


ALL = (reductions, moves, lists, compression, streams, graphs, bad_input, late, groups)
PARTS = {part.__name__: part for part in ALL}

if __name__ == "__main__":
    assert ml_dtypes is not None  # gives numpy its small floats
    this = Rank()
    PARTS[sys.argv[1]](this)
    torch.cuda.synchronize()
    this.gpu.close()
