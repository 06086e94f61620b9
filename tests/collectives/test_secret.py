"""The secret of a job on several machines: where it comes from, and what it keeps out."""

from __future__ import annotations

import json
import os
import re
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fastdist.collectives.rendezvous import machines
from fastdist.collectives.rendezvous.board import StoreBoard
from fastdist.errors import ClusterConfigError
from fastdist.link import secret as secret_module
from fastdist.link.secret import Secret, exchange, job_secret

OURS = Secret(b"0123456789abcdef", "FASTDIST_SECRET")
OTHER = Secret(b"0123456789abcdeF", "in a file")
GARBAGE = [
    "",
    "{",
    "[]",
    "[1, 2, 3]",
    '["text"]',
    '["text", "äöü"]',
    '["text", null]',
    "[" * 100_000,
    '["' + "x" * 70_000 + '", "0"]',
    b"\xff\xfe",
    "1e99",
    "9" * 5_000,
]


def test_only_the_secret_opens_a_text() -> None:
    sealed = OURS.seal("rank/1", "text")
    assert OURS.open("rank/1", sealed) == OURS.open("rank/1", sealed.encode()) == "text"
    for secret, label in ((OTHER, "rank/1"), (OURS, "rank/2")):
        with pytest.raises(ValueError, match="not sealed with this secret"):
            secret.open(label, sealed)
    with pytest.raises(ValueError, match="not sealed with this secret"):
        OURS.open("rank/1", sealed.replace("text", "test"))
    assert "0123" not in repr(OURS)


