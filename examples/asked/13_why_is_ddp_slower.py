"""Where the time of a step goes: one process, two replicas, DDP on Gloo, in turns.

Start it by `OMP_NUM_THREADS=1 fastdist run -n 2 examples/asked/13_why_is_ddp_slower.py`. Only the
results are checked; times say something on a quiet machine with a core for each rank.
"""

import statistics
import time

import fastdist as fd
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
strategy = fd.MirroredStrategy()
x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
half = x.chunk(2)[dist.get_rank()]


def make():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(8)))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model, optimizer, batch):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


with strategy.scope():
    ours = make()
alone, (model, optimizer) = make(), make()
theirs = DistributedDataParallel(model), optimizer
ways = {
    "half the batch, no exchange": lambda: step(*alone, half),
    "half the batch each, fastdist": lambda: strategy.run(lambda: step(*ours, half)),
    "half the batch each, DDP on Gloo": lambda: step(*theirs, half),
}
times = {name: [] for name in ways}
for _ in range(20):
    for name, way in ways.items():
        dist.barrier()
        start = time.perf_counter()
        way()
        times[name].append(1e3 * (time.perf_counter() - start))
if strategy.is_chief:
    for name, measured in times.items():
        print(f"{statistics.median(measured):6.1f} ms  {name}")
for one, other in zip(ours[0].parameters(), model.parameters(), strict=True):
    torch.testing.assert_close(one, other)
