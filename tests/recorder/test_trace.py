"""Traces of jobs, and what they tell of the ranks."""

import itertools
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fastdist.cli.trace.report import join
from fastdist.recorder.timeline import RankTimeline, find_late
from fastdist.recorder.trace_file import read_trace, write_trace

pytest.importorskip("torch")

TRACE = '{"otherData": {"program": "fastdist", "begin_s": 0}, "traceEvents": %s}'
OTHERS = [
    *("", "[]", "{}", '{"traceEvents": []}', "[" * 100_000, "\xff", TRACE % 5),
    *(TRACE % each for each in ("[[]]", '[{"pid": {}}]', '[{"pid": 1, "ph": "M", "args": 5}]')),
]

STEPS = 16
# Rank 1 needs 160 ms for each batch, for one busy second must not hide it.
PROGRAM = f"""
import os, time, torch, fastdist as fd

class Examples(torch.utils.data.Dataset):
    def __len__(self):
        return 8 * {STEPS}
    def __getitem__(self, i):
        time.sleep(0.04 * int(os.environ["RANK"]))
        return torch.ones(4)

strategy = fd.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

def step(batch):
    optimizer.zero_grad()
    loss = model(batch).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()

for batch in strategy.distribute_dataset(Examples(), global_batch_size=8):
    strategy.run(step, args=(batch,))
"""


