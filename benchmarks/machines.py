"""Measures all_reduce between machines next to Gloo, against bars. Needs root, `ip` and `tc`.

    python benchmarks/machines.py [--json FILE] [--sizes 64K 1M 16M 64M]

The machines are network namespaces of this computer, joined by a bridge; their links are shaped by
`tc tbf`, or not at all. Both engines live in the same processes and take turns. Each rank writes
its array before every timed call, results are checked, and the time of a call is that of its
slowest rank. The share of the limit is relative to the least time that the link allows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from bars import Bar
from fastdist.cli.machine_facts import machine_facts
from fastdist.cli.sizes import format_size, parse_size

_TIMED_S = 3.0
_LEAST_CALLS, _MOST_CALLS = 5, 200
# Gloo's time over fastdist's that is required: by machines × ranks, link and size.
_SHAPED = {"64K": 2.0, "1M": 1.4, "16M": 1.4, "64M": 1.4}
_LIMIT_SHARE = {"16M": 85.0, "64M": 85.0}


@dataclass(frozen=True)
class Setting:
    """A number of machines, ranks on each, and the rate of each machine's link; 0 is unshaped."""

    machines: int
    ranks: int
    mbit: int

    def __str__(self) -> str:
        link = f"{self.mbit} Mbit/s" if self.mbit else "unshaped"
        return f"{self.machines} machines × {self.ranks} ranks, {link}"


_SETTINGS = (Setting(2, 2, 1000), Setting(2, 2, 0), Setting(3, 1, 1000), Setting(3, 1, 0))


@dataclass(frozen=True)
class Result:
    """Medians of one setting and size, in microseconds."""

    setting: Setting
    size: str
    fastdist_us: float
    gloo_us: float
    limit_us: float
    wrong: int

    @property
    def ratio(self) -> float:
        """Gloo's time over fastdist's."""
        return self.gloo_us / self.fastdist_us


