"""The contract of every communicator. test_contract_*.py bind it to engines.

The functions run on each rank, check against numpy and return values for the test to compare.
"""

from __future__ import annotations

import itertools
import pickle
import threading
import time
import weakref
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest
from contract_errors import (
    check_bad_arguments,
    check_mismatch,
    check_mismatch_of_send,
    check_wrong_on_one_rank,
    check_wrong_on_one_rank_for_good,
    say_done,
    wait_for_others,
)
from contract_join import check_join
from contract_messages import check_messages
from fastdist import Communicator
from fastdist.errors import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    FastdistError,
    PeerFailureError,
)
from reference import (
    DTYPES,
    REDUCE_OPS,
    is_defined,
    numpy_dtype,
    reduced,
    same_bits,
    sample,
)

# Empty, one element, odd, a payload, one round, several rounds and a remainder.
SIZES = [0, 1, 3, 17, 1000, 5_003, 70_001, 700_001]


def check_calls_as_one(comm: Communicator) -> None:
    n = comm.world_size
    after, before = (comm.rank + 1) % n, (comm.rank - 1) % n
    for size in (3, 700_001):
        x, y, z = np.full(size, comm.rank), np.full(size, -1), np.ones(4)
        with comm.group():
            comm.send(x, after)  # with one rank to itself
            assert comm.recv(y, before) is y
            assert comm.all_reduce(z) is z
            joined = comm.all_gather(np.array([comm.rank]))
            best = comm.reduce(np.array([comm.rank]), "max", out=np.array([-1]))
            two = [np.ones(3), np.ones(2)]
            several = [*two]
            assert comm.all_reduce(several) is several
            several.clear()
        assert set(y) == {before}
        assert set(z) == {n}
        assert [set(each) for each in two] == [{n}, {n}]
        assert joined.tolist() == list(range(n))
        assert comm.rank > 0 or best[0] == n - 1
    kept = np.ones(3)
    with comm.group():
        comm.all_reduce(kept)
    is_kept = weakref.ref(kept)
    del kept
    assert is_kept() is None
    refused = {
        "barrier": comm.barrier,
        "all_gather_object": lambda: comm.all_gather_object(1),
        "broadcast_object": lambda: comm.broadcast_object(1),
        "split": lambda: comm.split(0),
        "group": lambda: comm.group().__enter__(),
        "all_to_all with splits": lambda: comm.all_to_all(np.ones(n), splits=[1] * n),
        r"all_reduce\(async_op=True\)": lambda: comm.all_reduce(z, async_op=True),
    }
    y, second = np.zeros(2), np.zeros(3, np.int32)
    with comm.group():
        comm.send(np.full(2, 5.0), comm.rank)
        comm.send([np.full(3, 6, np.int32)], comm.rank)
        comm.all_reduce(z)
        comm.recv(y, comm.rank)
        comm.recv([second], comm.rank)
    assert (set(y), set(second), set(z)) == ({5.0}, {6}, {n * n})
    z //= n
    with comm.group():
        comm.send(np.full(2, 4.0), comm.rank)
    assert comm.recv(y, comm.rank).tolist() == [4, 4]
    for other in (np.zeros(3), np.zeros(2, np.float32)):
        with pytest.raises(CollectiveMismatchError, match="do not match"), comm.group():
            (comm.recv(other, comm.rank), comm.send(y, comm.rank))
    if n > 1:
        y = np.full(3, -1)
        with pytest.raises(TypeError), comm.group():
            (comm.recv(y, before), comm.send("abc", after))
        with comm.group():
            comm.send(np.full(3, comm.rank), after)
            comm.recv(y, before)  # the one before is not made, since its group was refused
        assert set(y) == {before}
    with pytest.raises(ValueError, match="sun"), comm.group():
        (comm.all_reduce(z), comm.all_reduce(z, "sun"), pytest.fail("raises later"))
    for name, call in refused.items():
        with pytest.raises(ValueError, match=f"{name} cannot be in a group"), comm.group():
            (comm.all_reduce(z), call())  # the first is not made
    assert set(z) == {n}
    comm.all_reduce(z)
    assert set(z) == {n * n}


def inputs_of(comm: Communicator, dtype: str, size: int, seed: int) -> list[np.ndarray]:
    return [sample(dtype, size, seed, r) for r in range(comm.world_size)]


def check_reductions(comm: Communicator, dtypes: list[str]) -> None:
    for dtype, op in itertools.product(dtypes, REDUCE_OPS):
        x = sample(dtype, 5, 0, comm.rank).copy()
        if not is_defined(op, dtype):
            with pytest.raises(TypeError, match=f'op="{op}" is not defined for dtype {dtype}'):
                comm.all_reduce(x, op)
            continue
        for size in (0, 1, 3, 67, 5_003):
            inputs = [sample(dtype, size, 1, r) for r in range(comm.world_size)]
            x = inputs[comm.rank].copy()
            assert comm.all_reduce(x, op) is x
            assert same_bits(x, reduced(inputs, op)), (dtype, op, size)


