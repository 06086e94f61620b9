"""One of three ranks does not come: the others say which one, what it called last, and where it is.

Start it by `fastdist run -n 3 examples/asked/04_which_rank_hangs.py`. With `gloo` at its end the
error names neither the rank nor its call. Meanwhile `fastdist why`, in another terminal, says the
same without a timeout.
"""

import datetime
import sys
import time

import fastdist
import torch
import torch.distributed as dist

backend = sys.argv[1] if sys.argv[1:] else "fastdist"
dist.init_process_group(backend, timeout=datetime.timedelta(seconds=3))


def step(gradient):
    dist.all_reduce(gradient)


step(torch.ones(4))
if dist.get_rank() == 1:
    time.sleep(6)  # such as a slow disk, or a wait for a lock
    sys.exit()
try:
    step(torch.ones(4))
except RuntimeError as error:
    print(error)
    assert "rank 1: call 1, all_reduce" in str(error), "the error does not say what rank 1 did last"
    assert "asleep at 04_which_rank_hangs.py:26" in str(error), "the error does not say where it is"
else:
    sys.exit("no error")
