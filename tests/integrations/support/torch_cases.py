"""Programs of torch.distributed, one function each, that ranks run on a backend.

Each returns what its rank has received. Those in `LIKE_GLOO` must give on fastdist what they give
on Gloo; those in `MORE_THAN_GLOO` do what Gloo refuses, and check their results themselves.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch_compiled

# Torch 2.13 renamed them.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)

gather_functionally: Any = (
    getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
)
scatter_functionally: Any = (
    getattr(functional, "reduce_scatter_single", None) or functional.reduce_scatter_tensor
)

warnings.filterwarnings("ignore", "ComplexHalf support is experimental")

Case = Callable[[], Any]
LIKE_GLOO: dict[str, Case] = {case.__name__: case for case in torch_compiled.CASES}
MORE_THAN_GLOO: dict[str, Case] = {}
SLOW = ("compiled_functions", "dtensors", *LIKE_GLOO)  # by what they import and compile


def like_gloo(case: Case) -> Case:
    LIKE_GLOO[case.__name__] = case
    return case


def more_than_gloo(case: Case) -> Case:
    MORE_THAN_GLOO[case.__name__] = case
    return case


def run_case(comm: Any, name: str, backend: str, path: str) -> Any:
    """On a rank of `ProcessRanks`: run a case in a process group of its own."""
    dist.init_process_group(
        backend,
        init_method=f"file://{path}",
        rank=comm.rank,
        world_size=comm.world_size,
        timeout=timedelta(seconds=60),
    )
    dist.barrier()  # a rank that leaves while others connect fails them under Gloo
    try:
        return plain(({**LIKE_GLOO, **MORE_THAN_GLOO})[name]())
    finally:
        dist.destroy_process_group()


def groups_by_torchs_announced_rules(comm: Any, path: str) -> None:
    """On a rank of `ProcessRanks`: connected at once by `device_id`, one device for each group."""
    # Before 2.14, torch takes GPUs alone.
    device = {"device_id": torch.device("cpu", 0)} if torch.__version__ >= (2, 14) else {}
    for backend in ("cpu:fastdist", "fastdist"):
        dist.init_process_group(
            backend,
            init_method=f"file://{path}-{backend.partition(':')[0]}",
            rank=comm.rank,
            world_size=comm.world_size,
            **device,
        )
        try:
            half = dist.new_group([0], **device)
            for group in (None, half):
                if group is not dist.GroupMember.NON_GROUP_MEMBER:
                    x = torch.ones(2)
                    dist.all_reduce(x, group=group)
                    assert x[0] == dist.get_world_size(group)
        finally:
            dist.destroy_process_group()


def plain(value: Any) -> Any:
    """Return lists and numbers for tensors, which pipes can carry."""
    if isinstance(value, torch.Tensor):
        value = value.coalesce().to_dense() if value.is_sparse else value
        return value.to(torch.complex128 if value.is_complex() else torch.float64).tolist()
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def own(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return small numbers that differ between ranks."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) + 3 * dist.get_rank()) % 7 + 1).to(dtype).reshape(shape)


@like_gloo
def all_reduce_ops() -> Any:
    ops = dist.ReduceOp
    results = []
    for op in (ops.SUM, ops.PRODUCT, ops.MIN, ops.MAX, ops.AVG):
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
            x = own(5, dtype=dtype)
            dist.all_reduce(x, op)
            results.append(x)
    for op in (ops.SUM, ops.PRODUCT, ops.MIN, ops.MAX, ops.BAND, ops.BOR, ops.BXOR):
        for dtype in (torch.int32, torch.int64, torch.int8, torch.uint8):
            x = own(2, 3, dtype=dtype)
            dist.all_reduce(x, op)
            results.append(x)
    return results


@like_gloo
def all_reduce_of_complex_numbers() -> Any:
    x = own(4, dtype=torch.complex64) * (1 + 2j)
    dist.all_reduce(x)
    return x


@like_gloo
def all_reduce_coalesced() -> Any:
    tensors = [own(3), own(2, 2), own(1)]
    with dist._coalescing_manager():
        for tensor in tensors:
            dist.all_reduce(tensor)
    return tensors


@like_gloo
def calls_without_lists_and_options() -> Any:
    group, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    limit, op = timedelta(seconds=30), dist.ReduceOp.MAX
    root = size - 1
    x = [own(3) for _ in range(10)]
    works = [
        group.allreduce(x[0]),
        group.allreduce(x[1], op),
        group.allreduce([x[2]], op=op, timeout=limit),
        group.allreduce(tensors=[x[3]], opts=dist.AllreduceOptions()),
        group.broadcast(x[4], root),
        group.broadcast(tensor=x[5], root=root, timeout=limit),
        group.reduce(x[6], root=root, op=op),
    ]
    parts = [[torch.empty(3) for _ in range(size)] for _ in range(3)]
    works += [
        group.allgather(parts[0], own(3)),
        group.allgather(output_tensors=[parts[1]], input_tensors=[own(3)]),
        group.gather(parts[2] if rank == root else [], own(3), root, timeout=limit),
        group.scatter(x[7], [own(3) for _ in range(size)] if rank == root else [], root=root),
        group.reduce_scatter(x[8], [own(3) for _ in range(size)], op),
    ]
    halves = own(2 * size)
    received = torch.empty(2 * size)
    works.append(group.alltoall_base(received, halves, [], [], timeout=limit))
    works.append(group.barrier(timeout=limit))
    to, source = (rank + 1) % size, (rank - 1) % size
    message = torch.empty(2)
    works.append(group.send([own(2)], dstRank=to, tag=3))
    works.append(group.recv([message], srcRank=source, tag=3))
    for work in works:
        work.wait()
    x[6] = x[6] if rank == root else own(3)
    return [x, parts[:2], parts[2] if rank == root else None, received, message]


@like_gloo
def all_reduce_sparse() -> Any:
    rank = dist.get_rank()
    indices = torch.tensor([[0, rank + 1], [rank, 0]])
    x = torch.sparse_coo_tensor(indices, own(2, 3), (5, 5, 3), check_invariants=True)
    dist.all_reduce(x)
    return x


@like_gloo
def reduce_and_broadcast() -> Any:
    root = dist.get_world_size() - 1
    x, y = own(4), own(3, dtype=torch.int64)
    dist.reduce(x, root)
    dist.broadcast(y, root)
    flags = own(4) > 3
    dist.broadcast(flags, 0)
    half = own(3).to(torch.float8_e4m3fn)
    dist.broadcast(half.view(torch.uint8), 0)
    return [x if dist.get_rank() == root else None, y, flags, half.float()]


@like_gloo
def gathers() -> Any:
    size, rank = dist.get_world_size(), dist.get_rank()
    parts = [torch.empty(2, 3) for _ in range(size)]
    dist.all_gather(parts, own(2, 3))
    whole = torch.empty(size * 2, 3)
    all_gather_single(whole, own(2, 3))
    at_root = [torch.empty(4) for _ in range(size)] if rank == 0 else None
    dist.gather(own(4), at_root, 0)
    scattered = torch.empty(3)
    dist.scatter(scattered, [own(3) + r for r in range(size)] if rank == 0 else None, 0)
    return [parts, whole, at_root, scattered]


@like_gloo
def gather_into_parts_of_one_tensor() -> Any:
    size = dist.get_world_size()
    whole = torch.zeros(size, 2, 3)
    dist.all_gather(list(whole.unbind()), own(2, 3))
    return whole


@like_gloo
def reduce_scatters() -> Any:
    size = dist.get_world_size()
    one = torch.empty(3)
    dist.reduce_scatter(one, [own(3) + r for r in range(size)])
    other = torch.empty(2, 2)
    reduce_scatter_single(other, own(2 * size, 2))
    return [one, other]


@like_gloo
def all_to_alls() -> Any:
    size, rank = dist.get_world_size(), dist.get_rank()
    even = torch.empty(2 * size, 2)
    dist.all_to_all_single(even, own(2 * size, 2))
    given = [rank + 1 + r for r in range(size)]
    received = [rank + 1 + r for r in range(size)]
    uneven = torch.empty(sum(received), 2)
    dist.all_to_all_single(uneven, own(sum(given), 2), received, given)
    return [even, uneven]


@like_gloo
def objects() -> Any:
    size, rank = dist.get_world_size(), dist.get_rank()
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * rank})
    shared = [{"from": 0}, 5] if rank == 0 else [None, None]
    dist.broadcast_object_list(shared, 0)
    own_one: list[Any] = [None]
    dist.scatter_object_list(own_one, list(range(size)) if rank == 0 else None, 0)
    gathered: list[Any] | None = [None] * size if rank == 0 else None
    dist.gather_object(rank, gathered, 0)
    return [everyone, shared, own_one, gathered]


@like_gloo
def tensors_that_are_not_contiguous() -> Any:
    size = dist.get_world_size()
    x = own(4, 6)
    dist.all_reduce(x.T.contiguous().T)
    y = own(3, 4).T.contiguous().T
    dist.broadcast(y, 0)
    parts = [torch.zeros(3, 2).T for _ in range(size)]
    dist.all_gather(parts, own(2, 3))
    return [y, parts]


@like_gloo
def several_tensors_in_one_call() -> Any:
    group: Any = dist.group.WORLD
    size = dist.get_world_size()
    results = []
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        reduced = [own(2, 3), own(2, 3) + 1]
        options = dist.AllreduceOptions()
        options.reduceOp = op
        group.allreduce(reduced, options).wait()
        results.append(reduced)
    shared = [own(2, 2).t(), own(2, 2) + 5]
    to_all = dist.BroadcastOptions()
    to_all.rootRank, to_all.rootTensor = size - 1, 1
    group.broadcast(shared, to_all).wait()
    parts = [[torch.zeros(3) for _ in range(2 * size)] for _ in range(2)]
    group.allgather(parts, [own(3), own(3) + 1]).wait()
    return [results, shared, parts]


@like_gloo
def the_same_tensor_twice() -> Any:
    x, y = own(3), own(2, 3)
    group: Any = dist.group.WORLD
    group.allreduce_coalesced([x, y, x]).wait()
    return [x, y]


@like_gloo
def complex_numbers_of_half_precision() -> Any:
    size = dist.get_world_size()
    x = torch.complex(own(2, size).half(), own(2, size).half())
    strided = x.clone().t()
    scalar = x[0, 0].clone()
    for each in (x, strided, scalar):
        dist.all_reduce(each)
    out = torch.zeros(2, dtype=torch.complex32)
    reduce_scatter_single(out, x.reshape(-1)[: 2 * size].clone())
    parts = [torch.zeros(2, dtype=torch.complex32) for _ in range(size)]
    dist.all_gather(parts, out)
    return [x, strided, scalar, out, parts]


@like_gloo
def messages_that_are_shorter_or_of_another_dtype() -> Any:
    rank = dist.get_rank()
    large, small = torch.zeros(5), torch.zeros(8, dtype=torch.uint8)
    if rank == 0:
        works = [dist.isend(own(2) + tag, 1, tag=tag) for tag in range(3)]
        for work in works:
            work.wait()
    elif rank == 1:
        dist.recv(small, 0, tag=1)  # the one before is kept
        dist.recv(large, 0)
        dist.recv(large[3:].view(torch.uint8), 0, tag=2)
    return [large, small]


@like_gloo
def works() -> Any:
    x, y = own(3), own(4)
    work = dist.all_reduce(x, async_op=True)
    future = dist.all_reduce(y, async_op=True).get_future().then(lambda f: f.value()[0] + 1)
    work.wait()
    added = future.wait()
    dist.barrier(async_op=True).wait()
    return [x, added, work.is_completed()]


@like_gloo
def groups() -> Any:
    size, rank = dist.get_world_size(), dist.get_rank()
    results = []
    for ranks in ([0], [0, size - 1], list(range(size))):
        group = dist.new_group(ranks)
        x = own(3)
        if rank in ranks:
            dist.all_reduce(x, group=group)
            results.append([x, dist.get_rank(group), dist.get_process_group_ranks(group)])
            dist.destroy_process_group(group)
    return results


@like_gloo
def messages_in_another_order() -> Any:
    rank = dist.get_rank()
    a, b = torch.zeros(3), torch.zeros(3)
    if rank == 0:
        works = [dist.isend(own(3) + tag, 1, tag=tag) for tag in (1, 2)]
        for work in works:
            work.wait()
    elif rank == 1:
        dist.recv(b, 0, tag=2)
        dist.recv(a, 0, tag=1)
    return [a, b]


@like_gloo
def a_later_receive_that_an_earlier_one_waits_for() -> Any:
    rank = dist.get_rank()
    stop, data = torch.zeros(2), torch.zeros(2)
    if rank == 1:
        stopped = dist.irecv(stop, 0, tag=1)
        dist.recv(data, 0, tag=2)
        dist.send(data, 0, tag=3)
        stopped.wait()
    elif rank == 0:
        dist.send(own(2), 1, tag=2)
        dist.recv(data, 1, tag=3)
        dist.send(own(2) + 1, 1, tag=1)
    dist.barrier()  # a rank that leaves early ends Gloo's connections, which others still make
    return [stop, data]


@like_gloo
def messages_from_any_rank() -> Any:
    size, rank = dist.get_world_size(), dist.get_rank()
    if rank != 0:
        dist.send(own(3), 0)
        dist.send(own(2), 0, tag=7)
        return None
    received = {}
    for _ in range(1, size):
        x = torch.empty(3)
        source = dist.recv(x)
        received[source] = plain(x)
    sources = []
    for _ in range(1, size):
        x = torch.empty(2)
        work = dist.irecv(x, tag=7)
        work.wait()
        sources.append((work._source_rank(), plain(x)))
    return [sorted(received.items()), sorted(sources)]


@like_gloo
def a_ring_in_a_batch() -> Any:
    size, rank = dist.get_world_size(), dist.get_rank()
    given, received = own(4), torch.empty(4)
    ops = [
        dist.P2POp(dist.isend, given, (rank + 1) % size),
        dist.P2POp(dist.irecv, received, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return received


@like_gloo
def functional_collectives() -> Any:
    size, world = dist.get_world_size(), dist.group.WORLD
    return [
        functional.all_reduce(own(3), "sum", world) + 1,
        gather_functionally(own(2, 2), 1, world) + 1,
        scatter_functionally(own(2 * size), "sum", 0, world) + 1,
        functional.all_to_all_single(own(size, 2), None, None, world) + 1,
        functional.broadcast(own(3), 0, world) + 1,
        [x + 1 for x in functional.all_reduce_coalesced([own(2), own(3)], "avg", world)],
    ]


@like_gloo
def compiled_functions() -> Any:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        total = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        return gather_functionally(total + 1, 0, dist.group.WORLD)

    return step(own(3))


@like_gloo
def dtensors() -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(24.0).reshape(6, 4)
    rows = distribute_tensor(whole, mesh, [Shard(0)])
    columns = rows.redistribute(mesh, [Shard(1)])
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 12, bias=False), torch.nn.Linear(12, 2, bias=False)
    )
    for layer in model:
        torch.nn.init.constant_(layer.weight, 0.5)
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    out = model(whole)
    out.sum().backward()
    gradient = model[0].weight.grad
    return [columns.to_local(), (rows @ columns.T).full_tensor(), out, gradient.full_tensor()]


@like_gloo
def ddp() -> Any:
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU())
    parallel = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(parallel.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        parallel(own(5, 4)).square().mean().backward()
        optimizer.step()
    with parallel.no_sync():
        parallel(own(5, 4)).sum().backward()
    return [round(float(p.detach().sum()), 4) for p in parallel.parameters()]


@more_than_gloo  # whose process group sometimes ends in one of its own threads then, and aborts
def ddp_with_power_sgd() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power

    torch.manual_seed(0)
    own_model = torch.nn.Linear(32, 16)
    model = torch.nn.parallel.DistributedDataParallel(copy.deepcopy(own_model))
    state = power.PowerSGDState(None, matrix_approximation_rank=16, start_powerSGD_iter=2)
    model.register_comm_hook(state, power.powerSGD_hook)
    for _ in range(4):
        model.zero_grad()
        model(own(5, 32)).square().mean().backward()
    check_means(own_model, model, lambda net, x: net(x).square().mean(), 1e-3)


@more_than_gloo
def ddp_with_compressed_gradients() -> None:
    from fastdist.integrations import ddp as hooks

    torch.manual_seed(0)
    for hook, tolerance in (
        (hooks.fp16_hook, 2e-3),
        (hooks.bf16_hook, 1e-2),
        (hooks.fp8_hook, 7e-2),
    ):
        own_model = torch.nn.Linear(32, 16)
        model = torch.nn.parallel.DistributedDataParallel(own_model)
        own_model = copy.deepcopy(own_model)
        model.register_comm_hook(None, hook)
        model(own(5, 32)).square().mean().backward()
        check_means(own_model, model, lambda net, x: net(x).square().mean(), tolerance)


def check_means(
    own_model: torch.nn.Module, model: torch.nn.Module, loss: Callable[..., Any], tolerance: float
) -> None:
    """Compare the gradients of a model with the means of those that each rank computes."""
    own_model.zero_grad()
    loss(own_model, own(5, 32)).backward()
    for p, q in zip(model.parameters(), own_model.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        mean = q.grad.clone()
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        largest = q.grad.abs().max()  # the mean may be much less than what was rounded
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        assert (p.grad - mean).abs().max() <= tolerance * largest


@more_than_gloo
def gathers_of_uneven_parts() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    parts = [torch.zeros(r + 1, 2) for r in range(size)]
    dist.all_gather(parts, torch.full((rank + 1, 2), float(rank)))
    assert all(torch.equal(part, torch.full_like(part, r)) for r, part in enumerate(parts))
    mine = torch.empty(rank + 1)
    dist.reduce_scatter(mine, [torch.full((r + 1,), float(r)) for r in range(size)])
    assert torch.equal(mine, torch.full_like(mine, size * rank))
    received = [torch.empty(rank + 1) for _ in range(size)]
    dist.all_to_all(received, [torch.full((r + 1,), float(rank)) for r in range(size)])
    assert all(torch.equal(x, torch.full_like(x, r)) for r, x in enumerate(received))


@more_than_gloo
def dtypes() -> None:
    size = dist.get_world_size()
    dtypes = [torch.complex128, torch.bool]
    if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):  # not in torch 2.9, nor DLPack of float8
        dtypes += [torch.float8_e4m3fn, torch.float8_e5m2]
    for dtype in dtypes:
        x = torch.ones(4).to(dtype)
        dist.all_reduce(x, dist.ReduceOp.SUM)
        assert x.dtype is dtype
        assert x[0].to(torch.complex64).real == (1 if dtype is torch.bool else size), (dtype, x)
    for dtype in (torch.uint16, torch.uint64, torch.float8_e5m2fnuz):
        x = torch.full((3,), dist.get_rank()).to(dtype)
        parts = [torch.zeros(3).to(dtype) for _ in range(size)]
        dist.all_gather(parts, x)
        assert [int(part.float()[2]) for part in parts] == [*range(size)], dtype
    with pytest.raises(TypeError, match="float8_e5m2fnuz can be sent, but not reduced"):
        dist.all_reduce(x)


@more_than_gloo
def views_with_gaps() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.zeros(4, 6)
    view = whole[::2, 1::2]
    view.fill_(rank + 1)
    dist.all_reduce(view)
    assert torch.equal(view, torch.full((2, 3), size * (size + 1) / 2))
    assert whole.sum() == view.sum()
    dist.broadcast(whole.T[1:], size - 1)


@more_than_gloo
def gather_in_place() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.zeros(size, 5)
    whole[rank] = rank + 1
    all_gather_single(whole, whole[rank])
    assert torch.equal(whole[:, 0], torch.arange(size) + 1.0)
    reduce_scatter_single(whole[rank], whole)
    assert torch.equal(whole[rank], torch.full((5,), size * (rank + 1.0)))


@more_than_gloo
def outputs_that_share_memory() -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    same, base = [torch.zeros(4)] * size, torch.zeros(4 + 2 * size)
    for outputs in (same, [base[2 * r : 2 * r + 4] for r in range(size)]):
        with pytest.raises(ValueError, match="outputs must not share memory, got outputs 0 and 1"):
            dist.all_gather(outputs, own(4))
        with pytest.raises(ValueError, match="outputs must not share memory"):
            dist.all_to_all(outputs, [own(4)] * size)
    if rank == 0:
        with pytest.raises(ValueError, match="outputs must not share memory"):
            dist.gather(own(4), same)
    columns = list(torch.zeros(4, size).unbind(1))
    dist.all_gather(columns, own(4))
    assert torch.equal(columns[rank], own(4))


@more_than_gloo
def mean_of_integers() -> None:
    x = torch.tensor([-7, 8]) * (dist.get_rank() + 1)
    total = sum(range(1, dist.get_world_size() + 1))
    means = [int(n * total / dist.get_world_size()) for n in (-7, 8)]
    dist.all_reduce(x, dist.ReduceOp.AVG)
    assert x.tolist() == means


@more_than_gloo
def premultiplied_sum() -> None:
    x = torch.ones(3)
    dist.all_reduce(x, dist._make_nccl_premul_sum(0.5))
    assert torch.equal(x, torch.full((3,), dist.get_world_size() / 2))


@more_than_gloo
def messages_to_oneself() -> None:
    x = torch.empty(3)
    work = dist.irecv(x, dist.get_rank(), tag=4)
    dist.isend(own(3), dist.get_rank(), tag=4).wait()
    work.wait()
    assert torch.equal(x, own(3))


@more_than_gloo
def split_of_a_group() -> None:
    world: Any = dist.group.WORLD
    size, rank = dist.get_world_size(), dist.get_rank()
    half = [r for r in range(size) if r % 2 == rank % 2]
    group = world.split_group(half, timedelta(seconds=30), None, f"half{rank % 2}")
    x = torch.ones(2)
    group.allreduce([x]).wait()
    assert group.group_name == f"half{rank % 2}"
    assert x[0] == len(half) == group.size()
    group.shutdown()


@more_than_gloo
def profilers_that_stop_before_calls_end() -> None:
    """An event that another thread ends crashes them."""
    rank, other = dist.get_rank(), dist.new_group()
    for _ in range(10):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            work = None if rank == 1 else dist.all_reduce(own(64), async_op=True)
        dist.barrier(other)
        (work or dist.all_reduce(own(64), async_op=True)).wait()
        events = [e for e in profile.events() or [] if e.name == "fastdist:all_reduce"]
        assert [e.is_async for e in events] == [False] * (rank != 1)


@more_than_gloo
def what_groups_tell() -> None:
    group: Any = dist.group.WORLD
    options = copy.deepcopy(group._get_backend(torch.device("cpu")).options)  # as torch copies them
    assert options._timeout == timedelta(seconds=60)
    number = group._get_sequence_number_for_group()
    dist.all_reduce(own(2))
    dist.all_reduce(own(2), async_op=True).wait()
    assert group._get_sequence_number_for_group() == number + 2
    means = [own(2) + k for k in range(3)]
    wholes = [torch.tensor([3 * k, -3 * k - 1]) for k in range(2)]
    for several in (means, wholes):
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.AVG
        group.allreduce(several, options).wait()
    middle = own(2) + 1
    dist.all_reduce(middle, dist.ReduceOp.AVG)
    assert all(torch.allclose(mean, middle) for mean in means)
    assert [whole.tolist() for whole in wholes] == [[1, -2]] * 2
    with pytest.raises(TypeError, match="complex32 can only be summed and averaged, got max"):
        dist.reduce_scatter(
            torch.zeros(2, dtype=torch.complex32),
            [torch.zeros(2, dtype=torch.complex32)] * group.size(),
            dist.ReduceOp.MAX,
        )
