"""Host RANK of a slice of two hosts, with two of four devices. Writes its results to a file.

torch_xla's runtime for CPUs does not span processes, so it is simulated: each process has all four
devices and runs the whole program, but writes and reads only the rows of its own devices (rows of
the other devices come by the hosts' communicator). All code above the mesh is the code that runs on
a TPU. The numbers of a host's devices are not consecutive, as on some TPUs.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import fastdist as fd
import pytest
import torch
from digits_training import adam
from fastdist import PerReplica, VariableAggregation, VariableSynchronization
from fastdist.cluster import TPUClusterResolver
from fastdist.collectives.init import default_communicator
from fastdist.data import AutoShardPolicy
from fastdist.errors import CollectiveMismatchError, FastdistError
from fastdist.tpu import mesh
from fastdist.tpu import strategy as tpu_strategy
from fastdist.tpu.mesh import Mesh, RuntimeDevices
from torch import nn
from virtual_devices import normed, traced_id, train_on_dataset

RANK = int(sys.argv[1])
DEVICES = [(0, 2), (1, 3)]
RESOLVER = TPUClusterResolver(["127.0.0.1", "127.0.0.2"], RANK, port=int(sys.argv[2]))


class HalfMesh(Mesh):
    """A mesh of which this process sees its own devices only."""

    def _sent_rows(self, own: torch.Tensor) -> torch.Tensor:
        rows = default_communicator().all_gather(own)
        order = [number for numbers in DEVICES for number in numbers]
        return super()._sent_rows(rows[[order.index(device) for device in range(4)]])

    def rows(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        shards = super().rows(tensor)
        return [shards[number] for number in DEVICES[RANK]]


def half_of_the_devices() -> RuntimeDevices:
    return RuntimeDevices("CPU", 4, DEVICES[RANK])


def values(strategy: fd.TPUStrategy) -> dict[str, Any]:
    """Return the results of contexts, reductions, gathers, collectives and variables."""
    ids = strategy.run(traced_id)
    ragged = strategy.distribute_values_from_function(
        lambda c: torch.full((c.replica_id_in_sync_group + 1, 1), c.replica_id_in_sync_group)
    )
    with strategy.scope():
        total = fd.Variable(
            0.0,
            synchronization=VariableSynchronization.ON_READ,
            aggregation=VariableAggregation.SUM,
        )
        own = fd.Variable(0.0)

    def collectives() -> Any:
        context = fd.get_replica_context()
        assert context is not None
        total.assign_add(traced_id() + 1.0)
        own.assign(traced_id() * 10.0)
        return (
            context.all_reduce("sum", traced_id()),
            context.all_reduce("sum", float(RANK)),  # equal on a host's devices
            context.all_reduce("max", {"rank": RANK}),
            context.all_gather(traced_id()[None]),
        )

    summed, numbers, most, gathered = strategy.run(collectives)
    own.assign(PerReplica((RANK * 2 + 0.5, RANK * 2 + 1.5)))
    return {
        "replicas": (strategy.num_replicas_in_sync, strategy.local_replica_ids),
        "ids": [int(i) for i in strategy.local_results(ids)],
        "reduced": [float(strategy.reduce(op, ids)) for op in ("sum", "mean", "min", "max")],
        "numbers": float(strategy.reduce("sum", float(RANK))),
        "gathered": strategy.gather(ragged).flatten().tolist(),
        "joined": strategy.gather(strategy.run(lambda: traced_id()[None])).tolist(),
        "all_reduce": [int(i) for i in strategy.local_results(summed)],
        "all_reduce of numbers": [float(i) for i in strategy.local_results(numbers)],
        "max of numbers": [int(i) for i in strategy.local_results(most["rank"])],
        "all_gather": [i.tolist() for i in strategy.local_results(gathered)],
        "total": float(total.value),
        "own": [float(i) for i in strategy.local_results(own)],
        "read in run": [float(i) for i in strategy.local_results(strategy.run(lambda: own.value))],
    }


def trained(strategy: fd.TPUStrategy, size: int, epochs: int = 1) -> Any:
    """Return weights and losses; without the strategy, hosts would begin with other weights."""
    torch.manual_seed(1 + RANK)
    with strategy.scope():
        model, optimizer = adam()
    return train_on_dataset(strategy, lambda: (model, optimizer), epochs, global_batch_size=size)


def own_data(strategy: fd.TPUStrategy) -> list[float]:
    """Each host reads data of its own, and host 1 has less."""
    source = torch.arange(10.0) if RANK == 0 else torch.arange(100.0, 105.0)
    batches = strategy.distribute_dataset(
        source, global_batch_size=8, auto_shard_policy=AutoShardPolicy.OFF
    )
    return [
        float(strategy.reduce("sum", strategy.run(lambda x: x.sum(), (one,)))) for one in batches
    ]


def metrics(strategy: fd.TPUStrategy) -> float:
    tm = pytest.importorskip("torchmetrics")
    with strategy.scope():
        error = tm.MeanSquaredError()
    for one in strategy.distribute_dataset(torch.arange(10.0), global_batch_size=4):
        strategy.run(lambda x: error.update(x, torch.zeros_like(x)), (one,))
    return float(error.compute())


def mistakes(strategy: fd.TPUStrategy) -> dict[str, str]:
    """Return the errors for hosts that differ; the strategy stays usable."""
    said = {}

    def differs() -> Any:
        context = fd.get_replica_context()
        assert context is not None
        return context.all_reduce("sum", torch.ones(2 + RANK, device="xla"))

    with pytest.raises(CollectiveMismatchError) as caught:
        strategy.run(differs)
    said["call"] = str(caught.value)
    with pytest.raises(FastdistError) as other, strategy.scope():
        made = nn.Linear(2, 2 + RANK)
    del made
    said["model"] = str(other.value)
    said["after"] = str(float(strategy.reduce("sum", strategy.run(traced_id))))
    return said


def main() -> None:
    with pytest.raises(fd.errors.ClusterConfigError, match="4 CPU devices, 4 of them on this host"):
        fd.TPUStrategy(RESOLVER)
    mesh.start_runtime = tpu_strategy.start_runtime = half_of_the_devices
    tpu_strategy.Mesh = HalfMesh
    strategy = fd.TPUStrategy(RESOLVER)
    warnings.filterwarnings("ignore", "run of .* was compiled again")
    seen: dict[str, Any] = {"values": values(strategy)}
    strategy = fd.TPUStrategy(RESOLVER)
    seen["trained"] = trained(strategy, 100)
    seen["compiled"] = strategy.compilations.count
    seen["one example in the last"] = trained(strategy, 898)
    seen["six steps"] = trained(fd.TPUStrategy(RESOLVER, steps_per_execution=6), 100)
    seen["own data"] = own_data(strategy)
    seen["metric"] = metrics(strategy)
    seen["normed"] = train_on_dataset(strategy, normed, 1, global_batch_size=600)
    seen["mistakes"] = mistakes(strategy)
    torch.save(seen, sys.argv[3])


if __name__ == "__main__":
    main()