def fastdist(*arguments: object, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run the command."""
    return subprocess.run(
        [sys.executable, "-m", "fastdist", *map(str, arguments)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the trace of a job: out.json."""
    made = tmp_path_factory.mktemp("trace")
    (made / "train.py").write_text(PROGRAM)
    ran = fastdist("run", "-n", 2, "--trace", "out.json", "train.py", folder=made)
    assert ran.returncode == 0, ran.stderr
    assert "fastdist trace out.json" in ran.stderr
    return made


@pytest.fixture
def ranks(folder: Path) -> list[RankTimeline]:
    """The trace."""
    return read_trace(folder / "out.json")


def test_holds_every_call_and_phase(ranks: list[RankTimeline]) -> None:
    assert [rank.rank for rank in ranks] == [0, 1]
    first, second = ranks
    assert first.lost_calls == second.lost_calls == 0
    calls = [[(c.place, str(c.signature)) for c in rank.calls] for rank in ranks]
    assert sorted(calls[0]) == sorted(calls[1])
    gradients = [call for call in first.calls if call.site.endswith(" in step")]
    assert len(gradients) == STEPS
    for rank in ranks:
        assert len(rank.steps_s()) == STEPS - 1
        names = [span.phase for span in rank.spans]
        assert names.count("backward") == names.count("optimizer") == STEPS
        assert all(a.end_s <= b.begin_s + 1e-6 for a, b in itertools.pairwise(rank.spans))


def test_names_the_rank_that_others_wait_for(ranks: list[RankTimeline]) -> None:
    late = find_late(ranks)[0]
    assert (late.rank, late.reason) == (1, "data")
    assert late.cost_s > 0.002
    assert "train.py" in late.site


def test_ranks_that_were_started_again_have_the_same_number(ranks: list[RankTimeline]) -> None:
    again = [
        replace(
            rank,
            calls=[
                replace(call, member=replace(call.member, key=call.member.key + 1))
                for call in rank.calls
            ],
        )
        for rank in ranks
    ]
    once, twice = find_late(ranks), find_late([*ranks, *again])
    assert sorted(late.rank for late in twice) == sorted(2 * [late.rank for late in once])


def test_joins_machines_whose_clocks_differ_by_an_hour(folder: Path) -> None:
    (first,), (second,) = [[rank] for rank in read_trace(folder / "out.json")]
    expected = [call.there_s for call in second.calls]
    away = folder / "away.json"
    trace = json.loads((folder / "out.json").read_text())
    trace["traceEvents"] = [event for event in trace["traceEvents"] if event["pid"] == 1]
    trace["otherData"]["begin_s"] += 3600.0
    away.write_text(json.dumps(trace))
    joined = join([[first], read_trace(away)])
    found = [call.there_s for call in joined[1].calls]
    assert found == pytest.approx(expected, abs=0.005)
    with pytest.raises(ValueError, match="two traces have rank 1"):
        join([joined, read_trace(away)])


def test_command_prints_and_draws(folder: Path) -> None:
    shown = fastdist("trace", "out.json", "-o", "again.json", folder=folder)
    assert shown.returncode == 0, shown.stderr
    assert f"2 ranks, {STEPS - 1} steps of" in shown.stdout
    assert "rank 1 was last in" in shown.stdout
    assert "waiting for data" in shown.stdout
    again = read_trace(folder / "again.json")
    assert [len(rank.calls) for rank in again] == [
        len(rank.calls) for rank in read_trace(folder / "out.json")
    ]
    facts = json.loads(fastdist("trace", "out.json", "--json", folder=folder).stdout)
    assert facts["late"][0]["rank"] == 1
    assert len(facts["ranks"][0]["steps_s"]) == STEPS - 1


def test_is_a_chrome_trace(folder: Path) -> None:
    events = json.loads((folder / "out.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["ph"] for event in events} == {"M", "X"}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in slices)
    rows = {(event["pid"], event["tid"]) for event in slices}
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert rows <= named


@pytest.mark.parametrize("text", OTHERS)
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ValueError, match=r"other\.json is no trace of fastdist run --trace"):
        read_trace(tmp_path / "other.json")
    refused = fastdist("trace", "other.json", folder=tmp_path)
    assert refused.returncode == 2
    assert "other.json is no trace" in refused.stderr


def test_a_killed_rank_leaves_the_call_it_was_in(tmp_path: Path) -> None:
    (tmp_path / "die.py").write_text(
        "import os, signal, time, numpy as np, fastdist as fd\n"
        "comm = fd.init()\n"
        "comm.all_reduce(np.ones(2))\n"
        "if comm.rank == 1:\n"
        "    time.sleep(0.5)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "comm.barrier()\n"
    )
    ran = fastdist("run", "-n", 2, "--trace", "out.json", "die.py", folder=tmp_path)
    assert ran.returncode == 128 + 9
    first, second = read_trace(tmp_path / "out.json")
    assert [(c.signature.op, c.is_failed) for c in first.calls][-1] == ("barrier", True)
    assert [c.signature.op for c in second.calls][-1] == "all_reduce"


@pytest.mark.slow
def test_a_slow_rank_is_named_unasked(tmp_path: Path) -> None:
    program = (
        "import os, sys\n"
        "from fastdist.cli import slow_ranks\n"
        "slow_ranks._AFTER_S = 0.0\n"
        "look = slow_ranks._look\n"
        "def look_once_they_train(has_ended):\n"
        "    while not os.path.exists('trains') and not has_ended.wait(0.05):\n"
        "        pass\n"
        "    look(has_ended)\n"
        "slow_ranks._look = look_once_they_train\n"
        "from fastdist.cli.main import main\n"
        "sys.exit(main(['run', '-n', '2', 'slow.py']))\n"
    )
    (tmp_path / "slow.py").write_text(
        "import time, numpy as np, fastdist as fd\n"
        "comm = fd.init()\n"
        "while True:\n"
        "    time.sleep(0.04 * comm.rank)\n"
        "    comm.all_reduce(np.ones(3))\n"
        "    open('trains', 'w').close()\n"
    )
    ran = subprocess.Popen(
        [sys.executable, "-c", program], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    assert ran.stderr is not None
    line = ran.stderr.readline()
    ran.terminate()
    ran.communicate()
    assert line.startswith("fastdist run: rank 1 was last in ")
    assert "in user code" in line


def test_no_folder_is_said_before_the_job_starts(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('began')")
    ran = fastdist("run", "--trace", "none/out.json", "-n", 1, "train.py", folder=tmp_path)
    assert "began" not in ran.stdout
    assert ran.returncode == 2
    assert "there is no folder" in ran.stderr


def test_an_empty_trace_says_why(tmp_path: Path) -> None:
    write_trace(tmp_path / "out.json", [])
    shown = fastdist("trace", "out.json", folder=tmp_path)
    assert shown.returncode == 2
    assert "no process of the job has called fastdist.init" in shown.stderr
