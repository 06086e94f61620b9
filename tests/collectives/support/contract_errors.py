"""Errors that every communicator must raise; a part of the contract (contract.py)."""

from __future__ import annotations

import copy
import ctypes
import functools
import pickle
import time
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fastdist import Communicator
from fastdist.errors import CollectiveMismatchError, CollectiveTimeoutError

Bad = tuple[type[Exception], str, Callable[[], Any]]  # error, pattern of its message, call


class RedOpType(Enum):
    """Reductions that print as those of torch.distributed do."""

    SUM = 0
    BAND = 1


class Misshapen:
    """A DLPack array with wrong lengths in its shape."""

    def __init__(self, *lengths: int) -> None:
        self._array = np.zeros((1,) * len(lengths), np.float32)
        self._lengths = lengths

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0

    def __dlpack__(self, **options: Any) -> Any:
        if options:
            raise TypeError("only the first version of DLPack")
        capsule = self._array.__dlpack__()
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        words = ctypes.cast(pointer(capsule, b"dltensor"), ctypes.POINTER(ctypes.c_void_p))
        shape = ctypes.cast(words[3], ctypes.POINTER(ctypes.c_int64))  # data, device, kinds, shape
        for axis, length in enumerate(self._lengths):
            shape[axis] = length
        return capsule


def check_bad_arguments(comm: Communicator) -> None:
    calls = bad_arrays(comm), bad_options(comm), bad_ranks(comm), other_spellings(comm)
    for kind, message, call in [one for some in calls for one in some]:
        with pytest.raises(kind, match=message):
            call()
    comm.barrier()


def bad_arrays(comm: Communicator) -> list[Bad]:
    x = np.zeros((4, 6), np.float32)
    objects = np.zeros(2 * comm.world_size, object)
    locked = np.zeros(3)
    locked.setflags(write=False)
    bad: list[Bad] = [
        (ValueError, "dense.*ascontiguousarray", lambda: comm.all_reduce(x[:, ::2])),
        (ValueError, "read-only", lambda: comm.all_reduce(locked)),
        (ValueError, "read-only", lambda: comm.all_reduce(b"abc")),
        (TypeError, "object", lambda: comm.all_reduce(np.array([object()]))),
        (TypeError, "float128|longdouble", lambda: comm.all_reduce(np.zeros(2, np.longdouble))),
        (TypeError, ">f4", lambda: comm.all_reduce(np.zeros(2, ">f4"))),
        (TypeError, "float", lambda: comm.all_reduce([1.0, 2.0])),
        (TypeError, "NoneType", lambda: comm.all_reduce(None)),
        (TypeError, "str", lambda: comm.all_reduce("text")),
        (ValueError, "array .*negative .*-2", lambda: comm.all_reduce(Misshapen(2, -2))),
        (ValueError, "out must have", lambda: comm.all_reduce(x, out=np.zeros(3, np.float32))),
        (ValueError, "shares memory", lambda: comm.all_reduce(x[:2], out=x[1:3])),
        (ValueError, "as many arrays", lambda: comm.all_reduce([x], out=[x, x.copy()])),
        (TypeError, "array must not be a masked", lambda: comm.all_reduce(np.ma.array(x))),
        (TypeError, "^array has dtype object", lambda: comm.scatter(objects, comm.rank)),
        (
            ValueError,
            "array must hold every rank's out.* × float32 × 4, got float64 × ",
            lambda: comm.scatter(np.zeros(4 * comm.world_size), comm.rank, out=x[0, :4]),
        ),
        (ValueError, "out must be .* one array, got a list", lambda: comm.all_gather(x, out=[x])),
        (
            ValueError,
            "array must be as many arrays as out: expected one array, got a list of 1",
            lambda: comm.reduce_scatter([np.zeros(comm.world_size)], out=np.zeros(1)),
        ),
        (ValueError, "row-major", lambda: comm.all_gather(np.asfortranarray(x))),
        (ValueError, "every rank's array", lambda: comm.all_gather(x, out=np.zeros(1, np.float32))),
    ]
    if comm.world_size > 1:
        odd = np.zeros(comm.world_size + 1, np.float32)
        bad += [
            (ValueError, "multiple of", lambda: comm.reduce_scatter(odd)),
            (ValueError, "multiple of", lambda: comm.all_to_all(odd)),
            (ValueError, "multiple of", lambda: comm.reduce_scatter(odd, out=odd[:1])),
            (ValueError, "splits must be", lambda: comm.all_to_all(odd, splits=[99])),
        ]
        if comm.rank != 0:
            bad.append((ValueError, "needs out=", lambda: comm.scatter(None)))
    return bad


