"""Questions to launchers: who is answered, who is believed, and what is sent."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from fastdist.recorder import elsewhere, observation, place
from fastdist.recorder.encoding import decode, encode, read, write
from fastdist.recorder.jobs import jobs_here
from fastdist.recorder.machines import Machine, Machines
from fastdist.recorder.questions import NoAnswerError, answer, ask
from synthetic_records import write_records

JOB, KEY = "0123456789abcdef", "a key of the job"


@contextmanager
def listening(serve: Callable[[socket.socket], None]) -> Iterator[tuple[str, int]]:
    """Serve connections, one after the other."""

    def loop() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                serve(connection)

    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=loop)
    thread.start()
    try:
        yield listener.getsockname()
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        listener.close()


def launcher(connection: socket.socket) -> None:
    answer(connection, {JOB: KEY}.get, lambda job, about: f"{about} of {job}", 10.0)


def soon() -> float:
    return time.monotonic() + 5


def test_an_answer_and_the_clock() -> None:
    with listening(launcher) as address:
        text, ahead_s = ask(address, KEY, JOB, "ranks", soon())
        assert text == f"ranks of {JOB}"
        assert abs(ahead_s) < 5


@pytest.mark.parametrize(("key", "job"), [("another key", JOB), (KEY, "fedcba9876543210")])
def test_strangers_get_no_answer(key: str, job: str) -> None:
    with listening(launcher) as address:
        with pytest.raises(NoAnswerError, match="does not know this job and its key"):
            ask(address, key, job, "ranks", soon())
        assert ask(address, KEY, JOB, "ranks", soon())[0]


def test_a_recorded_question_gets_no_answer() -> None:
    heard: list[bytes] = []

    def listen(connection: socket.socket) -> None:
        connection.sendall(b'["1", 2.0]\n')
        heard.append(connection.recv(4096))

    with listening(listen) as address, pytest.raises(NoAnswerError):
        ask(address, KEY, JOB, "ranks", soon())
    with listening(launcher) as address, socket.create_connection(address, 5) as connection:
        connection.recv(4096)
        connection.sendall(heard[0])
        assert connection.recv(4096) == b""


@pytest.mark.parametrize(
    "text",
    [b"\n", b"[]\n", b"null\n", b"x" * 5000, b'["a", "b", "c"]\n', b"[" * 2000 + b"\n"],
)
def test_malformed_questions_get_no_answer(text: bytes) -> None:
    with listening(launcher) as address:
        with socket.create_connection(address, 5) as connection:
            connection.recv(4096)
            connection.sendall(b"0" * 64 + text)
            assert not answered(connection)
        assert ask(address, KEY, JOB, "ranks", soon())[0]


def answered(connection: socket.socket) -> bool:
    try:
        return connection.recv(4096) != b""
    except ConnectionResetError:
        return False


@pytest.mark.parametrize(
    "hello",
    [
        *(b'["1", 2.0]\n', b"[]\n", b"[1, []]\n", b"\xff\n", b"x" * 5000, b""),
        *(b"{}\n", b'"1"\n', b"[1, 1e999]\n", b"[1, NaN]\n", b"[1, 1" + b"0" * 400 + b"]\n"),
        b"[" * 2000 + b"\n",
    ],
)
def test_strangers_are_not_believed(hello: bytes) -> None:
    def lie(connection: socket.socket) -> None:
        connection.sendall(hello)
        connection.recv(4096)
        connection.sendall(b"0" * 64 + b"[[], []]\n")

    with listening(lie) as address, pytest.raises(NoAnswerError):
        ask(address, KEY, JOB, "ranks", time.monotonic() + 1)


def test_silence_ends_in_time() -> None:
    over = threading.Event()
    with listening(lambda connection: over.wait(20)) as address:
        began_s = time.monotonic()
        with pytest.raises(NoAnswerError, match="does not answer in time") as told:
            ask(address, KEY, JOB, "ranks", began_s + 0.2)
        assert not told.value.is_cut
        assert time.monotonic() - began_s < 5
        over.set()
    with pytest.raises(NoAnswerError, match="has ended") as told:
        ask(address, KEY, JOB, "ranks", soon())
    assert not told.value.is_cut


def test_machines_are_noted(tmp_path: Path) -> None:
    machines = (Machine((0, 2), "10.0.0.1", "10.0.0.1:9"), Machine((1,), "fe80::1", ""))
    noted = Machines.of_job("key", machines)
    write(tmp_path / "x", noted)
    assert read(Machines, tmp_path / "x") == noted
    assert read(Machines, tmp_path / "y") is None
    (tmp_path / "x").write_text("[1, 2]")
    assert read(Machines, tmp_path / "x") is None
    assert noted.key not in ("key", Machines.of_job("other", machines).key)


@pytest.fixture
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The records of rank 0 of 2, which waits."""
    made = tmp_path / "records"
    made.mkdir(mode=0o700)
    monkeypatch.setattr(place, "_folders", lambda: [made])
    monkeypatch.setattr(elsewhere, "INTERVAL_S", 0.01)
    monkeypatch.setattr(observation, "stacks_of", lambda *_: ({}, {}))
    return write_records(made, 0, 2, range(1, 200), running=True, engine=b"net")


