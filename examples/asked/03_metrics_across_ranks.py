"""A metric over all ranks is that of all examples, not the mean of the ranks' metrics.

Start it by `fastdist run -n 2 examples/asked/03_metrics_across_ranks.py`. It also shows what the
mean over ranks gives, which is what trainers log when they reduce a metric.
"""

import fastdist as fd
import torch
import torchmetrics
from sklearn.metrics import roc_auc_score

generator = torch.Generator().manual_seed(0)
labels = torch.arange(101) % 5 // 4  # one of five
scores = torch.rand(101, generator=generator) + 0.3 * labels
losses = torch.linspace(0, 1, 101) ** 2

strategy = fd.MirroredStrategy()
with strategy.scope():
    auc = torchmetrics.classification.BinaryAUROC()
    loss = torchmetrics.MeanMetric()


def evaluate(batch):
    own_scores, own_labels, own_losses = batch
    auc.update(own_scores, own_labels)
    loss.update(own_losses)
    return roc_auc_score(own_labels, own_scores)


data = strategy.distribute_dataset((scores, labels, losses), global_batch_size=101)
(own,) = [strategy.run(evaluate, (batch,)) for batch in data]  # 51 examples and 50
wanted = roc_auc_score(labels, scores)
found, mean_loss = auc.compute().item(), loss.compute().item()
of_means = float(strategy.reduce("mean", own))
if strategy.is_chief:
    print(f"AUC {found:.6f}; scikit-learn {wanted:.6f}; mean over ranks {of_means:.6f}")
    print(f"loss {mean_loss:.6f}; numpy {losses.numpy().mean():.6f}")
assert abs(found - wanted) < 1e-6
assert abs(mean_loss - losses.mean().item()) < 1e-6
assert abs(of_means - wanted) > 1e-4
