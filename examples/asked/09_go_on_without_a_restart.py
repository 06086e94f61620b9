"""One of three ranks dies; the other two go on with what they have, without a restart.

Start it by `python examples/asked/09_go_on_without_a_restart.py`. It starts its ranks itself, since
a launcher ends a job that has lost a rank.
"""

import os
import socket
import sys

import fastdist as fd
import numpy as np

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    address = f"127.0.0.1:{free.getsockname()[1]}"
pids = []
while len(pids) < 2 and 0 not in pids:
    pids.append(os.fork())
rank = len(pids) if 0 in pids else 0

comm = fd.init(rank=rank, world_size=3, address=address)
weights = np.zeros(4)
for step in range(10):
    if step == 5 and rank == 1:
        os._exit(9)
    try:
        gradient = comm.all_reduce(np.ones(4), op="mean")
    except fd.errors.PeerFailureError as error:
        print(f"rank {rank}: in step {step}: {error}", flush=True)
        comm = comm.shrink(error.ranks)
        gradient = comm.all_reduce(np.ones(4), op="mean")  # the step again
    weights += gradient
print(f"rank {rank}: {comm.world_size} ranks, weights {weights}", flush=True)
assert comm.world_size == 2
assert weights.tolist() == [10.0] * 4
if rank == 0:
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    sys.exit(codes != [9, 0])
