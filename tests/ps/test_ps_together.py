"""Small dense variables that share one message per server."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from fastdist.ps import Client, DenseSpec, RuleSpec, Server
from fastdist.ps.client.batched import Push, begin_pulls, begin_pushes
from fastdist.ps.client.commit import commit_round
from fastdist.ps.client.partition import FixedShards, RoundRobin
from fastdist.ps.client.sharded import ShardedVariable
from fastdist.ps.wire.batches import PART_SIZE, PUSH_ENTRY, SMALL_SIZE
from fastdist.ps.wire.protocol import UNKNOWN_STEP, Op

SGD = RuleSpec("SGD", {"lr": 1.0})
SHAPES = [(), (3,), (7, 5), (0,), (SMALL_SIZE,), (SMALL_SIZE + 2,), (2, PART_SIZE)]


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    with Server() as one, Server() as two:
        yield [one, two]


@pytest.fixture
def client(servers: list[Server]) -> Iterator[Client]:
    with Client([server.address for server in servers], timeout_s=20) as client:
        yield client


def make(client: Client, wire: str = "float32", **options: bool) -> list[ShardedVariable]:
    """Return variables of all sizes; those with several rows have two pieces."""
    placement = RoundRobin(2, FixedShards(2))
    made = []
    for number, shape in enumerate(SHAPES):
        spec = DenseSpec(f"{number}", shape, SGD, wire=wire, **options)
        pieces = placement.place(shape, 4)
        made.append(ShardedVariable(client, spec, pieces, np.full(shape, float(number))))
    return made


def pull(client: Client, variables: list[ShardedVariable]) -> list[np.ndarray]:
    return [pulled.value for pulled in begin_pulls(client, variables, [None] * 7).result()]


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "float16", "int8"])
def test_pushes_and_pulls(client: Client, wire: str) -> None:
    variables = make(client, wire)
    gradients = [np.full(shape, 0.5 * number, np.float32) for number, shape in enumerate(SHAPES)]
    pushes = [Push(v, g, 2.0, None) for v, g in zip(variables, gradients, strict=True)]
    begin_pushes(client, pushes[:3]).result()
    begin_pushes(client, [Push(pushes[0].variable, gradients[0]), *pushes[3:]]).result()
    outs = [np.full(shape, 9.0, np.float32) if shape else None for shape in SHAPES]
    pulled = begin_pulls(client, variables, outs).result()
    for number, (got, out) in enumerate(zip(pulled, outs, strict=True)):
        assert out is None or got.value is out
        assert got.value.shape == SHAPES[number]
        np.testing.assert_allclose(got.value, 0, atol=2e-4 if wire == "int8" else 0)
        assert got.steps == ((2,) if number == 0 else (1,) * len(variables[number].pieces))


def test_one_message_for_each_server(client: Client, servers: list[Server]) -> None:
    variables = [*make(client)[:5]]
    before = [server.stats()["requests"] for server in servers]
    pulled = begin_pulls(client, variables, [None] * 5).result()
    begin_pushes(
        client,
        [Push(v, one.value, None, one.steps) for v, one in zip(variables, pulled, strict=True)],
    ).result()
    assert [
        server.stats()["requests"] - was for server, was in zip(servers, before, strict=True)
    ] == [2, 2]
    assert [server.stats()["staleness"] for server in servers] == [{"0": 4}, {"0": 4}]


def test_many_values_take_several_messages(client: Client, servers: list[Server]) -> None:
    count = 2 * PART_SIZE // SMALL_SIZE + 1
    pieces = RoundRobin(1).place((SMALL_SIZE,), 4)
    variables = [
        ShardedVariable(
            client, DenseSpec(f"{i}", (SMALL_SIZE,), SGD), pieces, np.full(SMALL_SIZE, i)
        )
        for i in range(count)
    ]
    before = servers[0].stats()["requests"]
    values = begin_pulls(client, variables, [None] * count).result()
    assert [one.value[-1] for one in values] == list(range(count))
    assert servers[0].stats()["requests"] - before == 3


def test_rounds(client: Client) -> None:
    variables = make(client)
    for _ in range(2):
        pushes = [Push(variable, np.ones(variable.spec.shape)) for variable in variables]
        begin_pushes(client, pushes, round=4).result()
    assert [value.min(initial=1e9) for value in pull(client, variables)][1] == 1
    things = [(variable, 0.5) for variable in variables[1:]]
    assert commit_round(client, 4, things, weight=2.0).result() is True
    got = pull(client, variables)
    assert (got[0] == 0).all()
    assert all((value == number - 0.5).all() for number, value in enumerate(got) if number)


def test_an_invalid_entry_changes_nothing(client: Client, servers: list[Server]) -> None:
    variables = make(client, refuse_nonfinite=True)
    bad = np.ones((7, 5), np.float32)
    bad[0, 0] = np.nan
    wrong = [Push(variables[1], np.ones(3)), Push(variables[2], bad)]
    for round in (0, 3):
        with pytest.raises(ValueError, match=r"'2\[0:\]': 1 of 20 elements .* NaN or infinite"):
            begin_pushes(client, wrong, round).result()
    with pytest.raises(ValueError, match="lr must be a finite number, 0 or more, got -1"):
        begin_pushes(
            client, [Push(variables[0], np.ones(()), 1.0), Push(variables[0], np.ones(()), -1.0)]
        ).result()
    (server, number, _), *_ = variables[1].parts()
    about = np.array([(number, UNKNOWN_STEP, np.nan)], PUSH_ENTRY).view(np.uint8)
    for frames, message in (
        ([about, bytes(4)], "expected 1 values of 8 bytes, got 4"),
        ([about[1:], bytes(8)], "19 bytes, not a multiple of 20"),
    ):
        with pytest.raises(ValueError, match=message):
            client.wait(client.submit(server, Op.PUSH_MANY, 0, frames))
    with pytest.raises(ValueError, match="does not exist"):
        client.wait(client.submit(server, Op.PULL_MANY, 0, [np.array([number + 99], np.uint64)]))
    with pytest.raises(ValueError, match="not a multiple of 8"):
        client.wait(client.submit(server, Op.PULL_MANY, 0, [bytes(9)]))
    got = pull(client, variables)
    assert got[0] == 0
    assert (got[1][:2] == 1).all()
    assert (got[2][:4] == 2).all()
    assert commit_round(client, 3, [(variables[2], None)]).result() is True
    assert (pull(client, variables)[2][:4] == 2).all()
    entries = [entry for one in servers for entry in one.stats()["objects"]]
    assert {entry["name"]: entry["nonfinite"] for entry in entries}["2[0:]"] == 2


def test_a_push_sent_again_counts_once(client: Client, servers: list[Server]) -> None:
    (variable,) = make(client)[1:2]
    (server, number, _), *_ = variable.parts()
    about = np.array([(number, UNKNOWN_STEP, np.nan)], PUSH_ENTRY).view(np.uint8)
    frames = [about, np.ones(2, np.float32)]
    ticket = client.submit(server, Op.PUSH_MANY, number, frames)
    for _ in range(3):
        client._connections[server].send(ticket.header.pack(), frames)
    client.wait(ticket)
    assert (variable.pull()[:2] == 0).all()
    assert servers[server].stats()["repeated"] == 3


def test_messages_are_of_few_and_small_variables(client: Client) -> None:
    """Eight bytes that name a large variable would request gigabytes of memory."""
    sizes = {"large": SMALL_SIZE + 1, "small": SMALL_SIZE, "empty": 0}
    numbers = {}
    for name, size in sizes.items():
        numbers[name] = client.create(0, DenseSpec(name, (size,), SGD), np.zeros(size, np.float32))

    def ask(op: Op, name: str, count: int) -> None:
        number = numbers[name]
        frames = [np.full(count, number, np.uint64)]
        if op is Op.PUSH_MANY:
            about = np.zeros(count, PUSH_ENTRY)
            about["object"], about["lr"] = number, 1.0
            frames = [about.view(np.uint8), np.ones(sizes[name] * count, np.float32)]
        client.wait(client.submit(0, op, number, frames))

    for op in (Op.PULL_MANY, Op.PUSH_MANY):
        with pytest.raises(ValueError, match=f"'large' of {SMALL_SIZE + 1} elements.*{SMALL_SIZE}"):
            ask(op, "large", 1)
        with pytest.raises(ValueError, match=f"over {PART_SIZE} elements"):
            ask(op, "small", PART_SIZE // SMALL_SIZE + 1)
        with pytest.raises(ValueError, match=f"{PART_SIZE + 1} variables in a message"):
            ask(op, "empty", PART_SIZE + 1)
        assert (client.pull(0, numbers["small"], (SMALL_SIZE,)) == 0).all()
    ask(Op.PUSH_MANY, "small", PART_SIZE // SMALL_SIZE)
    assert (client.pull(0, numbers["small"], (SMALL_SIZE,)) == -32).all()
