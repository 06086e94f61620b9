"""The roster of an elastic job, spoken to by members in threads."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest
from fastdist.cluster import roster
from fastdist.cluster.branch import Branch
from fastdist.cluster.roster import Roster, RosterPlace, roster_place
from fastdist.collectives.elastic import BrokenWorldError, Member
from fastdist.errors import ClusterConfigError
from held_ports import free_port
from launched import wait_until
from raw_link import RawClient

World = tuple[int, int, int]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture
def pool(stack: ExitStack) -> ThreadPoolExecutor:
    return stack.enter_context(ThreadPoolExecutor(8))


class Job:
    """A roster, and members that connect to it."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def begin(self, least: int, most: int) -> Roster:
        self.roster = self._stack.enter_context(closing(Roster(least, most)))
        return self.roster

    def member(self) -> Member:
        return self._stack.enter_context(closing(Member(RosterPlace(self.roster.name, 0))))

    def members(self, count: int) -> list[Member]:
        return [self.member() for _ in range(count)]


@pytest.fixture
def job(stack: ExitStack) -> Job:
    return Job(stack)


def join(member: Member, seconds: float = 20) -> World:
    member.join(seconds)
    return member.world, member.Get_rank(), member.Get_size()


def gather(member: Member) -> list[object]:
    with member.rendezvous():
        return member.allgather(0)


def join_all(pool: ThreadPoolExecutor, *members: Member) -> list[World]:
    return [each.result(30) for each in [pool.submit(join, member) for member in members]]


def test_the_first_world_waits_for_all(job: Job, pool: ThreadPoolExecutor) -> None:
    job.begin(1, 3)
    members = job.members(3)
    early = [pool.submit(join, member) for member in members[:2]]
    time.sleep(0.2)
    assert not any(future.done() for future in early)
    worlds = [join(members[2]), *(future.result(20) for future in early)]
    assert sorted(worlds) == [(1, 0, 3), (1, 1, 3), (1, 2, 3)]


def test_or_for_the_last_call(
    job: Job, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "LAST_CALL_S", 0.3)
    job.begin(2, 3)
    assert sorted(join_all(pool, job.member(), job.member())) == [(1, 0, 2), (1, 1, 2)]


def test_those_that_have_come_furthest_are_first(job: Job, pool: ThreadPoolExecutor) -> None:
    job.begin(3, 3)
    members = job.members(3)
    for member, progress in zip(members, (4, 0, 5), strict=True):
        member.progress = progress
    assert [rank for _, rank, _ in join_all(pool, *members)] == [1, 2, 0]


def test_ranks_learn_that_another_waits(job: Job, pool: ThreadPoolExecutor) -> None:
    job.begin(2, 2)
    members = job.members(2)
    join_all(pool, *members)
    assert not any(member.must_join() for member in members)
    late = pool.submit(join, job.member())
    while not all(member.must_join() for member in members):
        time.sleep(0.01)
    worlds = join_all(pool, *members)
    assert sorted([*worlds, late.result(20)]) == [(2, 0, 3), (2, 1, 3), (2, 2, 3)]
    assert late.result()[1] == 2  # it has done nothing yet
    assert not any(member.must_join() for member in members)


def test_a_rank_that_leaves_is_not_waited_for(job: Job, pool: ThreadPoolExecutor) -> None:
    job.begin(2, 3)
    members = job.members(3)
    join_all(pool, *members)
    waits = [pool.submit(join, member) for member in members[:2]]
    members[2].close()
    assert sorted(future.result(20) for future in waits) == [(2, 0, 2), (2, 1, 2)]


def test_fewer_than_the_least_wait(job: Job, pool: ThreadPoolExecutor) -> None:
    job.begin(2, 2)
    members = job.members(2)
    join_all(pool, *members)
    members[1].close()
    waits = pool.submit(join, members[0], 0.1)
    time.sleep(0.3)
    assert not waits.done()
    assert join(job.member()) == (2, 1, 2)
    assert waits.result(20) == (2, 0, 2)