@pytest.mark.parametrize("text", GARBAGE, ids=range(len(GARBAGE)))
def test_garbage_is_not_sealed(text: str | bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  with various messages
        OURS.open("rank/1", text)


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """An environment without a secret, and an empty configuration folder."""
    for name in ("FASTDIST_SECRET", "FASTDIST_SECRET_FILE", "FASTDIST_INSECURE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return monkeypatch


def test_a_secret_is_made_once(environ: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found: list[Secret] = []
    threads = [threading.Thread(target=lambda: found.append(job_secret())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    path = tmp_path / "config" / "fastdist" / "secret"
    assert list(path.parent.iterdir()) == [path]
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_bytes().strip() == found[0].key
    assert len(found[0].key) == 64
    assert str(path) in found[0].origin

    path.chmod(0o640)
    with pytest.raises(ClusterConfigError, match="may be known to other users"):
        job_secret()


def test_variables_come_first(environ: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "job.secret"
    file.write_text("of a mounted file\n")
    file.chmod(0o600)
    environ.setenv("FASTDIST_SECRET_FILE", str(file))
    assert job_secret().key == b"of a mounted file"
    environ.setenv("FASTDIST_SECRET", "of the environment")
    assert job_secret().key == b"of the environment"
    assert not (tmp_path / "config").exists()


def test_a_secret_that_others_may_read_warns(environ: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "job.secret"
    file.write_text("of a mounted file\n")
    file.chmod(0o640)
    environ.setenv("FASTDIST_SECRET_FILE", str(file))
    if os.getuid() == 0:  # whose files are taken for mounts of an orchestrator
        assert job_secret().key == b"of a mounted file"
        os.chown(file, 12345, -1)
    with pytest.warns(UserWarning, match="other users may read the secret in .*chmod 600"):
        assert job_secret().key == b"of a mounted file"


def test_secrets_that_cannot_be_used(environ: pytest.MonkeyPatch, tmp_path: Path) -> None:
    environ.setenv("FASTDIST_SECRET", "short")
    with pytest.raises(ClusterConfigError, match="FASTDIST_SECRET has 5 bytes, expected at least"):
        job_secret()
    environ.delenv("FASTDIST_SECRET")
    environ.setenv("FASTDIST_SECRET_FILE", str(tmp_path / "missing"))
    with pytest.raises(ClusterConfigError, match="missing: No such file"):
        job_secret()
    environ.delenv("FASTDIST_SECRET_FILE")
    (tmp_path / "config").write_text("not a folder")
    with pytest.raises(ClusterConfigError, match=r"cannot be made .*: set FASTDIST_SECRET or"):
        job_secret()


def test_going_on_without_a_secret_warns_once(environ: pytest.MonkeyPatch) -> None:
    environ.setenv("FASTDIST_INSECURE", "1")
    secret_module._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="FASTDIST_INSECURE=1: anyone who can reach"):
        job_secret()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert job_secret().key == b""


class Store:
    """The part of torch's stores that a rendezvous uses."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()

    def set(self, key: str, value: str) -> None:
        self.values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self.values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def add(self, key: str, number: int) -> int:
        with self.lock:
            total = int(self.values.get(key, b"0")) + number
            self.values[key] = str(total).encode()
            return total

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self.lock:
            return self.values.setdefault(key, desired.encode())


def meet_all(secrets: list[Secret], store: Store, limit_s: float = 20) -> list[Any]:
    """Arrive as one rank for each secret; return each rank's rendezvous, or its error."""
    results: list[Any] = [None] * len(secrets)
    own = threading.local()

    def arrive(rank: int) -> None:
        own.rank = rank
        try:
            deadline = time.monotonic() + limit_s
            board = StoreBoard(store, rank, len(secrets), deadline, limit_s)
            try:
                results[rank] = machines.agree(board, deadline, "10.0.0.1:1")
                results[rank].listener.close()
            except ClusterConfigError as error:
                board.give_up(error)
                raise
        except BaseException as error:
            results[rank] = error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machines, "machine_id", lambda: f"machine {own.rank}")
        patch.setattr(machines, "job_secret", lambda: secrets[own.rank])
        patch.setattr(machines, "own_address", lambda *_: "0.0.0.0")
        threads = [threading.Thread(target=arrive, args=(rank,)) for rank in range(len(secrets))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return results


def test_a_key_that_is_not_in_the_store() -> None:
    store = Store()
    keys = {rendezvous.key for rendezvous in meet_all([OURS] * 3, store)}
    assert len(keys) == 1
    assert not any(key.encode() in value for key in keys for value in store.values.values())


def test_ranks_with_another_secret() -> None:
    """Every rank says at once what to set."""
    begin = time.monotonic()
    errors = meet_all([OURS, OTHER], Store(), limit_s=600)
    assert time.monotonic() - begin < 60
    for error in errors:
        assert isinstance(error, ClusterConfigError)
        assert "set FASTDIST_SECRET or FASTDIST_SECRET_FILE to the same" in str(error)
    assert "rank 1 does not prove" in str(errors[0])
    assert "rank 0 does not prove that it has the secret of rank 1, which is in a file" in str(
        errors[1]
    )


@pytest.mark.parametrize("text", GARBAGE, ids=range(len(GARBAGE)))
@pytest.mark.parametrize("turn", [0, 1])
def test_strangers_in_the_store(turn: int, text: str | bytes) -> None:
    class Written(Store):
        def set(self, key: str, value: str) -> None:
            if key == f"fastdist/1/{turn}/1":
                value = text if isinstance(text, str) else text.decode("latin-1")
            super().set(key, value)

    for error in meet_all([OURS] * 2, Written()):
        assert isinstance(error, ClusterConfigError)
        assert re.search("another program has written|does not prove|gave up", str(error))


def test_a_stranger_cannot_change_what_ranks_say() -> None:
    class Written(Store):
        def set(self, key: str, value: str) -> None:
            super().set(key, value.replace("0.0.0.0", "6.6.6.6"))

    for error in meet_all([OURS] * 2, Written()):
        assert isinstance(error, ClusterConfigError)
        assert "does not prove" in str(error)


def refused(call: Callable[[], Any]) -> ClusterConfigError:
    with pytest.raises(ClusterConfigError) as caught:
        call()
    return caught.value


NONE = Secret(b"", "FASTDIST_INSECURE=1")


@pytest.mark.parametrize(
    "packed",
    [
        "[]",
        "7",
        '["10.0.0.1", 1]',
        '["999.1.1.1", 70, ""]',
        '["10.0.0.1", 70000, ""]',
        '["10.0.0.1", 0, ""]',
        '["10.0.0.1", 1e99, ""]',
        '[null, 70, ""]',
        '[{}, 70, ""]',
        '["10.0.0.1", 70, null]',
    ],
)
def test_malformed_arrivals_of_jobs_without_a_secret(packed: str) -> None:
    with pytest.raises(ClusterConfigError, match="rank 1 has posted a malformed arrival"):
        machines._arrival(packed, 1)


@pytest.mark.parametrize(
    "refusal",
    [
        *("[", "7", "[]", '["why", {}]', "[{}, {}, {}]", "[" * 100_000),
        '[1, "\\u001b[31mwhy", [1]]',
        '["\\u001b[2J", "why", [1]]',
        '[7, "why", [1, 99, -4, true, "1", 1.5]]',
        '[0, "why", [Infinity, 1e400]]',
        '[0, "why", 7]',
    ],
    ids=range(11),
)
def test_malformed_refusals(refusal: str) -> None:
    store = Store()
    store.set("fastdist/1/0/decision", refusal)
    for error in meet_all([NONE, NONE], store):
        assert isinstance(error, ClusterConfigError)
        assert "\x1b" not in str(error)
        assert error.ranks in ((), (1,))


def test_an_exchange_between_ranks_with_another_secret() -> None:
    def sealed(secret: Secret, rank: int) -> str:
        found: list[str] = []
        with pytest.raises(IndexError):  # no rank has answered
            exchange(
                lambda text: found.append(text) or [][0], secret, rank, "label", f"text {rank}"
            )
        return found[0]

    ours = [sealed(OURS, 0), sealed(OURS, 1)]
    assert exchange(lambda _: ours, OURS, 0, "label", "text 0") == ["text 0", "text 1"]
    for replies in ([sealed(OURS, 0), sealed(OTHER, 1)], ours[::-1], [ours[0], "text 1"]):
        error = refused(lambda r=replies: exchange(lambda _: r, OURS, 0, "label", "text 0"))  # type: ignore[misc]
        assert "does not prove that it has the secret of rank 0" in str(error)
    with pytest.raises(ClusterConfigError):
        exchange(lambda _: ours, OURS, 0, "other", "text 0")
    error = refused(lambda: exchange(lambda _: list(json.loads("{")), OURS, 0, "label", "text 0"))
    assert "another rank does not prove" in str(error)
