"""A stream on the CPU: a thread that does in order what was enqueued, as a GPU does.

What the bench measures on GPUs runs on it without one. Arrays are numpy's, and whoever reads one
waits for the stream first.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import numpy as np
from fastdist.cli.bench.drivers import NUMPY_ARRAYS, ArrayLibrary

Step = Callable[[], object]


class StreamEvent:
    """Notes when the stream comes to it."""

    def __init__(self, enqueue: Callable[[Step], None]) -> None:
        self._enqueue = enqueue
        self.reached = threading.Event()
        self.at_ns = 0

    def reach(self) -> None:
        self.at_ns = perf_counter_ns()
        self.reached.set()

    def record(self) -> None:
        self.reached.clear()
        self._enqueue(self.reach)

    def query(self) -> bool:
        return self.reached.is_set()

    def elapsed_time(self, end: StreamEvent) -> float:
        assert self.reached.is_set()
        assert end.reached.is_set()
        return (end.at_ns - self.at_ns) / 1e6


class StreamDevice:
    """A `Gpu` of the bench. An exception in a step is raised by the next `synchronize`."""

    device = 0

    def __init__(self) -> None:
        self._steps: queue.SimpleQueue[Step] = queue.SimpleQueue()
        self._captured: list[Step] | None = None
        self._error: Exception | None = None
        self.arrays = self._library()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                self._steps.get()()
            except Exception as error:
                self._error = error

    @property
    def is_capturing(self) -> bool:
        return self._captured is not None

    def enqueue(self, step: Step) -> None:
        if self._captured is None:
            self._steps.put(step)
        else:
            self._captured.append(step)

    def event(self) -> StreamEvent:
        return StreamEvent(self.enqueue)

    def synchronize(self) -> None:
        end = StreamEvent(self._steps.put)
        end.record()
        assert end.reached.wait(60)
        if self._error is not None:
            raise self._error

    def copy_call(self, nbytes: int) -> Step:
        to, source = np.zeros(nbytes, np.uint8), np.ones(nbytes, np.uint8)
        return lambda: self.enqueue(lambda: np.copyto(to, source))

    def capture(self, call: Step) -> Step:
        steps: list[Step] = []
        self._captured = steps
        try:
            call()
        finally:
            self._captured = None

        def replay() -> None:
            for step in steps:
                self.enqueue(step)

        return replay

    def _library(self) -> ArrayLibrary:
        plain = NUMPY_ARRAYS

        def fill(array: Any, value: float) -> None:
            self.enqueue(lambda: array.fill(value))

        def write(flat: Any, block: Any) -> None:
            self.synchronize()
            plain.write(flat, block)

        def read(flat: Any) -> Any:
            self.synchronize()
            return plain.read(flat)

        return ArrayLibrary(plain.make, fill, write, read)