def test_what_was_observed_arrives(records: Path) -> None:
    told = decode(elsewhere.RanksThere, elsewhere.answer_to(JOB, "ranks"))
    ((there,), _) = told
    (here,) = observation.observe(jobs_here()[0][0], 0.0).ranks
    assert there.records.calls == here.records.calls
    assert there.records.usual == here.records.usual
    assert [call.is_running for call in there.before.calls] == [False] * 63 + [True]
    assert there.process is not None
    assert there.process.threads
    stacks, _ = decode(elsewhere.StacksThere, elsewhere.answer_to(JOB, "stacks"))
    assert stacks == {"0": ()}
    assert decode(elsewhere.RanksThere, elsewhere.answer_to("another", "ranks")) == ((), ())


def test_times_are_moved(records: Path) -> None:
    ((then,), _) = decode(elsewhere.RanksThere, elsewhere.answer_to(JOB, "ranks"))
    now = elsewhere._on_this_clock(then, "10.0.0.1:9", -3600.0)
    assert now.idle_since_s == pytest.approx(then.idle_since_s - 3600)
    assert now.running[0].entered_s == pytest.approx(then.running[0].entered_s - 3600)
    assert then.process is not None
    assert now.process is not None
    assert now.process.at_s == pytest.approx(then.process.at_s - 3600)
    assert now.process.cpu_s == then.process.cpu_s


def test_other_values_are_refused(records: Path) -> None:
    text = elsewhere.answer_to(JOB, "ranks")
    fields = json.loads(text)
    for wrong in ("", "3", "null", "[]", "[[], [], []]", "[[1], []]", json.dumps(fields[:1])):
        with pytest.raises(ValueError, match=r"."):
            decode(elsewhere.RanksThere, wrong)
    fields[0][0][0][1] = "a text where a number is expected"
    with pytest.raises(ValueError, match="expected int, got str"):
        decode(elsewhere.RanksThere, json.dumps(fields))
    assert encode(decode(elsewhere.RanksThere, text)) == text


def test_a_machine_without_a_launcher(records: Path) -> None:
    """The answer says where to ask, as for ranks of torchrun."""
    found = next(place.record_paths())
    machines = (Machine((0,), "10.0.0.1", "10.0.0.1:9"), Machine((1,), "10.0.0.2", ""))
    write(found.beside("machines"), Machines.of_job("key", machines))
    (job,) = jobs_here()[0]
    seen = elsewhere.observe_everywhere(job, 0.01)
    assert [str(why) for _, why in seen.unreached] == [
        "no fastdist run answers there; ask on that machine"
    ]
    assert (seen.missing, seen.unreached[0][1].is_cut) == ((1,), False)
    lost = replace(machines[1], launcher="192.0.2.1:9")  # an address for documents
    write(found.beside("machines"), Machines.of_job("key", (machines[0], lost)))
    began_s = time.monotonic()
    seen = elsewhere.observe_everywhere(job, 0.01)
    assert time.monotonic() - began_s < 20
    assert len(seen.unreached) == 1
