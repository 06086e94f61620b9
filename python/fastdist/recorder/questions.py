"""Questions to the launchers of other machines, and their answers: three lines of JSON over TCP.

The launcher speaks first: a random number, and the time of its clock. The question and the answer
are sealed with the job's key, each as a reply to the line before. So recorded questions and answers
are useless, and forged ones are rejected. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import socket
import time
from collections.abc import Callable

from fastdist.link.secret import Secret

_CONNECT_S = 1.5
_ANSWER_S = 10.0  # longer than the asker waits
_MOST_BYTES = 1 << 12
_MOST_ANSWER_BYTES = 1 << 28
# Of a connection, and of what a stranger says: any JSON.
_FAILURES = (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError)


class NoAnswerError(Exception):
    """A launcher does not answer; `is_cut`: its machine cannot be reached at all."""

    def __init__(self, message: str, is_cut: bool = False) -> None:
        super().__init__(message)
        self.is_cut = is_cut


def ask(
    address: tuple[str, int], key: str, job: str, about: str, end_s: float
) -> tuple[str, float]:
    """Ask a launcher about a job, until `end_s` on the monotonic clock.

    Returns the answer, and how many seconds this machine's clock is ahead of the launcher's.
    """
    connection = _connect(address, min(end_s, time.monotonic() + _CONNECT_S))
    secret = Secret(key.encode(), "the job's records")
    with connection:
        try:
            asked_s = time.monotonic()
            hello = _hear(connection, _MOST_BYTES, end_s)
            said_s = float(json.loads(hello)[1])
            ahead_s = (asked_s + time.monotonic()) / 2 - said_s
            if not math.isfinite(ahead_s):
                raise ValueError(f"a clock at {said_s}")
            question = secret.seal(hello, json.dumps([job, about, secrets.token_hex(16)]))
            _say(connection, question, end_s)
            sealed = _hear(connection, _MOST_ANSWER_BYTES, end_s)
            return secret.open(question, sealed, _MOST_ANSWER_BYTES), ahead_s
        except TimeoutError:
            raise NoAnswerError("its launcher does not answer in time") from None
        except _FAILURES:
            raise NoAnswerError(
                "its launcher has ended meanwhile, or does not know this job and its key"
            ) from None


def _connect(address: tuple[str, int], end_s: float) -> socket.socket:
    try:
        return socket.create_connection(address, max(end_s - time.monotonic(), 0.01))
    except ConnectionRefusedError:
        raise NoAnswerError("its launcher has ended") from None
    except TimeoutError:
        raise NoAnswerError("the machine does not answer", is_cut=True) from None
    except OSError as error:
        raise NoAnswerError(f"{error.strerror or error}", is_cut=True) from None


def answer(
    connection: socket.socket,
    key_of: Callable[[str], str | None],
    answer_to: Callable[[str, str], str],
    patience_s: float,
) -> None:
    """Answer one question that comes within `patience_s`, if it was asked with the job's key.

    `key_of` returns the key of a job, None for an unknown one; `answer_to` answers about a job.
    """
    end_s = time.monotonic() + patience_s
    hello = json.dumps([secrets.token_hex(16), time.monotonic()])
    with contextlib.suppress(*_FAILURES):
        _say(connection, hello, end_s)
        question = _hear(connection, _MOST_BYTES, end_s)
        job, about, _ = map(str, json.loads(json.loads(question)[0]))
        key = key_of(job)
        if key is None:
            return
        secret = Secret(key.encode(), "the job's records")
        secret.open(hello, question)
        sealed = secret.seal(question, answer_to(job, about))
        _say(connection, sealed, time.monotonic() + _ANSWER_S)


def _say(connection: socket.socket, line: str, end_s: float) -> None:
    connection.settimeout(max(end_s - time.monotonic(), 0.001))
    connection.sendall(line.encode() + b"\n")


def _hear(connection: socket.socket, most_bytes: int, end_s: float) -> str:
    """Return the other end's next line."""
    read = bytearray()
    while not read.endswith(b"\n"):
        connection.settimeout(max(end_s - time.monotonic(), 0.001))
        part = connection.recv(1 << 16)
        if not part:
            raise ConnectionResetError
        read += part
        if len(read) > most_bytes:
            raise ValueError("too long")
    return read[:-1].decode()
