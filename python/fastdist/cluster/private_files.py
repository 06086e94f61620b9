"""Files that hold secrets."""

from __future__ import annotations

import os
import stat
import warnings
from pathlib import Path


def read_private(
    path: str | Path, most_bytes: int = 1 << 16, *, must_be_private: bool = False
) -> bytes:
    """Return a file's first bytes; warn if other users may read it, unless it is root's.

    Orchestrators mount secrets as root's files, which all users of the container may read. Raises
    OSError if the file cannot be read, ValueError if it must be this user's alone and is not.
    """
    with open(path, "rb") as file:
        found = os.fstat(file.fileno())
        if must_be_private:
            if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
                raise ValueError(f"the secret in {path} may be known to other users")
        elif found.st_uid != 0 and stat.S_IMODE(found.st_mode) & 0o044:
            warnings.warn(
                f"other users may read the secret in {path}: run `chmod 600 {path}`, and replace "
                "the secret if they are not trusted",
                stacklevel=3,
            )
        return file.read(most_bytes)
