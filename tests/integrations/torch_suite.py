"""Runs torch's own test suite of c10d and DDP, on Gloo or on fastdist in Gloo's place.

    python torch_suite.py gloo|fastdist [--ranks N] [--like mpi] [--only RE] [--json FILE]

The suite lies in torch's wheel. Its tests choose what they check by the backend's name, so fastdist
takes Gloo's name here and must do what is expected of Gloo. With `--like mpi` run the tests that
the suite keeps for MPI, which Gloo cannot pass. Ranks are forks of this process.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
import types
import unittest
from collections.abc import Sequence
from datetime import timedelta
from typing import Any


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("backend", choices=["gloo", "fastdist"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--like", choices=["gloo", "mpi"], default="gloo")
    parser.add_argument("--only", default="", help="regular expression of test names")
    parser.add_argument("--json", help="write the outcome of each test to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        os.environ |= {
            "BACKEND": options.like,
            "WORLD_SIZE": str(options.ranks),
            "TEMP_DIR": directory,
            "OMP_NUM_THREADS": "1",
            "GLOO_DEVICE_TRANSPORT": "TCP",
        }
        outcomes = run(options.backend, options.only)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(outcomes, file, indent=1)
    kinds = [outcome["kind"] for outcome in outcomes.values()]
    print({kind: kinds.count(kind) for kind in sorted(set(kinds))})
    return int("failed" in kinds)


def run(backend: str, only: str) -> dict[str, dict[str, Any]]:
    """Run the tests; return the kind of outcome, the seconds and the message of each."""
    import torch
    import torch.testing._internal.distributed.distributed_test as suite

    suite.BACKEND = "gloo"
    if backend == "fastdist":
        take_place_of_gloo()
        # A synchronous call runs in its own thread, and its event is not asynchronous as Gloo's is.
        suite.PROFILING_SUPPORTED_BACKENDS.clear()

    class TestC10d(suite.TestDistBackend, suite.DistributedTest._DistTestBase):
        exit_codes: Sequence[int | None] = ()

        def setUp(self) -> None:
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

        def _check_return_codes(self, *arguments: Any) -> None:
            self.exit_codes = [process.exitcode for process in self.processes]
            super()._check_return_codes(*arguments)

    outcomes = {}
    for name in unittest.TestLoader().getTestCaseNames(TestC10d):
        if not re.search(only, name):
            continue
        result = unittest.TestResult()
        start = time.monotonic()
        test = TestC10d(name)
        test.run(result)
        seconds = time.monotonic() - start
        problems = result.errors + result.failures
        if problems:
            kind, message = "failed", f"exit codes {test.exit_codes}\n{problems[0][1]}"
        elif result.skipped:
            kind, message = "skipped", result.skipped[0][1]
        else:
            kind, message = "passed", ""
        outcomes[name] = {"kind": kind, "seconds": round(seconds, 2), "message": message}
        cause = re.findall(r"^\w*(?:Error|Exception).*", message, re.MULTILINE)
        print(f"{kind:8} {seconds:6.2f} s  {name}  {cause[-1] if cause else ''}", flush=True)
    return outcomes


def take_place_of_gloo() -> None:
    """Make torch build fastdist's process groups where it is asked for Gloo's."""
    import fastdist  # noqa: F401
    import torch.distributed.distributed_c10d as c10d
    from fastdist.integrations.torch_backend import calls, group

    calls.NAME = group.NAME = "gloo"
    # By this name, torch's C++ would look for members of the class of Gloo.
    group.ProcessGroupFastdist.getBackendName = lambda self: "fastdist"

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        return group.ProcessGroupFastdist.of_store(store, rank, size, timeout.total_seconds(), "")

    # Called and asked for by isinstance, as the class of Gloo is.
    place = type("ProcessGroupGloo", (type,), {"__call__": lambda self, *a, **k: make(*a, **k)})
    kind = place("ProcessGroupGloo", (), {})
    place.__instancecheck__ = lambda self, made: isinstance(made, group.ProcessGroupFastdist)
    group.ProcessGroupFastdist.options = types.SimpleNamespace()
    c10d.ProcessGroupGloo = kind


if __name__ == "__main__":
    sys.exit(main())
