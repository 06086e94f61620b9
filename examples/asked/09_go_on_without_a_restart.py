"""One of three ranks is killed; the others go on without it, and take it in when it is back.

Start it by `fastdist run --min 2 --max 3 examples/asked/09_go_on_without_a_restart.py`. In the end
the weights are what one device would have: no step is lost, and none counts twice.
"""

import os
import signal
import time

import fastdist as fd
import torch

strategy = fd.MultiWorkerMirroredStrategy()
torch.manual_seed(0)
x = torch.randn(240, 4)
with strategy.scope():
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = strategy.distribute_dataset(x, global_batch_size=6)
checkpoint = fd.Checkpoint(model=model, optimizer=optimizer, data=batches, sizes=[])
elastic = fd.Elastic(strategy, checkpoint)


def train_step(x):
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(x), x.sum(1, keepdim=True)).backward()
    optimizer.step()


def train():
    for batch in batches:
        ranks = strategy.num_replicas_in_sync
        if strategy.local_replica_ids == (1,) and ranks == 3 and len(checkpoint.sizes) == 10:
            os.kill(os.getpid(), signal.SIGKILL)
        strategy.run(train_step, args=(batch,))
        checkpoint.sizes = [*checkpoint.sizes, ranks]
        elastic.commit()
        if len(checkpoint.sizes) > 20 and ranks < 3:
            time.sleep(1)  # the new rank is on its way


elastic.run(train)
weights = torch.zeros(1, 4)
for batch in x.split(6):
    weights += 0.1 * 2 * ((batch.sum(1, keepdim=True) - batch @ weights.T) * batch).mean(0)
if strategy.is_chief:
    print("ranks of each step:", *checkpoint.sizes)
    print("weights", model.weight.tolist(), "expected", weights.tolist())
assert checkpoint.sizes[:10] == [3] * 10
assert len(checkpoint.sizes) == 40
assert {2, 3} == set(checkpoint.sizes)
torch.testing.assert_close(model.weight.detach(), weights)
