"""Finds libnccl: the loaded library, else the one in NVIDIA's package, else the system's."""

from __future__ import annotations

import importlib.util
import os
import secrets
from pathlib import Path

import fastdist._core as _core
from fastdist.errors import UnsupportedError


def candidates() -> list[str]:
    """Find the libraries of nvidia-nccl-cu12 and nvidia-nccl-cu13 without importing them."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else spec.submodule_search_locations or []
    paths = (Path(folder) / "nccl" / "lib" / "libnccl.so.2" for folder in folders)
    return [str(path) for path in paths if path.is_file()]


def why_unusable() -> str:
    """Return the reason why arrays on GPUs have no engine, or "" if they have one."""
    why = _core.why_no_cuda()
    if why:
        return why
    try:
        load()
    except UnsupportedError as error:
        return str(error).splitlines()[0]
    return ""


def load() -> _core.NcclLibrary:
    """Load libnccl; the first call decides for the rest of the process."""
    return _core.load_nccl(candidates())


def allow_sharing(version: int) -> None:
    """Set the environment variables that let ranks share a GPU, unless they are set already.

    NCCL, of this version, reads them when it makes the first communicator of a process.
    """
    for name, value in _core.nccl_settings_for_sharing(version, secrets.randbits(31)).items():
        os.environ.setdefault(name, value)