def bad_options(comm: Communicator) -> list[Bad]:
    x = np.zeros((4, 6), np.float32)
    bad: list[Bad] = [
        (ValueError, "op must be.*'plus'", lambda: comm.all_reduce(x, "plus")),
        (ValueError, "op must be", lambda: comm.all_reduce(x, None)),
        (TypeError, "mean.*int32", lambda: comm.all_reduce(np.zeros(2, np.int32), "mean")),
        (ValueError, "compress must be", lambda: comm.all_reduce(x, compress="zip")),
        (
            TypeError,
            "compress works on",
            lambda: comm.all_reduce(np.zeros(2, int), compress="bf16"),
        ),
        (ValueError, "compress works with", lambda: comm.all_reduce(x, "max", compress="bf16")),
        (ValueError, "bucket_bytes", lambda: comm.all_reduce(x, bucket_bytes=0)),
        (ValueError, "splits must be", lambda: comm.all_to_all(x, splits=[1])),
        (TypeError, "splits must be integers", lambda: comm.all_to_all(x, splits="1")),
        (ValueError, "timeout must be", lambda: comm.barrier(timeout=0)),
        (ValueError, "timeout must be", lambda: comm.barrier(timeout=float("nan"))),
        (ValueError, "must be different", lambda: comm.subgroup([0, 0])),
        (ValueError, "color", lambda: comm.split(-1)),
        (TypeError, "color must be an integer, got 'a'", lambda: comm.split("a")),
        (TypeError, "key must be an integer, got 0.5", lambda: comm.split(0, 0.5)),
        (ValueError, "color must fit in 64 bits, got 9", lambda: comm.split(2**63)),
        (ValueError, "key must fit in 64 bits", lambda: comm.split(0, -(2**70))),
        (ValueError, "splits must fit in 64 bits", lambda: comm.all_to_all(x, splits=[2**64])),
        (ValueError, "ranks must fit in 64 bits", lambda: comm.subgroup([2**64])),
        (TypeError, "dtype must be.*float64.*got <class 'object'>", lambda: comm.empty(3, object)),
        (TypeError, "dtype must be", lambda: comm.empty(3, "datetime64[s]")),
        (TypeError, "dtype must be", lambda: comm.empty(3, [("a", "float32")])),
        (TypeError, "dtype must be.*'>f4'", lambda: comm.empty(3, ">f4")),
        (TypeError, "shape must be integers", lambda: comm.empty(2.5)),
        (TypeError, "cannot be copied or pickled", lambda: copy.copy(comm)),
        (TypeError, "cannot be copied or pickled", lambda: pickle.dumps(comm)),
    ]
    for value, kind in (("1", TypeError), (float("nan"), ValueError), (-1, ValueError)):
        message = f"^timeout must be .* seconds.*, got {value!r}$"
        bad.append((kind, message, functools.partial(comm.all_reduce, x, timeout=value)))
        bad.append((kind, message, functools.partial(comm.all_gather, [x], timeout=value)))
        work = comm.all_reduce([x.copy()], async_op=True)
        bad.append((kind, message, functools.partial(work.wait, value)))
    return bad


