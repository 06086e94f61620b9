"""Five examples on two ranks: one has a batch more, and training ends all the same.

Start it by `fastdist run -n 2 examples/asked/01_uneven_batches.py`. With `gloo` at its end it
trains by DDP on Gloo, where rank 0 waits in backward for a batch that rank 1 does not have.
"""

import datetime
import sys

import fastdist as fd
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


def make():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model, optimizer, batch):
    optimizer.zero_grad()
    model(batch).square().mean().backward()
    optimizer.step()


if sys.argv[1:] == ["gloo"]:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=4))
    model, optimizer = make()
    model = DistributedDataParallel(model)
    for batch in x.split(1)[dist.get_rank() :: 2]:  # three on rank 0, two on rank 1
        step(model, optimizer, batch)
    dist.barrier()
    sys.exit()

alone = make()
for batch in x.split(2):
    step(*alone, batch)

strategy = fd.MirroredStrategy()
with strategy.scope():
    ours = make()
for batch in strategy.distribute_dataset(x, global_batch_size=2):
    strategy.run(lambda batch: step(*ours, batch), (batch,))

one, two = alone[0].weight.tolist(), ours[0].weight.tolist()
print(f"one device {one}, two replicas {two}")
torch.testing.assert_close(two, one)
