"""Ranks on two machines: two connected network namespaces with two ranks in each."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import contract
import fastdist
import numpy as np
import pytest
from fastdist import Communicator
from fastdist.collectives.engines import net
from fastdist.errors import (
    ClusterConfigError,
    CollectiveTimeoutError,
    FastdistError,
    PeerFailureError,
)
from held_ports import free_port
from machines import MACHINES, MachineRanks, Network, network, ports
from ranks import RankError
from test_net import check_compression_roughly

pytest.importorskip("torch.distributed")
__all__ = ["network"]  # a fixture


@pytest.fixture(scope="module")
def ranks(network: Network) -> Iterator[MachineRanks]:
    made = MachineRanks(network)
    yield made
    made.close()


@pytest.fixture
def doomed_ranks(network: Network) -> Iterator[MachineRanks]:
    made = MachineRanks(network)
    yield made
    made.close()


def with_few_sizes(comm: Communicator, function: Callable[..., Any], *args: Any) -> Any:
    """Run a function of the contract with few sizes."""
    usual, contract.SIZES = contract.SIZES, [0, 1, 17, 5_003, 150_001]
    try:
        return function(comm, *args)
    finally:
        contract.SIZES = usual


@pytest.mark.parametrize(
    ("function", "args"),
    [
        (contract.check_reductions, (["float32", "bfloat16", "uint16"],)),
        (contract.check_sizes, (True,)),
        (contract.check_movement, (False,)),
        (contract.check_splits, ()),
        (contract.check_parts_in_place, ()),
        (contract.check_send_recv, ()),
        (contract.check_messages, ()),
        (contract.check_lists, (["float32", "int8", "float64", "bfloat16"],)),
        (contract.check_lists_of_parts, ()),
        (contract.check_layouts, ()),
        (contract.check_bad_arguments, ()),
        (contract.check_mismatch, ()),
        (contract.check_mismatch_of_send, ()),
        (contract.check_async, ()),
        (contract.check_groups, ()),
        (contract.check_random_calls, (2, 80)),
        (check_compression_roughly, ()),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_contract(ranks: MachineRanks, function: Callable[..., Any], args: tuple[Any]) -> None:
    ranks.run(with_few_sizes, function, *args)


def test_same_bits_everywhere(ranks: MachineRanks) -> None:
    assert len(set(ranks.run(contract.check_same_bits))) == 1


def listening(comm: Communicator) -> list[str]:
    """Return the addresses on which processes of this namespace listen."""
    del comm
    lines = [
        line
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    rows = [line.split() for line in lines]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A"]


def test_listens_on_the_given_address_only(ranks: MachineRanks) -> None:
    found = ranks.run(listening)
    for machine, members in enumerate(MACHINES):
        octets = [int(part) for part in ranks.network.addresses[machine].split(".")]
        expected = "".join(f"{octet:02X}" for octet in reversed(octets))
        for rank in members:
            assert set(found[rank]) <= {expected}


def die_amid_calls(comm: Communicator, doomed: int, size: int) -> None:
    x = np.ones(size, np.float32)
    comm.all_reduce(x)
    if comm.rank == doomed:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    start = time.monotonic()

    def go_on() -> None:
        while True:
            comm.all_reduce(x)

    with pytest.raises(PeerFailureError) as caught:
        go_on()
    assert time.monotonic() - start < 5
    assert caught.value.ranks == (doomed,), str(caught.value)
    with pytest.raises(FastdistError, match="cannot be used any more"):
        comm.barrier()


@pytest.mark.parametrize(("doomed", "size"), [(0, 100), (2, 2_000_000), (3, 2_000_000)])
def test_killed_rank(doomed_ranks: MachineRanks, doomed: int, size: int) -> None:
    with pytest.raises(RankError) as caught:
        doomed_ranks.run(die_amid_calls, doomed, size)
    assert list(caught.value.errors) == [doomed], caught.value


def come_late(world: Communicator, late: int) -> None:
    comm = world.split(0)  # will be lost; the world stays usable
    assert comm is not None
    comm.barrier()
    if comm.rank == late:
        time.sleep(6)
    start = time.monotonic()

    def two_calls() -> None:
        comm.all_reduce(np.zeros(3, np.float32), timeout=3)
        comm.barrier()  # the late rank fails here at the latest

    with pytest.raises(FastdistError) as caught:
        two_calls()
    assert time.monotonic() - start < 15
    if comm.rank != late:
        assert isinstance(caught.value, CollectiveTimeoutError)
        assert caught.value.ranks == (late,), str(caught.value)
        assert f"rank {late}: call 1, barrier()" in str(caught.value)
    world.barrier()


@pytest.mark.parametrize("late", [1, 2])
def test_late_rank(ranks: MachineRanks, late: int) -> None:
    ranks.run(come_late, late)


BOOTSTRAPPED = """
    import os, pickle, sys, time, fastdist as fd, numpy as np
    sys.modules["torch"] = None  # as if it were not installed
    class Bootstrap:  # like an mpi4py communicator, but by files
        calls = 0
        Get_rank, Get_size = (lambda self: int(sys.argv[1])), (lambda self: int(sys.argv[2]))
        def allgather(self, obj):
            self.calls += 1
            path = os.path.join(sys.argv[3], f"{self.calls}.%d")
            with open(path % self.Get_rank() + ".part", "wb") as file: pickle.dump(obj, file)
            os.rename(path % self.Get_rank() + ".part", path % self.Get_rank())
            return [self.read(path % rank) for rank in range(self.Get_size())]
        def read(self, path):
            while not os.path.exists(path): time.sleep(0.01)
            with open(path, "rb") as file: return pickle.load(file)
    comm = fd.init(bootstrap=Bootstrap())
    print(comm.all_reduce(np.array([comm.rank + 1.0]))[0], type(comm.engine).__name__)
