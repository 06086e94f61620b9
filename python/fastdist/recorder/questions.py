"""Questions to the launchers of other machines, and their answers: three lines of JSON over TCP.

The launcher speaks first: a random number, and the time of its clock. The question and the answer
begin with an HMAC-SHA256 code of all lines so far, which only programs with the job's key can make.
So recorded questions and answers are useless, and forged ones are rejected. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import math
import secrets
import socket
import time
from collections.abc import Callable

_CONNECT_S = 1.5
_ANSWER_S = 10.0  # longer than the asker waits
_MOST_BYTES = 1 << 12
_MOST_ANSWER_BYTES = 1 << 28
_CODE_BYTES = 64
# Of a connection, and of what a stranger says: any JSON.
_FAILURES = (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError)


class NoAnswerError(Exception):
    """A launcher does not answer; the message says why.

    Attributes:
        is_cut: the machine cannot be reached at all.
    """

    def __init__(self, message: str, is_cut: bool = False) -> None:
        super().__init__(message)
        self.is_cut = is_cut


def ask(
    address: tuple[str, int], key: str, job: str, about: str, end_s: float
) -> tuple[str, float]:
    """Ask a launcher about a job, until `end_s` on the monotonic clock.

    Returns:
        The answer, and how many seconds this machine's monotonic clock is ahead of the launcher's.
    """
    connection = _connect(address, min(end_s, time.monotonic() + _CONNECT_S))
    with connection:
        talk = _Talk(connection, key.encode(), end_s)
        try:
            asked_s = time.monotonic()
            said_s = float(json.loads(talk.hear(_MOST_BYTES))[1])
            ahead_s = (asked_s + time.monotonic()) / 2 - said_s
            if not math.isfinite(ahead_s):
                raise ValueError(f"a clock at {said_s}")
            text = json.dumps([job, about, secrets.token_hex(16)])
            talk.say(text.encode(), with_code=True)
            return talk.hear(_MOST_ANSWER_BYTES, with_code=True).decode(), ahead_s
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
    """Answer one question, unless it was asked without the job's key.

    Args:
        connection: the connection to the program that asks.
        key_of: a function that returns the key of a job; None if the job is unknown.
        answer_to: a function that returns the answer from a job and the question.
        patience_s: seconds to wait for the question.
    """
    talk = _Talk(connection, b"", time.monotonic() + patience_s)
    with contextlib.suppress(*_FAILURES):
        talk.say(json.dumps([secrets.token_hex(16), time.monotonic()]).encode())
        job, about, _ = map(str, json.loads(talk.peek(_MOST_BYTES)[_CODE_BYTES:]))
        key = key_of(job)
        if key is None:
            return
        talk.key = key.encode()
        talk.hear(_MOST_BYTES, with_code=True)
        talk.end_s = time.monotonic() + _ANSWER_S
        talk.say(answer_to(job, about).encode(), with_code=True)


class _Talk:
    """One end of a connection on which both ends send lines.

    Attributes:
        end_s: the time to give up, on the monotonic clock.
    """

    def __init__(self, connection: socket.socket, key: bytes, end_s: float) -> None:
        self.key = key
        self.end_s = end_s
        self._connection = connection
        self._said = hashlib.sha256()  # the lines of both, without codes
        self._read = bytearray()

    def say(self, line: bytes, with_code: bool = False) -> None:
        self._said.update(line + b"\n")
        self._arm()
        self._connection.sendall((self._code() if with_code else b"") + line + b"\n")

    def hear(self, most_bytes: int, with_code: bool = False) -> bytes:
        """Return the other's line."""
        line = self.peek(most_bytes)
        self._read.clear()
        code, line = (line[:_CODE_BYTES], line[_CODE_BYTES:]) if with_code else (b"", line)
        self._said.update(line + b"\n")
        if with_code and not hmac.compare_digest(code, self._code()):
            raise ValueError("said by a stranger")
        return line

    def peek(self, most_bytes: int) -> bytes:
        """Return the other's line, which `hear` returns again."""
        while not self._read.endswith(b"\n"):
            self._arm()
            part = self._connection.recv(1 << 16)
            if not part:
                raise ConnectionResetError
            self._read += part
            if len(self._read) > most_bytes:
                raise ValueError("too long")
        return bytes(self._read[:-1])

    def _code(self) -> bytes:
        return hmac.new(self.key, self._said.digest(), hashlib.sha256).hexdigest().encode()

    def _arm(self) -> None:
        self._connection.settimeout(max(self.end_s - time.monotonic(), 0.001))
