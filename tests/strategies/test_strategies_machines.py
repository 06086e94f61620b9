"""Strategies across two machines, found by a launcher's variables or by TF_CONFIG."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest
from held_ports import free_port
from machines import MachineRanks, Network, network, ports
from test_strategies import Contract, run_case

pytest.importorskip("torch.distributed")
__all__ = ["network"]  # a fixture


@pytest.fixture(scope="module")
def strategies(network: Network) -> Iterator[Any]:
    made = OnMachines(network)
    yield made
    made.ranks.close()


class OnMachines:
    """MultiWorkerMirroredStrategy on two machines of two processes."""

    runs_in_one_process = False

    def __init__(self, network: Network) -> None:
        self.ranks = MachineRanks(network)

    def run(self, case: Callable[[Any], Any], **options: Any) -> list[Any]:
        return self.ranks.run(run_case, cloudpickle.dumps(case), "multi_worker", options)


contract = Contract()


@pytest.mark.parametrize(
    "test",
    [
        contract.test_reduce_of_one_on_each,
        contract.test_reduce_along_an_axis,
        contract.test_gather,
        contract.test_all_gather_and_its_gradient,
        contract.test_merge_call,
        contract.test_a_shuffled_dataset_trains_as_on_one_device,
        contract.test_replicas_without_examples,
        contract.test_batch_norm_keeps_the_mean_over_replicas,
        contract.test_sync_batch_norm_sees_the_global_batch,
        contract.test_sparse_gradients,
        contract.test_out_of_sync_is_seen,
    ],
    ids=lambda test: test.__name__,
)
def test_contract(strategies: Any, test: Callable[[Any], None]) -> None:
    test(strategies)


WORKER = """
    import torch, torch.nn.functional as F, fastdist as fd
    torch.set_num_threads(1)
    strategy = fd.MultiWorkerMirroredStrategy(devices=["cpu"] * DEVICES)
    torch.manual_seed(strategy.local_replica_ids[0])
    with strategy.scope():
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step(x):
        optimizer.zero_grad()
        F.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()
    x = torch.randn(7, 3, generator=torch.Generator().manual_seed(5))
    for batch in strategy.distribute_dataset(x, global_batch_size=4):
        strategy.run(step, args=(batch,))
    strategy.check_in_sync()
    engine = type(fd.init().engine).__name__
    if DEVICES == 1:  # a strategy of this machine beside it
        assert fd.MirroredStrategy(["cpu"]).num_replicas_in_sync == 1
    print(strategy.num_replicas_in_sync, engine, [round(v, 6) for v in model.weight[0].tolist()])
"""


def start(
    prefix: list[str],
    cluster: dict[str, list[str]],
    kind: str,
    index: int,
    patience_s: int = 40,
    devices: int = 1,
) -> Any:
    config = {"cluster": cluster, "task": {"type": kind, "index": index}}
    env = {**os.environ, "TF_CONFIG": json.dumps(config)}
    env["FASTDIST_RENDEZVOUS_TIMEOUT_S"] = str(patience_s)
    command = [*prefix, sys.executable, "-W", "error", "-c"]
    command.append(f"DEVICES = {devices}\n{textwrap.dedent(WORKER)}")
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, text=True, stdout=pipe, stderr=pipe)


def trained(started: list[Any]) -> str:
    answers = [process.communicate(timeout=60) for process in started]
    assert [process.returncode for process in started] == [0] * len(started), answers
    assert len({out for out, _ in answers}) == 1, answers
    out: str = answers[0][0]
    return out


def on_one_machine(
    kinds: list[tuple[str, int]], patience_s: int = 40, devices: int = 1
) -> list[Any]:
    jobs = [kind for kind, _ in kinds]
    cluster = {
        kind: [f"localhost:{free_port()}" for _ in range(jobs.count(kind))] for kind in set(jobs)
    }
    return [start([], cluster, kind, index, patience_s, devices) for kind, index in kinds]


@pytest.mark.timeout(120)
def test_tf_config(network: Network) -> None:
    """A worker on each machine trains what two on one machine do."""
    here = trained(on_one_machine([("chief", 0), ("worker", 0)]))
    addresses = [f"{address}:{next(ports)}" for address in network.addresses]
    cluster = {"worker": addresses, "evaluator": ["192.0.2.1:1"]}
    apart = trained([start(network.command(i), cluster, "worker", i) for i in range(2)])
    assert here.startswith("2 HostEngine")
    assert apart.replace("NetEngine", "HostEngine") == here


@pytest.mark.timeout(120)
def test_workers_with_two_devices_start_their_second_replica(network: Network) -> None:
    """Two workers of two replicas: on one machine, and on two."""
    here = trained(on_one_machine([("worker", 0), ("worker", 1)], devices=2))
    assert here.startswith("4 HostEngine")
    addresses = [f"{address}:{next(ports)}" for address in network.addresses]
    apart = trained(
        [start(network.command(i), {"worker": addresses}, "worker", i, devices=2) for i in range(2)]
    )
    assert apart.startswith("4 NetEngine")
    assert apart.split(" ", 2)[2] == here.split(" ", 2)[2]


@pytest.mark.slow
def test_workers_with_different_numbers_of_devices() -> None:
    cluster = {"worker": [f"localhost:{free_port()}" for _ in range(2)]}
    started = [start([], cluster, "worker", i, 10, devices=1 + i) for i in range(2)]
    errors = [process.communicate(timeout=60)[1] for process in started]
    assert any("disagree on the number of ranks" in error for error in errors), errors
    assert all(process.returncode != 0 for process in started)


@pytest.mark.slow
def test_tf_config_that_names_a_task_twice() -> None:
    started = on_one_machine([("worker", 0), ("worker", 0)], patience_s=4)
    errors = [process.communicate(timeout=60)[1] for process in started]
    assert any("ClusterConfigError" in error for error in errors), errors
    assert all(process.returncode != 0 for process in started)


@pytest.mark.slow
def test_the_evaluator_does_not_train() -> None:
    cluster = {"worker": ["localhost:1", "localhost:2"], "evaluator": ["localhost:3"]}
    process = start([], cluster, "evaluator", 0)
    assert "evaluator 0 takes no part in training" in process.communicate(timeout=60)[1]