def check_sizes(comm: Communicator, in_shared_memory: bool) -> None:
    n = comm.world_size
    for seed, size in enumerate(SIZES):
        for dtype in ("float32", "int8"):
            inputs = inputs_of(comm, dtype, size, seed)
            expected = reduced(inputs, "sum")
            x = comm.empty(size, dtype) if in_shared_memory else np.empty(size, dtype)
            x[:] = inputs[comm.rank]
            comm.all_reduce(x)
            assert same_bits(x, expected), size
            x[:] = inputs[comm.rank]
            out = np.full(size, 99, dtype)
            assert comm.all_reduce(x, out=out) is out
            assert same_bits(out, expected)
            assert same_bits(x, inputs[comm.rank])
            for root in {0, n - 1}:
                x[:] = inputs[comm.rank]
                comm.reduce(x, "sum", root)
                assert same_bits(x, expected if comm.rank == root else inputs[comm.rank])
                x[:] = inputs[comm.rank]
                comm.broadcast(x, root)
                assert same_bits(x, inputs[root])
            wide = comm.empty(n * size, dtype) if in_shared_memory else np.empty(n * size, dtype)
            many = inputs_of(comm, dtype, n * size, seed + 100)
            wide[:] = many[comm.rank]
            part = comm.reduce_scatter(wide)
            assert same_bits(part, reduced(many, "sum").reshape(n, size)[comm.rank])
            assert same_bits(wide, many[comm.rank])


def check_movement(comm: Communicator, in_shared_memory: bool) -> None:
    n, r = comm.world_size, comm.rank
    for seed, size in enumerate(SIZES):
        inputs = inputs_of(comm, "int64", size, seed)
        x = comm.empty(size, "int64") if in_shared_memory else np.empty(size, np.int64)
        x[:] = inputs[r]
        joined = np.concatenate(inputs)
        assert same_bits(comm.all_gather(x), joined)
        root = n - 1
        gathered = comm.gather(x, root)
        assert gathered is None if r != root else same_bits(gathered, joined)
        out = np.empty(size, np.int64)
        comm.scatter(joined if r == root else None, root, out=out)
        assert same_bits(out, inputs[r])
        many = inputs_of(comm, "int64", n * size, seed + 100)
        received = comm.all_to_all(many[r])
        assert same_bits(received, np.concatenate([m.reshape(n, size)[r] for m in many]))


def check_splits(comm: Communicator) -> None:
    n, r = comm.world_size, comm.rank
    for scale in (0, 1, 40, 30_000):
        rows = [[(i + 2 * j) % 3 * scale for j in range(n)] for i in range(n)]
        data = [sample("float32", 2 * sum(rows[i]), 3, i).reshape(-1, 2) for i in range(n)]
        got = comm.all_to_all(data[r], splits=rows[r])
        starts = [sum(rows[i][:r]) for i in range(n)]
        expected = [data[i][starts[i] : starts[i] + rows[i][r]] for i in range(n)]
        assert same_bits(got, np.concatenate(expected))


def check_parts_in_place(comm: Communicator) -> None:
    """A rank's part may be its place in the whole, and nothing else that overlaps it."""
    n, r = comm.world_size, comm.rank
    for count in (0, 1, 3, 5_000, 400_000):
        data = [sample("float32", count, 3, i) for i in range(n)]
        for as_list in (False, True):
            whole = np.full((n, count), 7, np.float32)
            whole[r] = data[r]
            given, out = ([whole[r]], [whole]) if as_list else (whole[r], whole)
            comm.all_gather(given, out=out)
            assert same_bits(whole, np.stack(data))
            wide = np.stack([row * (r + 1) for row in data])
            given, out = ([wide], [wide[r]]) if as_list else (wide, wide[r])
            comm.reduce_scatter(given, "max", out=out)
            assert same_bits(wide[r], np.max([data[r] * (i + 1) for i in range(n)], axis=0))
            root = n - 1
            whole = np.full((n, count), 7, np.float32)
            whole[r] = data[r]
            comm.gather(whole[r], root, out=whole if r == root else None)
            assert same_bits(whole, np.stack(data)) or r != root
            comm.scatter(whole if r == root else None, root, out=whole[r])
            assert same_bits(whole[r], data[r])
    if n > 1:
        x = np.ones((n, 4), np.float32)
        with pytest.raises(ValueError, match="shares memory"):
            comm.all_gather(x[(r + 1) % n], out=x)
        comm.barrier()


