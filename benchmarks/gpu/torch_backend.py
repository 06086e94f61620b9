"""torch.distributed with the backend "fastdist" on a GPU: each part checks its own results.

    fastdist run --no-prefix -n 2 benchmarks/gpu/torch_backend.py [PART...]

Ranks may share a GPU. Rank 0 prints a line of JSON for each part; a rank ends with 1 if a part
failed there. Without a GPU the tensors are on the CPU.
"""

from __future__ import annotations

import copy
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from time import monotonic
from typing import Any

import fastdist as fd
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

IS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if IS_GPU else "cpu"
SIZE = 4_000_001 if IS_GPU else 4_001
TURNS = 20


def synchronize() -> None:
    if IS_GPU:
        torch.cuda.synchronize()


def require(are_right: Iterable[Any]) -> None:
    """Raise unless all are true; each may be a tensor that is not computed yet."""
    checks = list(are_right)
    synchronize()
    assert all(bool(check) for check in checks), f"{sum(not bool(c) for c in checks)} are wrong"


def lists_async() -> None:
    """`wait` orders the copy into the list's tensors before the current stream."""
    n, r = dist.get_world_size(), dist.get_rank()
    for turn in range(TURNS):
        outs = [torch.zeros(SIZE, device=DEVICE) for _ in range(n)]
        given = torch.full((SIZE,), float(r + turn), device=DEVICE)
        dist.all_gather(outs, given, async_op=True).wait()
        require((out == p + turn).all() for p, out in enumerate(outs))


def memory_of_the_copy() -> None:
    """The copy's own memory is not reused before the copy has run."""
    n, r = dist.get_world_size(), dist.get_rank()
    for turn in range(TURNS):
        outs = [torch.zeros(SIZE, device=DEVICE) for _ in range(n)]
        given = torch.full((SIZE,), float(r + turn), device=DEVICE)
        work = dist.all_gather(outs, given, async_op=True)
        work.wait()
        del work
        torch.full((n * SIZE,), -1.0, device=DEVICE)
        require((out == p + turn).all() for p, out in enumerate(outs))


def strided_async() -> None:
    n = dist.get_world_size()
    for turn in range(TURNS):
        x = torch.full((SIZE // 2000, 2000), float(turn), device=DEVICE).t()
        dist.all_reduce(x, async_op=True).wait()
        require([(x == n * turn).all()])


def mean_of_integers() -> None:
    for turn in range(TURNS):
        x = torch.full((SIZE,), 6 * turn, device=DEVICE, dtype=torch.int32)
        dist.all_reduce(x, dist.ReduceOp.AVG, async_op=True).wait()
        require([(x == 6 * turn).all()])


def futures() -> None:
    n = dist.get_world_size()
    x = torch.ones(SIZE, device=DEVICE)
    future = dist.all_reduce(x, async_op=True).get_future().then(lambda f: f.value()[0] * 2)
    require([(future.wait() == 2 * n).all()])


def gradients_like_torch_alone(wrap: Callable[[nn.Module], nn.Module]) -> None:
    """The mean of all ranks' gradients, computed by one model on all ranks' batches."""
    torch.manual_seed(0)
    alone = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)]).to(DEVICE)
    model = wrap(copy.deepcopy(alone))
    optimizers = [torch.optim.SGD(m.parameters(), 0.05) for m in (alone, model)]
    for turn in range(5):
        numbers = torch.Generator().manual_seed(turn)
        batches = torch.randn(dist.get_world_size(), 32, 256, generator=numbers).to(DEVICE)
        for optimizer in optimizers:
            optimizer.zero_grad()
        (alone(batches.flatten(0, 1))).square().mean().backward()
        model(batches[dist.get_rank()]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(alone.parameters(), model.parameters(), strict=True):
        b = b.full_tensor() if hasattr(b, "full_tensor") else b
        require([torch.allclose(a, b, rtol=1e-3, atol=1e-5)])


def ddp() -> None:
    gradients_like_torch_alone(lambda model: DistributedDataParallel(model, bucket_cap_mb=1))


def compiled_ddp() -> None:
    gradients_like_torch_alone(
        lambda model: torch.compile(DistributedDataParallel(model), backend="aot_eager")
    )


def fsdp() -> None:
    def shard(model: nn.Module) -> nn.Module:
        for layer in model.children():
            fully_shard(layer)
        fully_shard(model)
        return model

    gradients_like_torch_alone(shard)


def compiled_functional_collective() -> None:
    n = dist.get_world_size()

    @torch.compile(backend="aot_eager")
    def step(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x * 2, "sum", dist.group.WORLD) + 1

    require(
        (step(torch.full((1000,), k, device=DEVICE)) == 2 * k * n + 1).all() for k in (1.0, 2.0)
    )


def groups() -> None:
    ranks = list(range(dist.get_world_size()))
    for group in (dist.new_group(ranks), dist.new_group(ranks, backend="fastdist")):
        x = torch.ones(1000, device=DEVICE)
        dist.all_reduce(x, group=group)
        require([(x == len(ranks)).all()])


def messages_before_peers_are_connected() -> None:
    """Futures of messages between ranks that have exchanged none, beside other kernels."""
    n, r = dist.get_world_size(), dist.get_rank()
    if n == 1:
        return
    group = dist.new_group(list(range(n)))  # whose ranks have not met on GPUs
    for turn in range(5):
        given = torch.full((SIZE,), float(r + turn), device=DEVICE)
        got = torch.zeros(SIZE, device=DEVICE)
        received = dist.irecv(got, (r - 1) % n, group=group).get_future()
        beside = torch.linspace(0, 1, 100_000, device=DEVICE).erfinv().sort().values.cumsum(0)
        sent = dist.isend(given, (r + 1) % n, group=group)
        (array,) = received.wait()
        sent.wait()
        require([(array == (r - 1) % n + turn).all(), beside.numel() == 100_000])


PARTS: dict[str, Callable[[], None]] = {
    part.__name__: part
    for part in (
        lists_async,
        memory_of_the_copy,
        strided_async,
        mean_of_integers,
        futures,
        ddp,
        fsdp,
        compiled_ddp,
        compiled_functional_collective,
        groups,
        messages_before_peers_are_connected,
    )
}


def main() -> None:
    """Every rank runs this."""
    device = (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        if IS_GPU
        else None
    )
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group("fastdist", device_id=device)
    assert fd is not None
    for name in sys.argv[1:] or PARTS:
        start = monotonic()
        try:
            PARTS[name]()
        except Exception:
            traceback.print_exc()
            os._exit(1)  # the ranks are out of step
        if dist.get_rank() == 0:
            seconds = round(monotonic() - start, 2)
            print(json.dumps({"part": name, "passed": True, "s": seconds}), flush=True)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
