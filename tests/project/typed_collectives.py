"""The types of collectives, strategies and their batches, and ten mistakes.

mypy and pyright check this file as a program of a user, mypy also with the installed wheel; nothing
runs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import fastdist as fd
import numpy as np
import torch

if TYPE_CHECKING:
    from typing import assert_type

Floats = np.ndarray[tuple[int], np.dtype[np.float32]]


def methods(comm: fd.Communicator, x: Floats, xs: list[Floats]) -> None:
    assert_type(comm.all_reduce(x), Floats)
    assert_type(comm.all_reduce(xs, "mean", out=xs, compress="bf16", timeout=3.0), list[Floats])
    assert_type(comm.all_reduce(x, async_op=False), Floats)
    assert_type(comm.all_reduce(x, "max", bucket_bytes=1 << 20, async_op=True), fd.Work)
    assert_type(comm.reduce(x, "sum", 1), Floats)
    assert_type(comm.reduce(x, root=1, async_op=True), fd.Work)
    assert_type(comm.broadcast(x, 0, out=x), Floats)
    assert_type(comm.broadcast(x, async_op=True), fd.Work)
    assert_type(comm.all_gather(x, stream=None), Floats)
    assert_type(comm.all_gather(x, async_op=True), fd.Work)
    assert_type(comm.gather(x, 0), Floats | Any)
    assert_type(comm.gather(x, 0, async_op=True), fd.Work)
    assert_type(comm.scatter(x), Floats)
    assert_type(comm.scatter(None, 0, out=x), Floats)
    assert_type(comm.scatter(x, async_op=True, timeout=None), fd.Work)
    assert_type(comm.reduce_scatter(x, "min"), Floats)
    assert_type(comm.reduce_scatter(x, async_op=True), fd.Work)
    assert_type(comm.all_to_all(x, splits=[1, 2]), Floats)
    assert_type(comm.all_to_all(xs, async_op=True), fd.Work)
    assert_type(comm.send(x, 1), Floats)
    assert_type(comm.send(x, 1, async_op=True), fd.Work)
    assert_type(comm.recv(x, 0), Floats)
    assert_type(comm.recv(x, 0, async_op=True), fd.Work)
    assert_type(comm.barrier(async_op=True, timeout=1.0), fd.Work)
    assert_type(comm.all_gather_object("a"), list[str])


def functions(x: Floats) -> None:
    assert_type(fd.all_reduce(x, "mean"), Floats)
    assert_type(fd.all_reduce(x, async_op=True), fd.Work)
    assert_type(fd.scatter(None, out=x), Floats)
    assert_type(fd.barrier(async_op=True), fd.Work)
    assert_type(fd.broadcast_object(3), int)


Tensor = torch.Tensor
Replicas = fd.PerReplica[torch.Tensor]


def loss_of(batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return torch.nn.functional.cross_entropy(x, y)


def norm_of(batch: tuple[Tensor, Tensor]) -> float:
    return float(batch[0].norm())


def both_of(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    return {"loss": loss_of(batch), "accuracy": batch[1]}


def show(batch: tuple[Tensor, Tensor]) -> None:
    print(loss_of(batch))


def training(strategy: fd.Strategy, x: Tensor, y: Tensor) -> None:
    batches = strategy.distribute_dataset((x, y), global_batch_size=8, shuffle=True, seed=1)
    for batch in batches:
        assert_type(batch, tuple[Replicas, Replicas])
        loss = strategy.run(loss_of, args=(batch,))
        assert_type(loss, Replicas | Tensor)
        assert_type(strategy.reduce("mean", loss), Tensor)
        norm = strategy.run(norm_of, (batch,))
        assert_type(norm, fd.PerReplica[float] | float)
        assert_type(strategy.reduce("max", norm), Tensor)
        assert_type(strategy.reduce("mean", strategy.run(both_of, [batch])), Any)


def other_sources(strategy: fd.Strategy, x: Tensor, examples: list[str]) -> None:
    for rows in strategy.distribute_dataset(x, global_batch_size=8):
        assert_type(rows, Replicas)
    for three in strategy.distribute_dataset((x, x, x), global_batch_size=8, prefetch=0):
        assert_type(three, tuple[Replicas, ...])
    for named in strategy.distribute_dataset({"x": x}, global_batch_size=8):
        assert_type(named, dict[str, Replicas])
    for anything in strategy.distribute_dataset(examples, global_batch_size=8, num_workers=2):
        assert_type(anything, Any)


def mistakes_in_collectives(comm: fd.Communicator, x: Floats) -> None:
    comm.all_reduce(x, "average")  # type: ignore[call-overload]
    comm.all_reduce(x, asynchronous=True)  # type: ignore[call-overload]
    fd.send(x, dst=1, label=3, async_op=True)  # type: ignore[call-overload]


def mistakes_in_training(strategy: fd.Strategy, x: Tensor, y: Tensor) -> None:
    strategy.distribute_dataset((x, y), batch_size=8)  # type: ignore[call-overload]
    for batch in strategy.distribute_dataset((x, y), global_batch_size=8):
        loss_of(batch)  # type: ignore[arg-type]
        print(batch[0].shape)  # type: ignore[attr-defined]
        strategy.run(loss_of, batch[0])  # type: ignore[call-overload]
        strategy.run(loss_of, batch=batch)  # type: ignore[call-overload]
        loss = strategy.run(loss_of, args=(batch,))
        float(loss)  # type: ignore[arg-type]
        strategy.reduce("average", loss)  # type: ignore[call-overload]