"""


def test_ranks_from_mpi(network: Network, tmp_path: Path) -> None:
    env = os.environ | {"MASTER_ADDR": network.addresses[0]}
    code = textwrap.dedent(BOOTSTRAPPED)
    python = [sys.executable, "-W", "error", "-c", code]
    started = [
        subprocess.Popen(
            network.command(r, *python, str(r), "2", str(tmp_path)),
            env=env,
            text=True,
            stdout=subprocess.PIPE,
        )
        for r in range(2)
    ]
    assert [p.communicate(timeout=60)[0] for p in started] == ["3.0 NetEngine\n"] * 2


def start_named(network: Network, code: str) -> list[subprocess.Popen[str]]:
    """Start a rank on each machine; `code` finds its rank and the address in sys.argv."""
    address = f"{network.addresses[0]}:{next(ports)}"
    python = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]
    return [
        subprocess.Popen(
            network.command(rank, *python, str(rank), address), text=True, stdout=subprocess.PIPE
        )
        for rank in range(2)
    ]


def test_ranks_that_a_program_names(network: Network) -> None:
    code = """
    import sys, fastdist as fd, numpy as np
    comm = fd.init(rank=int(sys.argv[1]), world_size=2, address=sys.argv[2])
    print(comm.all_reduce(np.array([comm.rank + 1.0]))[0], type(comm.engine).__name__)
"""
    started = start_named(network, code)
    assert [p.communicate(timeout=60)[0] for p in started] == ["3.0 NetEngine\n"] * 2


def test_ranks_with_different_secrets(network: Network) -> None:
    code = """
        import os, sys, fastdist as fd
        os.environ["FASTDIST_SECRET"] = "the secret of rank " + sys.argv[1]
        try: fd.init(rank=int(sys.argv[1]), world_size=2, address=sys.argv[2])
        except fd.errors.ClusterConfigError as error: print(error)
    """
    for rank, started in enumerate(start_named(network, code)):
        text = started.communicate(timeout=60)[0]
        assert f"rank {1 - rank} does not prove that it has the secret of rank {rank}" in text
        assert "set FASTDIST_SECRET or FASTDIST_SECRET_FILE to the same" in text


def test_launched_on_each_machine(network: Network) -> None:
    code = """
        import sys, fastdist as fd, numpy as np
        comm = fd.init(timeout=20)
        total = comm.all_reduce(np.array([comm.rank + 1.0]))[0]
        if comm.rank == 3 and sys.argv[1] == "fails": raise ValueError("the cause")
        comm.barrier()
        print(total, type(comm.engine).__name__)
    """

    def start(machine: int, address: str, *arguments: str) -> subprocess.Popen[str]:
        place = ["--nnodes", "2", "--node-rank", str(machine), "--rdzv", address, "-n", "2"]
        python = [sys.executable, "-W", "error"]
        run = [*python, "-m", "fastdist", "run", *place, *python, "-c", textwrap.dedent(code)]
        command = network.command(machine, *run, *arguments)
        pipe = subprocess.PIPE
        return subprocess.Popen(command, text=True, stdout=pipe, stderr=pipe)

    address = f"{network.addresses[0]}:{next(ports)}"
    for machine, job in enumerate([start(m, address, "ends") for m in range(2)]):
        out, err = job.communicate(timeout=60)
        expected = [f"[{2 * machine + local}] 10.0 NetEngine" for local in range(2)]
        assert (sorted(out.splitlines()), job.returncode) == (expected, 0), err
    address = f"{network.addresses[0]}:{next(ports)}"
    ends = [job.communicate(timeout=60)[1] for job in [start(m, address, "fails") for m in (0, 1)]]
    assert "rank 3 of 4 failed first" in ends[1]
    assert ends[1].endswith("ValueError: the cause\n")
    assert "PeerFailureError" in ends[0]


CUT = """
    import os, sys, fastdist as fd, numpy as np
    comm = fd.init(rank=int(sys.argv[1]), world_size=2, address=sys.argv[2], timeout=TIMEOUT_S)
    x = np.ones(1000)
    print("ready", flush=True)
    try:
        while True: comm.all_reduce(x)
    except BaseException as error: print(type(error).__name__, error, flush=True)
    os._exit(0)