def check_scan(comm: Communicator) -> None:
    n, r = comm.world_size, comm.rank
    for size in (0, 1, 70_001):
        whole = [sample("int64", size, 5, i) for i in range(n)]
        for op, reduce in (("sum", np.sum), ("max", np.max), ("xor", np.bitwise_xor.reduce)):
            assert same_bits(comm.scan(whole[r], op), reduce(whole[: r + 1], axis=0))
        assert same_bits(whole[r], sample("int64", size, 5, r))
        expected = np.sum(whole[:r], axis=0) if r else np.zeros(size, np.int64)
        out = whole[r].copy()
        assert comm.scan(out, exclusive=True, out=out) is out
        assert same_bits(out, expected)
        for out in (whole[r].copy(), np.zeros((size, 2), np.int64)[:, 0], np.zeros_like(whole[r])):
            assert same_bits(comm.scan(whole[r], out=out).copy(), np.sum(whole[: r + 1], axis=0))
        out = whole[r].copy()
        assert same_bits(comm.scan(out, out=out), np.sum(whole[: r + 1], axis=0))
        with np.errstate(all="raise" if r else "warn"):  # of one rank alone
            gaps = np.full(2 * size + 1, 1e200)[1::2]
            assert set(comm.scan(gaps, "prod")) <= {1e200, np.inf}
    assert comm.scan(np.full(2, 3.0), "prod", exclusive=True).tolist() == [3.0**r] * 2
    ones = np.full(3, 1 + 2**-10, np.float16)
    assert set(comm.scan(ones)) == {np.float16((r + 1) * (1 + 2**-10))}
    with pytest.raises(ValueError, match="op must be sum, prod"):
        comm.scan(ones, "mean")
    with pytest.raises(ValueError, match="no value on rank 0"):
        comm.scan(ones, "max", exclusive=True)
    with pytest.raises(TypeError, match='op="xor" is not defined for dtype float16'):
        comm.scan(ones, "xor")
    with pytest.raises(TypeError, match="that collectives do not support: >f4"):
        comm.scan(np.ones(2, ">f4"))
    for wrong in (np.ones(5, np.float16), np.ones(3, np.int64)):
        with pytest.raises(ValueError, match="out must have the array's shape"):
            comm.scan(ones, out=wrong)
    with pytest.raises(ValueError, match="out must be writable"):
        comm.scan(ones, out=np.frombuffer(bytes(6), np.float16))
    if n > 1:
        for op, array in (
            ("sum", np.ones(3 + (r == 1))),
            ("prod" if r == 1 else "sum", np.ones(3)),
            ("sum", np.ones((2, 3) if r == 1 else (3, 2))),
        ):
            told = r"rank 1: scan\(float64 × .* at .*contract\.py"
            with pytest.raises(CollectiveMismatchError, match=told):
                comm.scan(array, op)
    shape = 6 if r == 0 else (2, 3)
    assert comm.scan(np.ones(shape)).ravel().tolist() == [r + 1] * 6  # flat fits any shape
    with pytest.raises(ValueError, match="scan cannot be in a group"), comm.group():
        comm.scan(ones)


def check_objects(comm: Communicator) -> None:
    n, r = comm.world_size, comm.rank
    objects: list[Any] = ["x" * i * 50_000 or None for i in range(n)]
    assert comm.all_gather_object(objects[r]) == objects
    for root in {0, n - 1}:
        assert comm.broadcast_object(objects[r], root) == objects[root]
        assert comm.gather_object(objects[r], root) == (objects if r == root else None)
        assert comm.scatter_object(objects if r == root else None, root) == objects[r]
        for wrong in ([1] * (n + 1), [], None, [lambda: 0] * n):
            with pytest.raises(Exception, match=r"needs one object|could not (pickle|scatter)"):
                comm.scatter_object(wrong if r == root else None, root)
        with pytest.raises(Exception, match=r"a list of objects, got dict|could not scatter"):
            comm.scatter_object(dict.fromkeys(range(n)) if r == root else None, root)
    if r > 0:
        comm.send_object({r: objects[r]}, 0)
    else:
        for other in range(n - 1, 0, -1):
            assert comm.recv_object(other) == {other: objects[other]}
    if n > 1 and r == 0:  # a receive of an array takes no object
        comm.send_object("kept", 1, tag=3)
        comm.send(np.ones(1), 1, tag=3)
    if r == 1:
        assert comm.recv(np.zeros(1), 0, tag=3) == 1
        assert comm.recv_object(0, tag=3) == "kept"
    if n > 1:
        for call in (comm.all_gather_object, comm.gather_object):
            with pytest.raises(Exception, match="could not pickle"):
                call((lambda: 0) if r == 1 else 1)
        if r < 2:
            with pytest.raises(Exception, match="could not pickle"):
                comm.recv_object(1) if r == 0 else comm.send_object(lambda: 0, 0)
    for name in ("gather_object", "scatter_object", "send_object", "recv_object"):
        with pytest.raises(ValueError, match=f"{name} cannot be in a group"), comm.group():
            getattr(comm, name)(*([0] * (1 + (name == "send_object"))))


