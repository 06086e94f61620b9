"""The program of each rank of each engine; it executes the commands of the bench.

    python -m fastdist.cli.bench.worker --engine NAME --driver KIND --socket PATH

Exits with 1 after an error, which it sends to the bench, or if the bench has ended.
"""

from __future__ import annotations

import argparse
import os
import socket
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import numpy as np

from fastdist.cli.bench.arrays import UnsupportedCaseError
from fastdist.cli.bench.cases import Case
from fastdist.cli.bench.channel import Channel, ChannelClosedError, Message
from fastdist.cli.bench.driver import Call, Driver, open_driver
from fastdist.cli.bench.gpu_call import Batches, GpuCall, Lead
from fastdist.cli.bench.measured_call import Measured, MeasuredCall
from fastdist.cluster.launch import detect_launch


class Worker:
    """Executes the commands of the bench, one method per command."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._calls: dict[str, Measured] = {}
        self._copy_buffers: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]] | None = None
        self._lead = None if driver.gpu is None else Lead(driver.gpu)
        self._gpu_copy: tuple[int, Call] | None = None

    def bind(self, message: Message) -> Message:
        """Bind this rank's thread to one core, but not the threads of the engine."""
        os.sched_setaffinity(0, {message["cores"][self._driver.rank]})
        return {}

    def prepare(self, message: Message) -> Message:
        """Make the arrays of a case and call once, to find out whether the engine supports it."""
        variant = str(message["variant"])
        try:
            call = self._measured(Case(**message["case"]), variant, bool(message["graph"]))
            call.time(1, False)
        except UnsupportedCaseError as error:
            return {"unsupported": str(error)}
        except Exception as error:
            return {"unsupported": f"{type(error).__name__}: {error}"}
        self._calls[variant] = call
        return {"no_graph": call.no_graph}

    def _measured(self, case: Case, variant: str, graph: bool) -> Measured:
        if self._lead is None:
            return MeasuredCall(self._driver, case, variant)
        return GpuCall(self._driver, self._lead, case, variant, graph)

    def time(self, message: Message) -> Message:
        """Time a number of calls."""
        times = self._calls[message["variant"]].time(message["iterations"], message["graph"])
        return asdict(times)

    def check(self, message: Message) -> Message:
        """Count wrong elements."""
        return {"wrong": self._calls[message["variant"]].wrong_elements(message["graph"])}

    def release(self, message: Message) -> Message:
        """Free the arrays of the case."""
        self._calls.clear()
        return {}

    def copy(self, message: Message) -> Message:
        """Time copies of a buffer on all ranks at the same time, for the floor."""
        if self._lead is not None:
            times_ns = self._copies_on_gpu(self._lead, message["bytes"], message["iterations"])
            return {"times_ns": times_ns}
        from fastdist import _core  # not loaded in peers' ranks

        elements = message["bytes"] // 8
        if self._copy_buffers is None or self._copy_buffers[0].size != elements:
            self._copy_buffers = np.zeros(elements), np.ones(elements)
        to, source = self._copy_buffers
        barrier = self._driver.barrier_call()
        times_ns = []
        for _ in range(message["iterations"]):
            barrier()
            began = perf_counter_ns()
            _core.stream_copy(to, source)
            times_ns.append(perf_counter_ns() - began)
        return {"times_ns": times_ns}

    def _copies_on_gpu(self, lead: Lead, nbytes: int, iterations: int) -> list[int]:
        if self._gpu_copy is None or self._gpu_copy[0] != nbytes:
            self._gpu_copy = nbytes, lead.gpu.copy_call(nbytes)
        barrier = self._driver.barrier_call()
        return Batches(lead, iterations).work_ns([barrier] * iterations, self._gpu_copy[1])


def _serve(channel: Channel, driver: Driver) -> None:
    worker = Worker(driver)
    channel.send({"ready": driver.version, "rank": driver.rank})
    while (message := channel.receive())["command"] != "quit":
        channel.send(getattr(worker, message["command"])(message))
    driver.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank until the command `quit`; return an exit code."""
    parser = argparse.ArgumentParser(prog="python -m fastdist.cli.bench.worker")
    parser.add_argument("--engine", required=True)
    parser.add_argument("--driver", required=True)
    parser.add_argument("--socket", type=Path, required=True)
    options = parser.parse_args(arguments)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(str(options.socket))
    channel = Channel(connection)
    try:
        launch = detect_launch()
        rank = 0 if launch is None else launch.rank
        channel.send({"engine": options.engine, "rank": rank})
        _serve(channel, open_driver(options.driver, options.socket.parent))
    except ChannelClosedError:
        os._exit(1)  # leaving the engine could wait for ranks that have ended
    except BaseException:
        channel.send({"error": traceback.format_exc()})
        os._exit(1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
