"""Two ranks on one GPU; NCCL alone refuses ("Duplicate GPU detected").

Start it by `fastdist run -n 2 examples/asked/11_ranks_on_one_gpu.py`.
"""

import sys

import fastdist as fd
import torch

if not torch.cuda.is_available():
    print("skipped: needs a GPU")
    sys.exit()
comm = fd.init()
x = torch.full((4,), comm.rank + 1.0, device="cuda:0")
comm.all_reduce(x)
print(f"rank {comm.rank}: {x.tolist()}")
assert x.tolist() == [3.0] * 4