def check_uneven_parts(comm: Communicator) -> None:
    n, r = comm.world_size, comm.rank
    for scale in (0, 1, 40, 30_000):
        rows = [(2 * i + 1) % 3 * scale for i in range(n)]
        data = [sample("float32", 2 * rows[i], 3, i).reshape(-1, 2) for i in range(n)]
        expected = np.concatenate(data)
        assert same_bits(comm.all_gather(data[r], splits=rows), expected)
        out = np.full((sum(rows), 2), 7, np.float32)
        begin = sum(rows[:r])
        out[begin : begin + rows[r]] = data[r]
        work = comm.all_gather(
            [out[begin : begin + rows[r]]], splits=rows, out=[out], async_op=True
        )
        assert work.wait(30)[0] is out
        assert work.is_done()
        assert same_bits(out, expected)
        for root in {0, n - 1}:
            gathered = comm.gather([data[r]], root, splits=rows)
            assert r == root or gathered is None
            assert r != root or same_bits(gathered[0], expected)
            own = np.full((rows[r], 2), 7, np.float32)
            given = expected if r == root else None
            assert comm.scatter(given, root, splits=rows, out=own) is own
            assert same_bits(own, data[r])
        if n > 1 and scale == 1:
            with pytest.raises(CollectiveMismatchError, match="root=1"):
                comm.gather(data[r], int(r == 1), splits=rows)
            with pytest.raises(ValueError, match="out must have float32 rows"):
                comm.scatter(expected, r, splits=rows, out=np.ones((rows[r], 2)))
            own.flags.writeable = False
            with pytest.raises(ValueError, match="out must be writable"):
                comm.scatter(expected, r, splits=rows, out=own)
            with pytest.raises(ValueError, match="root must be an integer"):
                comm.gather(data[r], n, splits=rows)
        whole = [sample("int64", sum(rows), 5, i) for i in range(n)]
        part = comm.reduce_scatter(whole[r], "max", splits=rows)
        assert same_bits(part, np.max(whole, axis=0)[begin : begin + rows[r]])
        work = comm.reduce_scatter([whole[r]], splits=rows, async_op=True)
        assert same_bits(work.wait(30)[0], np.sum(whole, axis=0)[begin : begin + rows[r]])
        assert same_bits(whole[r], sample("int64", sum(rows), 5, r))
    assert list(comm.all_gather(bytearray([r]) * r, splits=range(n))) == [
        i for i in range(n) for _ in range(i)
    ]
    assert comm.gather([], n - 1, splits=[1] * n) == ([] if r == n - 1 else None)
    x = np.ones(n)
    for wrong in ([1] * (n + 1), [-1] * n, "ab"):
        with pytest.raises((ValueError, TypeError), match="splits must be"):
            comm.all_gather(x, splits=wrong)
    for call in (comm.gather, comm.scatter):
        with pytest.raises(ValueError, match="takes neither stream nor async_op"):
            call(x, r, splits=[1] * n, async_op=True)
        with pytest.raises(ValueError, match="with splits cannot be in a group"), comm.group():
            call(x, r, splits=[1] * n)
    with pytest.raises(ValueError, match="array must have 9 rows"):
        comm.all_gather(x, splits=[9] * n)
    with pytest.raises(ValueError, match=rf"out must have 1 rows, splits\[{r}\]"):
        comm.reduce_scatter(x, splits=[1] * n, out=np.ones(2))
    with pytest.raises(ValueError, match="all_gather with splits cannot be in a group"):  # noqa: SIM117
        with comm.group():
            comm.all_gather(x, splits=[n] * n)
    if n > 1:
        shape = (n, 2, 3) if r else (n, 3, 2)
        with pytest.raises(CollectiveMismatchError, match=r"rank 0: \[\(3, 2\)\]\n  rank 1: "):
            comm.all_to_all(np.ones(shape), splits=[1] * n)
        flat = (n, 6) if r else (n, 3, 2)
        assert comm.all_to_all(np.ones(flat), splits=[1] * n).shape == flat
        for given in ([1] * n, [2] + [1] * (n - 1)):
            with pytest.raises(CollectiveMismatchError, match="the splits differ, or the shapes"):
                comm.gather(np.ones((given[r], 1 + (r == n - 1))), splits=given)
        with pytest.raises(CollectiveMismatchError):
            comm.all_gather(np.ones(4 + (r == 0)), splits=[4 + (r == 0)] * n)


