"""The backend "fastdist" of torch.distributed on two machines with two ranks each."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from machines import MachineRanks, Network, network, ports  # noqa: E402
from ranks import ProcessRanks  # noqa: E402
from torch_cases import LIKE_GLOO, MORE_THAN_GLOO, run_case  # noqa: E402

__all__ = ["network"]  # a fixture


@pytest.fixture(scope="module")
def ranks(network: Network) -> Iterator[MachineRanks]:
    made = MachineRanks(network)
    yield made
    made.close()


@pytest.fixture(scope="module")
def here() -> Iterator[ProcessRanks]:
    made = ProcessRanks(4)
    yield made
    made.close()


@pytest.mark.parametrize("name", LIKE_GLOO)
def test_gives_what_gloo_gives(
    ranks: MachineRanks, here: ProcessRanks, name: str, tmp_path: Path
) -> None:
    expected = here.run(run_case, name, "gloo", str(tmp_path / "gloo"))
    assert ranks.run(run_case, name, "fastdist", str(tmp_path / "store")) == expected


@pytest.mark.parametrize("name", MORE_THAN_GLOO)
def test_does_what_gloo_refuses(ranks: MachineRanks, name: str, tmp_path: Path) -> None:
    ranks.run(run_case, name, "fastdist", str(tmp_path / "store"))


def meet_by_tcp(comm: Any, address: str) -> str:
    dist.init_process_group(
        "fastdist", init_method=address, rank=comm.rank, world_size=comm.world_size
    )
    x = torch.ones(3)
    dist.all_reduce(x)
    assert x[0] == comm.world_size
    world: Any = dist.group.WORLD
    engines = [type(world._comm.engine).__name__]
    for pair in ([0, 1], [0, 2], [2, 3], [1, 3]):
        group: Any = dist.new_group(pair)
        if comm.rank in pair:
            dist.all_reduce(x, group=group)
            engines.append(type(group._comm.engine).__name__)
    dist.barrier()
    dist.destroy_process_group()
    return " ".join(engines)


def test_groups_use_the_shortest_ways(ranks: MachineRanks) -> None:
    found = ranks.run(meet_by_tcp, f"tcp://{ranks.network.addresses[0]}:{next(ports)}")
    # Of the world, of the pair on this machine and of the pair across: in the order of the pairs.
    first, second = "NetEngine HostEngine NetEngine", "NetEngine NetEngine HostEngine"
    assert found == [first, "NetEngine HostEngine NetEngine", second, first]


def meet_with_secrets_of_machines(comm: Any, address: str) -> str:
    usual = os.environ["FASTDIST_SECRET"]
    os.environ["FASTDIST_SECRET"] = f"the secret of machine {comm.rank // 2}"
    try:
        with pytest.raises(dist.DistBackendError) as told:
            dist.init_process_group(
                "fastdist", init_method=address, rank=comm.rank, world_size=comm.world_size
            )
    finally:
        os.environ["FASTDIST_SECRET"] = usual
        comm.barrier()  # rank 0 has the store
    return str(told.value)


def test_ranks_with_different_secrets(ranks: MachineRanks) -> None:
    address = f"tcp://{ranks.network.addresses[0]}:{next(ports)}"
    for text in ranks.run(meet_with_secrets_of_machines, address):
        assert "does not prove that it has the secret of rank" in text
        assert "set FASTDIST_SECRET or FASTDIST_SECRET_FILE to the same" in text
