"""Checkpoints of parameter servers, read where there are no servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from fastdist.ps.checkpoint import checkpoint_files
from fastdist.ps.snapshot import read_values


def load(module: nn.Module, directory: str | Path, *, prefix: str = "0/") -> list[str]:
    """Fill a module with what `ParameterServerStrategy.save` wrote.

    For evaluators, and for going on without servers. Rows that no worker has ever touched are in
    no checkpoint; they stay as they are here, which is alike where the module is made alike.

    Args:
        module: as it was made in the scope.
        directory: of the checkpoint.
        prefix: of the names there: the number of the scope, from 0, and of its modules where there
            were several, such as "0/Net[1]."; what the error message shows.

    Returns:
        The names of parameters and buffers that the checkpoint has not: those that are frozen, or
        of integers.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: it has nothing of the module, or something in another shape.
    """
    files = checkpoint_files(directory)
    missing = []
    for name, tensor in _tensors(module):
        paths = files.get(prefix + name)
        if paths is None:
            missing.append(name)
            continue
        for path in paths:
            _fill(tensor, path)
    if len(missing) == sum(1 for _ in _tensors(module)):
        raise ValueError(
            f"{directory} has nothing that is called {prefix}{', '.join(missing[:3])}; it has "
            f"{', '.join(sorted(files)[:10])}"
        )
    return missing


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


@torch.no_grad()
def _fill(tensor: torch.Tensor, path: Path) -> None:
    begin, ids, values = read_values(path)
    rows = torch.from_numpy(values)
    whole = tensor if tensor.dim() else tensor.reshape(1)
    if not values.ndim:
        rows = rows.reshape(1)
    if rows.shape[1:] != whole.shape[1:] or (ids is None and begin + len(rows) > len(whole)):
        raise ValueError(
            f"{path} has values of shape {tuple(values.shape)} from row {begin} on, the module has "
            f"{tuple(tensor.shape)}"
        )
    if ids is None:
        whole[begin : begin + len(rows)] = rows.to(tensor)
    else:
        whole[torch.from_numpy(ids) + begin] = rows.to(tensor)
