"""Ranks that call different collectives get an error on each, with the line of each; nothing moves.

Start it by `fastdist run -n 2 examples/asked/05_mismatch.py`. With `gloo` at its end, Gloo's ranks
take each other's bytes for their own, or wait.
"""

import datetime
import sys

import fastdist
import torch
import torch.distributed as dist

backend = sys.argv[1] if sys.argv[1:] else "fastdist"
dist.init_process_group(backend, timeout=datetime.timedelta(seconds=2))
tensor = torch.full((4,), dist.get_rank() + 1.0)
before = tensor.clone()
try:
    if dist.get_rank() == 0:
        dist.all_reduce(tensor)
    else:
        dist.broadcast(tensor, src=0)
except RuntimeError as error:
    print(error)
    assert "05_mismatch.py:20" in str(error), "the error does not show rank 0's line"
    assert "05_mismatch.py:22" in str(error), "the error does not show rank 1's line"
else:
    sys.exit(f"rank {dist.get_rank()} got no error, and has {tensor.tolist()}")
assert torch.equal(tensor, before)
dist.all_reduce(tensor)  # the group can still be used
assert tensor.tolist() == [3.0] * 4
