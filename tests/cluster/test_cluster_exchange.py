"""Roles under torchrun, or under no launcher: how ranks tell each other where they listen."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from fastdist.cluster import TorchrunClusterResolver
from fastdist.cluster.address import own_address
from fastdist.errors import ClusterConfigError
from fork_server import python
from held_ports import free_port

JOBS = {"chief": 1, "worker": 2, "ps": 1}
SHOW = """
import json, socket, sys
from fastdist.cluster import TorchrunClusterResolver, split_address
resolver = TorchrunClusterResolver(jobs=json.loads(sys.argv[1]))
spec = resolver.cluster_spec()
again = TorchrunClusterResolver(jobs=json.loads(sys.argv[1]))
assert again.cluster_spec() == spec
own = split_address(spec.task_address(resolver.task_type, resolver.task_id))
with socket.socket() as listener:
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(own)
    listener.listen()
line = json.dumps([resolver.task_type, resolver.task_id, spec.as_dict()])
open(f"{sys.argv[2]}/{resolver.task_type}{resolver.task_id}", "w").write(line)
"""
PLACES = [["chief", 0], ["ps", 0], ["worker", 0], ["worker", 1]]


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "show.py"
    path.write_text(SHOW)
    return path


def environ(**changes: str) -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in names}
    return kept | {"OMP_NUM_THREADS": "1"} | changes


def check_shown(folder: Path) -> None:
    shown = [json.loads(path.read_text()) for path in sorted(folder.iterdir())]
    assert [line[:2] for line in shown] == PLACES
    spec = shown[0][2]
    assert all(line[2] == spec for line in shown)
    assert {job: len(tasks) for job, tasks in spec.items()} == JOBS
    addresses = [address for tasks in spec.values() for address in tasks]
    assert len({address.rpartition(":")[2] for address in addresses}) == 4


@pytest.mark.slow
def test_torchrun(script: Path, tmp_path: Path) -> None:
    folder = tmp_path / "shown"
    folder.mkdir()
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    done = subprocess.run(
        [*launch, str(script), json.dumps(JOBS), str(folder)],
        env=environ(),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    check_shown(folder)


def start(
    script: Path, folder: Path, rank: int, port: int, jobs: Mapping[str, int], **changes: str
) -> "subprocess.Popen[str]":
    place = {"RANK": str(rank), "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1"}
    return python(
        *(str(script), json.dumps(jobs), str(folder)),
        env=environ(**place, MASTER_PORT=str(port), **changes),
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_ranks_set_by_hand_where_rank_0_ends_at_once(script: Path, tmp_path: Path) -> None:
    folder = tmp_path / "shown"
    folder.mkdir()
    port = free_port()
    ranks = [start(script, folder, rank, port, JOBS) for rank in range(4)]
    said = [rank.communicate(timeout=120)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 4, said
    check_shown(folder)


@pytest.mark.slow
def test_pods_of_an_indexed_job(script: Path, tmp_path: Path) -> None:
    folder = tmp_path / "shown"
    folder.mkdir()
    run = [sys.executable, "-m", "fastdist", "run", "--nnodes", "4", "-n", "1"]
    run += ["--rdzv", f"127.0.0.1:{free_port()}", "--node-rank"]
    program = [str(script), json.dumps(JOBS), str(folder)]
    pods = [subprocess.Popen([*run, str(index), *program], env=environ()) for index in range(4)]
    assert [pod.wait(120) for pod in pods] == [0] * 4
    check_shown(folder)


@pytest.mark.slow
def test_a_rank_that_does_not_come(script: Path, tmp_path: Path) -> None:
    rank = start(script, tmp_path, 0, free_port(), JOBS, FASTDIST_RENDEZVOUS_TIMEOUT_S="2")
    _, said = rank.communicate(timeout=120)
    assert rank.returncode == 1
    assert "rank 0 of 4 could not exchange addresses at 127.0.0.1:" in said
    assert "within 2 s" in said


@pytest.mark.parametrize(
    ("jobs", "changes", "message"),
    [
        ({"worker": 3}, {}, "{'worker': 3} are 3 tasks; expected 4, as WORLD_SIZE='4'"),
        ({}, {}, "{} are 0 tasks; expected 4"),
        ({"worker": 5, "ps": -1}, {}, "{'worker': 5, 'ps': -1} are 4 tasks"),
        ({"chief": 2, "worker": 1, "ps": 1}, {}, "2 chiefs; expected at most one"),
        ({"master": 1, "worker": 3}, {}, "unknown job 'master'"),
        ({"ps": 4}, {}, "no worker and no chief"),
        (JOBS, {"MASTER_ADDR": ""}, "MASTER_ADDR and MASTER_PORT are not set"),
        (JOBS, {"MASTER_PORT": "x"}, "MASTER_PORT='x': malformed"),
        (JOBS, {"FASTDIST_RENDEZVOUS_TIMEOUT_S": "-1"}, "must be a positive number of seconds"),
    ],
)
def test_is_refused_before_anybody_waits(
    jobs: dict[str, int], changes: dict[str, str], message: str
) -> None:
    place = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with pytest.raises((ClusterConfigError, ValueError)) as caught:
        TorchrunClusterResolver({**place, **changes}, jobs=jobs)
    assert message in str(caught.value)


def test_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.distributed", None)
    place = {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    with pytest.raises(ImportError, match=r"pip install torch$"):
        TorchrunClusterResolver(place, jobs=JOBS)


def test_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert own_address("127.0.0.1", 9) == "127.0.0.1"
    with pytest.raises(ClusterConfigError, match="no route to no-such-host"):
        own_address("no-such-host.invalid", 9)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert own_address("10.0.0.1", 9) == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such")
    with pytest.raises(ClusterConfigError, match="GLOO_SOCKET_IFNAME='no-such'"):
        own_address("10.0.0.1", 9)
