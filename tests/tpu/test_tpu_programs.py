"""TPUStrategy: the number of compilations, and the collectives in programs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fastdist import TPUStrategy
from virtual_devices import N, on_devices

pytestmark = on_devices


def test_new_shapes_are_counted_and_named() -> None:
    strategy = TPUStrategy()

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    def shaped(*shape: int) -> Any:
        return strategy.distribute_values_from_function(lambda c: torch.ones(shape))

    strategy.run(double, (shaped(3, 1),))
    strategy.run(double, (shaped(3, 1),))
    assert (strategy.compilations.count, strategy.compilations.repeated) == (1, 0)
    with pytest.warns(
        UserWarning, match=r"double was compiled again, for float32\[5, 1\] .* for float32\[3"
    ) as caught:
        strategy.run(double, (shaped(5, 1),))
    assert [warning.filename for warning in caught] == [__file__]
    assert (strategy.compilations.count, strategy.compilations.repeated) == (2, 1)
    state = {"factor": torch.ones(1)}

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * state["factor"].to(x.device).sum()

    strategy.run(scaled, (shaped(3, 1),))
    state["factor"] = torch.ones(2)
    same = r"for float32\[3, 1\] on .* for float32\[3, 1\]\. .* state was made"
    with pytest.warns(UserWarning, match=same):
        strategy.run(scaled, (shaped(3, 1),))


STEP = """
import sys, fastdist as fd, torch
from torch import nn

class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(64, 32), nn.BatchNorm1d(32)
        self.wide = nn.Linear(32, 2).double()

    def forward(self, x):
        return self.wide(self.norm(self.first(x)).relu().double())

strategy = fd.TPUStrategy(steps_per_execution=int(sys.argv[1]))
with strategy.scope():
    model = Mixed()
    optimizer = torch.optim.AdamW(model.parameters())

def step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()

batches = strategy.distribute_dataset(torch.randn(93, 64), global_batch_size=16)
losses = [strategy.run(step, (one,)) for one in batches]
assert len(losses) == 6 and strategy.compilations.count == 1
"""


@pytest.mark.parametrize("steps", [1, 3])
def test_one_all_reduce_for_each_dtype(tmp_path: Path, steps: int) -> None:
    """Checks the one optimized module that XLA made of all steps, even and uneven."""
    flags = f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text"
    done = subprocess.run(
        [sys.executable, "-c", STEP, str(steps)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env=os.environ | {"XLA_FLAGS": flags},
    )
    assert done.returncode == 0, done.stderr
    (module,) = tmp_path.glob("*after_optimizations.txt")
    program = module.read_text()
    kinds = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
    collectives = re.findall(rf" ({kinds})(?:-start)?\(", program)
    assert collectives == ["all-reduce"] * (2 * steps if N > 1 else 0)
    assert f"num_partitions={N}" in program or N == 1
