"""Checkpoints of servers, read without servers: for evaluation, serving, and other programs."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from safetensors import safe_open
from torch import nn

from fastdist.ps.client.checkpoint import Saved, read_index
from fastdist.ps.wire.protocol import Array, to_ids
from fastdist.ps.wire.snapshot import Part, require_checksums
from fastdist.ps.wire.specs import DenseSpec, RowsSpec

_PIECE_ROWS = 1 << 16
# The number of the scope, and of the module if the scope had several.
_PREFIX = re.compile(r"(\d+/(\w+\[\d+\]\.)?)?")


@dataclass(frozen=True, slots=True)
class SavedRows:
    """The rows of a table that were trained, in files that are mapped into memory.

    Attributes:
        pieces: ids, int64 [rows], and values, float32 [rows, dim], of each file; read-only.
        dim: elements of a row.
        limit: ids are below this number; None for any 64-bit id.
    """

    pieces: tuple[tuple[Array, Array], ...]
    dim: int
    limit: int | None
    _spec: RowsSpec

    def __len__(self) -> int:
        """Return the number of rows that were trained."""
        return sum(ids.size for ids, _ in self.pieces)

    def look_up(self, ids: Any) -> torch.Tensor:
        """Return the rows of ids: float32 [ids, dim]; other rows have their initial values.

        Reads the ids of all files, and of their values only those of the rows that were asked for.

        Raises:
            TypeError: the ids are not integers.
            IndexError: an id is beyond the table.
        """
        wanted, places = np.unique(to_ids(ids).view(np.int64), return_inverse=True)
        beyond = wanted[(wanted < 0) | (wanted >= (self.limit or 0))]
        if self.limit is not None and beyond.size:
            raise IndexError(f"id {beyond[0]} is out of range: the table has {self.limit} rows")
        values = np.empty((wanted.size, self.dim), np.float32)
        replace(self._spec, rows=None).make().pull(wanted, values)
        for found, rows in self.pieces:
            at = np.searchsorted(wanted, found)
            is_wanted = at < wanted.size
            is_wanted[is_wanted] = wanted[at[is_wanted]] == found[is_wanted]
            values[at[is_wanted]] = rows[is_wanted]
        return torch.from_numpy(values[places.reshape(-1)])


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A checkpoint of servers.

    Attributes:
        values: parameters and buffers by the names that they have in their module; if modules of
            several scopes have equal names, by their names in the checkpoint. Tables are SavedRows.
        state: the `state` that was given to `ParameterServerStrategy.save`.
    """

    values: dict[str, torch.Tensor | SavedRows]
    state: Any


@overload
def load(source: str | Path) -> LoadedCheckpoint: ...
@overload
def load(source: nn.Module, directory: str | Path, *, prefix: str | None = None) -> list[str]: ...
def load(
    source: nn.Module | str | Path,
    directory: str | Path | None = None,
    *,
    prefix: str | None = None,
) -> LoadedCheckpoint | list[str]:
    """Read a checkpoint that `ParameterServerStrategy.save` wrote, without servers.

    `load(directory)` returns its values. `load(module, directory)` fills a module, for evaluators
    and to continue without servers: rows of tables that no worker has touched get the initial
    values that they had on the servers.

    Args:
        source: the directory of the checkpoint, or a module like one in a scope.
        directory: the checkpoint's directory, if the source is a module.
        prefix: the beginning of the module's names in the checkpoint: the number of the scope, from
            0, and if the scope had several modules the module's, such as "0/Net[1]."; None finds
            it.

    Returns:
        The values; for a module the names of its parameters and buffers that the checkpoint lacks:
        frozen or integer ones.

    Raises:
        FileNotFoundError: there is no checkpoint, or one of its files is gone.
        OSError: a file cannot be read.
        ValueError: the checkpoint is damaged, has nothing of the module or of several such modules,
            or has a tensor in another shape; the module is unchanged.
    """
    if isinstance(source, nn.Module):
        if directory is None:
            raise TypeError("load needs a directory after the module")
        return _load_into(source, Path(directory), prefix)
    return _load_all(Path(source))


