"""The program of each rank of each engine; it executes the commands of the bench.

    python -m fastdist.cli.bench.worker --driver KIND --socket PATH

Exits with 1 after an error, which it sends to the bench, or if the bench has ended.
"""

from __future__ import annotations

import argparse
import os
import traceback
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Client
from pathlib import Path

import numpy as np

import fastdist._core as _core
from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.driver import Call, Driver, UnsupportedCaseError, open_driver
from fastdist.cli.bench.measured_call import LEAD_BYTES, Batches, MeasuredCall, Times, work_ns
from fastdist.cluster.launch import detect_launch


class Worker:
    """Executes the commands of the bench, one method per command."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._call: MeasuredCall | None = None  # of the case
        gpu = driver.gpu
        self._lead: Call | None = None if gpu is None else gpu.copy_call(LEAD_BYTES)
        self._copy: Call | None = None

    def bind(self, cores: Sequence[int]) -> None:
        """Bind this rank's thread to one core, but not the threads of the engine."""
        os.sched_setaffinity(0, {cores[self._driver.rank]})

    def prepare(self, case: Case, graph: bool) -> dict[str, str]:
        """Make the arrays of a case and call once, to find out whether the engine supports it."""
        try:
            self._call = MeasuredCall(self._driver, case, self._lead, graph)
            self._call.time(1)
        except UnsupportedCaseError as error:
            return {"unsupported": str(error)}
        except Exception as error:
            return {"unsupported": f"{type(error).__name__}: {error}"}
        return {"no_graph": self._call.no_graph}

    def time(self, iterations: int, graph: bool) -> Times:
        """Time a number of calls."""
        assert self._call is not None
        return self._call.time(iterations, graph)

    def check(self, graph: bool) -> int:
        """Count wrong elements."""
        assert self._call is not None
        return self._call.wrong_elements(graph)

    def release(self) -> None:
        """Free the arrays of the case."""
        self._call = None

    def copy(self, nbytes: int, iterations: int) -> list[int]:
        """Time copies of a buffer on all ranks at the same time, for the floor."""
        if self._copy is None:  # every message asks for the same size
            self._copy = self._bind_copy(nbytes)
        barriers = [self._driver.barrier] * iterations
        if self._lead is None:
            return work_ns(barriers, self._copy)
        return Batches(self._driver.gpu, self._lead, iterations).work_ns(barriers, self._copy)

    def _bind_copy(self, nbytes: int) -> Call:
        if self._lead is None:
            return partial(_core.stream_copy, np.zeros(nbytes // 8), np.ones(nbytes // 8))
        copy: Call = self._driver.gpu.copy_call(nbytes)
        return copy


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank until the command `quit`; return an exit code."""
    parser = argparse.ArgumentParser(prog="python -m fastdist.cli.bench.worker")
    parser.add_argument("--driver", required=True)
    parser.add_argument("--socket", type=Path, required=True)
    options = parser.parse_args(arguments)
    channel = Client(str(options.socket), "AF_UNIX")
    try:
        launch = detect_launch()
        channel.send(0 if launch is None else launch.rank)
        driver = open_driver(options.driver)
        worker = Worker(driver)
        channel.send(("", driver.version))
        # While it waits it takes no processor time from the engine that is measured.
        while (message := channel.recv())[0] != "quit":
            command, given = message
            channel.send(("", getattr(worker, command)(**given)))
        driver.close()
    except (EOFError, ConnectionError):
        os._exit(1)  # leaving the engine could wait for ranks that have ended
    except BaseException:
        channel.send((traceback.format_exc(), None))
        os._exit(1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