def bad_ranks(comm: Communicator) -> list[Bad]:
    x = np.zeros((4, 6), np.float32)
    bad: list[Bad] = [
        (ValueError, "root must be", lambda: comm.broadcast(x, comm.world_size)),
        (ValueError, "root must be", lambda: comm.reduce(x, "sum", -1)),
        (ValueError, "root must be", lambda: comm.gather_object(x, comm.world_size)),
        (TypeError, "root must be", lambda: comm.gather_object(x, None)),  # type: ignore[arg-type]
        (ValueError, "src must be", lambda: comm.recv(x, comm.world_size)),
    ]
    last = comm.world_size - 1
    for value, kind in (
        ("0", TypeError),
        (None, TypeError),
        (2**40, ValueError),
        (2**70, ValueError),
    ):
        for argument, call in (
            ("root", lambda root: comm.broadcast(x, root)),
            ("root", lambda root: comm.reduce(x, "sum", root)),
            ("root", lambda root: comm.gather(x, root)),
            ("root", lambda root: comm.scatter(x, root)),
            ("root", lambda root: comm.broadcast_object(x, root)),
            ("dst", lambda dst: comm.send(x, dst)),
            ("src", lambda src: comm.recv(x, src)),
        ):
            message = f"^{argument} must be an integer from 0 to {last},.* got {value!r}$"
            bad.append((kind, message, functools.partial(call, value)))
    return bad


def other_spellings(comm: Communicator) -> list[Bad]:
    """Arguments as other libraries take them; the message says how fastdist takes them."""
    x = np.zeros(3)
    frame = SimpleNamespace(to_numpy=lambda: x)  # pandas, polars
    return [
        (ValueError, 'got .avg.; use op="mean"$', lambda: comm.all_reduce(x, "avg")),
        (ValueError, 'got .*SUM.*; use op="sum"$', lambda: comm.all_reduce(x, RedOpType.SUM)),
        (ValueError, 'got .*BAND.*; use op="and"$', lambda: comm.all_reduce(x, RedOpType.BAND)),
        (TypeError, r"got float; pass numpy.array\(x\)$", lambda: comm.all_reduce([1.0, 2.0])),
        (TypeError, r"got list; pass numpy.array\(x\)$", lambda: comm.all_reduce([[1], [2]])),
        (TypeError, "got generator; pass a list", lambda: comm.all_reduce(a for a in [x])),
        (TypeError, r"pass list\(x.values\(\)\) if it", lambda: comm.all_reduce({"x": x})),
        (TypeError, "objects go by broadcast_object, all", lambda: comm.broadcast({"x": 1})),
        (TypeError, "got float64; pass numpy.array", lambda: comm.all_reduce(np.float64(3))),
        (ValueError, 'got .*max.*; use op="max"$', lambda: comm.all_reduce(x, max)),
        (ValueError, 'got .*maximum.*; use op="max"$', lambda: comm.all_reduce(x, np.maximum)),
        (TypeError, "'dest'; use dst=$", lambda: comm.send(x, dest=0)),  # type: ignore[call-overload]
        (TypeError, "'source'; use src=$", lambda: comm.recv(x, source=0)),  # type: ignore[call-overload]
        (TypeError, "'source'; use src=$", lambda: comm.recv(source=0)),  # type: ignore[call-overload]
        (TypeError, "recv_object returns an object$", lambda: comm.recv(src=0)),  # type: ignore[call-overload]
        (TypeError, "'dest'; use root=$", lambda: comm.gather(x, dest=0)),  # type: ignore[call-overload]
        (TypeError, "'source'; use root=$", lambda: comm.broadcast(x, source=0)),  # type: ignore[call-overload]
        (TypeError, "'dst'; use root=$", lambda: comm.gather_object(x, dst=0)),
        (TypeError, r"pass x.to_numpy\(\)$", lambda: comm.all_reduce(frame)),
        (TypeError, "'src'; use root=$", lambda: comm.broadcast(x, src=0)),  # type: ignore[call-overload]
        (TypeError, "'dst'; use root=$", lambda: comm.reduce(x, dst=0)),  # type: ignore[call-overload]
        (TypeError, "gather got .* argument 'roots'$", lambda: comm.gather(x, roots=0)),  # type: ignore[call-overload]
    ]


