"""What one server keeps, as safetensors files; read by any number of servers.

A dense variable is one file, a table one per `_FILE_ROWS` rows. Each has the tensors `values` and
`slots`, of a table `ids` too, and says in its metadata which rows of what it holds.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import fastdist._core as _core
from fastdist.ps.client.spread import owner_of
from fastdist.ps.wire.frames import Array
from fastdist.ps.wire.specs import DenseSpec, Spec

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

    def may_share_rows(self, other: Part) -> bool:
        """Whether rows of another part of the same whole may be among these."""
        if self.end < 0:
            return self.owners != other.owners or self.owner == other.owner
        return max(self.begin, other.begin) < min(self.end, other.end)


@dataclass(frozen=True, slots=True)
class _Opened:
    """A file, what it holds, and the steps that it had seen."""

    file: Any
    part: Part
    step: int


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


def check(spec: Spec, paths: Sequence[Path]) -> list[Part]:
    """Look into all files of an object, without reading its rows.

    Args:
        spec: of the whole, as it was saved.
        paths: the files.

    Returns:
        What each file holds.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is damaged or holds something else, or rows are missing.
    """
    parts: list[Part] = []
    rows: Counter[Part] = Counter()
    for path in paths:
        opened = _open(path, spec.name)
        file, part = opened.file, opened.part
        found = {name: _kind(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118
        length = max(found.get("ids", ("", (0,)))[1], default=0)
        expected = _kinds(spec, part, length)
        if found != expected:
            raise ValueError(f"{path} has the tensors {found}, expected {expected}")
        parts.append(part)
        rows[part] += length
    _require_whole(spec, parts, rows)
    return parts


def restore(spec: Spec, kept: Any, part: Part, paths: Sequence[Path]) -> int:
    """Read the rows of an object that belong to this server, and the number of its steps.

    Args:
        spec: of the part.
        kept: what to fill.
        part: what it is.
        paths: the files that may have some of these rows, whichever server wrote them.

    Returns:
        How many rows were read.

    Raises:
        OSError: a file cannot be read.
        ValueError: a file is damaged or holds something else, or rows are missing.
    """
    if isinstance(spec, DenseSpec):
        return _restore_dense(spec, kept, part, paths)
    # The rows that are assigned are as old as the table's step says.
    kept.step = max((_open(path, part.name).step for path in paths), default=0)
    return sum(_read_rows(_open(path, part.name), kept, part) for path in paths)


def read_values(path: Path) -> tuple[int, Array | None, Array]:
    """What a file holds: its first row, the ids of its rows from there, or None, and values."""
    opened = _open(path)
    file = opened.file
    ids = file.get_tensor("ids") if "ids" in file.keys() else None  # noqa: SIM118
    return opened.part.begin, ids, file.get_tensor("values")


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
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise OSError(f"cannot write {path}: {error}") from error
    return path.name


def _open(path: Path, name: str | None = None) -> _Opened:
    """A file; of the object of this name."""
    from safetensors import safe_open

    try:
        file: Any = safe_open(path, framework="np")
        about = json.loads(file.metadata()["fastdist"])
        opened = _Opened(file, Part(**about["part"]), int(about["step"]))
        part = opened.part
        if any(type(n) is not int for n in (part.begin, part.end, part.owner, part.owners)):
            raise TypeError(f"{part} is none")
    except OSError as error:
        raise type(error)(f"cannot read {path}: {error}") from error
    except Exception as error:
        raise ValueError(f"{path} is damaged, or of no checkpoint: {error!r}") from error
    if name is not None and part.name != name:
        raise ValueError(f"{path} holds {part.name!r}, expected {name!r}")
    return opened


def _kind(tensor: Any) -> tuple[str, tuple[int, ...]]:
    """Type and shape, as safetensors names them."""
    return tensor.get_dtype(), tuple(tensor.get_shape())


def _kinds(spec: Spec, part: Part, rows: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Those of the tensors in a file, with so many rows of a table."""
    slots = len(spec.rule.make().slots)
    if isinstance(spec, DenseSpec):
        shape = (part.end - part.begin, *spec.shape[1:]) if spec.shape else ()
        return {"values": ("F32", shape), "slots": ("F32", (slots, *shape))}
    return {
        "ids": ("I64", (rows,)),
        "values": ("F32", (rows, spec.dim)),
        "slots": ("F32", (rows, spec.dim * slots)),
    }