def check_send_recv(comm: Communicator) -> None:
    n, r = comm.world_size, comm.rank
    for seed, size in enumerate(SIZES):
        inputs = inputs_of(comm, "float32", size, seed)
        for step in range(1, n):
            out = np.empty(size, np.float32)
            work = comm.send(inputs[r], (r + step) % n, async_op=True)
            assert comm.recv(out, (r - step) % n) is out
            work.wait(30)
            assert same_bits(out, inputs[(r - step) % n])
    # Each rank sends to both neighbours before any rank receives.
    left, right = (r - 1) % n, (r + 1) % n
    if n > 2:
        big = np.full(400_000, r, np.float32)
        works = [comm.send(big, left, async_op=True), comm.send(big, right, async_op=True)]
        for source in (left, right):
            out = np.empty(400_000, np.float32)
            comm.recv(out, source)
            assert (out == source).all()
        for work in works:
            work.wait(30)


def check_lists(comm: Communicator, dtypes: list[str]) -> None:
    sizes = [5, 0, 1, 100_000, 33, 7, 400_001, 2]
    kinds = [dtypes[i % len(dtypes)] for i in range(len(sizes))]

    def arrays(rank: int) -> list[np.ndarray]:
        pairs = zip(kinds, sizes, strict=True)
        return [sample(kind, size, i, rank).copy() for i, (kind, size) in enumerate(pairs)]

    one_by_one = arrays(comm.rank)
    for x in one_by_one:
        comm.all_reduce(x)
    fused = arrays(comm.rank)
    assert comm.all_reduce(fused) is fused
    outs = [np.empty_like(x) for x in fused]
    comm.all_reduce(arrays(comm.rank), out=outs)
    for a, b, c in zip(one_by_one, fused, outs, strict=True):
        assert same_bits(a, b)
        assert same_bits(a, c)
    root = comm.world_size - 1
    for a, b in zip(comm.broadcast(arrays(comm.rank), root), arrays(root), strict=True):
        assert same_bits(a, b)
    for a, x in zip(comm.all_gather(arrays(comm.rank)), arrays(comm.rank), strict=True):
        assert same_bits(a.reshape(comm.world_size, -1)[comm.rank], x)
    comm.all_reduce([])
    comm.barrier()


def check_lists_of_parts(comm: Communicator) -> None:
    n, r = comm.world_size, comm.rank
    rows = [3, 0, 100_000]
    whole = [np.arange(2.0 * n * k).reshape(n * k, 2) for k in rows]
    part = [x.reshape(n, -1, 2)[r] for x in whole]

    def equal(got: Any, expected: list[np.ndarray]) -> bool:
        return all(same_bits(a, b) for a, b in zip(got, expected, strict=True))

    outs = [np.empty_like(x) for x in whole]
    assert comm.all_gather(part, out=outs) is outs
    assert equal(outs, whole)
    gathered = comm.gather(part, n - 1, async_op=True).wait()
    assert gathered is None if r != n - 1 else equal(gathered, whole)
    outs = [np.empty_like(x) for x in part]
    comm.scatter(whole if r == 0 else None, out=outs)
    assert equal(outs, part)
    assert equal(comm.reduce_scatter(whole), [n * x for x in part])
    assert equal(comm.all_to_all(part if n == 1 else whole), [np.tile(x, (n, 1)) for x in part])
    pair = [np.full(3 * n, r), np.full((3 * n, 2), r, np.int8)]
    got = comm.all_to_all(pair, splits=[3] * n)
    assert equal(
        got, [np.repeat(np.arange(n), 3), np.repeat(np.arange(n, dtype=np.int8), 6).reshape(-1, 2)]
    )
    if n > 1:
        comm.send(part, (r + 1) % n, async_op=True)
        comm.recv(outs, (r - 1) % n)
        assert equal(outs, [x.reshape(n, -1, 2)[(r - 1) % n] for x in whole])
    first = np.full(2 * n, 7.0)
    for calls in (comm.all_gather, comm.gather):
        with pytest.raises(TypeError, match="dtype object"):
            calls([np.zeros(2), np.zeros(2, object)], out=[first, np.zeros(2 * n, object)])
    assert (first == 7).all()
    comm.barrier()


def check_compression(comm: Communicator) -> None:
    n = comm.world_size
    for dtype in ("float32", "float64"):
        for size in (0, 3, 5_000, 1_200_000):
            # Numbers of 24 bits, so that numpy's cast to 16 bits by way of float32 rounds once.
            inputs = [x.astype(dtype) for x in inputs_of(comm, "float32", size, 5)]
            for op in ("sum", "mean"):
                exact = reduced(inputs, op)
                for name, kind in (("bf16", ml_dtypes.bfloat16), ("fp16", np.float16)):
                    x = inputs[comm.rank].copy()
                    comm.all_reduce(x, op, compress=name)
                    narrow = [v.astype(kind) for v in inputs]
                    assert same_bits(x, reduced(narrow, op).astype(dtype)), (dtype, size, op, name)
                x = [inputs[comm.rank].copy() * 1000, inputs[comm.rank].copy() / 1000]
                comm.all_reduce(x, op, compress="fp8")
                for got, factor in zip(x, (1000, 1 / 1000), strict=True):
                    scale = max([np.abs(v).max() for v in inputs if v.size] or [1]) * factor * n
                    assert np.abs(got - exact * factor).max(initial=0) <= 0.07 * scale
    for name in ("fp16", "bf16", "fp8"):
        beyond = np.array([1e300, 1.0])
        comm.all_reduce(beyond, "mean", compress=name)
        assert np.isfinite(beyond).tolist() == [False, True]


