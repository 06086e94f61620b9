"""Diagnoses of jobs whose ranks are on two machines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fastdist.recorder import place
from fastdist.recorder.diagnosis import diagnose
from fastdist.recorder.jobs import Job, jobs_here
from fastdist.recorder.occupation import Kind
from machines import Network, network, ports
from stalled import PROGRAM

__all__ = ["network"]  # a fixture


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    made = tmp_path / "records"
    made.mkdir(mode=0o700)
    monkeypatch.setattr(place, "_folders", lambda: [made])
    return made


@pytest.fixture
def steady(network: Network, folder: Path) -> Iterator[Job]:
    """Two ranks on two machines, which make their steps."""
    port = str(next(ports))
    processes = []
    for rank in range(2):
        env = {key: value for key, value in os.environ.items() if key != "FASTDIST_JOB"}
        env |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        env |= {"MASTER_ADDR": network.addresses[0], "MASTER_PORT": port}
        command = network.command(rank, sys.executable, str(PROGRAM), "steady", "0", str(folder))
        processes.append(subprocess.Popen(command, env=env, stderr=subprocess.PIPE))
    end_s = time.monotonic() + 60
    while not (jobs := jobs_here()[0]) or not is_steady(jobs[0]):
        assert time.monotonic() < end_s
        time.sleep(0.05)
    yield jobs[0]
    for process in processes:
        process.kill()
        process.communicate()


def is_steady(job: Job) -> bool:
    return len(job.ranks) == 2 and all(len(each.records.calls) > 100 for each in job.ranks)


def test_a_cut_cable(network: Network, steady: Job) -> None:
    assert diagnose(steady).kind is Kind.SLOW
    network.set_cable("down", 1)
    try:
        time.sleep(2)
        found = diagnose(steady)
    finally:
        network.heal(1)
    assert found.kind is Kind.LINK, found.sentence
    assert "gets no answers from 10." in found.sentence or "get no answers" in found.sentence


def test_a_rank_whose_records_are_elsewhere(steady: Job, folder: Path) -> None:
    """The records of rank 1 are not here, as if its machine were another."""
    os.kill(steady.ranks[1].records.pid, signal.SIGSTOP)
    steady.ranks[1].place.remove()
    time.sleep(2)
    (job,) = jobs_here()[0]
    found = diagnose(job)
    assert (found.kind, found.ranks) == (Kind.UNKNOWN, (1,)), found.sentence
    assert found.sentence.startswith("rank 1 cannot be seen from here; rank 0 waits for it in all_")