def _length(shape: tuple[int, ...]) -> int:
    """Rows; a scalar is one."""
    return shape[0] if shape else 1


def _require_whole(spec: Spec, parts: Sequence[Part], rows: Mapping[Part, int]) -> None:
    """Raise unless the parts, and their numbers of rows in a table, make up the object."""
    if isinstance(spec, DenseSpec):
        _require_rows(spec.name, [(part.begin, part.end) for part in parts], 0, _length(spec.shape))
    elif spec.rows is not None:
        _require_rows(spec.name, [(part.begin, part.end) for part in rows], 0, spec.rows)
        for part, count in rows.items():
            if count != part.end - part.begin:
                raise ValueError(f"the files of {part} hold {count} rows")
    else:
        owners = parts[0].owners if parts else 1
        found = {part.owner for part in parts}
        # In this order: a damaged file may name any number of owners.
        is_whole = len(found) == owners and found == set(range(owners))
        if not is_whole or any(
            part != Part(spec.name, 0, -1, part.owner, owners) for part in parts
        ):
            raise ValueError(f"{spec.name!r}: the files are of {set(parts)}, not of all owners")


def _require_rows(name: str, held: Iterable[tuple[int, int]], begin: int, end: int) -> None:
    """Raise unless these ranges, one behind the other, are all rows from `begin` to `end`."""
    ranges = sorted(held)
    begins = [*(first for first, _ in ranges), end]
    ends = [begin, *(last for _, last in ranges)]
    if begins != ends:
        at = next(last for first, last in zip(begins, ends, strict=True) if first != last)
        raise ValueError(
            f"{name!r}: rows {begin} to {end} are needed, the files hold {ranges}; from row {at} "
            "on rows are missing, or there twice"
        )


def _restore_dense(
    spec: DenseSpec, kept: _core.DenseVariable, part: Part, paths: Sequence[Path]
) -> int:
    rows = part.end - part.begin
    values = np.empty((rows, spec.size // max(1, rows)), np.float32)
    slots = np.empty((len(spec.rule.make().slots), *values.shape), np.float32)
    step = 0
    held = []
    for path in paths:
        opened = _open(path, part.name)
        begin, end = max(opened.part.begin, part.begin), min(opened.part.end, part.end)
        if begin >= end:
            continue
        held.append((begin, end))
        step = max(step, opened.step)
        here = slice(begin - part.begin, end - part.begin)
        there = slice(begin - opened.part.begin, end - opened.part.begin)
        _read_dense(opened.file, there, values[here], slots[:, here])
    _require_rows(part.name, held, part.begin, part.end)
    kept.assign(values.reshape(spec.shape), slots.reshape(slots.shape[0], *spec.shape))
    kept.step = step
    return rows


def _read_dense(file: Any, there: slice, values: Array, slots: Array) -> None:
    """Read rows of a file into an array of rows, and one of such for each slot."""
    if not file.get_slice("values").get_shape():  # a scalar
        values[:] = file.get_tensor("values")
        slots[:] = file.get_tensor("slots").reshape(-1, 1, 1)
        return
    values[:] = file.get_slice("values")[there].reshape(values.shape)
    if slots.shape[0]:
        slots[:] = file.get_slice("slots")[:, there].reshape(slots.shape)


def _read_rows(opened: _Opened, kept: _core.RowTable, part: Part) -> int:
    file = opened.file
    read = 0
    total = file.get_slice("ids").get_shape()[0]
    for at in range(0, total, _READ_ROWS):
        there = slice(at, min(at + _READ_ROWS, total))
        ids = file.get_slice("ids")[there]
        if part.end < 0:
            mine = owner_of(ids, part.owners) == part.owner
        else:
            ids = ids + opened.part.begin
            mine = (ids >= part.begin) & (ids < part.end)
            ids = ids - part.begin
        if not mine.any():
            continue
        count = int(mine.sum())
        slots = file.get_slice("slots")[there][mine].reshape(count, len(kept.slots), kept.dim)
        kept.assign(ids[mine], file.get_slice("values")[there][mine], slots)
        read += count
    return read
