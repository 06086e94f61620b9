"""Jobs that stand still, and what `fastdist why` says of them."""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from fastdist.recorder import observation, place
from fastdist.recorder.diagnosis import Diagnosis, diagnose
from fastdist.recorder.jobs import Job, jobs_here
from fastdist.recorder.occupation import Kind
from fastdist.recorder.stacks import stacks_of
from launched import Launcher
from paths import TESTS

PROGRAM = TESTS / "recorder" / "support" / "stalled_rank.py"
# `fastdist run` that looks for records in a folder.
RUN = """
import pathlib, sys
from fastdist.cli.main import main
from fastdist.recorder import place
folder = pathlib.Path(sys.argv.pop(1))
place._folders = lambda: [folder]
sys.exit(main())
"""


class Stalled:
    """Starts jobs, each with a folder of its own for its records."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._launcher = Launcher()
        self._sizes: dict[str, int] = {}
        self._launchers: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, kind: str, ranks: int = 2, rank: int = 1, steps: int = 30) -> None:
        """Start a job of `ranks` ranks, in which `rank` does what `kind` says."""
        folder = self.folder(kind)
        folder.mkdir(mode=0o700)
        self._sizes[kind] = ranks
        words = (folder, "run", "-n", ranks, PROGRAM, kind, rank, folder, steps)
        command = [sys.executable, "-c", RUN, *map(str, words)]
        with (folder / "out").open("wb") as out:
            self._launchers[kind] = subprocess.Popen(
                command,
                env=self._launcher.environ,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )

    def folder(self, kind: str) -> Path:
        return self._folder / kind

    def job(self, kind: str, timeout_s: float = 120.0) -> Job:
        """Wait until all ranks of a job have begun, and return the job."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(place, "_folders", lambda: [self.folder(kind)])
            end_s = time.monotonic() + timeout_s
            while time.monotonic() < end_s:
                jobs, _ = jobs_here()
                if jobs and jobs[0].ranks and self._is_ready(kind, jobs[0]):
                    return jobs[0]
                time.sleep(0.05)
        raise AssertionError((self.folder(kind) / "out").read_text())

    def _is_ready(self, kind: str, job: Job) -> bool:
        if job.is_live:
            return len(job.ranks) == self._sizes[kind]
        return self._launchers[kind].poll() is not None

    def diagnosis(self, kind: str, timeout_s: float = 120.0) -> Diagnosis:
        """Diagnose a job as soon as it is no longer taken for slow."""
        end_s = time.monotonic() + timeout_s
        if kind == "timed_out":
            self._launchers[kind].wait(timeout_s)
        while True:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(observation, "stacks_of", partial(stacks_of, timeout_s=2.0))
                found = diagnose(self.job(kind))
            if found.kind is Kind.DEAD and self._launchers[kind].poll() is None:
                self._launchers[kind].wait(max(0.1, end_s - time.monotonic()))  # it notes a signal
            elif (
                kind == "without_the_gil"
                and "GIL" not in found.sentence
                and time.monotonic() < end_s
            ):
                time.sleep(0.5)  # on a busy machine a thread asks for the GIL less often
            elif found.kind is not Kind.SLOW or kind == "slow" or time.monotonic() > end_s:
                return found
            time.sleep(0.1)

    def close(self) -> None:
        self._launcher.kill()
        for process in self._launchers.values():
            process.wait()
