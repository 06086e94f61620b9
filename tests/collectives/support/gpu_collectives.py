"""Parts of gpu_rank.py: every collective on every dtype, on one array and on lists."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from fastdist.errors import UnsupportedError
from reference import DTYPES, REDUCE_OPS, is_defined, reduced, sample

if TYPE_CHECKING:
    from gpu_rank import Rank

SIZES = [0, 1, 7, 1000, 65_537]
RELATIVE = {"float16": 2e-3, "bfloat16": 2e-2, "float32": 1e-5, "complex64": 1e-4}


def check(r: Rank, array: Any, expected: Any, what: str) -> None:
    dtype = expected.dtype.name
    got = r.arrays.numpy(array, dtype)
    wide = np.complex128 if expected.dtype.kind == "c" else np.float64
    if expected.dtype.kind in "biu" or dtype.startswith("float8"):
        assert np.array_equal(got.view(np.uint8), expected.view(np.uint8)), what
        return
    scale = float(np.abs(expected.astype(wide)).max(initial=1.0))
    tolerance = RELATIVE.get(dtype, 1e-12)
    np.testing.assert_allclose(
        got.astype(wide), expected.astype(wide), tolerance, tolerance * scale, err_msg=what
    )


def nccl_lacks(op: str, dtype: str) -> bool:
    if dtype in ("int16", "uint16") or dtype.startswith("float8") or op == "xor":
        return True
    return (op in ("and", "or") and dtype != "bool") or (op == "prod" and "complex" in dtype)


def refused(r: Rank, op: str, dtype: str) -> None:
    """Reductions that NCCL lacks are refused before any array changes."""
    x, y = r.arrays.array(r.inputs(dtype, 7 * r.size)[r.rank]), r.arrays.full(9, 1)
    out = r.arrays.array(r.inputs(dtype, 7)[r.rank])
    for name, given in {
        "all_reduce": {"out": None},
        "reduce": {"root": 0},
        "reduce_scatter": {"out": out},
    }.items():
        with pytest.raises(UnsupportedError, match=f'op="{op}" of {dtype} is not supported on GPU'):
            r.call(name, x, op=op, **given)
    if is_defined(op, "float32"):
        with pytest.raises(UnsupportedError, match=f"{dtype} is not supported on GPUs"):
            r.call("all_reduce", [y, x], op=op)
        assert r.arrays.is_full(y, 1)
    check(r, x, r.inputs(dtype, 7 * r.size)[r.rank], f"refused {op} of {dtype}")


def reductions(r: Rank) -> None:
    for dtype in DTYPES:
        for op in REDUCE_OPS:
            if not is_defined(op, dtype):
                continue
            if nccl_lacks(op, dtype):
                refused(r, op, dtype)
                continue
            for size in SIZES:
                what = f"{op} of {dtype} × {size}"
                inputs = r.inputs(dtype, size)
                expected = reduced(inputs, op)
                x = r.arrays.array(inputs[r.rank])
                r.call("all_reduce", x, op=op)
                check(r, x, expected, f"all_reduce: {what}")
                x = r.arrays.array(inputs[r.rank])
                r.call("reduce", x, op=op, root=0)
                wanted = expected if r.rank == 0 else inputs[r.rank]
                check(r, x, wanted, f"reduce: {what}")
                wide = r.inputs(dtype, size * r.size)
                out = r.arrays.array(inputs[0])
                r.call("reduce_scatter", r.arrays.array(wide[r.rank]), op=op, out=out)
                part = reduced(wide, op)[r.rank * size : (r.rank + 1) * size]
                check(r, out, part, f"reduce_scatter: {what}")


def moves(r: Rank) -> None:
    last = r.size - 1
    for dtype in DTYPES:
        for size in SIZES:
            what = f"{dtype} × {size}"
            inputs = r.inputs(dtype, size)
            everyone = np.concatenate(inputs)
            mine = r.arrays.array(inputs[r.rank])
            out = r.arrays.array(np.zeros_like(everyone))
            r.call("all_gather", mine, out=out)
            check(r, out, everyone, f"all_gather: {what}")
            out = r.arrays.array(np.zeros_like(everyone))
            r.call("gather", mine, root=last, out=out if r.rank == last else None)
            if r.rank == last:
                check(r, out, everyone, f"gather: {what}")
            part = r.arrays.array(np.zeros_like(inputs[0]))
            r.call("scatter", r.arrays.array(everyone) if r.rank == 0 else None, root=0, out=part)
            check(r, part, inputs[r.rank], f"scatter: {what}")
            x = r.arrays.array(inputs[r.rank])
            r.call("broadcast", x, root=last)
            check(r, x, inputs[last], f"broadcast: {what}")
            wide = [
                np.concatenate([inputs[(k + p) % r.size] for p in range(r.size)])
                for k in range(r.size)
            ]
            out = r.arrays.array(np.zeros_like(wide[0]))
            r.call("all_to_all", r.arrays.array(wide[r.rank]), out=out)
            expected = np.concatenate([inputs[(k + r.rank) % r.size] for k in range(r.size)])
            check(r, out, expected, f"all_to_all: {what}")


def uneven(r: Rank) -> None:
    """all_to_all of parts of different sizes, some empty."""
    counts = np.array([[(p + k) % 3 * 100 for p in range(r.size)] for k in range(r.size)])
    sent = [sample("int32", int(counts[k].sum()), 5, k) for k in range(r.size)]
    out = r.arrays.full(int(counts[:, r.rank].sum()), 0, "int32")
    r.call(
        "all_to_all",
        r.arrays.array(sent[r.rank]),
        out=out,
        counts=[int(n) for n in counts.reshape(-1)],
    )
    begins = np.cumsum(counts, axis=1) - counts
    expected = [sent[k][begins[k, r.rank] :][: counts[k, r.rank]] for k in range(r.size)]
    check(r, out, np.concatenate(expected), "all_to_all of uneven parts")


def pairs(r: Rank) -> None:
    """send and recv around the ring; even ranks send first, to avoid a deadlock."""
    after, before = (r.rank + 1) % r.size, (r.rank - 1) % r.size
    for size in (1, 100_000):
        mine = sample("float32", size, 5, r.rank)
        x, y = r.arrays.array(mine), r.arrays.full(size, 0)
        if r.size == 1:
            return
        if r.rank % 2 == 0:
            r.call("send", x, dst=after)
            r.call("recv", y, src=before)
        else:
            r.call("recv", y, src=before)
            r.call("send", x, dst=after)
        check(r, y, sample("float32", size, 5, before), f"recv of {size}")


def lists(r: Rank) -> None:
    rng = np.random.default_rng(11)
    sizes = [int(n) for n in rng.integers(0, 30_000, 300)]
    dtypes = [str(d) for d in rng.choice(["float32", "float16", "int64", "bool", "uint8"], 300)]
    inputs = [
        [sample(d, n, 5, k) for d, n in zip(dtypes, sizes, strict=True)] for k in range(r.size)
    ]
    sums = [reduced([inputs[k][i] for k in range(r.size)], "sum") for i in range(len(sizes))]
    for bucket_bytes in ("auto", 1 << 16):
        arrays = [r.arrays.array(x) for x in inputs[r.rank]]
        r.call("all_reduce", arrays, bucket_bytes=bucket_bytes)
        for i, x in enumerate(arrays):
            check(r, x, sums[i], f"list of {bucket_bytes}: array {i}")
    arrays = [r.arrays.array(x) for x in inputs[r.rank]]
    outs = [r.arrays.array(np.zeros_like(x)) for x in inputs[r.rank]]
    r.call("all_reduce", arrays, out=outs)
    r.call("broadcast", arrays, root=0)
    for i, (x, out) in enumerate(zip(arrays, outs, strict=True)):
        check(r, out, sums[i], f"list out of place: array {i}")
        check(r, x, inputs[0][i], f"broadcast of a list: array {i}")
    r.call("broadcast", arrays, root=r.size - 1, out=outs if r.rank == r.size - 1 else None)
    r.call("reduce", arrays, op="max", root=0, out=outs if r.rank == 0 else None)
    for i, out in enumerate(outs):
        if r.rank == 0:
            check(r, out, inputs[0][i], f"reduce of a list: array {i}")
    flat = r.arrays.array(sample("float32", 50_000, 7, r.rank))
    r.call("all_reduce", [flat[:10_000], flat[10_000:10_001], flat[10_001:]])
    expected = reduced([sample("float32", 50_000, 7, k) for k in range(r.size)], "sum")
    check(r, flat, expected, "a list that is contiguous in memory")


def grouped(r: Rank) -> None:
    """Lists for collectives that NCCL runs per array."""
    sizes = [5, 0, 70_000, 3]
    inputs = [[sample("int32", n, 5, k) for n in sizes] for k in range(r.size)]
    mine = [r.arrays.array(x) for x in inputs[r.rank]]
    outs = [r.arrays.full(n * r.size, 0, "int32") for n in sizes]
    r.call("all_gather", mine, out=outs)
    for i, out in enumerate(outs):
        check(r, out, np.concatenate([inputs[k][i] for k in range(r.size)]), f"all_gather: {i}")
    parts = [r.arrays.full(n, 0, "int32") for n in sizes]
    r.call("reduce_scatter", outs, out=parts)
    for i, part in enumerate(parts):
        with np.errstate(over="ignore"):
            expected = (inputs[r.rank][i].astype(np.int64) * r.size).astype(np.int32)
        check(r, part, expected, f"reduce_scatter: {i}")
    r.call("reduce", mine, root=0)
    for i, x in enumerate(mine):
        wanted = reduced([inputs[k][i] for k in range(r.size)], "sum")
        check(r, x, wanted if r.rank == 0 else inputs[r.rank][i], f"reduce: {i}")


def compression(r: Rank) -> None:
    inputs = [[sample("float32", n, 9, k) for n in (3, 40_000, 1, 0, 777)] for k in range(r.size)]
    for bucket_bytes in ("auto", 1 << 14):
        for wire, tolerance in (("fp16", 4e-3), ("bf16", 4e-2)):
            arrays = [r.arrays.array(x) for x in inputs[r.rank]]
            r.call("all_reduce", arrays, op="mean", compress=wire, bucket_bytes=bucket_bytes)
            for i, x in enumerate(arrays):
                expected = reduced([inputs[k][i] for k in range(r.size)], "mean")
                error = np.abs(r.arrays.numpy(x, "float32") - expected).max(initial=0.0)
                limit = tolerance * max(np.abs(expected).max(initial=0.0), 1.0)
                assert error <= limit, f"{wire}, array {i}: off by {error}"
    x = r.arrays.full(9, 1)
    with pytest.raises(UnsupportedError, match='compress="fp8" is for arrays in host memory'):
        r.call("all_reduce", x, compress="fp8")
    assert r.arrays.is_full(x, 1)


PARTS = (reductions, moves, uneven, pairs, lists, grouped, compression)