def test_ranks_gather(job: Job, pool: ThreadPoolExecutor) -> None:
    job.begin(2, 2)
    members = job.members(2)
    worlds = join_all(pool, *members)
    futures: list[Future[list[object]]] = [
        pool.submit(member.allgather, ["é", rank])
        for member, (_, rank, _) in zip(members, worlds, strict=True)
    ]
    assert [future.result(20) for future in futures] == [[["é", 0], ["é", 1]]] * 2


@pytest.mark.parametrize("before", [True, False])
def test_a_gathering_without_a_rank_is_broken(
    job: Job, pool: ThreadPoolExecutor, before: bool
) -> None:
    job.begin(1, 3)
    members = job.members(3)
    join_all(pool, *members)
    if before:
        members[2].close()
        time.sleep(0.1)
    futures = [pool.submit(gather, member) for member in members[:2]]
    if not before:
        time.sleep(0.1)
        members[2].close()
    for future in futures:
        with pytest.raises(BrokenWorldError):
            future.result(20)
    assert sorted(join_all(pool, *members[:2])) == [(2, 0, 2), (2, 1, 2)]


@pytest.mark.parametrize("by_launcher", [True, False])
def test_once_the_work_is_done_nobody_begins(
    job: Job, pool: ThreadPoolExecutor, by_launcher: bool
) -> None:
    made = job.begin(2, 2)
    members = job.members(2)
    join_all(pool, *members)
    if by_launcher:
        made.finish()
    else:
        members[0].finish()
    with pytest.raises(SystemExit):
        join(job.member())
    waits = pool.submit(join, members[1])
    members[0].close()
    assert waits.result(20) == (2, 0, 1)  # goes on with what is left to do


@pytest.mark.parametrize(
    "said",
    [
        *(b"\n", b"[]\n", b"{}\n", b"\xff\n", b"[" * 100_000 + b"\n"),
        *(b'{"join": "x"}\n', b'{"join": Infinity}\n', b'{"late": 3}\n{"join": []}\n'),
    ],
)
def test_what_is_no_message_ends_the_connection(job: Job, said: bytes) -> None:
    job.begin(1, 1)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(f"\0{job.roster.name}")
        stranger.sendall(said)
        stranger.settimeout(20)
        assert stranger.recv(1) == b""
    assert join(job.member()) == (1, 0, 1)


def test_a_place_in_the_environment() -> None:
    place = RosterPlace("a", 3)
    assert roster_place(place.environment()) == place
    assert json.loads(place.environment()[roster.ROSTER_VARIABLE]) == {
        "name": "a",
        "slot": 3,
        "machine": 0,
    }
    assert roster_place({}) is None


def test_without_a_roster() -> None:
    with pytest.raises(ClusterConfigError, match="launcher of this elastic job has ended"):
        Member(RosterPlace("nobody", 0))


WAITS = """
import sys, time
from fastdist.cluster.roster import RosterPlace
from fastdist.collectives.elastic import Member
member = Member(RosterPlace(sys.argv[1], 0))
member.join(0.5)
print(member.Get_rank(), flush=True)
if sys.argv[2] == "gather":
    member.allgather(0)
time.sleep(60)
"""