def check_layouts(comm: Communicator) -> None:
    import torch

    base = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        x = base.transpose(order).copy().transpose(np.argsort(order)) + comm.rank
        comm.all_reduce(x)
        total = comm.world_size * base + sum(range(comm.world_size))
        assert (x == total).all()
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int16, torch.bool):
        t = torch.ones(3, 5, dtype=dtype)
        assert comm.all_reduce(t, "max") is t
        assert (t == torch.ones(3, 5, dtype=dtype)).all()
        assert comm.all_gather(t).shape == (3 * comm.world_size, 5)
    flat = np.ones((2, 3) if comm.rank == 0 else 6)  # matches any shape of its size
    assert (comm.all_reduce(flat) == comm.world_size).all()
    t = torch.full((2, 8, 4, 4), float(comm.rank)).to(memory_format=torch.channels_last)
    comm.all_reduce(t, "max")
    assert (t == comm.world_size - 1).all()
    with pytest.raises(ValueError, match="resolve_conj"):
        comm.all_gather(torch.ones(2, dtype=torch.complex64).conj())
    for dtype, shape in (
        (torch.complex64, (1,)),
        (torch.complex128, ()),
        (torch.complex64, (1, 1)),
    ):
        with pytest.raises(ValueError, match="resolve_neg"):
            comm.all_gather(torch.ones(shape, dtype=dtype).conj().imag)
    for negated in (torch.ones(2), torch.ones(5000), torch.ones(3, dtype=torch.int32)):
        with pytest.raises(ValueError, match="resolve_neg"):
            comm.all_reduce(torch._neg_view(negated))
    comm.all_reduce(torch.ones(3)[1:2])
    narrow = comm.scan(torch.ones(3, dtype=torch.bfloat16))
    assert (narrow.dtype, narrow.tolist()) == (torch.bfloat16, [comm.rank + 1.0] * 3)
    summed = comm.scan(torch.ones(2, requires_grad=True))
    assert (summed.requires_grad, summed.tolist()) == (False, [comm.rank + 1.0] * 2)
    released = torch.ones(4)
    released.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="no memory"):
        comm.all_reduce(released)
    with pytest.raises(TypeError, match="cannot be read in place"):
        comm.all_reduce(torch.ones(2, 2).to_sparse())
    kept = torch.full((2,), float(comm.rank))
    out = torch.full((2,), 9.0)
    assert comm.broadcast(kept, 0, out=out) is out
    assert (kept == comm.rank).all()
    assert (out == 0).all()
    weight = torch.nn.Parameter(torch.ones(7))
    comm.all_reduce(weight)
    assert (weight == comm.world_size).all()
    raw = bytearray([comm.rank] * 5)
    comm.all_reduce(raw, "max")
    assert raw == bytes([comm.world_size - 1] * 5)
    scalar = np.array(float(comm.rank))
    comm.all_reduce(scalar)
    assert scalar == sum(range(comm.world_size))
    assert comm.all_gather(scalar).shape == (comm.world_size,)
    shared = comm.empty((3, 5), torch.bfloat16)
    shared.fill_(1)
    comm.all_reduce(shared)
    assert (shared == comm.world_size).all()


def check_async(comm: Communicator) -> None:
    n, r = comm.world_size, comm.rank
    sizes = (3, 200_000, 50, 900_000) * 5
    arrays = [np.full(size, r, np.float32) for size in sizes]
    works = [comm.all_reduce(x, async_op=True) for x in arrays]
    last = np.full(2, r, np.float32)
    comm.all_reduce(last)  # runs after the earlier calls
    assert all(work.is_done() for work in works)
    for work, x in zip(works, arrays, strict=True):
        assert work.wait(timeout=30) is x
        assert (x == sum(range(n))).all()
    gathered = comm.all_gather([np.full(4, r), np.full(5, r)], async_op=True)
    assert [g.size for g in gathered.wait()] == [4 * n, 5 * n]
    comm.all_reduce(np.ones(100_000), async_op=True)  # neither is kept
    if n > 1:
        bad = comm.all_reduce(np.zeros(4 if r == 0 else 5), async_op=True)
        with pytest.raises(CollectiveMismatchError, match=r"contract\.py:"):
            bad.wait(30)
    comm.barrier()


