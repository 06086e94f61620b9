"""Ranks of the backend come and go, by the methods that torch 2.14 calls."""

import gc
import os
import signal
import time
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
import torch.distributed._functional_collectives as functional  # noqa: E402
from fastdist.integrations.torch_backend import _create  # noqa: E402
from machines import MachineRanks, Network, network  # noqa: E402
from ranks import ProcessRanks  # noqa: E402
from torch.distributed import distributed_c10d  # noqa: E402

__all__ = ["network"]  # a fixture


@pytest.fixture(scope="module")
def ranks() -> Iterator[ProcessRanks]:
    ranks = ProcessRanks(3)
    yield ranks
    ranks.close()


def unconnected(store: Any, comm: Any, seconds: float = 30) -> Any:
    """Make a group as `init_process_group(..., enable_reconfigure=True)` does."""
    options = SimpleNamespace(
        store=store,
        group_rank=comm.rank,
        group_size=comm.world_size,
        timeout=timedelta(seconds=seconds),
        group_id="world",
        enable_reconfigure=True,
    )
    return _create(options, None)


def options(uuid: int, handles: Any, seconds: float | None = None) -> Any:
    timeout = None if seconds is None else timedelta(seconds=seconds)
    return SimpleNamespace(uuid=uuid, handles=handles, timeout=timeout, hints={})


def check_sum(group: Any, own: float, total: float) -> None:
    x = torch.tensor([own])
    group.allreduce([x]).wait()
    assert x.item() == total


def worlds_that_change(comm: Any) -> None:
    group = unconnected(dist.HashStore(), comm)
    assert group.supports_reconfigure
    with pytest.raises(dist.DistBackendError, match="not connected: call reconfigure first"):
        group.allreduce([torch.ones(1)])
    handle = group.get_reconfigure_handle()
    everyone = comm.all_gather_object(handle)
    for uuid, members in enumerate(([0, 1, 2], [2, 0], [1, 2, 0], [0], [0, 1, 2])):
        if comm.rank in members:
            work = group.reconfigure(options(uuid, [everyone[rank] for rank in members]))
            assert work.wait()
            assert (group.rank(), group.size()) == (members.index(comm.rank), len(members))
            check_sum(group, comm.rank + 1.0, sum(rank + 1 for rank in members))
            assert group.failure() is None
        comm.barrier()
    group.reconfigure(options(5, set(everyone)))
    assert sorted(comm.all_gather_object(group.rank())) == [0, 1, 2]
    check_sum(group, 1.0, 3.0)
    group.abort()
    assert group.get_error().name == "COMM_ERROR"
    group.reconfigure(options(6, everyone))
    assert group.get_error().name == "SUCCESS"
    check_sum(group, 1.0, 3.0)
    assert group.get_reconfigure_handle() == handle
    group.shutdown()


def test_worlds_change(ranks: ProcessRanks) -> None:
    ranks.run(worlds_that_change)


def the_default_group(comm: Any, path: str) -> None:
    dist.init_process_group(
        "fastdist", init_method=f"file://{path}", rank=comm.rank, world_size=comm.world_size
    )
    world: Any = dist.group.WORLD
    everyone = comm.all_gather_object(world.get_reconfigure_handle())
    if comm.rank < 2:
        world.reconfigure(options(1, everyone[1::-1]))
        assert (dist.get_rank(), dist.get_world_size()) == (1 - comm.rank, 2)
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x.tolist() == [2, 2]
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))
        model(torch.full((1, 2), comm.rank + 1.0)).sum().backward()
        assert model.module.weight.grad.tolist() == [[1.5, 1.5]]
    else:
        with pytest.raises(dist.DistBackendError):
            dist.all_reduce(torch.ones(1))  # the others have left
    dist.destroy_process_group()


def test_the_default_group_changes(ranks: ProcessRanks, tmp_path: Any) -> None:
    ranks.run(the_default_group, str(tmp_path / "store"))


def by_torch(comm: Any, path: str) -> None:
    begin: Any = dist.init_process_group
    place = {"rank": comm.rank, "world_size": comm.world_size}
    begin("fastdist", init_method=f"file://{path}", **place, enable_reconfigure=True)
    assert distributed_c10d._supports_reconfigure()
    everyone = comm.all_gather_object(distributed_c10d._get_reconfigure_handle())
    for uuid, members in enumerate(([0, 1, 2], [2, 0], [1, 2, 0]), 1):
        if comm.rank in members:
            handles = [everyone[rank] for rank in members]
            assert distributed_c10d._reconfigure(uuid, handles).wait()
            assert dist.get_rank() == members.index(comm.rank)
            assert dist.get_world_size() == len(members)
            x = torch.ones(2)
            dist.all_reduce(x)
            y = functional.all_reduce(x, "sum", dist.group.WORLD)
            assert y.tolist() == [len(members) ** 2] * 2
        comm.barrier()
    dist.destroy_process_group()


