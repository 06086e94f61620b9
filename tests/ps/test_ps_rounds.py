"""Concurrent requests, and gradients that are applied by rounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
from fastdist.errors import UnavailableError
from fastdist.link.stream import Stream
from fastdist.ps import Client, DenseSpec, Item, RowsSpec, RuleSpec, Server
from fastdist.ps.client.partition import FixedShards, RoundRobin
from fastdist.ps.client.sharded import commit_round, discard_rounds, items_of, pull_together
from fastdist.ps.server.changes import DISCARDED, Rounds
from fastdist.ps.wire.protocol import Header, Op
from raw_link import RawServer
from sharded_things import ShardedRows, ShardedVariable, pull

SGD = RuleSpec("SGD", {"lr": 1.0})
SERVERS = (0, 1)


class Worker:
    """A client with a sharded variable and a sharded table."""

    def __init__(self, client: Client) -> None:
        self.client = client
        placement = RoundRobin(2, FixedShards(2))
        pieces = placement.place((4, 3), 4)
        self.dense = ShardedVariable(client, DenseSpec("w", (4, 3), SGD), pieces, np.zeros((4, 3)))
        self.rows = ShardedRows(client, RowsSpec("rows", 2, SGD), placement.place((2, 2), 4))

    def push(self, value: float, ids: list[int], round: int) -> None:
        rows = self.rows.change(ids, np.full((len(ids), 2), value))
        items = [*self.dense.change(np.full((4, 3), value)), *rows]
        self.client.wait_all(self.client.begin_change(items, round))

    def commit(self, round: int, weight: float = 1.0, lr: float | None = None) -> bool:
        things = [(self.dense, lr), (self.rows, lr)]
        return commit_round(self.client, round, things, weight=weight)

    def values(self, ids: list[int]) -> tuple[float, list[float]]:
        value, rows = self.dense.pull(), self.rows.pull(ids)
        assert (value == value[0, 0]).all()
        return float(value[0, 0]), rows[:, 0].tolist()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


@pytest.fixture
def servers(stack: ExitStack) -> list[Server]:
    return [stack.enter_context(Server()) for _ in SERVERS]


def workers(stack: ExitStack, servers: list[Server], count: int) -> list[Worker]:
    addresses = [server.address for server in servers]
    return [Worker(stack.enter_context(Client(addresses, timeout_s=20))) for _ in range(count)]


def test_sums_do_not_depend_on_arrival(stack: ExitStack, servers: list[Server]) -> None:
    """Float32 sums of five, by the tree over their places; rows in the order of their places."""
    members = workers(stack, servers, 5)
    chance = np.random.default_rng(0)
    dense = chance.standard_normal((5, 4, 3)).astype(np.float32)
    rows = chance.standard_normal((5, 1, 2)).astype(np.float32)
    ((a, b), (c, d)), e = (dense[:2], dense[2:4]), dense[4]
    total = ((a + b) + (c + d)) + e
    found = []
    for round, arrival in enumerate(([0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [3, 4, 1, 0, 2]), 1):
        before = members[0].dense.pull(), members[0].rows.pull([7])
        for place in arrival:
            one = members[place]
            changes = [*one.dense.change(dense[place]), *one.rows.change([7], rows[place])]
            one.client.wait_all(one.client.begin_change(changes, round, place))
        assert members[0].commit(round)
        np.testing.assert_array_equal(members[0].dense.pull(), before[0] - total)
        found.append((members[0].rows.pull([7]) - before[1]).tolist())
        reset = [*one.dense.change(-total), *one.rows.change([7], found[-1])]
        one.client.wait_all(one.client.begin_change(reset))
    assert found[0] == found[1] == found[2]


def test_concurrent_requests(stack: ExitStack, servers: list[Server]) -> None:
    (worker,) = workers(stack, servers, 1)
    lookups = [worker.dense.lookup() for _ in range(3)]
    tickets = [worker.client.begin_read(items_of([lookup])) for lookup in lookups]
    for lookup, read in zip(lookups, tickets, strict=True):
        worker.client.wait_all(read)
        assert (lookup.value == 0).all()
    pushes = [
        worker.client.begin_change(worker.dense.change(np.ones((4, 3)), lr=0.5)) for _ in range(4)
    ]
    for push in pushes:
        worker.client.wait_all(push)
    out = np.empty((4, 3), np.float32)
    (last,) = pull_together(worker.client, [worker.dense.lookup(out)])
    assert last.value is out
    assert (out == -2).all()
    with pytest.raises(ValueError, match=r"out must be contiguous float32 of shape \(4, 3\)"):
        worker.dense.lookup(np.empty((4, 3)))

    (one,) = pull_together(worker.client, [worker.rows.lookup([5])])
    assert one.value.tolist() == [[0, 0]]


def test_a_round_is_one_push_of_the_mean(stack: ExitStack, servers: list[Server]) -> None:
    one, two = workers(stack, servers, 2)
    one.push(1.0, [1, 2, 3, 4], round=7)
    two.push(4.0, [3, 4, 4], round=7)
    assert one.values([1, 2, 3, 4]) == (0, [0, 0, 0, 0])
    assert two.commit(7, weight=4.0, lr=2.0) is True
    assert one.values([1, 2, 3, 4]) == (-2.5, [-0.5, -0.5, -2.5, -4.5])
    one.push(9.0, [1], round=7)
    assert one.commit(7) is True  # applied rounds stay applied
    assert one.values([1]) == (-2.5, [-0.5])
    for server in servers:
        assert [entry["steps"] for entry in server.stats()["objects"]] == [1, 1]
        assert server.stats()["rounds"] == {"open": 0, "nbytes": 0}


def test_a_round_of_one_push_equals_the_push(stack: ExitStack, servers: list[Server]) -> None:
    (worker,) = workers(stack, servers, 1)
    for round in range(1, 4):
        worker.push(1.0, [1, 1], round)
        worker.push(0.5, [1, 2], round)
        assert worker.commit(round) is True
    assert worker.values([1, 2]) == (-4.5, [-7.5, -1.5])
    assert commit_round(worker.client, 4, [(worker.dense, None)]) is True
    assert worker.values([1, 2]) == (-4.5, [-7.5, -1.5])


def test_pushes_to_unnamed_objects_are_dropped(stack: ExitStack, servers: list[Server]) -> None:
    (worker,) = workers(stack, servers, 1)
    worker.push(1.0, [1, 2], round=1)
    assert commit_round(worker.client, 1, [(worker.dense, None)]) is True
    assert worker.values([1, 2]) == (-1, [0, 0])


def test_discarded_rounds(stack: ExitStack, servers: list[Server]) -> None:
    (worker,) = workers(stack, servers, 1)
    worker.push(1.0, [1], round=1)
    worker.push(1.0, [1], round=2)
    assert worker.commit(2) is True
    discard_rounds(worker.client, SERVERS, [1, 2, 3])
    for round in (1, 3):
        worker.push(1.0, [1], round)
        assert worker.commit(round) is False
    assert worker.values([1]) == (-1, [-1])
    assert servers[0].stats()["rounds"] == {"open": 0, "nbytes": 0}


def test_a_commit_sent_again_counts_once(stack: ExitStack, servers: list[Server]) -> None:
    (worker,) = workers(stack, servers, 1)
    worker.push(1.0, [1], round=1)
    server, number, _ = worker.dense.parts[0]
    body = f'{{"weight": 1, "objects": [[{number}, null]]}}'.encode()
    ticket = worker.client.submit(server, Op.COMMIT, 0, [body], round=1)
    connection = worker.client._connections[server]
    for _ in range(3):
        connection.send(ticket.header.pack(), [body])
    assert bytes(worker.client.wait(ticket)) == b'{"state": "applied"}'
    assert (worker.dense.pull()[:2] == -1).all()
    assert servers[0].stats()["objects"][0]["steps"] == 1


def test_invalid_commits(stack: ExitStack, servers: list[Server]) -> None:
    (worker,) = workers(stack, servers, 1)
    number = worker.dense.parts[0][1]
    for body, message in (
        (b"[]", "expected a JSON dict, got a list"),
        (b'{"weight": 0, "objects": []}', "a commit with the weight 0"),
        (f'{{"weight": 1, "objects": [[{number}, -1]]}}'.encode(), "lr must be"),
        (f'{{"weight": 1, "objects": [[{number + 9}, 1]]}}'.encode(), "does not exist"),
    ):
        with pytest.raises(ValueError, match=message):
            worker.client.wait(worker.client.submit(0, Op.COMMIT, 0, [body], round=1))
    with pytest.raises(ValueError, match="expected a JSON list, got a dict"):
        worker.client.wait(worker.client.submit(0, Op.DISCARD, 0, [b"{}"]))
    worker.push(1.0, [1], round=1)
    assert worker.commit(1) is True


def test_staged_gradients_have_a_limit(stack: ExitStack) -> None:
    server = stack.enter_context(Server(max_staged_bytes=2_100_000))
    client = stack.enter_context(Client([server.address]))
    pieces = RoundRobin(1).place((1 << 18,), 4)
    thing = ShardedVariable(client, DenseSpec("w", (1 << 18,), SGD), pieces, np.zeros(1 << 18))
    gradient = np.ones(1 << 18, np.float32)
    client.wait_all(client.begin_change(thing.change(gradient), 1))
    client.wait_all(client.begin_change(thing.change(gradient), 2))
    with pytest.raises(MemoryError, match="exceed the server's limit of 2100000"):
        client.wait_all(client.begin_change(thing.change(gradient), 3))
    discard_rounds(client, [0], [1])
    client.wait_all(client.begin_change(thing.change(gradient), 3))
    for round in (2, 3):
        assert commit_round(client, round, [(thing, None)]) is True
    assert (thing.pull() == -2).all()


def test_gradients_of_wrong_sizes(stack: ExitStack, servers: list[Server]) -> None:
    (worker,) = workers(stack, servers, 1)
    server, number, _ = worker.dense.parts[0]
    too_long = [Item(server, number, np.ones(50, np.float32))]
    with pytest.raises(ValueError, match="50 elements from 0 on, the variable has"):
        worker.client.wait_all(worker.client.begin_change(too_long, round=1))
    assert (worker.dense.pull() == 0).all()
    worker.push(1.0, [1], round=1)
    assert worker.commit(1) is True  # nothing was staged
    for size in (6, 1):
        item = Item(server, number, np.ones(size, np.float32))
        worker.client.wait_all(worker.client.begin_change([item], round=2))
    with pytest.raises(ValueError, match="gradients of 6 and 1 elements"):
        worker.commit(2)


def test_replies_after_a_failed_pull() -> None:
    """The value is not written to memory that may be in use again."""
    with (
        Server() as gone,
        RawServer() as by_hand,
        Client([gone.address, by_hand.address], grace_s=0.1) as client,
    ):
        client.create(0, DenseSpec("w", (4,), SGD), np.zeros(4))
        by_hand.connect(client, 1)
        out = np.full(4, 7.0, np.float32)
        gone.close()
        tickets = client.begin_read([Item(0, 0, out[:2]), Item(1, 0, out[2:])])
        with pytest.raises(UnavailableError, match="server 0"):
            client.wait_all(tickets)
        by_hand.reply(by_hand.receive(), bytes(8) + np.zeros(2, np.float32).tobytes())
        later = client.submit(1, Op.STATS)
        by_hand.reply(by_hand.receive())
        client.wait(later)
        assert (out == 7).all()


def test_a_reply_that_a_failed_pull_has_begun_to_receive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rest is not written to memory that may be in use again."""
    size = 1 << 20
    with (
        Server() as gone,
        Server() as slow,
        Client([gone.address, slow.address], grace_s=0.1) as client,
    ):
        spec = DenseSpec("w", (size,), SGD)
        numbers = [client.create(i, spec, np.full(size, i, np.float32)) for i in (0, 1)]
        gone.close()
        out = np.full((2, size), 7.0, np.float32)
        halves = [item for i in (0, 1) for item in Item(i, numbers[i], out[i]).cut()]
        tickets = client.begin_read(halves)
        receive_into = Stream._fill

        def fill_half(self: Stream, into: memoryview) -> Iterator[None]:
            if into.nbytes > size:
                yield from receive_into(self, into[: into.nbytes // 2])
                while not tickets[0].is_done:
                    yield
                yield from receive_into(self, into[into.nbytes // 2 :])
            else:
                yield from receive_into(self, into)

        monkeypatch.setattr(Stream, "_fill", fill_half)
        with pytest.raises(UnavailableError, match="server 0"):
            client.wait_all(tickets)
        monkeypatch.undo()
        assert (out[1] == 1).any()  # it has begun
        kept = out.copy()
        np.testing.assert_array_equal(pull(client, 1, numbers[1], (size,)), np.ones(size))
        np.testing.assert_array_equal(out, kept)


def test_frames_beyond_the_limit(stack: ExitStack, servers: list[Server]) -> None:
    client = stack.enter_context(Client([servers[0].address]))
    shape = (1 << 29,)
    with pytest.raises(ValueError, match=r"CREATE with 2147483648 bytes at once.* partitioner"):
        client.create(0, DenseSpec("w", shape, SGD), np.zeros(shape, np.float32))
    assert client.stats(0)["objects"] == []


def test_a_restarted_server_knows_no_rounds() -> None:
    server = Server("tcp://127.0.0.1:*")
    with Client([server.address], timeout_s=20) as client:
        pieces = RoundRobin(1).place((2,), 4)
        thing = ShardedVariable(client, DenseSpec("w", (2,), SGD), pieces, np.zeros(2))
        client.wait_all(client.begin_change(thing.change(np.ones(2)), 1))
        server.close()
        with Server(server.address):
            for call in (
                lambda: client.wait_all(client.begin_change(thing.change(np.ones(2)), 1)),
                lambda: commit_round(client, 1, [(thing, None)]),
            ):
                with pytest.raises(UnavailableError, match="was restarted"):
                    call()
            new = ShardedVariable(client, DenseSpec("w", (2,), SGD), pieces, np.zeros(2))
            assert commit_round(client, 1, [(new, None)]) is True
            assert (new.pull() == 0).all()


def test_idle_rounds_are_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(
        "fastdist.ps.server.changes.time", SimpleNamespace(monotonic=lambda: clock[0])
    )
    rounds = Rounds(1 << 20, idle_s=0.2)
    gradient = [(5, (0, np.ones(3, np.float32)))]
    rounds.stage(1, gradient)
    for _ in range(4):
        clock[0] += 0.1
        rounds.stage(2, gradient)
    assert rounds.stats() == {"open": 1, "nbytes": 4 * (12 + 512)}
    rounds.stage(1, gradient)
    assert rounds.commit(1) == DISCARDED
    assert rounds.stats() == {"open": 1, "nbytes": 4 * (12 + 512)}


def test_ids_and_empty_gradients_are_counted() -> None:
    """They use memory as well."""
    rounds = Rounds(8192)
    nothing = np.zeros((0, 2), np.float32)
    for _ in range(16):
        rounds.stage(1, [(5, (np.zeros(0, np.uint64), nothing))])
    with pytest.raises(MemoryError, match="8192 bytes are staged"):
        rounds.stage(1, [(5, (np.zeros(0, np.uint64), nothing))])
    rounds.discard([1])
    with pytest.raises(MemoryError):
        rounds.stage(2, [(5, (np.zeros(1000, np.uint64), nothing))])


def test_limits_of_open_and_finished_rounds() -> None:
    rounds = Rounds(1 << 20)
    rounds.discard(list(range(1, 10_000)))
    assert len(rounds._finished) == 4096
    assert rounds.commit(9_999) == DISCARDED
    gradient = [(0, (0, np.ones(1, np.float32)))]
    for round in range(10_000, 11_024):
        rounds.stage(round, gradient)
    with pytest.raises(ValueError, match="1024 rounds are open already"):
        rounds.stage(11_024, gradient)


def test_headers_round_trip() -> None:
    header = Header(Op.CHANGE, 3, b"c" * 16, (7 << 32) + 5, 2, 2**64 - 2)
    assert Header.unpack(header.pack()) == header
