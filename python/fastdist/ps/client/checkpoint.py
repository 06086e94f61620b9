"""Checkpoints of all servers: each server writes its own files, and one index makes them valid."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fastdist.checkpoints import files
from fastdist.errors import DamagedCheckpointError
from fastdist.ps.client.client import Client
from fastdist.ps.client.sharded import Sharded, ShardedRows
from fastdist.ps.wire.protocol import Op
from fastdist.ps.wire.snapshot import Part
from fastdist.ps.wire.specs import DenseSpec, RowsSpec, Spec, from_json, to_json

_TIMEOUT_S = 3600.0  # for one server to write or read its share of a table
# In the user's directory, which may have other files.
_FOLDER = "servers"
_Request = tuple[int, int, dict[str, Any]]  # to a server, about the object of a number


@dataclass(frozen=True, slots=True)
class Saved:
    """A variable or table in a checkpoint, with the spec of the whole."""

    spec: Spec
    checksums: dict[Path, int]  # of the files with its rows
    parts: dict[Path, Part]  # what each of them holds


@dataclass(frozen=True, slots=True)
class Index:
    """A checkpoint: its variables and tables by name, and what the user saved with them."""

    directory: Path
    saved: dict[str, Saved]
    state: Any


def save_checkpoint(
    client: Client, directory: str | Path, things: Sequence[Sharded], *, state: Any = None
) -> None:
    """Write variables and tables, which may be in use meanwhile; no row is torn.

    Raises as `ParameterServerStrategy.save`. The previous checkpoint is then unchanged.
    """
    try:
        json.dumps(state)
    except (TypeError, ValueError) as error:
        raise TypeError(f"state must be what JSON can hold: {error}") from None
    place = Path(directory).absolute() / _FOLDER
    write_others = partial(write_files, client, things, state=state)
    files.write(place, {}, {}, write_others)


def write_files(
    client: Client, things: Sequence[Sharded], directory: Path, *, state: Any = None
) -> Any:
    """Make servers write files into a directory; return what its index says for `read_index`."""
    requests: list[_Request] = []
    for thing in things:
        for server, number, own in thing.parts:
            stem = str(directory / f"part-{len(requests)}")
            requests.append((server, number, {"part": asdict(own), "stem": stem}))
    objects: dict[str, Any] = {
        thing.spec.name: {"spec": json.loads(to_json(thing.spec)), "files": []} for thing in things
    }
    for (*_, about), reply in zip(requests, _ask(client, Op.SAVE, requests), strict=True):
        part, sums = about["part"], json.loads(bytes(reply))
        objects[part["name"]]["files"] += [[file, sum_, part] for file, sum_ in sums.items()]
    return {"state": state, "objects": objects}


def remove_checkpoint(directory: str | Path) -> None:
    """Remove a checkpoint, if there is one; other files in the directory are not touched."""
    place = Path(directory).absolute() / _FOLDER
    if place.exists():
        files.delete([files.set_aside(place)])


def restore_checkpoint(
    client: Client, directory: str | Path, things: Sequence[Sharded], *, is_checked: bool = False
) -> Any:
    """Read a checkpoint into existing variables and tables, and return the state saved with them.

    Rows that the checkpoint lacks begin as in the job that wrote it. All files and their checksums
    are checked before any server changes anything, unless `check_checkpoint` has done so.
    """
    index = read_index(directory) if is_checked else check_checkpoint(client, directory, things)
    for thing in things:
        source = index.saved[thing.spec.name].spec
        if isinstance(thing, ShardedRows) and isinstance(source, RowsSpec):
            thing.spec = replace(thing.spec, seed=source.seed)
    _move(client, index, things, only_check=False)
    return index.state


def check_checkpoint(client: Client, directory: str | Path, things: Sequence[Sharded]) -> Index:
    """Check that a checkpoint can be restored, and every byte of it.

    Raises as `ParameterServerStrategy.restore`.
    """
    files.tidy(Path(directory), _FOLDER)  # a save may have been interrupted
    index = read_index(directory)
    for thing in things:
        name = thing.spec.name
        if name not in index.saved:
            known = ", ".join(sorted(index.saved))
            raise ValueError(f"{directory} has no {name!r}; it has {known}")
        saved = index.saved[name].spec
        (layout, rows), (wanted, limit) = _layout(saved), _layout(thing.spec)
        if layout != wanted or rows > limit:  # a table's limit may be higher than when it was saved
            raise ValueError(f"{directory} has {name!r} as {saved}, expected {thing.spec}")
        for path in index.saved[name].checksums:
            path.stat()  # the servers' errors do not tell what is missing
    try:
        _move(client, index, things, only_check=True)
    except ValueError as error:
        raise DamagedCheckpointError(str(error)) from error
    return index


def _move(client: Client, index: Index, things: Sequence[Sharded], *, only_check: bool) -> None:
    """Make servers read their parts, or compare the files' checksums."""
    requests: list[_Request] = []
    for thing in things:
        source = index.saved[thing.spec.name]
        for server, number, part in thing.parts:
            holders = [path for path, held in source.parts.items() if part.may_share_rows(held)]
            about = {
                "only_check": only_check,
                "seed": source.spec.seed if isinstance(source.spec, RowsSpec) else None,
                "part": asdict(part),
                "directory": str(index.directory),
                "files": {path.name: source.checksums[path] for path in holders},
            }
            requests.append((server, number, about))
    _ask(client, Op.RESTORE, requests)


def has_checkpoint(directory: str | Path) -> bool:
    """Return True if a directory has a checkpoint, complete or damaged."""
    files.tidy(Path(directory), _FOLDER)
    return (Path(directory) / _FOLDER).exists()


def read_index(directory: str | Path) -> Index:
    """Return what a checkpoint has: one of `save_checkpoint`, or of `fd.Checkpoint`."""
    place = Path(directory).absolute()
    if not (place / files.INDEX).exists():
        place = place / _FOLDER
    others = files.read_index(place).others
    if others is None:
        raise ValueError(f"{place} has nothing that parameter servers have written")
    try:
        saved = {}
        for name, about in others["objects"].items():
            spec = from_json(json.dumps(about["spec"]).encode())
            if spec.name != name:
                raise ValueError(f"{spec} is not the spec of {name!r}")
            _layout(spec)  # raises if the spec is invalid
            if any(Path(file).name != file for file, *_ in about["files"]):
                raise ValueError(f"{name!r} has files elsewhere")
            sums = {place / file: int(sum_) for file, sum_, _ in about["files"]}
            parts = {place / file: Part(**part) for file, _, part in about["files"]}
            saved[name] = Saved(spec, sums, parts)
        return Index(place, saved, others["state"])
    except Exception as error:
        raise DamagedCheckpointError(
            f"{place / files.INDEX} is damaged, or of another version: {error!r}"
        ) from error


def _layout(spec: Spec) -> tuple[tuple[object, ...], int]:
    """Return all that an element's place in a file depends on, and the limit of a table's rows."""
    slots = spec.rule.make().slots
    if isinstance(spec, DenseSpec):
        return (spec.shape, slots), 0
    return (spec.dim, spec.rows is None, slots), int(spec.rows or 0)


def _ask(client: Client, op: Op, requests: Sequence[_Request]) -> list[memoryview]:
    """Return the replies to all requests; if one fails, wait for the others before raising."""
    tickets = [
        client.submit(server, op, number, [json.dumps(about).encode()], timeout_s=_TIMEOUT_S)
        for server, number, about in requests
    ]
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
