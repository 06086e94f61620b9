"""Two ranks that wait for each other get an error at once, not after the timeout of ten minutes.

Start it by `fastdist run -n 2 examples/asked/10_no_timeout_needed.py`. With `gloo` at its end they
wait for the timeout, which is two seconds here and thirty minutes by default.
"""

import datetime
import sys

import fastdist as fd
import numpy as np

if sys.argv[1:] == ["gloo"]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=2))
    dist.recv(torch.ones(4), src=1 - dist.get_rank())

comm = fd.init(timeout=600)
try:
    comm.recv(np.ones(4), src=1 - comm.rank)  # each waits for the other's send
except fd.errors.CollectiveMismatchError as error:
    print(error)
else:
    sys.exit("no error")
