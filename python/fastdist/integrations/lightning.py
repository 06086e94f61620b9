"""Lightning and Fabric over fastdist's backend: `Trainer(strategy="fastdist")`.

The name is registered by an import of this module, and of `fastdist` if Lightning is loaded.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch

PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")  # the same code, three names
# The modules of strategies, their registries, and the method that reduces over processes.
_STRATEGIES = (
    ("lightning.pytorch.strategies", "StrategyRegistry", "reduce"),
    ("pytorch_lightning.strategies", "StrategyRegistry", "reduce"),
    ("lightning.fabric.strategies", "STRATEGY_REGISTRY", "all_reduce"),
    ("lightning_fabric.strategies", "STRATEGY_REGISTRY", "all_reduce"),
)


def _register(module: str, registry: str, method: str) -> None:
    strategies: Any = sys.modules[module]
    plain = getattr(strategies.DDPStrategy, method)

    def reduce(self: Any, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        # Lightning rounds means of integers to integers, and divides by them.
        is_mean = isinstance(reduce_op, str) and reduce_op.lower() in ("mean", "avg")
        if is_mean and isinstance(tensor, torch.Tensor) and not tensor.is_floating_point():
            tensor = tensor.double()
        return plain(self, tensor, group, reduce_op)

    members = {"__module__": __name__, "__doc__": strategies.DDPStrategy.__doc__, method: reduce}
    getattr(strategies, registry).register(
        "fastdist",
        type("FastdistStrategy", (strategies.DDPStrategy,), members),
        description="DDP on fastdist's collectives",
        process_group_backend="fastdist",
    )


if not any(package in sys.modules for package in PACKAGES):
    importlib.import_module("lightning")
for _strategies in _STRATEGIES:
    if _strategies[0] in sys.modules:
        _register(*_strategies)