@pytest.fixture
def other(job: Job, pool: ThreadPoolExecutor) -> Iterator[tuple[Member, subprocess.Popen[str]]]:
    """A member, and a process that is a rank of the same world and does nothing more."""
    made = job.begin(1, 2)
    member = job.member()
    place = pool.submit(join, member, 0.5)
    command = [sys.executable, "-c", WAITS, made.name, "wait"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert place.result(30)[2] == 2
        assert process.stdout is not None
        process.stdout.readline()
        yield member, process
        process.kill()


class TestLateRanks:
    @pytest.fixture(autouse=True)
    def soon(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(roster, "_LATE_S", 0.3)
        monkeypatch.setattr(roster, "_GATHERING_S", 0.3)

    def test_are_killed(self, other: tuple[Member, subprocess.Popen[str]]) -> None:
        member, process = other
        member.report([1 - member.Get_rank()])
        assert join(member) == (2, 0, 1)
        assert process.wait(20) == -signal.SIGKILL

    def test_also_stopped_and_unnamed(self, other: tuple[Member, subprocess.Popen[str]]) -> None:
        member, process = other
        process.send_signal(signal.SIGSTOP)
        assert join(member, 0.2) == (2, 0, 1)
        assert process.wait(20) == -signal.SIGKILL

    @pytest.mark.slow
    def test_once_the_others_have_ended(
        self, job: Job, pool: ThreadPoolExecutor, other: tuple[Member, subprocess.Popen[str]]
    ) -> None:
        """Nobody of its world is left to report it; the restarted ranks know nothing of it."""
        member, process = other
        member.close()
        restarted = pool.submit(join, job.member(), 0.2)
        assert process.wait(20) == -signal.SIGKILL
        assert restarted.result(20) == (2, 0, 1)

    def test_is_not_said_of_ranks_that_a_new_one_waits_for(
        self, job: Job, pool: ThreadPoolExecutor, other: tuple[Member, subprocess.Popen[str]]
    ) -> None:
        """They come when their step has ended, however long that takes."""
        member, process = other
        restarted = pool.submit(join, job.member(), 0.2)
        time.sleep(1.0)
        assert process.poll() is None
        assert member.must_join()
        assert join(member, 0.2)[2] == restarted.result(20)[2] == 2  # without the other
        assert process.wait(20) == -signal.SIGKILL

    def test_in_the_middle_of_a_message(
        self, job: Job, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(roster, "_GATHERING_S", 20.0)
        monkeypatch.setattr(roster, "_LATE_S", 20.0)
        made = job.begin(2, 2)
        member = job.member()
        place = pool.submit(join, member)
        command = [sys.executable, "-c", WAITS, made.name, "gather"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            place.result(20)
            time.sleep(0.3)  # it has sent its own part by then
            process.send_signal(signal.SIGSTOP)
            member._line.send(gather="x" * 900_000)
            worlds = [pool.submit(join, each) for each in (member, job.member())]
            assert process.wait(20) == -signal.SIGKILL
            assert [world.result(20)[2] for world in worlds] == [2, 2]

    def test_in_a_gathering(self, other: tuple[Member, subprocess.Popen[str]]) -> None:
        member, process = other
        with pytest.raises(BrokenWorldError):
            gather(member)
        assert process.wait(20) == -signal.SIGKILL

    @pytest.mark.slow
    def test_that_come_after_all_live(
        self, job: Job, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(roster, "_LATE_S", 2.0)
        job.begin(2, 2)
        members = job.members(2)
        join_all(pool, *members)
        members[0].report([members[1].Get_rank()])
        assert sorted(join_all(pool, *members)) == [(2, 0, 2), (2, 1, 2)]
        time.sleep(2.5)
        assert not members[1].must_join()


class TestBranch:
    """Members of another machine's launcher, here over the loopback."""

    def begin(self, stack: ExitStack, most: int = 2) -> tuple[Roster, Branch, list[str]]:
        reasons: list[str] = []
        roster = stack.enter_context(closing(Roster(1, most, "tcp://127.0.0.1:*")))
        address = f"tcp://127.0.0.1:{roster.port}"
        return roster, stack.enter_context(closing(Branch(address, most, reasons.append))), reasons

    def member(self, stack: ExitStack, of: Roster | Branch) -> Member:
        return stack.enter_context(closing(Member(RosterPlace(of.name, 0))))

    def test_ranks_here_and_there_make_worlds(
        self, stack: ExitStack, pool: ThreadPoolExecutor
    ) -> None:
        roster, branch, _ = self.begin(stack)
        here, there = self.member(stack, roster), self.member(stack, branch)
        assert not branch.has_begun()
        places = [pool.submit(join, member) for member in (here, there)]
        assert sorted(place.result(20) for place in places) == [(1, 0, 2), (1, 1, 2)]
        values = [
            pool.submit(member.allgather, name) for member, name in ((here, "h"), (there, "t"))
        ]
        assert sorted(values[0].result(20)) == ["h", "t"] == sorted(values[1].result(20))
        wait_until(branch.has_begun)

    def test_ranks_come_before_the_roster(self, stack: ExitStack, pool: ThreadPoolExecutor) -> None:
        port = free_port()
        branch = stack.enter_context(closing(Branch(f"tcp://127.0.0.1:{port}", 1, print)))
        place = pool.submit(join, self.member(stack, branch))
        time.sleep(0.3)
        stack.enter_context(closing(Roster(1, 1, f"tcp://127.0.0.1:{port}")))
        assert place.result(20) == (1, 0, 1)

    def test_the_end_of_the_work_is_told(self, stack: ExitStack, pool: ThreadPoolExecutor) -> None:
        roster, branch, reasons = self.begin(stack)
        members = [self.member(stack, branch) for _ in range(2)]
        for place in [pool.submit(join, member) for member in members]:
            place.result(20)
        members[0].finish()
        wait_until(lambda: roster._has_finished)
        late = self.member(stack, branch)
        with pytest.raises(SystemExit):
            late.join(20)
        roster.close()
        last = self.member(stack, branch)  # starts as the others have ended
        with pytest.raises(SystemExit):
            last.join(20)
        assert reasons == []

    def test_a_rank_that_waits_is_let_go(self, stack: ExitStack, pool: ThreadPoolExecutor) -> None:
        """Its world has ended with the roster's machine, whose rank was done."""
        roster, branch, _ = self.begin(stack)
        here, there = self.member(stack, roster), self.member(stack, branch)
        for place in [pool.submit(join, member) for member in (here, there)]:
            place.result(20)
        here.finish()
        wait_until(lambda: branch._has_finished)
        left = pool.submit(join, there)
        time.sleep(0.3)
        assert not left.done()  # the other rank still has its world
        roster.close()
        with pytest.raises(SystemExit):
            left.result(20)

    def test_a_program_that_fails_ends_the_job(self, stack: ExitStack) -> None:
        failures: list[str] = []
        address = f"tcp://127.0.0.1:{free_port()}"
        branch = stack.enter_context(closing(Branch(address, 1, failures.append)))
        ending = threading.Thread(target=branch.end, args=(True,))
        ending.start()
        time.sleep(0.3)
        stack.enter_context(closing(Roster(1, 2, address, failures.append)))
        wait_until(lambda: bool(failures))
        ending.join()
        assert "failed on another machine" in failures[0]

    def test_a_roster_that_leaves_is_told(self, stack: ExitStack) -> None:
        roster, branch, reasons = self.begin(stack)
        wait_until(lambda: branch._is_connected)
        roster.close()
        wait_until(lambda: bool(reasons))
        assert "has ended" in reasons[0]

    def test_another_secret(self, stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FASTDIST_RENDEZVOUS_TIMEOUT_S", "1.5")
        reasons: list[str] = []
        roster = stack.enter_context(closing(Roster(1, 1, "tcp://127.0.0.1:*")))
        monkeypatch.setenv("FASTDIST_SECRET", "the secret of others")
        address = f"tcp://127.0.0.1:{roster.port}"
        stack.enter_context(closing(Branch(address, 1, reasons.append)))
        wait_until(lambda: bool(reasons))
        assert "does not let this machine in: does it have the same secret?" in reasons[0]

    def test_garbage_drops_its_sender_alone(
        self, stack: ExitStack, pool: ThreadPoolExecutor
    ) -> None:
        roster, branch, _ = self.begin(stack, most=1)
        with RawClient(f"tcp://127.0.0.1:{roster.port}") as known:
            for garbage in (b"", b"{}", b"[1]", b'["said", 1]', b'["said", 1, "join", 3]', b"\xff"):
                known.send(garbage)
                known.receive(0.05)
            assert join(self.member(stack, branch)) == (1, 0, 1)
