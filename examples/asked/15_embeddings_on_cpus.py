"""A table of embeddings on CPU servers, for ids of any size; workers train without each other.

Start it by `fastdist run --workers 2 --ps 1 examples/asked/15_embeddings_on_cpus.py`.
"""

import fastdist as fd
import torch

strategy = fd.ParameterServerStrategy()  # in workers and servers this call does not return
coordinator = fd.ClusterCoordinator(strategy)
with strategy.scope():
    users = fd.nn.Embedding(None, 8, seed=0)  # no number of rows: ids are 64-bit hashes
    optimizer = torch.optim.Adagrad(users.parameters(), lr=0.5)


def step(ids):
    optimizer.zero_grad()
    loss = (users(ids).sum(1) - (ids % 2)).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


ids = torch.randint(1 << 62, (64,), generator=torch.Generator().manual_seed(0))
before = coordinator.fetch(coordinator.schedule(step, (ids,)))
for _ in range(60):
    coordinator.schedule(step, (ids,))
coordinator.join()
after = coordinator.fetch(coordinator.schedule(step, (ids,)))
print(f"loss {before:.3f}, after 60 steps of two workers {after:.5f}")
assert after < before / 100
