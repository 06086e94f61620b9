"""Checkpoints of what all servers keep: written side by side, valid all at once, or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastdist.ps.client.client import Client
from fastdist.ps.client.sharded import ShardedRows, ShardedVariable
from fastdist.ps.client.ticket import Ticket
from fastdist.ps.wire.protocol import MAX_LONG_META_BYTES, MAX_META_BYTES, Op
from fastdist.ps.wire.snapshot import Part, check
from fastdist.ps.wire.specs import DenseSpec, Spec, from_json, to_json

_INDEX = "index.json"
_FORMAT = 1
# Of files with data; servers that were stopped may have left unfinished ones.
_OURS = re.compile(r"fastdist-[0-9a-f]{12}-\d+-\d+\.(safetensors|unfinished)")
# Of the names of one object's files: they must fit into the request that restores it.
_MAX_NAMES_BYTES = MAX_LONG_META_BYTES - MAX_META_BYTES
Sharded = ShardedVariable | ShardedRows


@dataclass(frozen=True, slots=True)
class Saved:
    """What a checkpoint has of a variable or table.

    Attributes:
        spec: of the whole.
        paths: of the files with its rows.
    """

    spec: Spec
    paths: list[Path]

    def check(self) -> list[Part]:
        """As `fastdist.ps.wire.snapshot.check`."""
        return check(self.spec, self.paths)


def save_checkpoint(
    client: Client, directory: str | Path, things: Sequence[Sharded], *, timeout_s: float = 600.0
) -> None:
    """Write variables and tables, which may be in use meanwhile; no row is torn.

    Servers write their files into the directory, which all of them must see. The checkpoint that
    was there before stays valid until the new one is complete, and is removed then; other files
    in the directory are left alone.

    Raises:
        OSError: a server could not write; what was there before is untouched.
        ValueError: a table is in far too many files.
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
                raise ValueError(f"{name!r} is in {len(own)} files, too many to be restored")
        specs = {thing.spec.name: json.loads(to_json(thing.spec)) for thing in things}
        index = {"format": _FORMAT, "files": files, "specs": specs}
        _replace(directory / _INDEX, json.dumps(index, indent=1))
    except BaseException:
        _remove(path for path in directory.glob(f"{stem}-*"))
        raise
    kept = {name for names in files.values() for name in names}
    ours = (path for path in directory.glob("fastdist-*") if _OURS.fullmatch(path.name))
    _remove(path for path in ours if path.name not in kept)


def restore_checkpoint(
    client: Client, directory: str | Path, things: Sequence[Sharded], *, timeout_s: float = 600.0
) -> None:
    """Read what `save_checkpoint` wrote into variables and tables that exist, cut in any way.

    Rows that a table has and the checkpoint has not stay as they are. The directory is looked into
    from here, before anything is changed.

    Raises:
        FileNotFoundError: there is no checkpoint, or a file of it is gone.
        OSError: it cannot be read.
        ValueError: it is damaged, lacks a variable, or has it in another shape or for another rule.
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
        for server, number, part in thing.parts():
            about = {
                "part": asdict(part),
                "directory": str(Path(directory).absolute()),
                "files": [name for name, source in files if part.may_share_rows(source)],
            }
            tickets.append(_submit(client, server, Op.RESTORE, number, about, timeout_s))
    _wait(client, tickets)


def saved_in(directory: str | Path) -> dict[str, Saved]:
    """The variables and tables of a checkpoint, by name.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: its index is damaged, or of another version.
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
                raise ValueError(f"{name!r} is not the name of a file, or is there twice")
        saved = {}
        for name, names in index["files"].items():
            spec = from_json(json.dumps(index["specs"][name]).encode())
            if spec.name != name:
                raise ValueError(f"{spec} is not that of {name!r}")
            _layout(spec), _rows(spec)  # raise where these make no sense
            saved[name] = Saved(spec, [directory / file for file in names])
        return saved
    except Exception as error:
        raise ValueError(f"{path} is damaged, or of another version: {error!r}") from error


def _require_same(saved: Spec, wanted: Spec, directory: str | Path) -> None:
    """Raise unless what was saved of one can be read into the other."""
    if _layout(saved) != _layout(wanted) or _rows(saved) > _rows(wanted):
        raise ValueError(f"{directory} has {wanted.name!r} as {saved}, expected {wanted}")


def _layout(spec: Spec) -> tuple[object, ...]:
    """Of which an element's place depends: shapes, and the update rule's slots."""
    slots = spec.rule.make().slots
    if isinstance(spec, DenseSpec):
        return (spec.shape, slots)
    return (spec.dim, spec.rows is None, slots)


def _rows(spec: Spec) -> int:
    """Of a table with a limit, which may have more of them than were saved."""
    return 0 if isinstance(spec, DenseSpec) else int(spec.rows or 0)


def _submit(
    client: Client, server: int, op: Op, number: int, about: dict[str, Any], timeout_s: float
) -> Ticket:
    frames = [json.dumps(about).encode()]
    return client.submit(server, op, number, frames, timeout_s=timeout_s)


def _wait(client: Client, tickets: Sequence[Ticket]) -> list[memoryview]:
    """The replies to all requests; where one fails, too, none is under way any more."""
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
    """What cannot be removed does no harm; the next checkpoint tries again."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()
