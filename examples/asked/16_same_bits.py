"""The same bits on whichever machines ranks run: a job of a cluster repeated on one computer.

Start it by `fastdist run -n 4 examples/asked/16_same_bits.py`.
"""

import hashlib
import sys

import numpy as np


def values(rank):
    """The array of a rank; float32 sums of such numbers depend on their order."""
    return np.random.default_rng(rank).standard_normal(100_003).astype(np.float32)


if "gloo" in sys.argv:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    total = torch.from_numpy(values(dist.get_rank()))
    dist.all_reduce(total)
    total = total.numpy()
    dist.destroy_process_group()
else:
    import fastdist as fd

    comm = fd.init()
    total = comm.all_reduce(values(comm.rank))

# One tree over the ranks, on whichever machines they run and however large the arrays are.
expected = (values(0) + values(1)) + (values(2) + values(3))
print(hashlib.sha256(total.tobytes()).hexdigest()[:16], "expected:", end=" ")
print(hashlib.sha256(expected.tobytes()).hexdigest()[:16])
assert total.tobytes() == expected.tobytes()