def check_wrong_on_one_rank(comm: Communicator) -> None:
    """The other ranks wait; the call succeeds when the rank calls with the right argument."""
    last = comm.world_size - 1
    x = np.full(3, comm.rank)
    if comm.rank == last:
        x.setflags(write=False)
        for _ in range(2):
            with pytest.raises(ValueError, match="read-only"):
                comm.all_reduce(x)
        time.sleep(0.2)
        x = x.copy()
    comm.all_reduce(x)
    assert (x == sum(range(comm.world_size))).all()


def say_done(comm: Communicator, folder: Path) -> None:
    """Let `wait_for_others` return on another rank, without a communicator."""
    (folder / str(comm.rank)).touch()


def wait_for_others(comm: Communicator, folder: Path) -> None:
    """Wait until every other rank has called `say_done`."""
    deadline = time.monotonic() + 30
    while len(list(folder.iterdir())) < comm.world_size - 1:
        assert time.monotonic() < deadline, "the other ranks are not done after 30 s"
        time.sleep(0.01)


def check_wrong_on_one_rank_for_good(comm: Communicator, folder: Path) -> None:
    last = comm.world_size - 1
    comm.barrier()
    if comm.rank == last:
        with pytest.raises(TypeError, match="root must be"):
            comm.broadcast(np.zeros(3), "0")  # type: ignore[arg-type]
        wait_for_others(comm, folder)
        return
    with pytest.raises(CollectiveTimeoutError) as caught:
        comm.broadcast(np.zeros(3), timeout=1)
    assert caught.value.ranks == (last,)
    message = str(caught.value)
    assert f"rank {last}" in message.partition("last collective")[0]
    assert f"rank {last}: call 1, barrier()" in message
    assert f"rank {comm.rank}: call 2, broadcast(float64 × 3, root=0)" in message
    say_done(comm, folder)