def check_lists_in_flight(comm: Communicator) -> None:
    """The caller may change the list during the call; arrays are released when the call ends."""
    bucket = [np.full(200_000, comm.rank, np.float32) for _ in range(20)]
    alive = [weakref.ref(x) for x in bucket]
    work = comm.all_reduce(bucket, "max", async_op=True)
    bucket.clear()
    work.wait(30)
    del work
    assert all(reference() is None for reference in alive)
    x = np.ones(1000, np.float32)
    for wrong in ([x, x], [x, x[500:]], [x[:600], x[500:]]):
        with pytest.raises(ValueError, match="share memory"):
            comm.all_reduce(wrong)
    a, b = np.ones(3), np.ones(3)
    with pytest.raises(ValueError, match="shares memory"):
        comm.all_reduce([a, b], out=[b, a])


def check_groups(comm: Communicator) -> None:
    n, r = comm.world_size, comm.rank
    for _ in range(3):
        parity = comm.split(r % 2, key=-r)
        assert parity is not None
        members = [q for q in range(n) if q % 2 == r % 2][::-1]
        assert (parity.world_size, parity.rank) == (len(members), members.index(r))
        x = np.full(300_000, r, np.int64)
        parity.all_reduce(x)
        assert (x == sum(members)).all()
        x = np.full(5, r)
        comm.all_reduce(x)
        assert (x == sum(range(n))).all()
        parity.close()
    assert comm.split(None) is None
    ends = comm.subgroup([n - 1, 0] if n > 1 else [0])
    assert (ends is not None) == (r in (0, n - 1))
    if ends is not None:
        assert (ends.all_gather(np.array([r])) == ([n - 1, 0] if n > 1 else [0])).all()
        inner = ends.subgroup([0])
        assert (inner is not None) == (ends.rank == 0)
    if n > 1:
        with pytest.raises(CollectiveMismatchError, match=r"different ranks"):
            comm.subgroup([0] if r == 0 else [0, 1])
    if r == n - 1:
        with pytest.raises(pickle.PicklingError, match="could not pickle lock"):
            comm.broadcast_object(threading.Lock(), n - 1)
    else:
        with pytest.raises(FastdistError, match="could not pickle"):
            comm.broadcast_object(None, n - 1)
    value = {"rank": r, "data": list(range(1000 * r))}
    assert comm.all_gather_object(value)[n - 1]["rank"] == n - 1
    assert comm.broadcast_object(value, n - 1) == {"rank": n - 1, "data": [*range(1000 * (n - 1))]}
    comm.barrier()


def check_same_bits(comm: Communicator) -> bytes:
    x = sample("float32", 1_000_003, 8, comm.rank).copy()
    y = [sample("float16", size, 8, comm.rank).copy() for size in (1, 70_000, 9)]
    comm.all_reduce(x)
    comm.all_reduce(y, "mean")
    return x[::97].tobytes() + b"".join(a.tobytes() for a in y)