@pytest.mark.skipif(not hasattr(distributed_c10d, "_reconfigure"), reason="needs torch 2.14")
def test_torch_changes_the_world(ranks: ProcessRanks, tmp_path: Any) -> None:
    ranks.run(by_torch, str(tmp_path / "store"))


def bad_handles(comm: Any) -> None:
    group = unconnected(dist.HashStore(), comm)
    own = group.get_reconfigure_handle()
    with pytest.raises(ValueError, match="must hold this rank's once, got it 2 times"):
        group.reconfigure(options(0, [own, own]))
    with pytest.raises(ValueError, match="not a handle of the backend"):
        group.reconfigure(options(0, [own, "[1, 2, 3]"]))
    lonely = unconnected(dist.HashStore(), comm).get_reconfigure_handle()
    with pytest.raises(dist.DistBackendError, match=r"did not arrive within 0\.3 s"):
        group.reconfigure(options(1, [own, lonely], 0.3))
    group.reconfigure(options(2, [own]))
    check_sum(group, 1.0, 1.0)
    group.shutdown()


def test_bad_handles_and_missing_ranks(ranks: ProcessRanks) -> None:
    ranks.run(bad_handles)


def a_death(comm: Any) -> float:
    group = unconnected(dist.HashStore(), comm)
    everyone = comm.all_gather_object(group.get_reconfigure_handle())
    group.reconfigure(options(1, everyone))
    if comm.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(dist.DistBackendError, match="rank 0 has died"):
        check_sum(group, 1.0, 3.0)
    assert "rank 0 has died" in str(group.failure())
    group.reconfigure(options(2, everyone[1:]))
    check_sum(group, 1.0, 2.0)
    group.shutdown()
    return time.monotonic() - began


def test_survivors_go_on_without_the_first_rank() -> None:
    ranks = ProcessRanks(3)
    try:
        with pytest.raises(AssertionError) as told:
            ranks.run(a_death)
        assert set(told.value.errors) == {0}  # type: ignore[attr-defined]
    finally:
        ranks.close()


def many_changes(comm: Any, count: int) -> list[int]:
    group = unconnected(dist.HashStore(), comm)
    everyone = comm.all_gather_object(group.get_reconfigure_handle())
    counts: list[list[int]] = []
    for uuid in range(count + 10):
        group.reconfigure(options(uuid, everyone))
        work = group.allreduce([torch.ones(1 << 16)])
        work.get_future().wait()
        if uuid in (9, count + 9):
            gc.collect()
            counts.append([len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd")])
    group.shutdown()
    return [now - then for then, now in zip(*counts, strict=True)]


@pytest.mark.slow
def test_changes_leak_nothing(ranks: ProcessRanks) -> None:
    grown = ranks.run(many_changes, 100)
    assert max(map(max, grown)) <= 1  # one may come or go at any moment; a leak is 100


def on_machines(comm: Any, address: str) -> list[str]:
    host, _, port = address.rpartition(":")
    # Each machine has a store of its own, as if other jobs had made the groups.
    first = comm.rank % 2 == 0
    store = dist.TCPStore(host, int(port), is_master=first, wait_for_workers=False)
    group = unconnected(dist.PrefixStore("of this group", store), comm)
    everyone = comm.all_gather_object(group.get_reconfigure_handle())
    engines = []
    for uuid, members in enumerate(([0, 1, 2, 3], [3, 0, 1], [2, 3], [1, 2])):
        if comm.rank in members:
            group.reconfigure(options(uuid, [everyone[rank] for rank in members]))
            check_sum(group, comm.rank + 1.0, sum(rank + 1 for rank in members))
            engines.append(type(group._comm.engine).__name__)
        comm.barrier()
    group.shutdown()
    return engines


def test_worlds_change_on_two_machines(network: Network) -> None:
    ranks = MachineRanks(network)
    try:
        addresses = [f"{address}:29411" for address in network.addresses]
        found = ranks.run(on_either_machine, addresses)
    finally:
        ranks.close()
    net, host = "NetEngine", "HostEngine"
    assert found == [[net, net], [net, net, net], [net, host, net], [net, net, host]]


def on_either_machine(comm: Any, addresses: list[str]) -> list[str]:
    return on_machines(comm, addresses[comm.rank // 2])
