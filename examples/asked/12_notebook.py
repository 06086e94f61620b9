"""Replicas from a notebook: a function that the notebook defines trains on two of them.

Start it by `python - < examples/asked/12_notebook.py`: a program from the standard input is like a
notebook, since no other process can import what it defines. With `spawn` after the dash it shows
what torch.multiprocessing makes of the same function.
"""

import sys

import fastdist as fd
import torch


def train(steps):
    strategy = fd.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        optimizer.zero_grad()
        (model(batch) - 3 * batch).square().mean().backward()
        optimizer.step()

    x = torch.randn(10 * steps, 1, generator=torch.Generator().manual_seed(0))
    for batch in strategy.distribute_dataset(x, global_batch_size=10):
        strategy.run(step, (batch,))
    return model.state_dict(), strategy.num_replicas_in_sync


if sys.argv[1:] == ["spawn"]:
    torch.multiprocessing.spawn(train, (1,), nprocs=2)

weights, replicas = fd.launch(train, replicas=2, args=(200,))
print(f"{replicas} replicas found {weights['weight'].item():.3f} (3)")
assert replicas == 2
assert abs(weights["weight"].item() - 3) < 0.1
