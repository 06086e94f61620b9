"""Checkpoints of all servers: every server writes its own files, and one index makes them valid."""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fastdist.ps.client.client import Client
from fastdist.ps.client.requests import Ticket
from fastdist.ps.client.sharded import ShardedRows, ShardedVariable
from fastdist.ps.wire.protocol import MAX_LONG_META_BYTES, MAX_META_BYTES, Op
from fastdist.ps.wire.snapshot import Part, check_files, read_values
from fastdist.ps.wire.specs import DenseSpec, RowsSpec, Spec, from_json, to_json

_INDEX = "index.json"
_FORMAT = 1
# Names of data files; interrupted servers may have left unfinished ones.
_DATA_FILE = re.compile(r"fastdist-[0-9a-f]{12}-\d+-\d+\.(safetensors|unfinished)")
# Limit for the names of one object's files: they must fit into the request that restores it.
_PIECE_ROWS = 1 << 16
_MAX_NAMES_BYTES = MAX_LONG_META_BYTES - MAX_META_BYTES
Sharded = ShardedVariable | ShardedRows


@dataclass(frozen=True, slots=True)
class Saved:
    """A variable or table in a checkpoint.

    Attributes:
        spec: of the whole.
        paths: of the files with its rows.
    """

    spec: Spec
    paths: list[Path]

    def check(self) -> list[Part]:
        """See `fastdist.ps.wire.snapshot.check_files`."""
        return check_files(self.spec, self.paths)


def save_checkpoint(
    client: Client, directory: str | Path, things: Sequence[Sharded], *, timeout_s: float = 600.0
) -> None:
    """Write variables and tables, which may be in use meanwhile; no row is torn.

    Servers write their files into the directory, which all servers must see. The previous
    checkpoint stays valid until the new one is complete, and is then removed; other files in the
    directory are not touched.

    Raises:
        OSError: a server could not write; the previous checkpoint is unchanged.
        ValueError: a table has far too many files.
        UnavailableError: a server does not answer.
    """
    directory = Path(directory).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    stem = f"fastdist-{uuid.uuid4().hex[:12]}"
    files: dict[str, list[str]] = {}
    try:
        names: list[str] = []
        tickets: list[Ticket] = []
        for thing in things:
            for server, number, part in thing.parts():
                path = str(directory / f"{stem}-{len(tickets)}")
                about = {"part": asdict(part), "stem": path}
                tickets.append(_submit(client, server, Op.SAVE, number, about, timeout_s))
                names.append(thing.spec.name)
        for name, reply in zip(names, _wait(client, tickets), strict=True):
            files.setdefault(name, []).extend(json.loads(bytes(reply)))
        for name, own in files.items():
            if len(json.dumps(own)) > _MAX_NAMES_BYTES:
                raise ValueError(f"{name!r} is in {len(own)} files, too many to restore")
        specs = {thing.spec.name: json.loads(to_json(thing.spec)) for thing in things}
        index = {"format": _FORMAT, "files": files, "specs": specs}
        _replace(directory / _INDEX, json.dumps(index, indent=1))
    except BaseException:
        _remove(path for path in directory.glob(f"{stem}-*"))
        raise
    kept = {name for names in files.values() for name in names}
    ours = (path for path in directory.glob("fastdist-*") if _DATA_FILE.fullmatch(path.name))
    _remove(path for path in ours if path.name not in kept)


def restore_checkpoint(
    client: Client, directory: str | Path, things: Sequence[Sharded], *, timeout_s: float = 600.0
) -> None:
    """Read a checkpoint into existing variables and tables, however they are sharded.

    Rows that a table has and the checkpoint lacks stay as they are; those that neither has begin as
    in the job that wrote the checkpoint. This process checks all files before any server changes
    anything.

    Raises:
        FileNotFoundError: there is no checkpoint, or one of its files is gone.
        OSError: a file cannot be read.
        ValueError: the checkpoint is damaged, lacks a variable, or has it in another shape or for
            another rule.
        UnavailableError: a server does not answer.
    """
    saved = saved_in(directory)
    sources: list[tuple[Sharded, list[tuple[str, Part]]]] = []
    for thing in things:
        name = thing.spec.name
        if name not in saved:
            raise ValueError(f"{directory} has no {name!r}; it has {', '.join(sorted(saved))}")
        _require_same(saved[name].spec, thing.spec, directory)
        names = (path.name for path in saved[name].paths)
        sources.append((thing, list(zip(names, saved[name].check(), strict=True))))
    tickets = []
    for thing, files in sources:
        spec = saved[thing.spec.name].spec
        if isinstance(thing, ShardedRows) and isinstance(spec, RowsSpec):
            thing.spec = replace(thing.spec, seed=spec.seed)
        for server, number, part in thing.parts():
            about = {
                "seed": getattr(thing.spec, "seed", None),
                "part": asdict(part),
                "directory": str(Path(directory).absolute()),
                "files": [name for name, source in files if part.may_share_rows(source)],
            }
            tickets.append(_submit(client, server, Op.RESTORE, number, about, timeout_s))
    _wait(client, tickets)


