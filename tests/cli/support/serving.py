"""`fastdist serve` processes, and a client that fills them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from fastdist.ps import Client, DenseSpec, RowsSpec, RuleSpec
from fastdist.ps.client.partition import Piece
from sharded_things import ShardedVariable, push_rows

RULE = RuleSpec("SGD", {"lr": 0.5})
BIAS = DenseSpec("bias", (3,), RULE)
WORDS = RowsSpec("words", 4, RULE)
COMMAND = [sys.executable, "-m", "fastdist"]


class Servers:
    """Starts `fastdist serve`; all servers end with the test."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.environ = dict(os.environ)

    def start(self, *options: object, **pipes: Any) -> "subprocess.Popen[bytes]":
        given = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | pipes
        process = subprocess.Popen(
            [*COMMAND, "serve", *map(str, options)], env=self.environ, **given
        )
        self.processes.append(process)
        return process

    def start_json(self, *options: object) -> tuple["subprocess.Popen[bytes]", dict[str, Any]]:
        """Start a server; return it and its first line."""
        process = self.start("--json", *options)
        return process, read_json(process)

    def __enter__(self) -> "Servers":
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


def read_json(process: "subprocess.Popen[bytes]") -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, process.communicate()[1]
    read: dict[str, Any] = json.loads(line)
    return read


def read_json_until(
    process: "subprocess.Popen[bytes]", condition: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    for _ in range(100):
        line = read_json(process)
        if condition(line):
            return line
    raise AssertionError(f"waited in vain, last {line}")


def end(process: "subprocess.Popen[bytes]", number: signal.Signals) -> tuple[int, bytes]:
    process.send_signal(number)
    _, stderr = process.communicate(timeout=20)
    return process.returncode, stderr


def fill(address: str) -> None:
    """Create a variable with 3 pushes, and a table of 5 rows."""
    with Client([address], timeout_s=10) as client:
        bias = ShardedVariable(client, BIAS, [Piece(0, 0, 3)], np.zeros(3, np.float32))
        for _ in range(3):
            bias.push(np.ones(3, np.float32))
        words = client.create(0, WORDS)
        push_rows(client, 0, words, np.arange(5), np.ones((5, 4), np.float32))
        np.testing.assert_array_equal(bias.pull(), np.full(3, -1.5, np.float32))
