"""Measures the digits step under TPUStrategy, next to the same step with torch_xla alone.

    PJRT_DEVICE=CPU CPU_NUM_DEVICES=4 python benchmarks/tpu_step.py
    PJRT_DEVICE=CPU CPU_NUM_DEVICES=1 python benchmarks/tpu_step.py

On several devices, the peer is torch_xla's SPMD with manual sharding and one fused all-reduce,
written by hand; on one device, plain torch_xla. Both run in one process, take turns in blocks of
steps, and start from batches on the devices; a block ends when its last loss is computed. The
weights must agree after the same steps. Prints one JSON object: milliseconds per step (p50 and p99
of the blocks), the ratio of the medians, and the bar: 1.1 on several devices, 1.05 on one.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import fastdist as fd
import numpy as np
import torch
import torch.nn.functional as F
import torch_xla
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from sklearn.datasets import load_digits
from torch import nn

Step = Callable[[], torch.Tensor]
BATCH = 128


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = load_digits(return_X_y=True)
    count = len(labels) // BATCH * BATCH
    return torch.tensor(images[:count], dtype=torch.float32) / 16, torch.tensor(labels[:count])


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def by_strategy(uneven: bool) -> tuple[Step, nn.Module]:
    """Returns steps by TPUStrategy; with `uneven`, the last batch is padded."""
    strategy = fd.TPUStrategy()
    with strategy.scope():
        model = network()
        optimizer = make_optimizer(model)
    x, y = digits()
    if uneven:
        x, y = x[:-1], y[:-1]
    dataset = strategy.distribute_dataset((x, y), global_batch_size=BATCH)
    whole = [batch for batch in dataset if sum(batch[0].examples) == BATCH]
    batches = itertools.cycle(whole)

    def train_step(batch: Any) -> torch.Tensor:
        x, y = batch
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def step() -> torch.Tensor:
        result = strategy.run(train_step, args=(next(batches),))
        if type(result) is fd.PerReplica:
            tensor: torch.Tensor = result.values[0].tensor
            return tensor
        return result

    return step, model


def by_hand() -> tuple[Step, nn.Module]:
    """Returns steps by torch_xla's SPMD, with parameters and batch in manual sharding."""
    count = xr.global_runtime_device_count()
    mesh = xs.Mesh(np.arange(count), (count,), ("data",))
    model = network().to("xla")
    optimizer = make_optimizer(model)
    parameters = dict(model.named_parameters())
    groups = [list(range(count))]
    x, y = digits()
    placed = []
    for i in range(0, len(y), BATCH):
        images, labels = x[i : i + BATCH].to("xla"), y[i : i + BATCH].to("xla")
        xs.mark_sharding(images, mesh, ("data", None))
        xs.mark_sharding(labels, mesh, ("data",))
        placed.append((images, labels))
    for parameter in parameters.values():
        xs.mark_sharding(parameter, mesh, (None,) * parameter.dim())
    torch_xla.sync()
    batches = itertools.cycle(placed)

    def step() -> torch.Tensor:
        images, labels = next(batches)
        local = {
            name: xs.enable_manual_sharding(p.detach(), (None,) * p.dim(), mesh=mesh)
            .global_tensor.detach()
            .requires_grad_()
            for name, p in parameters.items()
        }
        own_x = xs.enable_manual_sharding(images, ("data", None), mesh=mesh).global_tensor
        own_y = xs.enable_manual_sharding(labels, ("data",), mesh=mesh).global_tensor
        loss = F.cross_entropy(torch.func.functional_call(model, local, (own_x,)), own_y)
        loss.backward()
        gradients = [tensor.grad for tensor in local.values()]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        flat = torch_xla._XLAC._xla_spmd_all_reduce("sum", flat, 1.0 / count, groups)
        parts = torch.split(flat, [gradient.numel() for gradient in gradients])
        for parameter, part in zip(parameters.values(), parts, strict=True):
            whole = xs.disable_manual_sharding(
                part.view(parameter.shape), (None,) * parameter.dim(), parameter.shape, mesh=mesh
            )
            parameter.grad = whole.global_tensor
        optimizer.step()
        losses = xs.disable_manual_sharding(
            loss.detach().unsqueeze(0), ("data",), (count,), mesh=mesh
        )
        torch_xla.sync()
        result: torch.Tensor = losses.global_tensor
        return result

    return step, model


def by_torch_xla() -> tuple[Step, nn.Module]:
    """Returns steps by torch_xla on one device."""
    model = network().to("xla")
    optimizer = make_optimizer(model)
    x, y = digits()
    placed = [
        (x[i : i + BATCH].to("xla"), y[i : i + BATCH].to("xla")) for i in range(0, len(y), BATCH)
    ]
    batches = itertools.cycle(placed)

    def step() -> torch.Tensor:
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        torch_xla.sync()
        return loss.detach()

    return step, model


def timed(step: Step, steps: int) -> float:
    """Returns the milliseconds per step of a block."""
    began = time.perf_counter()
    for _ in range(steps):
        loss = step()
    loss.cpu()
    return 1e3 * (time.perf_counter() - began) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--steps", type=int, default=20, help="steps in each block")
    options = parser.parse_args()

    devices = xr.global_runtime_device_count()
    first, model = by_strategy(uneven=False)  # first, since SPMD must be on before tensors are made
    filled, _ = by_strategy(uneven=True)
    other, reference = by_hand() if devices > 1 else by_torch_xla()
    ways = {"fastdist": first, "torch_xla": other, "fastdist, batches filled up": filled}
    for step in ways.values():
        timed(step, 2 * options.steps)
    for own, same in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(own.detach().cpu(), same.detach().cpu(), rtol=0, atol=1e-5)

    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.blocks):
        for name, step in ways.items():
            times[name].append(timed(step, options.steps))
    median = {name: statistics.median(values) for name, values in times.items()}
    bar = 1.1 if devices > 1 else 1.05
    ratio = median["fastdist"] / median["torch_xla"]
    result = {
        "devices": devices,
        "beside": "SPMD by hand" if devices > 1 else "plain torch_xla",
        "ms p50": {name: round(value, 3) for name, value in median.items()},
        "ms p99": {name: round(float(np.percentile(v, 99)), 3) for name, v in times.items()},
        "ratio": round(ratio, 3),
        "bar": bar,
        "passes": ratio <= bar,
        "ratio filled up": round(median["fastdist, batches filled up"] / median["torch_xla"], 3),
        "versions": {"torch": torch.__version__, "torch_xla": torch_xla.__version__},
        "cores": os.cpu_count(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