def saved_in(directory: str | Path) -> dict[str, Saved]:
    """Return the variables and tables of a checkpoint, by name.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: the index is damaged, or of another version.
    """
    directory = Path(directory).absolute()
    path = directory / _INDEX
    data = path.read_bytes()
    try:
        index = json.loads(data)
        if index["format"] != _FORMAT:
            raise ValueError(f"format {index['format']}, expected {_FORMAT}")
        times = Counter(name for names in index["files"].values() for name in names)
        for name, count in times.items():
            if Path(name).name != name or count > 1:
                raise ValueError(f"{name!r} is not a file's name, or is listed twice")
        saved = {}
        for name, names in index["files"].items():
            spec = from_json(json.dumps(index["specs"][name]).encode())
            if spec.name != name:
                raise ValueError(f"{spec} is not the spec of {name!r}")
            _layout(spec), _rows(spec)  # raise if the spec is invalid
            saved[name] = Saved(spec, [directory / file for file in names])
        return saved
    except Exception as error:
        raise ValueError(f"{path} is damaged, or of another version: {error!r}") from error


def load(module: nn.Module, directory: str | Path, *, prefix: str = "0/") -> list[str]:
    """Fill a module from a checkpoint that `ParameterServerStrategy.save` wrote, without servers.

    For evaluators, and to continue without servers. Rows of tables that no worker has touched get
    the initial values that they had on the servers.

    Args:
        module: the same as in the scope.
        directory: of the checkpoint.
        prefix: of the names in the checkpoint: the number of the scope, from 0, and if the scope
            had several modules the module's, such as "0/Net[1]."; the error message lists names.

    Returns:
        The names of parameters and buffers that the checkpoint lacks: frozen or integer ones.

    Raises:
        FileNotFoundError: there is no checkpoint, or one of its files is gone.
        OSError: a file cannot be read.
        ValueError: the checkpoint is damaged, has nothing of the module, or has a tensor in
            another shape; the module is unchanged.
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
            f"{directory} has nothing called {prefix}{', '.join(missing[:3])}; it has "
            f"{', '.join(sorted(saved)[:10])}"
        )
    for tensor, source in found:
        source.check()
        _require_room(tensor, source, directory)
    for tensor, source in found:
        if isinstance(source.spec, RowsSpec):
            _fill_initial(tensor, source.spec)
        for path in source.paths:
            _fill(tensor, path)
    return missing


def _require_same(saved: Spec, wanted: Spec, directory: str | Path) -> None:
    """Raise unless a saved object can be read into another one."""
    if _layout(saved) != _layout(wanted) or _rows(saved) > _rows(wanted):
        raise ValueError(f"{directory} has {wanted.name!r} as {saved}, expected {wanted}")


def _layout(spec: Spec) -> tuple[object, ...]:
    """Return everything that an element's place in a file depends on."""
    slots = spec.rule.make().slots
    if isinstance(spec, DenseSpec):
        return (spec.shape, slots)
    return (spec.dim, spec.rows is None, slots)


def _rows(spec: Spec) -> int:
    """Return the limit of rows of a table, which may be higher than when it was saved; else 0."""
    return 0 if isinstance(spec, DenseSpec) else int(spec.rows or 0)


def _submit(
    client: Client, server: int, op: Op, number: int, about: dict[str, Any], timeout_s: float
) -> Ticket:
    frames = [json.dumps(about).encode()]
    return client.submit(server, op, number, frames, timeout_s=timeout_s)


def _wait(client: Client, tickets: Sequence[Ticket]) -> list[memoryview]:
    """Return the replies to all requests; if one fails, wait for the others before raising."""
    replies = []
    failed: Exception | None = None
    for ticket in tickets:
        try:
            replies.append(client.wait(ticket))
        except Exception as error:
            failed = failed or error
    if failed is not None:
        raise failed
    return replies


def _replace(path: Path, text: str) -> None:
    unfinished = path.with_suffix(".unfinished")
    try:
        with unfinished.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    except BaseException:
        _remove([unfinished])
        raise


def _remove(paths: Iterable[Path]) -> None:
    """Remove files, ignoring errors: the next checkpoint tries again."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()


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
def _fill_initial(tensor: torch.Tensor, spec: RowsSpec) -> None:
    table = replace(spec, rows=None).make()
    rows = np.empty((_PIECE_ROWS, spec.dim), np.float32)
    for begin in range(0, spec.rows or len(tensor), _PIECE_ROWS):
        end = min(begin + _PIECE_ROWS, spec.rows or len(tensor))
        table.pull(np.arange(begin, end), rows[: end - begin])
        tensor[begin:end] = torch.from_numpy(rows[: end - begin])


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
