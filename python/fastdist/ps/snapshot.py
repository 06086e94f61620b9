"""What one server keeps, as safetensors files; read by any number of servers.

A dense variable is one file, a table one per `_FILE_ROWS` rows. Each has the tensors `values` and
`slots`, of a table `ids` too, and says in its metadata which rows of what it holds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastdist import _core
from fastdist.ps.frames import Array
from fastdist.ps.specs import DenseSpec, Spec
from fastdist.ps.spread import owner_of

_FILE_ROWS = 1 << 20
_READ_ROWS = 1 << 16


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of a variable or table that a server keeps.

    Attributes:
        name: of the whole.
        begin: the first row.
        end: one past the last; -1 for a table without a limit.
        owner: of such a table: which of its `owners` the server is.
        owners: how many there are.
    """

    name: str
    begin: int
    end: int
    owner: int = 0
    owners: int = 1


def save(spec: Spec, kept: Any, part: Part, stem: Path) -> list[str]:
    """Write an object, while it is in use: no row is torn. Files appear when they are complete.

    Returns:
        The names of the files, which begin with `stem`.

    Raises:
        OSError: the disk is full, or cannot be written.
    """
    if isinstance(spec, DenseSpec):
        values = np.empty(spec.shape, np.float32)
        slots = np.empty((len(spec.rule.make().slots), *spec.shape), np.float32)
        step = kept.read_state(values, slots)
        return [_write(stem, 0, part, step, {"values": values, "slots": slots})]
    names: list[str] = []
    for tensors in _row_files(kept):
        names.append(_write(stem, len(names), part, kept.step, tensors))
    return names


def restore(spec: Spec, kept: Any, part: Part, files: Sequence[Path]) -> int:
    """Read those rows of an object that belong to this server.

    Args:
        spec: of the part.
        kept: what to fill.
        part: what it is.
        files: all that hold rows of the whole, whichever server wrote them.

    Returns:
        How many rows were read.

    Raises:
        ValueError: rows are missing, or the files hold something else.
    """
    found = 0
    values = slots = None
    if isinstance(spec, DenseSpec):
        rows = part.end - part.begin
        values = np.empty((rows, spec.size // max(1, rows)), np.float32)
        slots = np.empty((len(spec.rule.make().slots), *values.shape), np.float32)
    for path in files:
        with _open(path) as file:
            about = json.loads(file.metadata()["fastdist"])
            source = Part(**about["part"])
            if source.name != part.name:
                raise ValueError(f"{path} holds {source.name!r}, expected {part.name!r}")
            kept.step = max(kept.step, about["step"])
            if values is not None and slots is not None:
                found += _read_dense(file, source, part, values, slots)
            else:
                found += _read_rows(file, kept, source, part)
    if values is not None and slots is not None:
        if found != part.end - part.begin:
            raise ValueError(
                f"{part.name!r}: rows {part.begin} to {part.end} need {part.end - part.begin} "
                f"rows, the checkpoint has {found}"
            )
        kept.assign(values.reshape(spec.shape), slots.reshape(slots.shape[0], *spec.shape))  # type: ignore[union-attr]
    return found


def read_values(path: Path) -> tuple[int, Array | None, Array]:
    """What a file holds: its first row, the ids of its rows from there, or None, and values."""
    with _open(path) as file:
        begin = json.loads(file.metadata()["fastdist"])["part"]["begin"]
        ids = file.get_tensor("ids") if "ids" in file.keys() else None  # noqa: SIM118
        return begin, ids, file.get_tensor("values")


def _row_files(kept: _core.RowTable) -> Iterator[dict[str, Array]]:
    """Rows by files; one without rows where there are none."""
    pieces: list[tuple[Array, Array, Array]] = []
    rows = 0
    is_first = True
    for piece in kept.snapshot():
        pieces.append(piece)
        rows += piece[0].size
        if rows >= _FILE_ROWS:
            yield _joined(pieces, kept)
            pieces, rows, is_first = [], 0, False
    if rows or is_first:
        yield _joined(pieces, kept)


def _joined(pieces: list[tuple[Array, Array, Array]], kept: _core.RowTable) -> dict[str, Array]:
    width = kept.dim * len(kept.slots)
    empty = (np.empty(0, np.uint64), np.empty((0, kept.dim), np.float32))
    parts = pieces or [(*empty, np.empty((0, width), np.float32))]
    ids, values, slots = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    return {"ids": ids.view(np.int64), "values": values, "slots": slots.reshape(ids.size, width)}


def _write(stem: Path, number: int, part: Part, step: int, tensors: dict[str, Array]) -> str:
    from safetensors.numpy import save_file

    path = stem.with_name(f"{stem.name}-{number:05d}.safetensors")
    unfinished = path.with_suffix(".unfinished")
    try:
        about = json.dumps({"part": asdict(part), "step": step})
        save_file(tensors, unfinished, {"fastdist": about})
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    except Exception as error:
        unfinished.unlink(missing_ok=True)
        raise OSError(f"cannot write {path}: {error}") from error
    return path.name


def _open(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="np")


def _read_dense(file: Any, source: Part, part: Part, values: Array, slots: Array) -> int:
    begin, end = max(source.begin, part.begin), min(source.end, part.end)
    if begin >= end:
        return 0
    there = slice(begin - source.begin, end - source.begin)
    here = slice(begin - part.begin, end - part.begin)
    rows = end - begin
    if not file.get_slice("values").get_shape():  # a scalar
        values[here] = file.get_tensor("values")
        slots[:, here] = file.get_tensor("slots").reshape(-1, 1, 1)
        return rows
    values[here] = file.get_slice("values")[there].reshape(rows, -1)
    if slots.shape[0]:
        slots[:, here] = file.get_slice("slots")[:, there].reshape(slots.shape[0], rows, -1)
    return rows


def _read_rows(file: Any, kept: _core.RowTable, source: Part, part: Part) -> int:
    is_hashed = part.end < 0
    read = 0
    total = file.get_slice("ids").get_shape()[0]
    for at in range(0, total, _READ_ROWS):
        there = slice(at, min(at + _READ_ROWS, total))
        ids = file.get_slice("ids")[there]
        if is_hashed:
            mine = owner_of(ids, part.owners) == part.owner
        else:
            ids = ids + source.begin
            mine = (ids >= part.begin) & (ids < part.end)
            ids = ids - part.begin
        if not mine.any():
            continue
        count = int(mine.sum())
        slots = file.get_slice("slots")[there][mine].reshape(count, len(kept.slots), kept.dim)
        kept.assign(ids[mine], file.get_slice("values")[there][mine], slots)
        read += count
    return read