def _load_all(directory: Path) -> LoadedCheckpoint:
    index = read_index(directory)
    for saved in index.saved.values():
        require_checksums(saved.checksums)
    short = {name: re.sub(r"^\d+/", "", name) for name in index.saved}
    is_clear = len(set(short.values())) == len(short)
    values: dict[str, torch.Tensor | SavedRows] = {}
    for full, saved in index.saved.items():
        name, spec = short[full] if is_clear else full, saved.spec
        if isinstance(spec, RowsSpec):
            pieces = tuple(_mapped(path, part) for path, part in saved.parts.items())
            values[name] = SavedRows(pieces, spec.dim, spec.rows, spec)
        else:
            values[name] = _fill(torch.empty(spec.shape), saved)
    return LoadedCheckpoint(values, index.state)


def _mapped(path: Path, part: Part) -> tuple[Any, Array]:
    """Map a checked file: the ids of a table's rows, or a slice of a variable's; and the values."""
    with safe_open(path, framework="pt") as file:  # whose tensors are the mapped memory
        arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
    for array in arrays.values():
        array.flags.writeable = False
    if "ids" not in arrays:
        return slice(part.begin, part.end), arrays["values"]
    ids = arrays["ids"]
    return (ids + part.begin if part.begin else ids), arrays["values"]


def _load_into(module: nn.Module, directory: Path, prefix: str | None) -> list[str]:
    saved = read_index(directory).saved
    tensors = dict[str, torch.Tensor]([*module.named_parameters(), *module.named_buffers()])
    if prefix is None:
        prefix = _find_prefix(saved, tensors, directory)
    found = {name: saved[prefix + name] for name in tensors if prefix + name in saved}
    missing = [name for name in tensors if name not in found]
    if not found:
        raise ValueError(
            f"{directory} has nothing called {prefix}{', '.join(missing[:3])}; it has "
            f"{', '.join(sorted(saved)[:10])}"
        )
    for name, source in found.items():
        require_checksums(source.checksums)
        _require_room(tensors[name], source, directory)
    for name, source in found.items():
        _fill(tensors[name], source)
    return missing


def _find_prefix(saved: dict[str, Saved], tensors: dict[str, torch.Tensor], directory: Path) -> str:
    """Return the prefix with which a checkpoint has the most tensors of a module."""
    prefixes = (
        full.removesuffix(name) for full in saved for name in tensors if full.endswith(name)
    )
    counts = Counter(prefix for prefix in prefixes if _PREFIX.fullmatch(prefix))
    most = max(counts.values(), default=0)
    best = sorted(prefix for prefix, count in counts.items() if count == most)
    if len(best) > 1:
        raise ValueError(
            f"{directory} has several modules with these names: pass prefix=, one of "
            f"{', '.join(map(repr, best))}"
        )
    return best[0] if best else ""


def _require_room(tensor: torch.Tensor, source: Saved, directory: str | Path) -> None:
    spec = source.spec
    if isinstance(spec, DenseSpec):
        fits = tensor.shape == spec.shape
    else:
        fits = tensor.dim() == 2 and tensor.shape[1] == spec.dim
        fits = fits and tensor.shape[0] >= (spec.rows or 0)
    if not fits:
        raise ValueError(f"{directory} has {spec}, the module has the shape {tuple(tensor.shape)}")
    if isinstance(spec, RowsSpec) and spec.rows is None:
        for path, part in source.parts.items():
            ids, _ = _mapped(path, part)
            beyond = ids[(ids < 0) | (ids >= tensor.shape[0])]
            if beyond.size:
                raise ValueError(
                    f"{directory} has a row of {spec.name!r} for the id {beyond[0]}, the module "
                    f"has {tensor.shape[0]} rows: read such tables with fastdist.ps.load(directory)"
                )


@torch.no_grad()
def _fill(tensor: torch.Tensor, source: Saved) -> torch.Tensor:
    """Fill a tensor with what a checkpoint has; rows that it lacks get their initial values."""
    spec = source.spec
    if isinstance(spec, RowsSpec):
        table = replace(spec, rows=None).make()
        rows = np.empty((_PIECE_ROWS, spec.dim), np.float32)
        for begin in range(0, spec.rows or len(tensor), _PIECE_ROWS):
            end = min(begin + _PIECE_ROWS, spec.rows or len(tensor))
            table.pull(np.arange(begin, end), rows[: end - begin])
            tensor[begin:end] = torch.from_numpy(rows[: end - begin])
    for path, part in source.parts.items():
        places, values = _mapped(path, part)
        read = torch.from_numpy(np.array(values)).to(tensor)
        if isinstance(spec, RowsSpec):
            tensor[torch.from_numpy(np.array(places))] = read
        elif tensor.dim():
            tensor[places] = read
        else:
            tensor.copy_(read)
    return tensor
