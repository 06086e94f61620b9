"""The program of each rank of each engine; it executes the commands of the bench.

    python -m fastdist.cli.bench.worker --driver KIND --socket PATH

Exits with 1 after an error, which it sends to the bench, or if the bench has ended.
"""

from __future__ import annotations

import argparse
import os
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from multiprocessing.connection import Client
from pathlib import Path
from time import perf_counter_ns

import numpy as np

import fastdist._core as _core
from fastdist.cli.bench.arrays import UnsupportedCaseError
from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.driver import Driver, Message, open_driver
from fastdist.cli.bench.gpu_call import Batches, GpuCall, Lead
from fastdist.cli.bench.measured_call import BoundCase, MeasuredCall
from fastdist.cluster.launch import detect_launch


class Worker:
    """Executes the commands of the bench, one method per command."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._calls: dict[str, BoundCase] = {}
        self._lead = None if driver.gpu is None else Lead(driver.gpu)
        self._copies_ns: Callable[[int], list[int]] | None = None

    def bind(self, message: Message) -> Message:
        """Bind this rank's thread to one core, but not the threads of the engine."""
        os.sched_setaffinity(0, {message["cores"][self._driver.rank]})
        return {}

    def prepare(self, message: Message) -> Message:
        """Make the arrays of a case and call once, to find out whether the engine supports it."""
        case, variant = Case(**message["case"]), message["variant"]
        try:
            call: BoundCase
            if self._lead is None:
                call = MeasuredCall(self._driver, case, variant)
            else:
                call = GpuCall(self._driver, self._lead, case, variant, message["graph"])
            call.time(1)
        except UnsupportedCaseError as error:
            return {"unsupported": str(error)}
        except Exception as error:
            return {"unsupported": f"{type(error).__name__}: {error}"}
        self._calls[variant] = call
        return {"no_graph": call.no_graph}

    def time(self, message: Message) -> Message:
        """Time a number of calls."""
        return asdict(self._calls[message["variant"]].time(message["iterations"], message["graph"]))

    def check(self, message: Message) -> Message:
        """Count wrong elements."""
        return {"wrong": self._calls[message["variant"]].wrong_elements(message["graph"])}

    def release(self, message: Message) -> Message:
        """Free the arrays of the case."""
        self._calls.clear()
        return {}

    def copy(self, message: Message) -> Message:
        """Time copies of a buffer on all ranks at the same time, for the floor."""
        if self._copies_ns is None:  # every message asks for the same size
            self._copies_ns = self._bind_copies(message["bytes"])
        return {"times_ns": self._copies_ns(message["iterations"])}

    def _bind_copies(self, nbytes: int) -> Callable[[int], list[int]]:
        barrier = self._driver.barrier
        if self._lead is not None:
            lead, copy = self._lead, self._lead.gpu.copy_call(nbytes)
            return lambda count: Batches(lead, count).work_ns([barrier] * count, copy)
        to, source = np.zeros(nbytes // 8), np.ones(nbytes // 8)

        def copies_ns(iterations: int) -> list[int]:
            times_ns = []
            for _ in range(iterations):
                barrier()
                began = perf_counter_ns()
                _core.stream_copy(to, source)
                times_ns.append(perf_counter_ns() - began)
            return times_ns

        return copies_ns


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank until the command `quit`; return an exit code."""
    parser = argparse.ArgumentParser(prog="python -m fastdist.cli.bench.worker")
    parser.add_argument("--driver", required=True)
    parser.add_argument("--socket", type=Path, required=True)
    options = parser.parse_args(arguments)
    channel = Client(str(options.socket), "AF_UNIX")
    try:
        launch = detect_launch()
        channel.send({"rank": 0 if launch is None else launch.rank})
        driver = open_driver(options.driver)
        worker = Worker(driver)
        channel.send({"ready": driver.version})
        # While it waits it takes no processor time from the engine that is measured.
        while (message := channel.recv())["command"] != "quit":
            channel.send(getattr(worker, message["command"])(message))
        driver.close()
    except (EOFError, ConnectionError):
        os._exit(1)  # leaving the engine could wait for ranks that have ended
    except BaseException:
        channel.send({"error": traceback.format_exc()})
        os._exit(1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
