"""One of three ranks does not come: the others say which one, and what it called last.

Start it by `fastdist run -n 3 examples/asked/04_which_rank_hangs.py`. With `gloo` at its end the
error names neither the rank nor its call.
"""

import datetime
import sys
import time

import fastdist
import torch
import torch.distributed as dist

backend = sys.argv[1] if sys.argv[1:] else "fastdist"
dist.init_process_group(backend, timeout=datetime.timedelta(seconds=2))


def step(gradient):
    dist.all_reduce(gradient)


step(torch.ones(4))
if dist.get_rank() == 1:
    time.sleep(5)  # such as a slow disk, or a wait for a lock
    sys.exit()
try:
    step(torch.ones(4))
except RuntimeError as error:
    print(error)
    assert "rank 1: call 1, all_reduce" in str(error), "the error does not say what rank 1 did last"
else:
    sys.exit("no error")
