"""Workers and servers are killed and stopped under load, and acknowledged pushes are counted.

Every change pushes ones, and each side counts: the pushes that a client has begun, the acknowledged
pushes, and the values on the servers at the end. No push is applied twice, and none is lost.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from fastdist.ps import Client
from fastdist.ps.client.checkpoint import restore_checkpoint, save_checkpoint
from fastdist.ps.client.partition import FixedShards
from fastdist.ps.client.sharded import pull_together
from launched import wait_until
from ps_cluster import PsCluster
from ps_load import CLIENTS, MOST, Job, Things

seconds = pytest.mark.parametrize(
    "seconds", [pytest.param(25, marks=[pytest.mark.slow, pytest.mark.timeout(400)])]
)


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    job.close()


def within(values: np.ndarray, least: int, most: int) -> None:
    assert least <= values.min()
    assert values.max() <= most


@seconds
def test_clients_that_are_killed_and_servers_that_are_slow(job: Job, seconds: float) -> None:
    with Client(job.addresses, timeout_s=60) as client:
        things = Things(client, MOST)
        job.disturb(seconds, random.Random(0))
        job.hold()
        acked, begun = np.array(job.acked), np.array(job.begun)
        for number in range(job.made):
            got = things.row(number)
            if number in job.clients:
                assert got == acked[number] == begun[number]
            else:
                assert acked[number] <= got <= begun[number] <= acked[number] + 1
        pulled = [one.value for one in pull_together(client, [one.lookup() for one in things.all])]
        for i, value in enumerate(pulled):
            its = slice(i, None, len(pulled))
            within(value, acked[its].sum(), begun[its].sum())
        within(things.large.pull(), acked[::CLIENTS].sum(), begun[::CLIENTS].sum())
        counts = [client.stats(server) for server in range(2)]
    assert job.made > CLIENTS
    assert sum(count["repeated"] for count in counts) > 0
    assert acked.sum() > job.made
    print(
        f"{acked.sum()} acknowledged, {job.made - CLIENTS} clients killed, {counts[0]['repeated']}"
    )


@seconds
def test_servers_that_are_killed(job: Job, seconds: float, tmp_path: Path) -> None:
    end = time.monotonic() + seconds
    lost = np.zeros(CLIENTS, np.int64)  # acknowledged, but not in the restored checkpoint
    server = 0
    wait_until(lambda: all(job.acked[n] > 2 for n in range(CLIENTS)))
    while server < 2 or time.monotonic() < end:
        with Client(job.addresses, timeout_s=60) as client:
            least = np.array(job.acked)[:CLIENTS] - lost
            save_checkpoint(client, tmp_path, Things(client, MOST).sharded)
            most = np.array(job.begun)[:CLIENTS] - lost
        time.sleep(0.5)
        job.kill_server(server % 2)
        job.hold()  # clients notice within seconds
        job.start_server(server % 2)
        with Client(job.addresses, timeout_s=60) as client:
            things = Things(client, MOST)
            restore_checkpoint(client, tmp_path, things.sharded)
            for number in range(CLIENTS):
                kept = things.row(number)
                assert least[number] <= kept <= most[number]
                lost[number] = job.begun[number] - kept
            job.go_on()
            before = np.array(job.acked)[:CLIENTS]
            wait_until(lambda: (np.array(job.acked)[:CLIENTS] > before + 2).all())  # noqa: B023
            job.hold()
            for number in range(CLIENTS):
                assert things.row(number) == job.begun[number] - lost[number]
            job.go_on()
        server += 1
    print(f"{sum(job.acked)} acknowledged, {server} servers killed")


@seconds
def test_workers_that_are_killed(seconds: float) -> None:
    """Each finished function has stepped; the function of a killed worker may step repeatedly."""
    cluster = PsCluster(workers=2, servers=2)
    try:
        strategy = cluster.strategy(FixedShards(2))
        coordinator = cluster.coordinator(strategy)
        with strategy.scope():
            model = torch.nn.Linear(8, 4)
            with torch.no_grad():
                model.weight.zero_()
            optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def count(number: int) -> int:
            optimizer.zero_grad()
            model.weight.sum().neg().backward()
            optimizer.step()
            return number

        values, kills = [], 0
        end = time.monotonic() + seconds
        while kills < 2 or time.monotonic() < end:
            values += [coordinator.schedule(count, (len(values) + i,)) for i in range(100)]
            wait_until(values[-90].is_done)
            cluster.kill("worker", kills % 2)
            cluster.start("worker", kills % 2)
            kills += 1
        coordinator.join()
        assert coordinator.fetch(values) == list(range(len(values)))
        weight = model.weight.detach().numpy()
        assert (
            len({row.tobytes() for row in weight[:2]})
            == len({row.tobytes() for row in weight[2:]})
            == 1
        )
        within(weight, len(values), len(values) + 2 * kills)
        twice = weight.max() - len(values)
        print(f"{len(values)} functions, {kills} workers killed, {twice:.0f} ran twice")
    finally:
        cluster.close()
