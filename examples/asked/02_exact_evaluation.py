"""Accuracy over seven test examples on two ranks: each counts once, as on one device.

Start it by `fastdist run -n 2 examples/asked/02_exact_evaluation.py`. It also shows what torch's
DistributedSampler gives the ranks: eight examples, one of them twice.
"""

import fastdist as fd
import torch
import torchmetrics
from torch.utils.data import DistributedSampler

predictions = torch.tensor([0, 1, 1, 0, 1, 0, 1])
labels = torch.tensor([1, 1, 1, 0, 1, 0, 1])  # the first prediction is wrong: 6 of 7 are right

strategy = fd.MirroredStrategy()
with strategy.scope():
    accuracy = torchmetrics.classification.BinaryAccuracy()
for batch in strategy.distribute_dataset((predictions, labels), global_batch_size=4):
    strategy.run(lambda batch: accuracy.update(*batch) if len(batch[0]) else None, (batch,))
found = accuracy.compute().item()

shares = [list(DistributedSampler(labels, 2, rank, shuffle=False)) for rank in range(2)]
padded = torch.tensor([index for share in shares for index in share])
theirs = (predictions == labels)[padded].float().mean().item()

if strategy.is_chief:
    print(f"accuracy {found:.4f} (6/7); over DistributedSampler's {len(padded)} {theirs:.4f}")
assert abs(found - 6 / 7) < 1e-6
assert abs(theirs - 6 / 7) > 0.1
