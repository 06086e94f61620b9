"""The secret by which the processes of a job on several machines know each other.

It is never sent; all keys are derived from it. Servers and workers prove it on each connection
(sealing.py). Anyone who can reach the store of a rendezvous can read and write it: so ranks seal
the addresses that they post there. The key of their connections is derived from the secret and from
random numbers of all ranks. On each connection both ends prove that they have the key
(collectives/rendezvous/connections.py), so that values recorded in another job are of no use.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import json
import os
import secrets
import stat
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from fastdist._config import SECRET_VARIABLE, settings
from fastdist.errors import ClusterConfigError
from fastdist.link.addresses import is_path

_LEAST_BYTES = 16
_MOST_BYTES = 1 << 16  # of a file, or of a sealed text
_HOW = (
    "set FASTDIST_SECRET or FASTDIST_SECRET_FILE to the same secret on all machines (`openssl rand "
    "-hex 32` makes one), or FASTDIST_INSECURE=1 on all of them if only trusted programs reach them"
)


@final
@dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """A secret that all processes of a job have."""

    key: bytes  # empty if the job continues without a secret
    origin: str  # where this process found it, for messages

    def seal(self, label: str, text: str) -> str:
        """Return the text with a code that only ranks with the secret can make.

        The label says what the text is; a text sealed for another purpose is not taken for it.
        """
        return json.dumps([text, self.derive(label, text)])

    def open(self, label: str, sealed: str | bytes, most_bytes: int = _MOST_BYTES) -> str:
        """Return the text in the output of `seal`; raise ValueError for any other text."""
        try:
            if len(sealed) > most_bytes:
                raise ValueError("too long for a sealed text")
            text, code = json.loads(sealed)
            own = self.derive(label, text)
            if not hmac.compare_digest(own.encode(), str(code).encode()):
                raise ValueError("not sealed with this secret")
        except (TypeError, RecursionError):
            raise ValueError("not a sealed text") from None
        return str(text)

    def derive(self, label: str, text: str) -> str:
        """Return a code for a text that only ranks with the secret can make, 64 hex digits."""
        message = json.dumps([label, text]).encode()
        return hmac.new(self.key, message, hashlib.sha256).hexdigest()

    def mismatch(self, rank: int, other: int | None) -> ClusterConfigError:
        """Make the error of `rank`: what `other`, or any rank if None, posted is not sealed."""
        who = "another rank" if other is None else f"rank {other}"
        return ClusterConfigError(
            f"rendezvous: {who} does not prove that it has the secret of rank {rank}, which is "
            f"{self.origin}: {_HOW}",
            () if other is None else (other,),
        )


def exchange(
    allgather: Callable[[str], list[str]], secret: Secret | None, rank: int, label: str, text: str
) -> list[str]:
    """Gather a text of each rank, and check that the ranks have the secret. Every rank must call.

    `allgather` may bring texts of strangers; without a secret it is believed. The label says what
    the text is, with random numbers of all ranks.
    """
    if secret is None:
        return allgather(text)
    try:
        everyone = allgather(secret.seal(f"{rank}/{label}", text))
    except ValueError:  # not even JSON
        raise secret.mismatch(rank, None) from None
    found = []
    for other, sealed in enumerate(everyone):
        try:
            found.append(secret.open(f"{other}/{label}", sealed))
        except ValueError:
            raise secret.mismatch(rank, other) from None
    return found


def connection_key(address: str) -> bytes | None:
    """Return the 32 bytes that both ends of a connection to an address must have.

    None for a Unix socket, where the kernel names the other end's user, and with
    FASTDIST_INSECURE=1.
    """
    if is_path(address):
        return None
    secret = job_secret()
    if not secret.key:
        return None
    import fastdist.link.sealing  # noqa: F401  raises with a hint

    return bytes.fromhex(secret.derive("connection", "servers and workers"))


def job_secret() -> Secret:
    """Find the secret of this process's job.

    It is FASTDIST_SECRET, the content of the file FASTDIST_SECRET_FILE, or the content of a file
    in the user's configuration folder, which is made if it does not exist. With FASTDIST_INSECURE=1
    there is none, and the process warns once.
    """
    config = settings()
    if config.insecure:
        _warn_once()
        return Secret(b"", "FASTDIST_INSECURE=1")
    if config.secret is not None:
        return _checked(config.secret.encode(), SECRET_VARIABLE)
    if config.secret_file is not None:
        path = Path(config.secret_file)
        return _checked(_read(path), f"in FASTDIST_SECRET_FILE={config.secret_file}")
    path = Path(config.config_folder) / "fastdist" / "secret"
    with contextlib.suppress(FileExistsError):
        if not os.path.exists(path):  # False also where this user may not look
            _make(path)
    return _checked(_read(path, must_be_private=True), f"in the file {path}")


@functools.cache
def _warn_once() -> None:
    warnings.warn(
        "FASTDIST_INSECURE=1: anyone who can reach the ports of this job can join it and run code "
        "in it",
        stacklevel=3,
    )


def _checked(key: bytes, origin: str) -> Secret:
    key = key.strip()
    if len(key) < _LEAST_BYTES:
        raise ClusterConfigError(
            f"the secret {origin} has {len(key)} bytes, expected at least {_LEAST_BYTES}: {_HOW}"
        )
    return Secret(key, origin)


def _read(path: Path, must_be_private: bool = False) -> bytes:
    """Return a file's content; warn if other users may read it, unless it is root's.

    Orchestrators mount secrets as root's files, which all users of the container may read.
    """
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            key = file.read(_MOST_BYTES)
    except OSError as error:
        raise ClusterConfigError(
            f"cannot read the secret of this job in {path}: {error.strerror}: {_HOW}"
        ) from None
    mode = stat.S_IMODE(found.st_mode)
    if must_be_private and (found.st_uid != os.getuid() or mode & 0o077):
        raise ClusterConfigError(
            f"the secret in {path} may be known to other users: delete the file, so that a new one "
            "is made"
        )
    if found.st_uid != 0 and mode & 0o044:
        warnings.warn(
            f"other users may read the secret in {path}: run `chmod 600 {path}`, and replace "
            "the secret if they are not trusted",
            stacklevel=3,
        )
    return key


def _make(path: Path) -> None:
    """Write a new secret; ranks of other machines may do so at the same time."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent)  # only this user can read it
        try:
            with open(descriptor, "w") as file:
                file.write(secrets.token_hex(32) + "\n")
            os.link(name, path)  # the name appears with the whole content
        finally:
            os.unlink(name)
    except FileExistsError:
        raise
    except OSError as error:
        raise ClusterConfigError(
            f"this job needs a secret, and {path} cannot be made ({error.strerror}): {_HOW}"
        ) from None
