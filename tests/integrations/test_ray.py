"""fastdist on a Ray cluster of two nodes on this machine, which the tests start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from paths import ROOT

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

from fastdist.errors import ClusterConfigError  # noqa: E402
from fastdist.integrations import ray as on_ray  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[str]:
    """The address of the cluster."""
    from ray.cluster_utils import Cluster

    head: dict[str, Any] = {"num_cpus": 3, "include_dashboard": False}
    # Workers that start in advance lack the runtime environment and are not used.
    head["_system_config"] = {"prestart_worker_first_driver": False}
    made = Cluster(initialize_head=True, head_node_args=head)
    try:
        made.add_node(num_cpus=3)
        environment = {"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}}
        ray.init(address=made.address, log_to_driver=False, runtime_env=environment)
        yield made.address
    finally:
        ray.shutdown()
        made.shutdown()


def add_up(summand: float) -> tuple[int, float, str]:
    import fastdist as fd
    import numpy as np

    comm = fd.init(timeout=60)
    total = comm.all_reduce(np.array([comm.rank + summand]))
    return comm.rank, float(total[0]), ray.get_runtime_context().get_node_id()


@pytest.mark.parametrize(("placement", "ranks"), [("PACK", 4), ("STRICT_SPREAD", 2)])
def test_ranks(placement: str, ranks: int) -> None:
    found = on_ray.run(add_up, ranks=ranks, args=(1.0,), placement=placement)
    total = ranks * (ranks + 1) / 2
    assert [result[:2] for result in found] == [(rank, total) for rank in range(ranks)]
    assert len({node for _, _, node in found}) == 2


def lose_a_rank(folder: Path) -> tuple[int, bool]:
    import fastdist as fd

    comm = fd.init(timeout=60)
    comm.barrier()
    first = not (folder / "lost").exists()
    comm.barrier()
    if comm.rank == 1 and first:
        (folder / "lost").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    comm.barrier()
    return comm.rank, first


def test_lost_ranks_are_started_again(tmp_path: Path) -> None:
    found = on_ray.run(lose_a_rank, ranks=2, args=(tmp_path,), max_restarts=1)
    assert found == [(0, False), (1, False)]


def test_restarts_are_counted(tmp_path: Path) -> None:
    with pytest.raises(ray.exceptions.RayActorError):
        on_ray.run(lose_a_rank, ranks=2, args=(tmp_path,))


def fail_on_one() -> None:
    import fastdist as fd

    comm = fd.init(timeout=60)
    if comm.rank == 1:
        raise ValueError("the cause")
    comm.barrier()


def test_the_first_error_is_raised() -> None:
    with pytest.raises(ValueError, match="the cause"):
        on_ray.run(fail_on_one, ranks=2, max_restarts=2)


def test_no_room() -> None:
    with pytest.raises(ClusterConfigError, match="no room for 40 processes"):
        on_ray.run(add_up, ranks=40, args=(1.0,), timeout=1)


def test_wrong_arguments() -> None:
    for given in ({}, {"ranks": 2, "workers": 1, "ps": 1}, {"workers": 2}, {"ps": 1}):
        with pytest.raises(ValueError, match="expected ranks=, or workers= and ps="):
            on_ray.run(add_up, **given)
    with pytest.raises(ValueError, match="at least 1"):
        on_ray.run(add_up, ranks=0)
    with pytest.raises(ValueError, match="at least one worker"):
        on_ray.run(add_up, workers=0, ps=1)


def train_mirrored() -> list[float]:
    import fastdist as fd
    import torch

    strategy = fd.MultiWorkerMirroredStrategy()
    with strategy.scope():
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    x = torch.arange(12.0).reshape(4, 3) / 12
    for batch in strategy.distribute_dataset(x, global_batch_size=4):
        strategy.run(step, args=(batch,))
    values: list[float] = model.weight.flatten().tolist()
    return values


def test_a_strategy_trains_as_on_one_device() -> None:
    alone = on_ray.run(train_mirrored, ranks=1)
    together = on_ray.run(train_mirrored, ranks=2)
    assert together[0] == together[1] == pytest.approx(alone[0], abs=1e-6)


def train_on_servers() -> Any:
    import fastdist as fd
    import torch

    strategy = fd.ParameterServerStrategy(fd.cluster.TFConfigClusterResolver())
    coordinator = fd.ClusterCoordinator(strategy)
    with strategy.scope():
        model = torch.nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with torch.no_grad():
            model.weight.zero_()

    def step(x: float) -> float:
        optimizer.zero_grad()
        model(torch.full((1, 2), x)).sum().backward()
        optimizer.step()
        return x

    results = [coordinator.schedule(step, args=(float(i),)) for i in range(4)]
    coordinator.join()
    return sorted(coordinator.fetch(results)), model.weight.detach().tolist()


def test_parameter_servers() -> None:
    pytest.importorskip("cryptography")
    assert on_ray.run(train_on_servers, workers=2, ps=1) == ([0, 1, 2, 3], [[-6.0, -6.0]])


def test_digits(cluster: str) -> None:
    command = [sys.executable, str(ROOT / "examples" / "cluster" / "ray_digits.py")]
    environ = os.environ | {"RAY_ADDRESS": cluster}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    ranks, _, _, loss, _, accuracy = done.stdout.split()  # "2 ranks  loss 0.2  accuracy 1.0"
    assert ranks == "2"
    assert float(loss) < 0.3
    assert float(accuracy) > 0.9
