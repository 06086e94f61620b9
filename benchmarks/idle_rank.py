"""How much of a core a rank takes while it waits for another that is late.

    fastdist run --no-prefix -n 2 benchmarks/idle_rank.py

Rank 0 comes to a barrier seconds after the others; each prints `{"core_percent": ...}`.
"""

from __future__ import annotations

import json
import time

import fastdist

_LATE_S = 5.0


def main() -> None:
    """Every rank runs this."""
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
