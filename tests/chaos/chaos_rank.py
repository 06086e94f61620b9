"""A rank that makes random collectives, checks every result, and suffers a fault.

Run as `python chaos_rank.py PLAN`, a JSON of a `Plan` (test_chaos.py). It prints "starts" before
`init` and "ready" in its calls. Its last line says how it ended: "done", "error NAME RANKS" or
"interrupted", and when, in seconds of the wall clock.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import threading
import time
from typing import Any

import fastdist as fd
import numpy as np

SIZES = (1, 2, 3, 100, 4097, 70_000, 600_000)


class Oops(Exception):
    """A fault of the program itself."""


def call(comm: fd.Communicator, rng: random.Random, shared: Any, kinds: int) -> None:
    """Make a call that `rng` chooses, the same on all ranks, and check its result."""
    size, rank, n = rng.choice(SIZES), comm.rank, comm.world_size
    x = shared[:size] if rng.random() < 0.3 else np.empty(size, np.float32)
    value, kind = rng.randrange(1, 9), rng.randrange(kinds)
    x[:] = value * (rank + 1)
    total = value * n * (n + 1) // 2
    if kind == 0:
        assert (comm.all_reduce(x) == total).all()
    elif kind == 1:
        assert (comm.all_reduce(x, async_op=True).wait() == total).all()
    elif kind == 2:
        root = rng.randrange(n)
        assert (comm.broadcast(x, root) == value * (root + 1)).all()
    elif kind == 3:
        assert (comm.all_gather(x).reshape(n, -1)[:, -1] == value * np.arange(1, n + 1)).all()
    elif kind == 4:
        comm.barrier()
    elif rank == 0:
        comm.send(x, n - 1)
    elif rank == n - 1:
        assert (comm.recv(x, 0) == value).all()


def die() -> None:
    os.write(1, f"dies at {time.time()}\n".encode())
    os.kill(os.getpid(), signal.SIGKILL)


def leave() -> None:
    os.write(1, f"dies at {time.time()}\n".encode())
    os._exit(7)


def suffer(comm: fd.Communicator, fault: str, delay_s: float) -> None:
    """Do to this rank what the plan says, in the middle of a collective or before one."""
    if fault in ("kill", "kill behind a late rank"):
        threading.Timer(delay_s, die).start()
    elif fault == "exit":
        leave()
    elif fault == "raise":
        raise Oops
    elif fault == "close":
        comm.close()
    elif fault == "late":
        time.sleep(0.3)
    elif fault == "mismatch":
        comm.all_reduce(np.ones(77_777, np.int8), "max")
    elif fault == "deadlock":
        comm.recv(np.ones(5), (comm.rank + 1) % comm.world_size)


def suffer_at_start(plan: dict[str, Any]) -> None:
    """Do to this rank what the plan says, before or amid `init`."""
    fault = plan["fault"]
    if fault == "files":
        resource.setrlimit(resource.RLIMIT_NOFILE, (plan["limit"],) * 2)
    elif fault == "memory":
        resource.setrlimit(resource.RLIMIT_AS, (plan["limit"] << 20,) * 2)
    elif fault in ("kill amid init", "exit amid init"):
        threading.Timer(plan["delay_s"], die if fault.startswith("kill") else leave).start()
    elif fault == "late amid init":
        time.sleep(10 * plan["delay_s"])


def work(plan: dict[str, Any]) -> None:
    rank, fault = int(os.environ["RANK"]), plan["fault"]
    is_victim = rank == plan["victim"]
    print("starts", flush=True)
    if is_victim:
        suffer_at_start(plan)
    comm = fd.init(timeout=plan["timeout_s"])
    rng = random.Random(plan["seed"])
    shared = comm.empty(SIZES[-1])
    for step in range(plan["steps"]):
        if step == 1:
            print("ready", flush=True)
        try:
            if is_victim and step == plan["step"]:
                suffer(comm, fault, plan["delay_s"])
            if rank == plan["late"] and step == plan["step"]:
                time.sleep(2.0)
            if not (is_victim and step == plan["step"] and fault == "mismatch"):
                call(comm, rng, shared, 5 if fault == "mismatch" else 6)
            else:
                raise AssertionError("a mismatch went unseen")
        except fd.errors.CollectiveMismatchError:
            if fault != "mismatch" or step != plan["step"]:
                raise
            rng = random.Random(plan["seed"] + 1)  # all ranks go on alike
    comm.barrier()


def main() -> None:
    try:
        work(json.loads(sys.argv[1]))
        how = "done"
    except KeyboardInterrupt:
        how = "interrupted"
    except (fd.errors.FastdistError, Oops, MemoryError, OSError) as error:
        ranks = ",".join(map(str, getattr(error, "ranks", ())))
        how = f"error {type(error).__name__} {ranks}"
    print(f"{how} at {time.time()}", flush=True)


if __name__ == "__main__":
    main()
