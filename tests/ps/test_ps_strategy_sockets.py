"""Jobs on one machine: tasks talk over sockets in a folder that only their user can open."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import fastdist as fd
import pytest
from fastdist.errors import ClusterConfigError, UnavailableError
from launched import wait_until
from ps_cluster import PsCluster

torch = pytest.importorskip("torch")


@pytest.mark.slow
def test_tasks_are_lost_and_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o700)
    monkeypatch.setenv("FASTDIST_PS_FOLDER", str(tmp_path))
    cluster = PsCluster(workers=2, servers=1)
    try:
        strategy = cluster.strategy()
        assert strategy.server_addresses == (f"ipc://{tmp_path}/ps-0",)
        coordinator = cluster.coordinator(strategy)
        assert {path.name for path in tmp_path.iterdir()} == {"ps-0", "worker-0", "worker-1"}
        with strategy.scope():
            model: Any = torch.nn.Linear(300, 2000, bias=False)
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
            torch.nn.init.zeros_(model.weight)

        def step() -> None:
            optimizer.zero_grad()
            model.weight.sum().backward()
            optimizer.step()

        def train(steps: int) -> float:
            for _ in range(steps):
                coordinator.schedule(step)
            coordinator.join()
            return float(model.weight.detach().unique())

        assert train(4) == -4
        strategy.save(tmp_path / "saved")
        cluster.kill("worker", 0)
        wait_until(lambda: coordinator.workers == [1])
        assert train(2) == -6
        cluster.start("worker", 0)
        wait_until(lambda: coordinator.workers == [0, 1])
        cluster.kill("worker", 1)
        wait_until(lambda: coordinator.workers == [0])
        assert train(2) == -8
        cluster.kill("ps", 0)
        with pytest.raises(UnavailableError, match=r"server 0 at ipc://.* is gone"):
            train(1)
        cluster.start("ps", 0)
        wait_until(lambda: is_restored(strategy, tmp_path / "saved"))
        assert train(2) == -6
        coordinator.close()
    finally:
        cluster.close()


def is_restored(strategy: Any, directory: Path) -> bool:
    try:
        strategy.restore(directory)
    except UnavailableError:
        return False
    return True


def test_a_folder_that_cannot_be_used_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)
    spec = {"chief": ["127.0.0.1:1"], "worker": ["127.0.0.1:2"], "ps": ["127.0.0.1:3"]}

    def start(folder: str) -> None:
        task = {"cluster": spec, "task": {"type": "chief", "index": 0}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(task))
        monkeypatch.setenv("FASTDIST_PS_FOLDER", folder)
        fd.ParameterServerStrategy()

    with pytest.raises(PermissionError, match="must be a folder of this user's alone"):
        start(str(tmp_path))
    for folder in ("@relative", f"/tmp/{'x' * 100}"):
        with pytest.raises(ClusterConfigError, match="must be an absolute path of up to 90 bytes"):
            start(folder)
    spec["ps"] = ["node1:3"]
    with pytest.raises(ClusterConfigError, match=r"tasks on 127\.0\.0\.1, node1: unset it"):
        start(str(tmp_path))
    assert os.listdir(tmp_path) == []
