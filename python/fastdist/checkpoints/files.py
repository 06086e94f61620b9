"""A checkpoint on disk: a directory of safetensors files and an index in JSON.

    checkpoint-1200/
      checkpoint.json      the values that are not tensors, and the name, size and checksum of each
                           tensor of each file
      model.safetensors    the tensors of one part, by their names in its state_dict
      optimizer.safetensors

The directory is renamed to its final name only after all files are flushed, so a directory of that
name is complete. Checksums (CRC-32) show whether the disk has lost or changed bytes since.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fastdist._version import __version__
from fastdist.checkpoints.encoding import decode
from fastdist.errors import DamagedCheckpointError

FORMAT = 1
INDEX = "checkpoint.json"
_UNFINISHED = ".unfinished-"
_REMOVED = ".removed-"
_REPLACED = ".replaced-"
_READ_THREADS = 4
_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_DAMAGE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)


@dataclass(frozen=True, slots=True)
class PartFiles:
    """A part of a checkpoint."""

    encoded: Any  # its JSON
    tensors: Mapping[str, torch.Tensor]  # by name, on the CPU
    class_name: str  # of the object


Checksums = Mapping[str, Future[dict[str, int]]]  # of tensors, by part and name


def start_checksums(parts: Mapping[str, PartFiles]) -> Checksums:
    """Compute checksums while another thread, started later, writes the tensors.

    It cannot start this one itself: an exiting interpreter waits for threads, but starts none.
    """
    sums: dict[str, Future[dict[str, int]]] = {name: Future() for name in parts}

    def compute() -> None:
        for name, part in parts.items():
            try:
                sums[name].set_result({key: _checksum(t) for key, t in part.tensors.items()})
            except BaseException as error:  # the thread that writes raises it
                sums[name].set_exception(error)

    threading.Thread(target=compute, name="fastdist-checksums").start()
    return sums


def write(
    path: Path,
    parts: Mapping[str, PartFiles],
    checksums: Checksums,
    write_others: Callable[[Path], Any] | None = None,
) -> None:
    """Write a checkpoint, and rename it to its final name after all of it is flushed.

    Starts no thread. Replaces a checkpoint of that name at the end; an error leaves it unchanged.
    `write_others` writes and flushes further files into the directory it is given; it returns what
    the index says of them.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    parent = path.parent
    parent.mkdir(parents=True, exist_ok=True)
    unfinished = parent / f"{_UNFINISHED}{path.name}"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir()
        files = {}
        for name, part in parts.items():
            if not part.tensors:
                continue
            file = unfinished / f"{name}.safetensors"
            save_file(_apart(part.tensors), file, {"format": "pt"})
            flush(file)
            files[file.name] = {
                "bytes": file.stat().st_size,
                "header": _header_checksum(file),
                "tensors": checksums[name].result(),
            }
        content = {
            "format": FORMAT,
            "fastdist": __version__,
            "parts": {name: part.encoded for name, part in parts.items()},
            "classes": {name: part.class_name for name, part in parts.items()},
            "files": files,
            "others": None if write_others is None else write_others(unfinished),
        }
        index = unfinished / INDEX
        index.write_text(
            json.dumps({"checksum": _checksum_of(content), "content": content}, indent=1)
        )
        for name in files:
            shutil.copymode(index, unfinished / name)  # safetensors makes files for their owner
        flush(index)
        flush(unfinished)
        replaced = path.with_name(f"{_REPLACED}{path.name}")
        if path.exists():
            path.rename(replaced)
        unfinished.rename(path)
        flush(parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise OSError(f"cannot write the checkpoint {path}: {error}") from error
        raise


def set_aside(path: Path) -> Path:
    """Rename a checkpoint so that it no longer looks like one; return the path to delete."""
    removed = path.with_name(f"{_REMOVED}{path.name}")
    shutil.rmtree(removed, ignore_errors=True)
    path.rename(removed)
    return removed


def set_damaged_aside(path: Path) -> None:
    """Rename a damaged checkpoint, for the user to look at."""
    place = path.with_name(f"damaged-{path.name}")
    times = 1
    while place.exists():  # a checkpoint of this number was damaged before
        times += 1
        place = path.with_name(f"damaged-{path.name}.{times}")
    path.rename(place)


def delete(paths: Iterable[Path]) -> None:
    """Delete what was set aside. If interrupted, `tidy` deletes the rest."""
    for path in paths:
        shutil.rmtree(path, ignore_errors=True)


def tidy(directory: Path, name: str = "*") -> None:
    """Finish or undo what a killed process has left of checkpoints; `name` may be a pattern."""
    for replaced in directory.glob(f"{_REPLACED}{name}"):
        path = directory / replaced.name.removeprefix(_REPLACED)
        if not path.exists():
            replaced.rename(path)
    for prefix in (_UNFINISHED, _REMOVED, _REPLACED):
        for left in directory.glob(f"{prefix}{name}"):
            shutil.rmtree(left, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Index:
    """The JSON file of a checkpoint."""

    path: Path  # of the checkpoint
    parts: dict[str, Any]  # the JSON of each part, by name
    classes: dict[str, str]  # the class name of each part, by name
    files: dict[str, Any]  # the size, the checksum of the header, and the tensors of each file
    others: Any  # what `write_others` has returned; None without other files


def read_index(path: Path) -> Index:
    """Read the JSON file of a checkpoint.

    Raises DamagedCheckpointError if it is missing or damaged, another ValueError if a newer release
    of fastdist has written it, an OSError if there is none or it cannot be read now.
    """
    file = path / INDEX
    if not path.exists():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    try:
        data = file.read_bytes()
    except _MISSING as error:
        raise DamagedCheckpointError(f"{file} is missing: {error}") from error
    try:
        read = json.loads(data)
        content = read["content"]
        if read["checksum"] != _checksum_of(content):
            raise ValueError("its checksum does not fit")
        version, wrote = int(content["format"]), content["fastdist"]
        index = Index(
            path,
            dict(content["parts"]),
            dict(content["classes"]),
            dict(content["files"]),
            content.get("others"),
        )
        if index.parts.keys() != index.classes.keys():
            raise ValueError(f"expected classes of {list(index.parts)}, got {list(index.classes)}")
        if any(os.sep in name for name in (*index.parts, *index.files)):
            raise ValueError(f"expected names of files, got {[*index.parts, *index.files]}")
    except _DAMAGE as error:
        raise DamagedCheckpointError(f"{file} is damaged: {error!r}") from error
    if version > FORMAT:
        raise ValueError(
            f"{path} was written by fastdist {wrote} in format {version}, and this is fastdist "
            f"{__version__}, which reads format {FORMAT}: upgrade fastdist"
        )
    return index


def read_part(index: Index, name: str) -> PartFiles:
    """Read a part, and check its bytes and its shape; raises what `read_index` raises."""
    part = PartFiles(index.parts[name], read_tensors(index, name), index.classes[name])
    try:
        decode(part.encoded, part.tensors)
    except _DAMAGE as error:
        raise DamagedCheckpointError(f"{index.path}: {name} is damaged: {error!r}") from error
    return part


def read_tensors(index: Index, part: str) -> dict[str, torch.Tensor]:
    """Read the tensors of a part, and check every byte of its file."""
    from safetensors import safe_open

    path = index.path / f"{part}.safetensors"
    expected = index.files.get(path.name)
    if expected is None:
        return {}
    try:
        if path.stat().st_size != expected["bytes"]:
            raise ValueError(f"expected {expected['bytes']} bytes, got {path.stat().st_size}")
        if _header_checksum(path) != expected["header"]:
            raise ValueError("the checksum of its header does not fit")
        names = list(expected["tensors"])
    except (*_MISSING, *_DAMAGE) as error:
        raise DamagedCheckpointError(f"{path} is damaged or missing: {error!r}") from error
    with safe_open(path, framework="pt") as file:  # the header is whole: an error is no damage
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if set(names) != set(tensors):
        raise DamagedCheckpointError(f"{path} has the tensors {list(tensors)}, expected {names}")

    def take(name: str) -> tuple[torch.Tensor, int]:
        # The file's memory is aligned to 8 bytes, and BLAS' rounding depends on the alignment: a
        # copy is aligned as torch aligns all tensors, on every rank.
        aligned = tensors[name].clone()
        return aligned, _checksum(aligned)

    with ThreadPoolExecutor(_READ_THREADS) as pool:
        for name, (tensor, found) in zip(names, pool.map(take, names), strict=True):
            if found != expected["tensors"][name]:
                raise DamagedCheckpointError(
                    f"{path} is damaged: the checksum of the tensor {name!r} does not fit"
                )
            tensors[name] = tensor
    return tensors


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return contiguous tensors, no two of which share memory; safetensors refuses others."""
    apart = {name: tensor.contiguous() for name, tensor in tensors.items()}
    end = 0
    for name in sorted(apart, key=lambda name: apart[name].data_ptr()):
        tensor = apart[name]
        if tensor.data_ptr() < end:
            apart[name] = tensor.clone()
        end = max(end, tensor.data_ptr() + tensor.nbytes)
    return apart


def _checksum(tensor: torch.Tensor) -> int:
    data: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return zlib.crc32(data)


def _checksum_of(content: Any) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True).encode())


def _header_checksum(path: Path) -> int:
    """Return the checksum of a safetensors file without its tensors."""
    with path.open("rb") as file:
        size = file.read(8)
        length = int.from_bytes(size, "little")
        if length > path.stat().st_size:
            raise ValueError(f"its header claims {length} bytes")
        return zlib.crc32(size + file.read(length))


def flush(path: Path) -> None:
    """Flush a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