def check_random_calls(comm: Communicator, seed: int, calls: int) -> None:
    """Collectives of random kinds and sizes, back to back: leftovers of a call would show."""
    rng = np.random.default_rng(seed)
    n, r = comm.world_size, comm.rank
    for call in range(calls):
        size = int(rng.choice([0, 1, 10, 1000, 3000, 40_000, int(rng.integers(1, 300_000))]))
        root = int(rng.integers(n))
        kind = rng.integers(7)
        base = np.arange(size, dtype=np.int32) + call
        if kind == 0:
            x = base * (r + 1)
            comm.all_reduce(x)
            assert (x == base * (n * (n + 1) // 2)).all()
        elif kind == 1:
            x = base + r
            comm.broadcast(x, root)
            assert (x == base + root).all()
        elif kind == 2:
            assert (
                comm.all_gather(base + r).reshape(n, size) == base + np.arange(n)[:, None]
            ).all()
        elif kind == 3:
            got = comm.all_to_all(np.concatenate([base + 10 * r + q for q in range(n)]))
            expected = np.concatenate([base + 10 * q + r for q in range(n)])
            assert (got == expected).all()
        elif kind == 4:
            x = base + r
            comm.reduce(x, "max", root)
            assert (x == base + (n - 1 if r == root else r)).all()
        elif kind == 5:
            got = comm.reduce_scatter(np.concatenate([base + q for q in range(n)]))
            assert (got == (base + r) * n).all()
        else:
            comm.barrier()


def check_timeout(comm: Communicator, folder: Path) -> None:
    late = comm.world_size - 1
    comm.barrier()
    if comm.rank == late:
        wait_for_others(comm, folder)
    start = time.monotonic()

    def two_calls() -> None:
        comm.all_reduce(np.zeros(3, np.float32), timeout=0.2)
        comm.all_reduce(np.zeros(4, np.float32))  # the late rank learns it here at the latest

    with pytest.raises(FastdistError) as caught:
        two_calls()
    assert time.monotonic() - start < 20
    if comm.rank != late:
        assert isinstance(caught.value, CollectiveTimeoutError)
        assert late in caught.value.ranks
        assert f"rank {late}: call 1, barrier()" in str(caught.value)
        say_done(comm, folder)
    with pytest.raises(FastdistError, match="cannot be used any more"):
        comm.barrier()


def check_closed_peer(comm: Communicator) -> None:
    gone = comm.world_size - 1
    if comm.rank == gone:
        comm.close()
        with pytest.raises(FastdistError, match="closed"):
            comm.barrier()
        return
    start = time.monotonic()
    with pytest.raises(PeerFailureError) as caught:
        comm.all_reduce(np.zeros(3))
    assert time.monotonic() - start < 5
    assert caught.value.ranks == (gone,)


class CommunicatorContract:
    """The tests of the contract.

    Attributes:
        ranks_class: makes the ranks; set by subclasses.
        worlds: sizes in the default run; `slow_worlds` are marked slow.
        doomed_worlds: likewise, for tests that leave a world unusable.
    """

    ranks_class: ClassVar[type]
    worlds: ClassVar[tuple[int, ...]]
    slow_worlds: ClassVar[tuple[int, ...]] = ()
    doomed_worlds: ClassVar[tuple[int, ...]]
    slow_doomed_worlds: ClassVar[tuple[int, ...]] = ()

    def test_every_reduction(self, ranks: Any) -> None:
        assert all(numpy_dtype(dtype).name == dtype for dtype in DTYPES)
        ranks.run(check_reductions, DTYPES, limit_s=150)

    @pytest.mark.parametrize("in_shared_memory", [False, True])
    def test_reductions_of_every_size(self, ranks: Any, in_shared_memory: bool) -> None:
        ranks.run(check_sizes, in_shared_memory)

    @pytest.mark.parametrize("in_shared_memory", [False, True])
    def test_movement_of_every_size(self, ranks: Any, in_shared_memory: bool) -> None:
        ranks.run(check_movement, in_shared_memory)

    def test_all_to_all_with_splits(self, ranks: Any) -> None:
        ranks.run(check_splits)

    def test_parts_in_place(self, ranks: Any) -> None:
        ranks.run(check_parts_in_place)

    def test_calls_as_one(self, ranks: Any) -> None:
        ranks.run(check_calls_as_one)

    def test_uneven_parts(self, ranks: Any) -> None:
        ranks.run(check_uneven_parts)
        ranks.run(check_objects)
        ranks.run(check_scan)

    def test_join(self, ranks: Any) -> None:
        ranks.run(check_join)

    def test_send_recv(self, ranks: Any) -> None:
        ranks.run(check_send_recv)
        ranks.run(check_messages)

    @pytest.mark.parametrize("dtypes", [["float32"], ["float32", "int8", "float64", "bfloat16"]])
    def test_lists_equal_single_calls(self, ranks: Any, dtypes: list[str]) -> None:
        ranks.run(check_lists, dtypes)

    def test_lists_of_parts(self, ranks: Any) -> None:
        ranks.run(check_lists_of_parts)

    def test_compression(self, ranks: Any) -> None:
        ranks.run(check_compression)

    def test_layouts_and_libraries(self, ranks: Any) -> None:
        pytest.importorskip("torch")
        ranks.run(check_layouts)

    def test_bad_arguments(self, ranks: Any) -> None:
        ranks.run(check_bad_arguments)

    def test_mismatch(self, ranks: Any) -> None:
        if ranks.size > 1:
            ranks.run(check_mismatch)
            ranks.run(check_mismatch_of_send)

    def test_async(self, ranks: Any) -> None:
        ranks.run(check_async)

    def test_lists_in_flight(self, ranks: Any) -> None:
        ranks.run(check_lists_in_flight)

    def test_groups_and_objects(self, ranks: Any) -> None:
        ranks.run(check_groups)

    def test_same_bits_on_every_rank_and_run(self, ranks: Any) -> None:
        assert len({*ranks.run(check_same_bits), *ranks.run(check_same_bits)}) == 1

    def test_random_calls(self, ranks: Any) -> None:
        ranks.run(check_random_calls, 1, 150)

    def test_timeout(self, doomed_ranks: Any, tmp_path: Path) -> None:
        doomed_ranks.run(check_timeout, tmp_path)

    def test_wrong_argument_on_one_rank(self, ranks: Any) -> None:
        ranks.run(check_wrong_on_one_rank)

    @pytest.mark.slow
    def test_wrong_argument_on_one_rank_for_good(self, doomed_ranks: Any, tmp_path: Path) -> None:
        doomed_ranks.run(check_wrong_on_one_rank_for_good, tmp_path)

    def test_closed_peer(self, doomed_ranks: Any) -> None:
        doomed_ranks.run(check_closed_peer)