def main() -> None:
    """Measure every setting and print a line per size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the results into a file")
    parser.add_argument("--sizes", nargs="+", default=["64K", "1M", "16M", "64M"])
    parser.add_argument("--only", help="measure settings whose text contains this")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return _work(json.loads(arguments.worker))
    results: list[Result] = []
    for setting in _SETTINGS:
        if arguments.only and arguments.only not in str(setting):
            continue
        print(setting, flush=True)
        for result in _measure(setting, arguments.sizes):
            results.append(result)
            bars = list(_bars(result))
            limit = f", {100 * result.limit_us / result.fastdist_us:3.0f} % of the link's limit"
            print(
                f"  {result.size:>4}: fastdist {result.fastdist_us:10,.0f} us, "
                f"gloo {result.gloo_us:10,.0f} us, {result.ratio:.2f} times as fast"
                + (limit if setting.mbit else "")
                + f", {result.wrong} wrong; "
                + "; ".join(f"{bar.verdict} {bar}" for bar in bars),
                flush=True,
            )
    if arguments.json:
        with open(arguments.json, "w") as file:
            rows = [asdict(result) for result in results]
            json.dump({"machine": machine_facts(), "rows": rows}, file, indent=1)


def _bars(result: Result) -> Iterator[Bar]:
    setting = result.setting
    least = 1.0
    if setting.machines == 2:
        least = _SHAPED.get(result.size, 1.0) if setting.mbit else 1.5
    yield Bar("against gloo", result.ratio, least)
    if setting.mbit and result.size in _LIMIT_SHARE:
        share = 100 * result.limit_us / result.fastdist_us
        yield Bar("of the limit", share, _LIMIT_SHARE[result.size], unit="%")


def _measure(setting: Setting, sizes: list[str]) -> Iterator[Result]:
    world = setting.machines * setting.ranks
    with _network(setting) as names:
        plan = json.dumps({"sizes": sizes, "ranks": setting.ranks})
        workers = []
        for rank in range(world):
            machine, local = divmod(rank, setting.ranks)
            env = os.environ | {
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_RANK": str(local),
                "LOCAL_WORLD_SIZE": str(setting.ranks),
                "MASTER_ADDR": _address(0),
                "MASTER_PORT": "29500",
                "GLOO_SOCKET_IFNAME": "eth0",
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, __file__, "--worker", plan]
            workers.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", names[machine], *command],
                    env=env,
                    text=True,
                    stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                )
            )
        try:
            assert workers[0].stdout is not None
            for line in workers[0].stdout:
                row = json.loads(line)
                # A link must carry 2 (m - 1) / m bytes per byte of the array in each direction.
                crossing = 2 * (setting.machines - 1) / setting.machines
                limit = crossing * parse_size(row["size"]) * 8 / setting.mbit if setting.mbit else 0
                yield Result(setting, limit_us=limit, **row)
            if any(worker.wait(60) for worker in workers):
                sys.exit("a rank has failed")
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()


def _address(machine: int) -> str:
    return f"10.213.9.{machine + 1}"


@contextmanager
def _network(setting: Setting) -> Iterator[list[str]]:
    """Namespaces joined by a bridge in another namespace."""
    tag = f"fdb{os.getpid()}"
    names = [f"{tag}m{machine}" for machine in range(setting.machines)]
    hub = f"{tag}hub"
    try:
        for name in (hub, *names):
            _run("ip", "netns", "add", name)
        _run("ip", "-n", hub, "link", "add", "br0", "type", "bridge")
        _run("ip", "-n", hub, "link", "set", "br0", "up")
        for machine, name in enumerate(names):
            far = f"p{machine}"
            _run("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", far, "netns", hub)
            _run("ip", "-n", hub, "link", "set", far, "master", "br0", "up")
            _run("ip", "-n", name, "addr", "add", f"{_address(machine)}/24", "dev", "eth0")
            _run("ip", "-n", name, "link", "set", "eth0", "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            if setting.mbit:
                shape = ("rate", f"{setting.mbit}mbit", "burst", "128k", "latency", "50ms")
                for where, device in ((name, "eth0"), (hub, far)):
                    _run("tc", "-n", where, "qdisc", "add", "dev", device, "root", "tbf", *shape)
        yield names
    finally:
        for name in (hub, *names):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: {done.stderr.strip()} (is this root?)")


def _work(plan: dict[str, Any]) -> None:
    import fastdist as fd
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    comm = fd.init()
    dist.init_process_group("gloo")
    for size in plan["sizes"]:
        count = parse_size(size) // 4
        x = np.zeros(count, np.float32)
        tensor = torch.from_numpy(x)

        def by_fastdist(x: Any = x) -> None:
            comm.all_reduce(x)

        def by_gloo(tensor: Any = tensor) -> None:
            dist.all_reduce(tensor)

        values = np.arange(count, dtype=np.float32) % 977
        expected = values * comm.world_size + sum(range(comm.world_size))
        times: dict[str, list[float]] = {"fastdist": [], "gloo": []}
        wrong, calls = 0, 0
        end = time.monotonic() + _TIMED_S
        going = np.array([1])
        while going[0]:
            for name, call in (("fastdist", by_fastdist), ("gloo", by_gloo)):
                np.add(values, comm.rank, out=x)
                comm.barrier()
                start = time.perf_counter()
                call()
                took = np.array([time.perf_counter() - start])
                times[name].append(float(comm.all_reduce(took, "max")[0]))
                if calls in (0, _LEAST_CALLS):
                    wrong += int((x != expected).sum())
            calls += 1
            late = calls >= _LEAST_CALLS + 1 and time.monotonic() > end
            going[0] = 0 if late or calls >= _MOST_CALLS else 1
            comm.broadcast(going)
        wrong = int(comm.all_reduce(np.array([wrong]))[0])
        # The first calls find cold connections.
        medians = {name: statistics.median(all_[1:]) * 1e6 for name, all_ in times.items()}
        if comm.rank == 0:
            row = {"size": format_size(parse_size(size)), "wrong": wrong}
            row |= {f"{name}_us": medians[name] for name in medians}
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
