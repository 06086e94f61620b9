"""`fastdist why` of jobs on two machines: it asks the launcher of the other machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from launched import Launcher, wait_until
from machines import Network, network, ports
from stalled import PROGRAM, RUN

pytest.importorskip("torch.distributed")
__all__ = ["network"]  # a fixture

_HOUR_LATER = ("unshare", "--time", "--monotonic", "3600")


class TwoMachines:
    """A job of two ranks on each of two machines, which keep their records apart.

    The clock of the second machine is an hour ahead.
    """

    def __init__(self, network: Network, folder: Path, kind: str, rank: int) -> None:
        self._network = network
        self._launcher = Launcher()
        self._folders = [folder / f"machine{number}" for number in range(2)]
        self.launchers: list[subprocess.Popen[bytes]] = []
        rdzv = f"{network.addresses[0]}:{next(ports)}"
        for number, records in enumerate(self._folders):
            records.mkdir(mode=0o700)
            place = ("--nnodes", 2, "--node-rank", number, "--rdzv", rdzv, "-n", 2)
            command = self._on(number, "run", *place, PROGRAM, kind, rank, records)
            with (records / "out").open("wb") as out:
                self.launchers.append(
                    subprocess.Popen(
                        command,
                        env=self._launcher.environ,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=out,
                    )
                )

    def _on(self, machine: int, *words: object) -> list[str]:
        later = _HOUR_LATER if machine else ()
        run = (*later, sys.executable, "-c", RUN, self._folders[machine], *words)
        return self._network.command(machine, *map(str, run))

    def why(self, machine: int = 0) -> dict[str, Any]:
        """Return the answer of `fastdist why --json`; empty if there is no job yet."""
        done = subprocess.run(
            self._on(machine, "why", "--json"),
            env=self._launcher.environ,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0 or "no job of this user" in done.stderr, done.stderr
        found: dict[str, Any] = json.loads(done.stdout or "{}")
        return found

    def until(self, kind: str, machine: int = 0, timeout_s: float = 60.0) -> dict[str, Any]:
        """Ask until the class of the answer is `kind`, and return the answer."""
        end_s = time.monotonic() + timeout_s
        while (found := self.why(machine)).get("class") != kind:
            assert time.monotonic() < end_s, (found, [f.read_text() for f in self._outputs()])
        return found

    def output(self, machine: int) -> str:
        """Return what the launcher of a machine has written, with its ranks' warnings."""
        return self._outputs()[machine].read_text()

    def _outputs(self) -> list[Path]:
        return [folder / "out" for folder in self._folders]

    def close(self) -> None:
        self._launcher.kill()
        for process in self.launchers:
            process.wait()


@contextmanager
def job(network: Network, folder: Path, kind: str, rank: int = 2) -> Iterator[TwoMachines]:
    made = TwoMachines(network, folder, kind, rank)
    try:
        yield made
    finally:
        made.close()


# Class, ranks that are the cause, words of the sentence; rank 2 is on the other machine.
CAUSES: dict[str, tuple[str, list[int], tuple[str, ...]]] = {
    "asleep": (
        "never arrived, still in user code",
        [2],
        ("rank 2 has not arrived", "in asleep", "ranks 0, 1 and 3 wait for it there"),
    ),
    "other_size": ("other call or size", [2], ("float64 × 9", "float64 × 8")),
    "killed": ("dead", [2], ("rank 2 is dead",)),
}


@pytest.mark.parametrize("kind", CAUSES)
def test_the_cause_is_on_the_other_machine(network: Network, tmp_path: Path, kind: str) -> None:
    expected, ranks, words = CAUSES[kind]
    with job(network, tmp_path, kind) as made:
        found = made.until(expected)
        assert found["ranks"] == ranks, found["sentence"]
        for word in words:
            assert word in found["sentence"]
        if kind == "asleep":
            assert found["not_seen"] == []
            assert all(0 < row["since_s"] < 600 for row in found["table"])
            assert made.until(expected, machine=1)["sentence"].startswith("rank 2 has not")
            wait_until(lambda: "[0] rank 2 has not arrived: it is in user code" in made.output(0))


def test_a_timeout_names_the_rank_on_the_other_machine(network: Network, tmp_path: Path) -> None:
    with job(network, tmp_path, "timed_out_late") as made:
        wait_until(lambda: "] why: rank 2 has not arrived: it is in user code" in made.output(0))


def test_what_cannot_be_reached(network: Network, tmp_path: Path) -> None:
    with job(network, tmp_path, "steady") as made:
        found = made.until("slow, not stuck")
        while len(found["table"]) < 4:
            found = made.until("slow, not stuck")
        os.kill(found["table"][2]["pid"], signal.SIGSTOP)
        found = made.until("stopped")
        assert found["ranks"] == [2]
        assert "rank 2 is stopped by a signal" in found["sentence"]
        os.kill(made.launchers[1].pid, signal.SIGSTOP)
        found = made.until("unknown")
        assert (
            "ranks 2 and 3, on 10.213.7.2: its launcher does not answer in time"
            in (found["not_seen"])
        )
        assert found["sentence"].startswith("ranks 2")
        network.set_cable("down", 1)
        try:
            found = made.until("link down or lossy")
        finally:
            network.heal(1)
        assert found["ranks"] == [2, 3]
        assert "ranks 2 and 3 cannot be reached: nothing answers at 10.213.7.2" in found["sentence"]
        assert "ranks 0 and 1 wait for them in all_reduce" in found["sentence"]
