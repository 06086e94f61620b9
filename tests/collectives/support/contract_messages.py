"""Messages with tags, and from any rank, in the contract of communicators."""

from __future__ import annotations

import numpy as np
import pytest
from fastdist import Communicator
from fastdist.errors import CollectiveMismatchError, CollectiveTimeoutError

SIZES = (1, 8, 5_000, 300_000)


def check_messages(comm: Communicator) -> None:
    """Messages are matched by their tags, in whichever order receives ask for them."""
    n, r = comm.world_size, comm.rank
    _check_to_itself(comm)
    if n == 1:
        return
    after, before = (r + 1) % n, (r - 1) % n
    _check_orders(comm, after, before)
    _check_from_any(comm)
    _check_objects(comm, after, before)
    _check_bad_input(comm, after, before)
    comm.barrier()


def _check_to_itself(comm: Communicator) -> None:
    r, x, out = comm.rank, np.arange(3.0), np.zeros(3)
    for tag in (0, 4):
        later = comm.recv(out, r, tag=tag, async_op=True)
        assert comm.send(x, r, tag=tag) is x
        assert later.wait(30) is out
        assert comm.send(x + tag, r, tag=tag, async_op=True).is_done()
        comm.send(x + 1, r, tag=7)
        assert (comm.recv(out, r, tag=tag) == x + tag).all()
        assert comm.recv_any(out, tag=7) == r
        assert (out == x + 1).all()
    comm.send_object("me", r)
    assert comm.recv_object(r) == "me"
    comm.send(x, r)
    with pytest.raises(CollectiveMismatchError, match=r"float64 × 3, .* float64 × 2"):
        comm.recv(np.zeros(2), r)
    with pytest.raises(CollectiveTimeoutError, match=f"rank {r} has sent no message in time"):
        comm.recv(out, r, timeout=0.05)
    first, second = np.zeros(2), np.zeros(2)
    with comm.group():
        comm.recv(second, comm.rank, tag=2)
        comm.send(np.full(2, 1.0), comm.rank, tag=1)
        comm.send(np.full(2, 2.0), comm.rank, tag=2)
        comm.recv(first, comm.rank, tag=1)
    assert (first.tolist(), second.tolist()) == ([1, 1], [2, 2])


def _check_orders(comm: Communicator, after: int, before: int) -> None:
    tags = (7, 0, 2**63 - 1, 1) * 2
    for size in SIZES:
        sent = [
            comm.send(np.full(size, 10.0 * comm.rank + k), after, tag=tag, async_op=True)
            for k, tag in enumerate(tags)
        ]
        outs = [np.zeros(size) for _ in tags]
        received = []
        for place, k in enumerate((3, 1, 5, 0, 7, 2, 4, 6)):
            if place % 2 == 0:
                received.append(comm.recv(outs[k], before, tag=tags[k], async_op=True))
            else:
                assert comm.recv(outs[k], before, tag=tags[k]) is outs[k]
        for work in [*sent, *received]:
            work.wait(30)
        for k, out in enumerate(outs):
            assert (out == 10.0 * before + k).all()
    # A receive that waits for a message without a tag lets those with tags through, and the other
    # way round.
    for first, second in ((0, 5), (5, 0)):
        out, other = np.zeros(3), np.zeros(3)
        waits = comm.recv(out, before, tag=first, async_op=True)
        sent = comm.send(np.full(3, 2.0), after, tag=second, async_op=True)
        assert comm.recv(other, before, tag=second).tolist() == [2.0] * 3
        assert not waits.is_done()
        comm.barrier()
        sent_too = comm.send(np.full(3, 1.0), after, tag=first, async_op=True)
        assert waits.wait(30).tolist() == [1.0] * 3
        sent.wait(30), sent_too.wait(30)
    # Lists, and a group.
    lists = [np.full(3, comm.rank), np.full((2, 2), comm.rank, np.int8)]
    outs = [np.zeros(3, int), np.zeros((2, 2), np.int8)]
    later = comm.recv(outs, before, tag=8, async_op=True)
    sent = comm.send(lists, after, tag=8, async_op=True)
    assert later.wait(30) is outs
    assert all((out == before).all() for out in outs)
    sent.wait(30)
    with comm.group():
        for tag in (2, 1):
            comm.send(np.full(2, float(tag)), after, tag=tag)
        for tag, array in ((1, one := np.zeros(2)), (2, two := np.zeros(2))):
            comm.recv(array, before, tag=tag)
    assert (one[0], two[0]) == (1, 2)
    # The order of axes goes with a message that was kept.
    columns = np.asfortranarray(np.arange(6.0).reshape(2, 3))
    sent = comm.send(columns, after, tag=1, async_op=True)
    last = comm.send(np.zeros(1), after, async_op=True)
    comm.recv(np.zeros(1), before)
    assert (comm.recv(np.zeros_like(columns), before, tag=1) == columns).all()
    sent.wait(30), last.wait(30)