def check_mismatch(comm: Communicator) -> None:
    n = comm.world_size
    odd_one_out = comm.rank == n - 1

    one = np.ones(1, int)

    def zeros(size: int, dtype: str = "float32") -> np.ndarray:
        return np.zeros(size, dtype)

    cases: list[tuple[Callable[[], Any], Callable[[], Any], str]] = [
        (lambda: comm.all_reduce(zeros(4)), lambda: comm.barrier(), "barrier"),
        (lambda: comm.all_reduce(zeros(4)), lambda: comm.all_reduce(zeros(5)), "float32 × 5"),
        (lambda: comm.all_reduce(zeros(4)), lambda: comm.all_reduce(zeros(4, "int32")), "int32"),
        (lambda: comm.all_reduce(zeros(4)), lambda: comm.all_reduce(zeros(4), "max"), "max"),
        (lambda: comm.broadcast(zeros(4), 0), lambda: comm.broadcast(zeros(4), 1), "root=1"),
        (
            lambda: comm.all_gather(zeros(4)),
            lambda: comm.all_gather(zeros(5)),
            "all_gather of parts that differ in size needs splits=",
        ),
        (
            lambda: comm.all_to_all(zeros(2 * n)),
            lambda: comm.all_to_all(zeros(3 * n)),
            "all_to_all of parts that differ in size needs splits=",
        ),
        (lambda: comm.all_reduce(zeros(9**5)), lambda: comm.all_reduce(zeros(9)), "× 59049"),
        (
            lambda: comm.all_reduce([zeros(4), zeros(2)]),
            lambda: comm.all_reduce([zeros(2), zeros(4)]),
            "in a list",
        ),
        (
            lambda: comm.all_reduce([np.zeros((2, 3)), zeros(4, "float64")]),
            lambda: comm.all_reduce([np.zeros((3, 2)), zeros(4, "float64")]),
            "the arrays of the lists differ in shape",
        ),
        (
            lambda: comm.all_reduce(np.zeros((2, 3))),
            lambda: comm.all_reduce(np.asfortranarray(np.zeros((2, 3)))),
            "not in row-major order",
        ),
        (
            lambda: comm.all_reduce(np.zeros((2, 3))),
            lambda: comm.all_reduce(np.zeros((3, 2))),
            'float64 × 6 of shape (3, 2), op="sum"',
        ),
        (
            lambda: comm.all_gather(np.zeros((70_000, 1, 1))),
            lambda: comm.all_gather(np.zeros((1, 70_000, 1))),
            "of shape (70000, 1, 1)",
        ),
        (
            lambda: comm.broadcast(np.zeros((1,) * 6 + (2,))),
            lambda: comm.broadcast(np.zeros((1,) * 7 + (2,))),
            "float64 × 2 of shape #",
        ),
        (
            lambda: comm.all_reduce(zeros(4, "float16")),
            lambda: comm.all_reduce(zeros(4), compress="fp16"),
            'float32 × 4, op="sum", compress="fp16"',
        ),
        (
            lambda: comm.all_reduce([zeros(4), zeros(2)], compress="fp8"),
            lambda: comm.all_reduce([zeros(4), zeros(3)], compress="fp8"),
            'float32 × 7 in a list, op="sum", compress="fp8"',
        ),
        (
            lambda: comm.all_gather([zeros(4), zeros(2)]),
            lambda: comm.all_gather([zeros(4), zeros(3)]),
            "all_gather(float32 × 7 in a list)",
        ),
        (
            lambda: comm.gather([zeros(4), zeros(2)]),
            lambda: comm.gather([zeros(4)]),
            "gather(float32 × 6 in a list, root=0)",
        ),
        (
            lambda: comm.all_to_all([zeros(n), zeros(n)], splits=[1] * n),
            lambda: comm.all_to_all([zeros(n), zeros(n, "int8")], splits=[1] * n),
            "all_to_all(float32 × 0 in a list)",
        ),
        # Calls that are made of others do not match these.
        (lambda: comm.scan(zeros(3)), lambda: comm.all_gather(one), "scan(float32 × 3, "),
        (
            lambda: comm.gather_object(1),
            lambda: comm.all_gather_object(1),
            " gather_object(root=0)",
        ),
        (lambda: comm.all_gather_object(1), lambda: comm.all_gather(one), "all_gather_object()"),
        (lambda: comm.broadcast_object(1), lambda: comm.broadcast(one), "broadcast_object(root=0)"),
        (lambda: comm.gather_object(1), lambda: comm.gather_object(1, n - 1), f"root={n - 1})"),
        (lambda: comm.split(0), lambda: comm.all_gather(np.ones((1, 2), int)), "split()"),
        (
            lambda: comm.gather(zeros(1), splits=[1] * n),
            lambda: comm.all_gather(one),
            f"gather(float32 × {n}, root=0, splits=…)",
        ),
        (
            lambda: comm.all_to_all(zeros(n), splits=[1] * n),
            lambda: comm.all_gather(np.ones((1, n + 1), int)),
            f"all_to_all(int64 × {n + 1} of shape (1, {n + 1}), splits=…)",
        ),
    ]
    for usual, other, text in cases:
        start = time.monotonic()
        with pytest.raises(CollectiveMismatchError) as caught:
            (other if odd_one_out else usual)()
        assert time.monotonic() - start < 20
        message = str(caught.value)
        assert text in message
        assert ("splits=" in message) == ("splits=" in text)
        assert message.count("contract_errors.py:") == comm.world_size, message
        assert all(f"rank {r}: " in message for r in range(comm.world_size))
        x = np.full(3, comm.rank)
        comm.all_reduce(x, "max")
        assert (x == comm.world_size - 1).all()


def check_mismatch_of_send(comm: Communicator) -> None:
    if comm.rank == 0:
        with pytest.raises(
            CollectiveMismatchError, match=r"float32 × 4.* at .*contract_errors\.py"
        ) as e:
            comm.send(np.zeros(4, np.float32), 1)
        assert str(e.value).count("contract_errors.py:") == 2
        comm.send(np.arange(4.0), 1)
    if comm.rank == 1:
        out = np.zeros(5, np.float32)
        with pytest.raises(CollectiveMismatchError, match="float32 × 5"):
            comm.recv(out, 0)
        out = np.zeros(4)
        comm.recv(out, 0)
        assert (out == np.arange(4.0)).all()
    comm.barrier()
