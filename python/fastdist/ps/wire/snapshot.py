"""One server's objects as safetensors files, which any number of servers can read.

A dense variable is one file, a table one per `_FILE_ROWS` rows or more that exist. Each file
has the tensors `values` and `slots`, for tables also `ids`; its metadata says which rows of which
object it holds.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import fastdist._core as _core
from fastdist.ps.wire.protocol import Array
from fastdist.ps.wire.specs import DenseSpec, Spec

_FILE_ROWS = 1 << 20
_READ_ROWS = 1 << 16
_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of a variable or table that one server keeps."""

    name: str  # of the whole variable or table
    begin: int  # the first row
    end: int  # one past the last; -1 for a table without a limit of rows
    owner: int = 0  # the server's number among the `owners`, for a table without a limit
    owners: int = 1  # number of servers that share the table

    def may_share_rows(self, other: Part) -> bool:
        """Return True if another part of the same variable or table may have some of these rows."""
        if self.end < 0:
            return self.owners != other.owners or self.owner == other.owner
        return max(self.begin, other.begin) < min(self.end, other.end)


_Opened = tuple[Any, Part, int]  # a file, what it holds, and the object's step when it was written


def save(spec: Spec, stored: Any, part: Part, stem: Path) -> dict[str, int]:
    """Write an object's files, while the object is in use: no row is torn.

    Returns the names of the files, which begin with `stem`'s, and their checksums.
    """
    from safetensors.numpy import save_file

    sums: dict[str, int] = {}
    for step, tensors in _contents(spec, stored):
        path = stem.with_name(f"{stem.name}-{len(sums):05d}.safetensors")
        try:
            about = json.dumps({"part": asdict(part), "step": step})
            save_file(tensors, path, {"fastdist": about})
            with path.open("rb") as file:
                os.fsync(file.fileno())
        except Exception as error:
            raise OSError(f"cannot write {path}: {error}") from error
        sums[path.name] = _checksum_of(path)
    return sums


def _checksum_of(path: Path) -> int:
    """Return the CRC-32 of a file."""
    found = 0
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            found = zlib.crc32(data, found)
    return found


def require_checksums(checksums: Mapping[Path, int]) -> None:
    """Raise ValueError unless files have the bytes that were written; OSError if one is gone."""
    for path, expected in checksums.items():
        if _checksum_of(path) != expected:
            raise ValueError(f"{path} is damaged: its checksum is not the checkpoint's")


def restore(spec: Spec, stored: Any, part: Part, paths: Sequence[Path]) -> int:
    """Read the rows of this server's part of an object, and its step; return how many rows.

    Rows that the files lack get their initial values. The files are complete and checked; any
    server may have written them.
    """
    opened = [_open(path) for path in paths]
    step = max((step for *_, step in opened), default=0)
    if isinstance(spec, DenseSpec):
        _restore_dense(spec, stored, part, opened)
        stored.step = step
        return part.end - part.begin
    stored.step = step  # before the rows: assigned rows take the table's step as their age
    stored.clear()
    return sum(_read_rows(file, held, stored, part) for file, held, _ in opened)


def _contents(spec: Spec, stored: Any) -> Iterator[tuple[int, dict[str, Array]]]:
    """Yield the step and the tensors of each file; an empty table has one file without rows."""
    if isinstance(spec, DenseSpec):
        values = np.empty(spec.shape, np.float32)
        slots = np.empty((len(spec.rule.make().slots), *spec.shape), np.float32)
        yield stored.read_state(values, slots), {"values": values, "slots": slots}
        return
    part = 0
    while part < stored.parts:
        ids, values, slots, part = stored.read_parts(part, _FILE_ROWS)
        yield stored.step, {"ids": ids.view(np.int64), "values": values, "slots": slots}


def _open(path: Path) -> _Opened:
    from safetensors import safe_open

    try:
        file: Any = safe_open(path, framework="np")
        about = json.loads(file.metadata()["fastdist"])
        return file, Part(**about["part"]), int(about["step"])
    except OSError as error:
        raise type(error)(f"cannot read {path}: {error}") from error
    except Exception as error:
        raise ValueError(f"{path} is damaged, or not a checkpoint's file: {error!r}") from error


def _restore_dense(
    spec: DenseSpec, stored: _core.DenseVariable, part: Part, files: Sequence[_Opened]
) -> None:
    rows = part.end - part.begin
    values = np.empty((rows, spec.size // max(1, rows)), np.float32)
    slots = np.empty((len(spec.rule.make().slots), *values.shape), np.float32)
    for file, held, _ in files:
        begin, end = max(held.begin, part.begin), min(held.end, part.end)
        here = slice(begin - part.begin, end - part.begin)
        there = slice(begin - held.begin, end - held.begin)
        if not file.get_slice("values").get_shape():  # a scalar
            values[:] = file.get_tensor("values")
            slots[:] = file.get_tensor("slots").reshape(-1, 1, 1)
            continue
        values[here] = file.get_slice("values")[there].reshape(values[here].shape)
        if slots.shape[0]:
            slots[:, here] = file.get_slice("slots")[:, there].reshape(slots[:, here].shape)
    stored.assign(0, values, slots)


def _read_rows(file: Any, held: Part, stored: _core.RowTable, part: Part) -> int:
    read = 0
    total = file.get_slice("ids").get_shape()[0]
    for at in range(0, total, _READ_ROWS):
        there = slice(at, min(at + _READ_ROWS, total))
        ids = file.get_slice("ids")[there]
        if part.end < 0:
            mine = _core.Owners(part.owners).owners_of(ids) == part.owner
        else:
            ids = ids + held.begin
            mine = (ids >= part.begin) & (ids < part.end)
            ids = ids - part.begin
        if not mine.any():
            continue
        values, slots = (file.get_slice(name)[there][mine] for name in ("values", "slots"))
        stored.assign(ids[mine], values, slots)
        read += int(mine.sum())
    return read
