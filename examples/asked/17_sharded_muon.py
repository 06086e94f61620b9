"""Muon with its states divided among replicas: the same parameters, and less memory on each.

Start it by `fastdist run -n 2 examples/asked/17_sharded_muon.py`.
"""

import fastdist as fd
import torch
from torch import nn


def train(shard):
    """Return the parameters after 5 steps, and the elements of this replica's states."""
    strategy = fd.MirroredStrategy(options=fd.CommunicationOptions(shard_optimizer=shard))
    torch.manual_seed(0)
    with strategy.scope():
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
        optimizer = torch.optim.Muon(model.parameters(), lr=1e-2)

    def step(batch):
        (x,) = batch
        optimizer.zero_grad()
        (model(x) - x).square().mean().backward()
        optimizer.step()

    x = torch.randn(80, 64, generator=torch.Generator().manual_seed(1))
    for batch in strategy.distribute_dataset((x,), global_batch_size=16):
        strategy.run(step, args=(batch,))
    elements = sum(state["momentum_buffer"].numel() for state in optimizer.state.values())
    return [p.detach().clone() for p in model.parameters()], elements


whole, all_elements = train(False)
sharded, elements = train(True)
print(f"elements of the optimizer's state: {all_elements} whole, {elements} sharded")
assert all(torch.equal(one, other) for one, other in zip(whole, sharded, strict=True))
assert elements == all_elements / fd.init().world_size
