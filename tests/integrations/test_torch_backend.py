"""The backend "fastdist" of torch.distributed, beside Gloo in the same processes."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch")

from ranks import ProcessRanks  # noqa: E402
from torch_cases import (  # noqa: E402
    LIKE_GLOO,
    MORE_THAN_GLOO,
    SLOW,
    groups_by_torchs_announced_rules,
    run_case,
)


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest) -> Iterator[ProcessRanks]:
    ranks = ProcessRanks(request.param)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in LIKE_GLOO],
)
def test_gives_what_gloo_gives(ranks: ProcessRanks, name: str, tmp_path: Path) -> None:
    if "compiled" in name and ranks.size > 2:
        pytest.skip("two ranks compile the same, and compiling takes long")
    outcomes: dict[str, Any] = {}
    for backend in ("gloo", "fastdist"):
        outcomes[backend] = ranks.run(run_case, name, backend, str(tmp_path / backend))
    assert outcomes["fastdist"] == outcomes["gloo"]


# torch asks a group for its backends before it has registered it, for `device_id=`.
ASKS_EARLY = """
import torch, torch.distributed as dist, fastdist, sys
from fastdist.integrations.torch_backend.group import ProcessGroupFastdist
made = ProcessGroupFastdist.__init__
def ask(group, *arguments):
    made(group, *arguments)
    assert group._get_backend(torch.device("cuda")) is group
ProcessGroupFastdist.__init__ = ask
store = f"file://{sys.argv[1]}/store"
dist.init_process_group("cpu:fastdist,cuda:gloo", init_method=store, rank=0, world_size=1)
print(type(dist.group.WORLD._get_backend(torch.device("cuda"))).__name__)
"""


@pytest.mark.slow
def test_a_group_that_is_asked_early_keeps_its_backends(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ASKS_EARLY, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout == "ProcessGroupGloo\n", done.stderr


IMPORTS = {
    "fastdist first": "import fastdist, sys; assert 'torch' not in sys.modules; import torch",
    "torch first": "import torch.distributed; import fastdist",
    "both twice": "import fastdist, torch, importlib; importlib.reload(fastdist)",
    "by the entry point alone": (
        "import torch.distributed, importlib.metadata as m;"
        "[point] = m.entry_points(group='torch.distributed.backends', name='fastdist');"
        "point.load()(None)"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("order", IMPORTS)
def test_is_registered_in_any_order_of_imports(order: str, tmp_path: Path) -> None:
    if "entry point" in order and not entry_points(group="torch.distributed.backends"):
        pytest.skip("fastdist is not installed")
    code = f"""
import warnings
{IMPORTS[order]}
import torch, torch.distributed as dist
dist.init_process_group("fastdist", init_method="file://{tmp_path}/store", rank=0, world_size=1)
x = torch.ones(2)
dist.all_reduce(x)
assert dist.get_backend() == "fastdist" and x.tolist() == [1, 1]
dist.destroy_process_group()
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", MORE_THAN_GLOO)
def test_does_what_gloo_refuses(ranks: ProcessRanks, name: str, tmp_path: Path) -> None:
    ranks.run(run_case, name, "fastdist", str(tmp_path / "store"))


def test_follows_rules_that_torch_has_announced(ranks: ProcessRanks, tmp_path: Path) -> None:
    ranks.run(groups_by_torchs_announced_rules, str(tmp_path / "store"))


class Stream(list[Any]):
    """A stand-in for a GPU's stream: what was enqueued."""

    def __init__(self, handle: int = 0, device: Any = None) -> None:
        super().__init__()


class Streams(threading.local):
    def __init__(self) -> None:
        self.current = Stream()

    def set(self, stream: Stream) -> None:
        self.current = stream


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Stand-ins for GPUs."""
    streams = Streams()

    class Event:
        def record(self, stream: Stream) -> None:
            self.before = list(stream)

        def wait(self, stream: Stream) -> None:
            stream.extend(self.before)

    for name, value in {
        "ExternalStream": Stream,
        "Event": Event,
        "set_stream": streams.set,
        "current_stream": lambda device: streams.current,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.futures, "Future", lambda devices: mock.Mock())
    return streams


def test_a_stream_that_waits_has_the_copies_of_another(streams: Streams) -> None:
    from fastdist.integrations.torch_backend.tensors import to_write
    from fastdist.integrations.torch_backend.work import Completer, Pending

    class OnGpu(torch.Tensor):
        is_cuda = True

        def record_stream(self, stream: Stream) -> None:
            stream.append(("keeps", self.data_ptr()))

        def copy_(self, source: Any, non_blocking: bool = False) -> Any:
            streams.current.append("copy")
            return super().copy_(source)

    class Call:
        stream = 1

        def is_enqueued(self) -> bool:
            return True

        def wait(self, timeout: float | None, *, compared: bool = True) -> None:
            streams.current.append("collective")

    main = streams.current
    completer = Completer()
    tensor = torch.zeros(3, 2).t().as_subclass(OnGpu)
    plain, finish = to_write(tensor)
    address = plain.data_ptr()
    pending = Pending(Call(), [tensor], finish, completer)
    assert main == []
    pending.wait()
    assert main[0] == "collective"
    assert "copy" in main
    assert {("keeps", address), ("keeps", tensor.data_ptr())} <= set(main)
    completer.close()


def test_a_future_of_gpu_tensors_waits_for_no_other_rank(streams: Streams) -> None:
    from fastdist.integrations.torch_backend.work import Completer, Pending

    class OnGpu(torch.Tensor):
        is_cuda = True

    class Call:
        """One of a pair of ranks that may not be connected yet."""

        stream = 2

        def __init__(self, *, is_connected: bool) -> None:
            self.is_connected = threading.Event()
            if is_connected:
                self.is_connected.set()

        def is_enqueued(self) -> bool:
            return self.is_connected.is_set()

        def wait(self, timeout: float | None, *, compared: bool = True) -> None:
            assert not compared
            assert self.is_connected.wait(5)
            streams.current.append("collective")

    main, completer = streams.current, Completer()
    tensor = torch.zeros(3).as_subclass(OnGpu)
    early, late = Call(is_connected=True), Call(is_connected=False)
    futures: list[Any] = [
        Pending(call, [tensor], None, completer).get_future() for call in (early, late)
    ]
    futures[0].set_result.assert_called_once()
    futures[1].set_result.assert_not_called()
    late.is_connected.set()
    completer.close()
    futures[1].set_result.assert_called_once()
    assert main == []
