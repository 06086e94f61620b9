"""Checkpoints of all servers: each server writes its own files, and one index makes them valid."""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fastdist.ps.client.client import Client
from fastdist.ps.client.requests import Ticket
from fastdist.ps.client.sharded import ShardedRows, ShardedVariable
from fastdist.ps.wire.protocol import MAX_LONG_META_BYTES, MAX_META_BYTES, Op
from fastdist.ps.wire.snapshot import Part, check_files, require_checksums
from fastdist.ps.wire.specs import DenseSpec, RowsSpec, Spec, from_json, to_json

_INDEX = "index.json"
_FORMAT = 2
# Names of data files; interrupted servers may have left unfinished ones.
_DATA_FILE = re.compile(r"fastdist-[0-9a-f]{12}-\d+-\d+\.(safetensors|unfinished)")
# Limit for the names of one object's files: they must fit into the request that restores it.
_MAX_NAMES_BYTES = MAX_LONG_META_BYTES - MAX_META_BYTES
Sharded = ShardedVariable | ShardedRows


@dataclass(frozen=True, slots=True)
class Saved:
    """A variable or table in a checkpoint.

    Attributes:
        spec: the spec of the whole.
        paths: the files with its rows.
        checksums: these files' checksums.
    """

    spec: Spec
    paths: list[Path]
    checksums: Mapping[Path, int]

    def check(self) -> list[Part]:
        """See `fastdist.ps.wire.snapshot.check_files`."""
        parts = check_files(self.spec, self.paths)
        for path in self.paths:
            if path not in self.checksums:
                raise ValueError(f"the index has no checksum of {path}")
        return parts

    def check_bytes(self) -> list[Part]:
        """Read all files and check their checksums, after `check`."""
        parts = self.check()
        require_checksums({path: self.checksums[path] for path in self.paths})
        return parts


@dataclass(frozen=True, slots=True)
class Index:
    """The contents of a checkpoint.

    Attributes:
        saved: variables and tables, by name.
        state: what the user saved with them.
    """

    saved: dict[str, Saved]
    state: Any


def save_checkpoint(
    client: Client,
    directory: str | Path,
    things: Sequence[Sharded],
    *,
    state: Any = None,
    timeout_s: float = 600.0,
) -> None:
    """Write variables and tables, which may be in use meanwhile; no row is torn.

    Servers write their files into the directory, which all servers must see. The previous
    checkpoint stays valid until the new one is complete, and is then removed; other files in the
    directory are not touched. `state` is anything that JSON can hold.

    Raises:
        OSError: a server could not write; the previous checkpoint is unchanged.
        TypeError: JSON cannot hold the state.
        ValueError: a table has far too many files.
        UnavailableError: a server does not answer.
    """
    _require_json(state)
    directory = Path(directory).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    stem = f"fastdist-{uuid.uuid4().hex[:12]}"
    files: dict[str, dict[str, int]] = {}
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
            files.setdefault(name, {}).update(json.loads(bytes(reply)))
        for name, own in files.items():
            if len(json.dumps(own)) > _MAX_NAMES_BYTES:
                raise ValueError(f"{name!r} is in {len(own)} files, too many to restore")
        specs = {thing.spec.name: json.loads(to_json(thing.spec)) for thing in things}
        index = {
            "format": _FORMAT,
            "state": state,
            "files": {name: list(own) for name, own in files.items()},
            "checksums": {file: sum_ for own in files.values() for file, sum_ in own.items()},
            "specs": specs,
        }
        _replace(directory / _INDEX, json.dumps(index, indent=1))
    except BaseException:
        _remove(path for path in directory.glob(f"{stem}-*"))
        raise
    kept = {name for names in files.values() for name in names}
    _remove(path for path in _data_files(directory) if path.name not in kept)


def remove_checkpoint(directory: str | Path) -> None:
    """Remove a checkpoint, if there is one; other files in the directory are not touched."""
    directory = Path(directory).absolute()
    _remove([directory / _INDEX, *_data_files(directory)])


def _data_files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.glob("fastdist-*") if _DATA_FILE.fullmatch(path.name))


def restore_checkpoint(
    client: Client, directory: str | Path, things: Sequence[Sharded], *, timeout_s: float = 600.0
) -> Any:
    """Read a checkpoint into existing variables and tables, however they are sharded.

    Rows that a hashed table has and the checkpoint lacks stay as they are; those that neither has
    begin as in the job that wrote the checkpoint. All files and their checksums are checked before
    any server changes anything.

    Returns:
        The state that was saved with them.

    Raises:
        FileNotFoundError: there is no checkpoint, or one of its files is gone.
        OSError: a file cannot be read.
        ValueError: the checkpoint is damaged, lacks a variable, or has it in another shape or for
            another rule.
        UnavailableError: a server does not answer.
    """
    index = read_index(directory)
    saved = index.saved
    sources: list[tuple[Sharded, list[tuple[Path, Part]]]] = []
    for thing in things:
        name = thing.spec.name
        if name not in saved:
            raise ValueError(f"{directory} has no {name!r}; it has {', '.join(sorted(saved))}")
        _require_same(saved[name].spec, thing.spec, directory)
        sources.append((thing, list(zip(saved[name].paths, saved[name].check(), strict=True))))
    for only_check in (True, False):
        tickets = []
        for thing, files in sources:
            source = saved[thing.spec.name]
            seed = None
            if isinstance(thing, ShardedRows) and isinstance(source.spec, RowsSpec):
                seed = source.spec.seed
                thing.spec = thing.spec if only_check else replace(thing.spec, seed=seed)
            for server, number, part in thing.parts():
                mine = [path for path, held in files if part.may_share_rows(held)]
                about = {
                    "only_check": only_check,
                    "seed": seed,
                    "part": asdict(part),
                    "directory": str(Path(directory).absolute()),
                    "files": {path.name: source.checksums[path] for path in mine},
                }
                tickets.append(_submit(client, server, Op.RESTORE, number, about, timeout_s))
        _wait(client, tickets)
    return index.state


def has_checkpoint(directory: str | Path) -> bool:
    """Return True if a directory has a checkpoint, complete or damaged."""
    return (Path(directory) / _INDEX).exists()


def read_index(directory: str | Path) -> Index:
    """Return what a checkpoint has.

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
        checksums = {directory / file: int(sum_) for file, sum_ in index["checksums"].items()}
        saved = {}
        for name, names in index["files"].items():
            spec = from_json(json.dumps(index["specs"][name]).encode())
            if spec.name != name:
                raise ValueError(f"{spec} is not the spec of {name!r}")
            _layout(spec), _rows(spec)  # raise if the spec is invalid
            saved[name] = Saved(spec, [directory / file for file in names], checksums)
        return Index(saved, index["state"])
    except Exception as error:
        raise ValueError(f"{path} is damaged, or of another version: {error!r}") from error


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


def _require_json(state: Any) -> None:
    try:
        json.dumps(state)
    except (TypeError, ValueError) as error:
        raise TypeError(f"state must be what JSON can hold: {error}") from None


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
