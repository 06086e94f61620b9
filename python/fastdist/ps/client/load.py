"""Checkpoints of parameter servers, read where there are no servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from fastdist.ps.client.checkpoint import Saved, saved_in
from fastdist.ps.wire.snapshot import read_values
from fastdist.ps.wire.specs import DenseSpec


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
        FileNotFoundError: there is no checkpoint, or a file of it is gone.
        OSError: it cannot be read.
        ValueError: it is damaged, has nothing of the module, or something in another shape; the
            module is as it was.
    """
    saved = saved_in(directory)
    found = []
    missing = []
    for name, tensor in _tensors(module):
        if prefix + name in saved:
            found.append((tensor, saved[prefix + name]))
        else:
            missing.append(name)
    if not found:
        raise ValueError(
            f"{directory} has nothing that is called {prefix}{', '.join(missing[:3])}; it has "
            f"{', '.join(sorted(saved)[:10])}"
        )
    for tensor, source in found:
        source.check()
        _require_room(tensor, source, directory)
    for tensor, source in found:
        for path in source.paths:
            _fill(tensor, path)
    return missing


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _require_room(tensor: torch.Tensor, source: Saved, directory: str | Path) -> None:
    spec = source.spec
    if isinstance(spec, DenseSpec):
        fits = tensor.shape == spec.shape
    else:
        fits = tensor.dim() == 2 and tensor.shape[1] == spec.dim
        fits = fits and tensor.shape[0] >= (spec.rows or 0)
    if not fits:
        raise ValueError(f"{directory} has {spec}, the module has the shape {tuple(tensor.shape)}")


@torch.no_grad()
def _fill(tensor: torch.Tensor, path: Path) -> None:
    begin, ids, values = read_values(path)
    rows = torch.from_numpy(values).to(tensor)
    if not tensor.dim():
        tensor.copy_(rows)
    elif ids is None:
        tensor[begin : begin + len(rows)] = rows
    else:
        tensor[torch.from_numpy(ids) + begin] = rows
