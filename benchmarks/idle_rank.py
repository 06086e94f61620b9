"""Measures the processor time of a rank that waits for a late rank.

    fastdist run --no-prefix -n 2 benchmarks/idle_rank.py

Rank 0 arrives at a barrier 5 s after the others; each rank prints `{"core_percent": ...}`.
"""

from __future__ import annotations

import json
import time

import fastdist

_LATE_S = 5.0


def main() -> None:
    """Runs on every rank."""
    comm = fastdist.init()
    comm.barrier()
    if comm.rank == 0:
        time.sleep(_LATE_S)
    began_s, busy_s = time.monotonic(), time.process_time()
    comm.barrier()
    waited_s = time.monotonic() - began_s
    share = (time.process_time() - busy_s) / waited_s if comm.rank else 0.0
    print(json.dumps({"core_percent": 100 * share}), flush=True)
    comm.close()


if __name__ == "__main__":
    main()