def _check_from_any(comm: Communicator) -> None:
    n, r = comm.world_size, comm.rank
    if r == 0:  # rank 0 hands out work as others ask for it
        asked, out = [], np.zeros(2)
        for _ in range(3 * (n - 1)):
            source = comm.recv_any(out, tag=4)
            assert out.tolist() == [source, 1.0]
            asked.append(source)
            comm.send(out * 2, source, tag=5)
        assert sorted(asked) == sorted(list(range(1, n)) * 3)
    else:
        for _ in range(3):
            comm.send(np.array([r, 1.0]), 0, tag=4)
            assert comm.recv(np.zeros(2), 0, tag=5).tolist() == [2.0 * r, 2.0]
    work = comm.recv_any(x := np.zeros(1), async_op=True)
    sent = comm.send(np.full(1, float(r)), (r + 1) % n, async_op=True)
    assert (work.wait(30), x[0]) == ((r - 1) % n, (r - 1) % n)
    assert work.is_done()
    sent.wait(30)


def _check_objects(comm: Communicator, after: int, before: int) -> None:
    if comm.rank == 0:
        comm.send_object({"of": 0}, after, tag=9)
        assert comm.recv_object(before, tag=9) == {"of": before}
    else:
        assert comm.recv_any_object(tag=9) == ({"of": before}, before)
        comm.send_object({"of": comm.rank}, after, tag=9)
    comm.barrier()


def _check_bad_input(comm: Communicator, after: int, before: int) -> None:
    x = np.ones(2)
    for tag in (-1, 2**63, 1.5, "a", 0.0, ""):
        for call in (
            lambda tag: comm.send(x, after, tag=tag),
            lambda tag: comm.recv_any(x, tag=tag),
        ):
            with pytest.raises((TypeError, ValueError), match=r"tag must be an integer .* 2\*\*63"):
                call(tag)
    for src in (1.0, "a", None, -1, 2**40):
        with pytest.raises((TypeError, ValueError), match="src must be an integer from 0 to"):
            comm.recv(x, src, tag=5)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="src must be an integer from 0 to"):
        comm.recv(x, tag=5)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="is of one array, got a list"):
        comm.recv_any([x, np.ones(2)])
    with pytest.raises(ValueError, match="recv_any cannot be in a group"), comm.group():
        comm.recv_any(x)
    with pytest.raises(ValueError, match="dst must be an integer from 0"):
        comm.send(x, comm.world_size, tag=1)
    with pytest.raises(CollectiveTimeoutError, match="tag 3"):
        comm.recv_any(x, tag=3, timeout=0.05)
    # A message that was kept does not fit.
    sent = comm.send(x, after, tag=1, async_op=True)
    last = comm.send(x, after, async_op=True)
    comm.recv(np.ones(2), before)
    with pytest.raises(CollectiveMismatchError, match=r"float64 × 2, .*float32 × 2 with tag 1"):
        comm.recv(np.ones(2, np.float32), before, tag=1)
    sent.wait(30), last.wait(30)
