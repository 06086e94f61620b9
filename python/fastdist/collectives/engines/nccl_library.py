"""Which libnccl is used: the loaded one, else that of NVIDIA's package, else the system's."""

from __future__ import annotations

import importlib.util
import os
import secrets
from pathlib import Path

import fastdist._core as _core
from fastdist.errors import UnsupportedError


def candidates() -> list[str]:
    """Libraries of the packages nvidia-nccl-cu12 and nvidia-nccl-cu13, found without an import."""
    spec = importlib.util.find_spec("nvidia")
    folders = [] if spec is None else spec.submodule_search_locations or []
    paths = (Path(folder) / "nccl" / "lib" / "libnccl.so.2" for folder in folders)
    return [str(path) for path in paths if path.is_file()]


def why_unusable() -> str:
    """Why arrays on GPUs have no engine here; "" where they have one."""
    why = _core.why_no_cuda()
    if why:
        return why
    try:
        load()
    except UnsupportedError as error:
        return str(error).splitlines()[0]
    return ""


def load() -> _core.NcclLibrary:
    """Load it; the first call decides for the rest of the process.

    Raises:
        UnsupportedError: there is none, or one that is too old.
    """
    return _core.load_nccl(candidates())


def allow_sharing(version: int) -> None:
    """Set what NCCL reads when it makes a process's first communicator: ranks may share a GPU.

    What the environment says already stays.

    Args:
        version: of the NCCL that this process uses.
    """
    for name, value in _core.nccl_settings_for_sharing(version, secrets.randbits(31)).items():
        os.environ.setdefault(name, value)
