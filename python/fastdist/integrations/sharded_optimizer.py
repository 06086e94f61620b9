"""An optimizer divided among the ranks of a process group, for DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fastdist.collectives.communicator import Communicator
from fastdist.integrations.torch_backend.group import ProcessGroupFastdist
from fastdist.training.sharded import ShardedStep

Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)


def ShardedOptimizer(
    optimizer_class: Callable[..., Optimizer],
    params: Iterable[Any],
    *,
    group: dist.ProcessGroup | Communicator | None = None,
    **settings: Any,
) -> Optimizer:
    """Make an optimizer whose work and states are divided among ranks. Every rank must call.

    Each rank keeps the states of the parameters that it owns, and steps for these; the results are
    those of the optimizer alone, bit by bit. Gradients must be equal on all ranks, as they are
    after backward of DistributedDataParallel. `step` and `state_dict` are then calls that every
    rank must make. `state_dict` returns all states, and `load_state_dict` takes such states of any
    number of ranks; when ranks were replaced, all must load a state before the next step. Under a
    strategy, `CommunicationOptions(shard_optimizer=True)` does the same.

    Args:
        optimizer_class: the class of the optimizer, such as torch.optim.Muon.
        params: its parameters or groups of parameters.
        group: a process group of backend "fastdist", or a communicator; None: the default group.
        settings: arguments of the class.

    Raises:
        TypeError: the group has another backend.
        UnsupportedError: the class's step of one parameter depends on other parameters' gradients.

    Examples:
        >>> import fastdist as fd, torch, torch.distributed as dist
        >>> dist.init_process_group("fastdist", rank=0, world_size=1, store=dist.HashStore())
        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        >>> optimizer = fd.ShardedOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3)
        >>> model(torch.ones(4, 2)).mean().backward()
        >>> optimizer.step()
        >>> dist.destroy_process_group()
    """
    serving = dist.group.WORLD if group is None else group
    if not isinstance(serving, ProcessGroupFastdist | Communicator):
        raise TypeError(
            'ShardedOptimizer needs a process group of backend "fastdist", or a communicator, got '
            f"{type(serving).__name__}"
        )

    def connect() -> Communicator | None:
        found = serving.communicator if isinstance(serving, ProcessGroupFastdist) else serving
        return None if found.world_size == 1 else found

    optimizer = optimizer_class(params, **settings)
    ShardedStep(optimizer, connect)
    return optimizer
