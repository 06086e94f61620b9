"""Layers and losses for code that runs in several replicas (counterparts of tf.nn)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fastdist.collectives.autograd import as_tensor
from fastdist.errors import UnsupportedError
from fastdist.ps.model.embeddings import Embedding, EmbeddingBag, EmbeddingBagCollection
from fastdist.replicas.context import ReplicaContext, state
from fastdist.training.modules import is_materialized


def compute_average_loss(
    per_example_loss: torch.Tensor,
    sample_weight: torch.Tensor | None = None,
    global_batch_size: int | None = None,
) -> torch.Tensor:
    """Return the sum of a replica's losses divided by the global batch size.

    For `gradient_reduction="sum"`: the replicas' results add up to the mean over the global batch
    (tf.nn.compute_average_loss).

    Args:
        per_example_loss: shape (examples of this replica, …).
        sample_weight: factors, of a shape that broadcasts to `per_example_loss`.
        global_batch_size: examples of all replicas; by default the examples that
            `distribute_dataset` has put into the current batch, or without one this replica's
            examples times the number of replicas.

    Examples:
        >>> import fastdist as fd, torch
        >>> losses = torch.tensor([1.0, 2.0, 3.0])
        >>> fd.nn.compute_average_loss(losses, global_batch_size=6)
        tensor(1.)
    """
    losses = as_tensor(per_example_loss)
    if sample_weight is not None:
        losses = losses * sample_weight
    if global_batch_size is None:
        replica = state.replica
        global_batch_size = losses.shape[0] if losses.dim() else 1
        if replica is not None and replica.examples is not None:
            global_batch_size = sum(replica.examples)
        elif replica is not None:
            global_batch_size *= replica.num_replicas_in_sync
    if global_batch_size <= 0:
        raise ValueError(f"global_batch_size must be positive, got {global_batch_size}")
    return losses.sum() / global_batch_size


def scale_regularization_loss(loss: torch.Tensor) -> torch.Tensor:
    """Divide a loss that does not depend on the batch by the number of replicas.

    For `gradient_reduction="sum"`, where every replica adds it (tf.nn.scale_regularization_loss).

    Examples:
        >>> import fastdist as fd, torch
        >>> fd.nn.scale_regularization_loss(torch.tensor(0.5))  # one replica
        tensor(0.5000)
    """
    replica = state.replica
    return loss if replica is None else loss / replica.num_replicas_in_sync


class SyncBatchNorm(_BatchNorm):
    """Batch normalization with the statistics of the global batch.

    Every replica must call. Arguments as for `torch.nn.BatchNorm1d` to `3d`; inputs have any
    number of dimensions from 2 on: (examples, channels, …). Replicas may have different numbers of
    examples, or none. Outside of `run`, in evaluation mode and with one replica it equals torch's
    layer.

    Examples:
        >>> import fastdist as fd, torch
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
        >>> model = fd.nn.SyncBatchNorm.convert(model)
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalize over all replicas' examples."""
        replica = state.replica
        if not self.training or replica is None or replica.num_replicas_in_sync == 1:
            return super().forward(input)
        is_one = replica.examples is not None and sum(replica.examples) == 1
        if is_one and input.shape[0] <= 1 and math.prod(input.shape[2:]) == 1:  # as torch's layer
            raise ValueError(
                "SyncBatchNorm: expected more than 1 value per channel when training, got 1 in the "
                "global batch; leave such a batch out by drop_remainder=True"
            )
        mean, variance, count = self._statistics(input, replica)
        if self.track_running_stats:
            self._update_running(mean, variance, count)
        shape = (1, -1, *(1,) * (input.dim() - 2))
        scale = torch.rsqrt(variance + self.eps)
        weight = scale if self.weight is None else scale * self.weight
        bias = -mean * weight if self.bias is None else self.bias - mean * weight
        normalized: torch.Tensor = input * weight.reshape(shape) + bias.reshape(shape)
        return normalized

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2 dimensions, got shape {tuple(input.shape)}")

    def _statistics(self, input: torch.Tensor, replica: ReplicaContext) -> Any:
        """Return mean and variance per channel, and the number of examples.

        Two passes avoid cancellation in the variance.
        """
        self._check_input_dim(input)
        axes = [axis for axis in range(input.dim()) if axis != 1]
        # Count by a sum over the batch, so that padding examples do not count.
        own_count = torch.ones_like(input.detach()[:, :1]).sum(axes)
        total = replica.all_reduce("sum", torch.cat([input.sum(axes), own_count]))
        count = total[-1].detach()
        mean = total[:-1] / count
        shape = (1, -1, *(1,) * (input.dim() - 2))
        squares = (input - mean.reshape(shape)).square().sum(axes)
        variance = replica.all_reduce("sum", squares) / count
        return mean, variance, count

    @torch.no_grad()
    def _update_running(
        self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor
    ) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        rate = self.momentum
        if rate is None:
            rate = 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean), rate)
        self.running_var.lerp_(unbiased.to(self.running_var), rate)

    @classmethod
    def convert(cls, module: nn.Module) -> nn.Module:
        """Replace every BatchNorm layer by a SyncBatchNorm with its parameters and statistics.

        Raises:
            UnsupportedError: a layer is of a class that changes what torch's BatchNorm does, such
                as timm's BatchNormAct2d, or is a lazy layer that has seen no input.
        """
        for name, layer in module.named_modules():
            if isinstance(layer, _BatchNorm) and not isinstance(layer, SyncBatchNorm):
                _require_plain(name, layer)
        return cls._convert(module)

    @classmethod
    def _convert(cls, module: nn.Module) -> nn.Module:
        converted = module
        if isinstance(module, _BatchNorm) and not isinstance(module, SyncBatchNorm):
            converted = cls(module.num_features)
            vars(converted).update(vars(module))  # parameters, statistics, settings, mode, hooks
        for name, child in module.named_children():
            setattr(converted, name, cls._convert(child))
        return converted


def _require_plain(name: str, layer: _BatchNorm) -> None:
    plain, reason = nn.BatchNorm1d(1), ""
    for kind in type(layer).__mro__:
        if kind.__module__ == _BatchNorm.__module__:
            break
        own = (attribute for attribute in vars(kind) if hasattr(plain, attribute))
        for attribute in own:
            is_special = attribute.startswith("__") and attribute != "__call__"
            if not is_special and attribute not in ("extra_repr", "_check_input_dim"):
                reason = (
                    f"whose own {attribute} would be lost: put a fastdist.nn.SyncBatchNorm, and "
                    "the rest of what the layer does, into the model instead"
                )
    if not all(map(is_materialized, layer.parameters(recurse=False))):
        reason = "whose size is not known yet: call the model once before, or give the size"
    if reason:
        kind, place = type(layer), f"{name} is a" if name else "got a"
        raise UnsupportedError(
            f"SyncBatchNorm.convert: {place} {kind.__module__}.{kind.__qualname__}, {reason}"
        )


__all__ = [
    "Embedding",
    "EmbeddingBag",
    "EmbeddingBagCollection",
    "SyncBatchNorm",
    "compute_average_loss",
    "scale_regularization_loss",
]
