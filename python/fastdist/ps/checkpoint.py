"""Checkpoints of what all servers keep: written side by side, valid all at once, or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import re
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastdist.ps.client import Client
from fastdist.ps.protocol import Op
from fastdist.ps.sharded import ShardedRows, ShardedVariable
from fastdist.ps.specs import DenseSpec, Spec, from_json, to_json
from fastdist.ps.ticket import Ticket

_INDEX = "index.json"
_FORMAT = 1
# Of files with data; servers that were stopped may have left unfinished ones.
_OURS = re.compile(r"fastdist-[0-9a-f]{12}-\d+-\d+\.(safetensors|unfinished)")
Sharded = ShardedVariable | ShardedRows


def save_checkpoint(
    client: Client, directory: str | Path, things: Sequence[Sharded], *, timeout_s: float = 600.0
) -> None:
    """Write variables and tables, which may be in use meanwhile; no row is torn.

    Servers write their files into the directory, which all of them must see. The checkpoint that
    was there before stays valid until the new one is complete, and is removed then; other files
    in the directory are left alone.

    Raises:
        OSError: a server could not write; what was there before is untouched.
        UnavailableError: a server does not answer.
    """
    directory = Path(directory).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    stem = f"fastdist-{uuid.uuid4().hex[:12]}"
    files: dict[str, list[str]] = {}
    try:
        tickets: list[tuple[str, Ticket]] = []
        for thing in things:
            for server, number, part in thing.parts():
                path = str(directory / f"{stem}-{len(tickets)}")
                about = {"part": asdict(part), "stem": path}
                ticket = _submit(client, server, Op.SAVE, number, about, timeout_s)
                tickets.append((thing.spec.name, ticket))
        for name, ticket in tickets:
            files.setdefault(name, []).extend(json.loads(bytes(client.wait(ticket))))
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

    Rows that a table has and the checkpoint has not stay as they are.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: it lacks a variable, or has it in another shape or for another rule; nothing
            has been changed then.
    """
    files, specs = checkpoint_files(directory), _index(directory).get("specs", {})
    for thing in things:
        name = thing.spec.name
        if name not in files:
            raise ValueError(f"{directory} has no {name!r}; it has {', '.join(sorted(files))}")
        if name in specs:
            _require_same(from_json(json.dumps(specs[name]).encode()), thing.spec, directory)
    tickets = []
    for thing in things:
        paths = list(map(str, files[thing.spec.name]))
        for server, number, part in thing.parts():
            about = {"part": asdict(part), "files": paths}
            tickets.append(_submit(client, server, Op.RESTORE, number, about, timeout_s))
    for ticket in tickets:
        client.wait(ticket)


def checkpoint_files(directory: str | Path) -> dict[str, list[Path]]:
    """The files of each variable and table of a checkpoint.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: it is of another version.
    """
    directory = Path(directory).absolute()
    files = _index(directory)["files"]
    return {name: [directory / file for file in own] for name, own in files.items()}


def _index(directory: str | Path) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((Path(directory) / _INDEX).read_text())
    if index["format"] != _FORMAT:
        raise ValueError(f"{directory} has format {index['format']}, expected {_FORMAT}")
    return index


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
    return 0 if isinstance(spec, DenseSpec) else spec.rows or 0


def _submit(
    client: Client, server: int, op: Op, number: int, about: dict[str, Any], timeout_s: float
) -> Ticket:
    frames = [json.dumps(about).encode()]
    return client.submit(server, op, number, frames, timeout_s=timeout_s)


def _replace(path: Path, text: str) -> None:
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def _remove(paths: Iterable[Path]) -> None:
    """What cannot be removed does no harm; the next checkpoint tries again."""
    for path in paths:
        with contextlib.suppress(OSError):
            path.unlink()
