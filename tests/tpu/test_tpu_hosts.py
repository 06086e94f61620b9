"""A slice of two hosts with two devices each, simulated as tpu_host.py describes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import fastdist as fd
import pytest
import torch
from digits_training import adam, require_close
from virtual_devices import N, mirrored, normed, on_devices, train_on_dataset

pytestmark = [*on_devices, pytest.mark.skipif(N != 4, reason="needs CPU_NUM_DEVICES=4")]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("hosts")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    script = Path(__file__).with_name("tpu_host.py")
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), port, str(folder / str(rank))],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environ,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=280)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(said)
    return [torch.load(folder / str(rank)) for rank in range(2)]


def test_values(hosts: list[dict[str, Any]]) -> None:
    for rank, seen in enumerate(hosts):
        own = [2 * rank, 2 * rank + 1]
        assert seen["values"] == {
            "replicas": (4, tuple(own)),
            "ids": own,
            "reduced": [6, 1.5, 0, 3],
            "numbers": 2,
            "gathered": [r for r in range(4) for _ in range(r + 1)],
            "joined": [0, 1, 2, 3],
            "all_reduce": [6, 6],
            "all_reduce of numbers": [2],
            "max of numbers": [1],
            "all_gather": [[0, 1, 2, 3]] * 2,
            "total": 10,
            "own": [i + 0.5 for i in own],
            "read in run": [i + 0.5 for i in own],
        }


@pytest.mark.parametrize(
    ("name", "size"),
    [("trained", 100), ("one example in the last", 898), ("six steps", 100)],
)
def test_trains_as_on_one_device(hosts: list[dict[str, Any]], name: str, size: int) -> None:
    wanted, same = train_on_dataset(fd.OneDeviceStrategy("cpu"), adam, 1, global_batch_size=size)
    for seen in hosts:
        got, losses = seen[name]
        require_close(got, wanted, 4e-5)
        assert losses == pytest.approx(same, abs=1e-4)
    assert [seen["compiled"] for seen in hosts] == [1, 1]


def batch_norm_of_replicas(strategy: fd.Strategy) -> Any:
    return train_on_dataset(strategy, normed, 1, global_batch_size=600)


def test_batch_norm(hosts: list[dict[str, Any]]) -> None:
    wanted, _ = mirrored(batch_norm_of_replicas, replicas=4)
    for seen in hosts:
        require_close(seen["normed"][0], wanted, 4e-5)


def test_hosts_with_data_of_their_own(hosts: list[dict[str, Any]]) -> None:
    first = [sum(range(i, min(i + 4, 10))) for i in range(0, 10, 4)]
    second = [sum(range(100, 104)), 104, 0]
    for seen in hosts:
        assert seen["own data"] == [a + b for a, b in zip(first, second, strict=True)]


def test_metrics(hosts: list[dict[str, Any]]) -> None:
    assert [seen["metric"] for seen in hosts] == [pytest.approx(28.5)] * 2


def test_mistakes(hosts: list[dict[str, Any]]) -> None:
    for seen in hosts:
        said = seen["mistakes"]
        assert 'rank 0: all_reduce(float32 × 2, op="sum") at ' in said["call"]
        assert 'rank 1: all_reduce(float32 × 3, op="sum") at ' in said["call"]
        assert "in differs" in said["call"]
        assert "the model differs between replicas, seen from rank" in said["model"]
        assert said["after"] == "6.0"
