"""Joins the states of a torchmetrics metric over all replicas."""

from __future__ import annotations

import functools
import itertools
import warnings
from typing import Any

import torch

from fastdist.collectives.communicator import Communicator
from fastdist.replicas.per_replica import map_structure

_NOTHING = object()


def join_states(metric: Any, communicator: Communicator) -> None:
    """Replace a metric's states by the joined states of all replicas. Every replica must call.

    Replicas whose metric was never updated contribute nothing. Elements of list states are ordered
    by update, then by replica. That is the order of the examples, up to the first batch that had
    no examples for some replicas.
    """
    own = {name: getattr(metric, name) for name in metric._reductions}
    gathered = communicator.all_gather_object((_is_updated(metric), map_structure(_pack, own)))
    rank, device = communicator.rank, metric.device
    if metric.compute_on_cpu and any(isinstance(value, list) for value in own.values()):
        device = torch.device("cpu")
    states = [
        own if i == rank else map_structure(functools.partial(_unpack, device), packed)
        for i, (is_updated, packed) in enumerate(gathered)
        if is_updated
    ]
    if not states and rank == 0:
        name = type(metric).__name__
        warnings.warn(
            f"compute of {name} was called before its update on any replica", stacklevel=2
        )
    for name, reduction in metric._reductions.items():
        values = [one[name] for one in states]
        if len(values) <= 1:
            joined = values[0] if values else own[name]
        elif isinstance(values[0], torch.Tensor):
            joined = torch.stack(values) if reduction is None else reduction(torch.stack(values))
        else:
            rows = itertools.zip_longest(*values, fillvalue=_NOTHING)
            joined = [item for row in rows for item in row if item is not _NOTHING]
            joined = reduction(joined) if joined and reduction is not None else joined
        setattr(metric, name, joined)


def _is_updated(metric: Any) -> bool:
    if metric._update_count > 0:
        return True
    pairs = [(getattr(metric, name), default) for name, default in metric._defaults.items()]
    return any(
        len(now) > 0 if isinstance(default, list) else not torch.equal(now, default.to(now.device))
        for now, default in pairs
    )


def _pack(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    data = torch.empty(leaf.numel(), dtype=leaf.dtype).copy_(leaf.detach().flatten())
    return functools.partial(_tensor, data.view(torch.uint8).numpy(), leaf.dtype, leaf.shape)


def _unpack(device: torch.device, leaf: Any) -> Any:
    return leaf().to(device) if isinstance(leaf, functools.partial) else leaf


def _tensor(data: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(data).view(dtype).reshape(shape)