"""


@pytest.mark.parametrize("interrupts", [False, True], ids=["timeout", "Ctrl-C"])
def test_a_cut_cable(network: Network, interrupts: bool) -> None:
    """Both machines notice, though the store cannot be asked, and Ctrl-C works."""
    ranks = start_named(network, CUT.replace("TIMEOUT_S", "60" if interrupts else "2"))
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n"
        time.sleep(0.5)
        network.set_cable("down")
        if interrupts:
            time.sleep(2)
            for rank in ranks:
                rank.send_signal(signal.SIGINT)
        names = [rank.communicate(timeout=25)[0].strip() for rank in ranks]
    finally:
        network.set_cable("up")
        for rank in ranks:
            rank.kill()
    for rank, text in enumerate(names):
        other = network.addresses[1 - rank]
        if interrupts:
            assert text.startswith("KeyboardInterrupt")
        else:
            assert text.startswith("PeerFailureError")
            assert f"the machine {other} of rank {1 - rank} cannot be reached" in text


def reduce_through_a_cut(comm: Communicator, network: Network) -> None:
    x = np.ones(8_000_000, np.float32)
    comm.barrier()
    if comm.rank == 0:
        threading.Timer(0.05, network.set_cable, ["down"]).start()
        threading.Timer(3.05, network.set_cable, ["up"]).start()
    for _ in range(8):
        x.fill(1)
        comm.all_reduce(x, timeout=20)
        assert (x == comm.world_size).all()


def test_a_cable_that_is_connected_again(ranks: MachineRanks) -> None:
    begin = time.monotonic()
    ranks.run(reduce_through_a_cut, ranks.network)
    assert time.monotonic() - begin > 3


def connect_through_a_cut(comm: Communicator, network: Network) -> None:
    """Ranks 2 and 3 connect to the others while their own network is down."""
    connect = net.connect_ranks

    def cut_first(*args: Any) -> Any:
        network.set_cable("down", 1)
        threading.Timer(2, network.set_cable, ["up", 1]).start()
        return connect(*args)

    if comm.rank == 2:
        net.connect_ranks = cut_first
    try:
        part = comm.split(0)
    finally:
        net.connect_ranks = connect
    assert part is not None
    assert part.all_reduce(np.ones(1))[0] == comm.world_size


def test_a_cable_that_is_out_while_ranks_connect(ranks: MachineRanks) -> None:
    begin = time.monotonic()
    ranks.run(connect_through_a_cut, ranks.network)
    assert time.monotonic() - begin > 2


def move_slowly(world: Communicator) -> None:
    """Collectives that take longer than their timeout while bytes flow, then a rank that leaves."""
    comm = world.split(0)
    assert comm is not None
    x = np.full(2_000_000, comm.rank, np.uint8)
    for root in (0, 3):
        comm.broadcast(x, root, timeout=1)
        assert (x == root).all()
        x.fill(comm.rank)
        comm.barrier()  # ranks that have their result must not wait for the others in another call
    everyone = comm.gather(x, 0, timeout=1)
    assert everyone is None or (np.arange(4) == everyone.reshape(4, -1).T).all()
    comm.barrier()
    comm.broadcast(x, 1, timeout=1)
    comm.close()  # rank 1 leaves while its bytes are on their way
    assert (x == 1).all()
    world.barrier()


def test_a_slow_link(ranks: MachineRanks) -> None:
    network = ranks.network
    try:
        for machine in (0, 1):
            network.slow(machine, "8mbit")
        ranks.run(move_slowly)
    finally:
        for machine in (0, 1):
            network.heal(machine)


def reduce_and_send(comm: Communicator) -> None:
    for turn, size in enumerate((1, 20_000, 300_000) * 3):
        x = np.full(size, comm.rank + turn, np.float32)
        comm.all_reduce(x)
        assert (x == 6 + 4 * turn).all()
        y = np.empty(size, np.float32)
        with comm.group():
            comm.send(np.full(size, comm.rank, np.float32), (comm.rank + 1) % 4)
            comm.recv(y, (comm.rank - 1) % 4)
        assert (y == (comm.rank - 1) % 4).all()


def test_a_link_that_loses_packets(network: Network) -> None:
    """One packet of twenty is lost in each direction, also while the ranks connect."""
    ranks = MachineRanks(network)
    try:
        for machine in (0, 1):
            network.lose(machine, 0.05)
        ranks.run(reduce_and_send)
    finally:
        for machine in (0, 1):
            network.heal(machine)
        ranks.close()


def die_in_split(comm: Communicator) -> None:
    comm.barrier()
    if comm.rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(FastdistError) as caught:
        comm.split(0)
    assert time.monotonic() - begin < 5
    assert caught.value.ranks == (3,)


def test_killed_while_ranks_connect(doomed_ranks: MachineRanks) -> None:
    with pytest.raises(RankError) as caught:
        doomed_ranks.run(die_in_split)
    assert list(caught.value.errors) == [3], caught.value


def test_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", 0), ("WORLD_SIZE", 4), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ClusterConfigError, match="expected MASTER_ADDR and MASTER_PORT"):
        fastdist.init()
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.77")  # reserved for documentation: no machine has it
    with pytest.raises(ClusterConfigError, match=r"cannot listen at 192\.0\.2\.77"):
        fastdist.init()
    monkeypatch.setenv("MASTER_PORT", "0x50")
    with pytest.raises(ClusterConfigError, match="malformed address"):
        fastdist.init()


def test_rank_that_does_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTDIST_RENDEZVOUS_TIMEOUT_S", "0.5")
    for name, value in (("RANK", 0), ("WORLD_SIZE", 2), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with pytest.raises(ClusterConfigError, match=r"ranks \[1\] of 2 did not arrive within 0.5 s"):
        fastdist.init()


@pytest.mark.slow
def test_a_store_that_never_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTDIST_RENDEZVOUS_TIMEOUT_S", "3")
    for name, value in (("RANK", 1), ("WORLD_SIZE", 2), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    begin = time.monotonic()
    with pytest.raises(ClusterConfigError, match=r"cannot reach the store .* within 3 s: .*refuse"):
        fastdist.init()
    assert time.monotonic() - begin < 5.9  # torch alone may take twice the timeout


def await_listener(port: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.05)
    raise TimeoutError(f"nothing listens on port {port}")


@pytest.mark.slow
def test_two_jobs_on_one_port() -> None:
    code = """
        import os, fastdist as fd
        try: fd.init()
        except fd.errors.ClusterConfigError as error: print(error.ranks, error)
    """
    env = os.environ | {"WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    python = [sys.executable, "-W", "error", "-c", textwrap.dedent(code)]

    def start(rank: int) -> subprocess.Popen[str]:
        env["RANK"] = str(rank)
        return subprocess.Popen(python, env=env, text=True, stdout=subprocess.PIPE)

    waiting = [start(1), start(0)]
    await_listener(int(env["MASTER_PORT"]))
    assert "(0,) rendezvous: rank 0 cannot open the store" in start(0).communicate(timeout=60)[0]
    for job in waiting:
        assert "(0,) rendezvous: rank 0 arrived twice" in job.communicate(timeout=60)[0]
