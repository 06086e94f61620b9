"""The thread that reads ahead: what it does, how its errors travel, and that it ends."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from data_jobs import Counting, Exchange, alone, distribute_dataset, layouts, on_workers
from fastdist.data import Files
from fastdist.data.distributed import read_ahead
from fastdist.data.input_context import InputLayout
from launched import wait_until
from torch.utils.data import Dataset, IterableDataset


def prefetch_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "fastdist-prefetch"]


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert prefetch_threads() == []


@pytest.mark.parametrize("depth", [1, 3])
def test_reads_that_far_ahead_and_no_further(depth: int) -> None:
    source = Counting(20)
    steps = iter(distribute_dataset(source, alone(), global_batch_size=2, prefetch=depth))
    assert source.asked == []
    for taken in range(1, 4):
        next(steps)
        wait_until(lambda n=2 * (taken + depth): len(source.asked) == n)
        time.sleep(0.02)
        assert len(source.asked) == 2 * (taken + depth)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_without_prefetch_there_is_no_thread(prefetch: int) -> None:
    steps = iter(distribute_dataset(Counting(8), alone(), global_batch_size=2, prefetch=prefetch))
    assert prefetch_threads() == []
    next(steps)
    assert len(prefetch_threads()) == (1 if prefetch else 0)
    del steps


def test_arrays_for_cpus_need_no_thread() -> None:
    steps = iter(distribute_dataset(torch.ones(8), alone(), global_batch_size=2))
    next(steps)
    assert prefetch_threads() == []


@pytest.mark.slow
@pytest.mark.parametrize("end", ["finish", "drop", "close", "break", "error"])
def test_the_thread_ends(end: str) -> None:
    dataset = distribute_dataset(Counting(40), alone(), global_batch_size=2)
    steps: Any = iter(dataset)
    next(steps)
    assert len(prefetch_threads()) == 1
    if end == "finish":
        list(steps)
    elif end == "drop":
        del steps
    elif end == "close":
        steps.close()
    elif end == "break":
        steps = None
        for _ in dataset:
            break
    else:
        with pytest.raises(KeyError):
            steps.throw(KeyError())
    assert prefetch_threads() == []


class Closing(IterableDataset[int]):
    """Notes the thread that closes its iterator."""

    def __init__(self) -> None:
        self.closed_by: list[str] = []

    def __iter__(self) -> Iterator[int]:
        try:
            yield from range(40)
        finally:
            self.closed_by.append(threading.current_thread().name)


def test_the_thread_that_opened_a_source_closes_it() -> None:
    source = Closing()
    for _ in distribute_dataset(source, alone(), global_batch_size=2):
        break
    assert source.closed_by == ["fastdist-prefetch"]


class Broken(Dataset[int]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise LookupError("example 5 is broken")
        return index


@pytest.mark.parametrize(
    ("prefetch", "loaders"), [(0, 0), (4, 0), pytest.param(4, 1, marks=pytest.mark.slow)]
)
def test_an_error_comes_after_the_batches_before_it(prefetch: int, loaders: int) -> None:
    made = distribute_dataset(
        Broken(), alone(), global_batch_size=2, prefetch=prefetch, num_workers=loaders
    )
    steps = iter(made)
    assert [next(steps).values[0].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(LookupError, match="example 5 is broken") as caught:
        next(steps)
    told = "".join(traceback.format_exception(caught.value))
    assert "__getitem__" in told
    with pytest.raises(StopIteration):
        next(steps)
    assert made.state_dict()["step"] == 2


def test_workers_ask_each_other_only_from_the_thread_that_iterates() -> None:
    exchange = Exchange(2)
    source = Files(["0", "6"], lambda p: range(int(p), int(p) + 6))
    devices = (torch.device("cpu"),)

    def steps(layout: InputLayout) -> int:
        return len(list(distribute_dataset(source, layout, global_batch_size=2, prefetch=3)))

    jobs = [
        InputLayout(2, (0,), 2, 0, devices, lambda ints: exchange.gather(0, ints)),
        InputLayout(2, (1,), 2, 1, devices, lambda ints: exchange.gather(1, ints)),
    ]
    assert on_workers(jobs, steps) == [6, 6]
    assert "fastdist-prefetch" not in exchange.threads
    assert layouts(1)[0].num_workers == 1


def test_an_epoch_after_an_epoch_left_early_does_not_overlap_it() -> None:
    inside = 0

    class Exclusive(Counting):
        def __getitem__(self, index: int) -> Any:
            nonlocal inside
            inside += 1
            assert inside == 1
            time.sleep(0.001)
            inside -= 1
            return super().__getitem__(index)

    dataset = distribute_dataset(Exclusive(30), alone(), global_batch_size=2, prefetch=2)
    for _ in range(3):
        for _ in dataset:
            break
    assert len(list(dataset)) == 15


def test_closing_twice_and_after_the_end() -> None:
    ahead = read_ahead(iter([1, 2]), 1)
    assert list(ahead) == [1, 2]
    ahead.close()
    ahead.close()
    assert list(ahead) == []


def test_dropped_without_close() -> None:
    ahead = read_ahead(iter(range(100)), 1)
    assert next(ahead) == 0
    del ahead
    gc.collect()


@pytest.mark.slow
@pytest.mark.parametrize("loaders", [0, 2])
def test_the_interpreter_exits_amid_an_epoch(loaders: int) -> None:
    script = f"""
        import fastdist as fd
        strategy = fd.OneDeviceStrategy("cpu")
        steps = iter(
            strategy.distribute_dataset(range(99), global_batch_size=2, num_workers={loaders})
        )
        print(next(steps).values[0].tolist())
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[0, 1]\n", "")


def test_fastdist_itself_does_not_import_the_data_layer() -> None:
    script = "import fastdist, sys; assert not {'torch', 'fastdist.data'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", script], timeout=60, check=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_are_on_their_gpu(prefetch: int) -> None:
    gpu = torch.device("cuda", 0)
    layout = InputLayout(2, (0, 1), 1, 0, (gpu, gpu), lambda ints: [list(ints)])
    source = (torch.arange(4096.0).repeat(64, 1).T.contiguous(), [str(i) for i in range(4096)])
    examples = list(zip(*source, strict=True))
    seen = 0
    for x, text in distribute_dataset(examples, layout, global_batch_size=256, prefetch=prefetch):
        for rows, names in zip(x.values, text.values, strict=True):
            assert rows.device == gpu
            assert rows[:, 0].tolist() == [float(name) for name in names]
            seen += len(names)
    assert seen == 4096
