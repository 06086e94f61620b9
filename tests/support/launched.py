"""Jobs of `fastdist run` as a user starts them, such that nothing they leave behind is missed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

# Times that the launcher waits, shortened for tests of what happens after them.
SHORT_TIMES = """
import sys
from fastdist.cli import run
from fastdist.processes import supervisor
run.GRACE_S = 0.5
supervisor._CAUSE_WAIT_S = 0.1
from fastdist.cli.main import main
sys.exit(main())
"""

# What the scripts of jobs with roles begin with. `serve` serves at the task's address until it is
# told to end. Files in the folder STEP say how far the job is: worker1.0 is there when worker 1
# serves, worker1.1 when it does so again.
ROLES = """
import json, os, signal, socket, subprocess, sys, time
config = json.loads(os.environ["TF_CONFIG"])
task = config["task"]
job, name = task["type"], task["type"] + str(task["index"])
step = os.environ["STEP"]
def wait_for(*names):
    while not all(os.path.exists(f"{step}/{name}") for name in names):
        time.sleep(0.01)
def serve():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    host, port = config["cluster"][job][task["index"]].split(":")
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((host, int(port)))
    listener.listen()
    starts = len([n for n in os.listdir(step) if n.startswith(f"{name}.")])
    print("serves at", port, flush=True)
    open(f"{step}/{name}.{starts}", "w").close()
    time.sleep(60)
"""


class Launcher:
    """Starts `fastdist run` so that everything that a job started can be found again."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self.environ = {
            k: v
            for k, v in os.environ.items()
            if k not in ("OMP_NUM_THREADS", "PYTHONUNBUFFERED", "FASTDIST_JOB")
        } | {"TEST_MARK": self.mark, "TERM": "xterm"}

    def start(
        self, *words: object, short_times: bool = False, **options: object
    ) -> "subprocess.Popen[bytes]":
        program = ["-c", SHORT_TIMES] if short_times else ["-m", "fastdist"]
        command = [sys.executable, *program, "run", *map(str, words)]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, env=self.environ, **(pipes | options))  # type: ignore[call-overload,no-any-return]

    def run(
        self, *words: object, input: bytes = b"", short_times: bool = False
    ) -> "subprocess.CompletedProcess[bytes]":
        process = self.start(*words, short_times=short_times, stdin=subprocess.PIPE)
        return finish(process, input)

    def left(self) -> list[int]:
        """Processes that carry this launcher's mark, other than zombies, which have none."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                environ = (entry / "environ").read_bytes() if entry.name.isdigit() else b""
            except OSError:
                continue
            if f"TEST_MARK={self.mark}".encode() in environ.split(b"\0"):
                found.append(int(entry.name))
        return found

    def kill(self) -> list[int]:
        """Kill the processes that are left; return their numbers."""
        left = self.left()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):  # it was ending
                os.kill(pid, signal.SIGKILL)
        return left


def finish(
    process: "subprocess.Popen[bytes]", input: bytes = b""
) -> "subprocess.CompletedProcess[bytes]":
    stdout, stderr = process.communicate(input or None, timeout=150)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "waited in vain"
        time.sleep(0.01)


def read_lines(process: "subprocess.Popen[bytes]", count: int) -> list[bytes]:
    assert process.stdout is not None
    return [process.stdout.readline() for _ in range(count)]


def task_processes(launcher: Launcher, job: str, index: int) -> list[int]:
    """The processes of a task, those included that it has started."""
    found = []
    for pid in launcher.left():
        try:
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # ended since
            continue
        config = next((e for e in entries if e.startswith(b"TF_CONFIG=")), None)
        if config is not None:
            task = json.loads(config.partition(b"=")[2])["task"]
            if (task["type"], task["index"]) == (job, index):
                found.append(pid)
    return found
