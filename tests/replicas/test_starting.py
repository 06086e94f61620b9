"""Programs that start themselves once more for each other replica, and `fastdist.launch`."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import signal
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fastdist as fd
import pytest
from launched import Launcher, wait_until

pytest.importorskip("torch")

TRAIN = """
    import os, sys, torch, fastdist as fd
    strategy = fd.MirroredStrategy(["cpu:0", "cpu:1"])
    torch.manual_seed(0)
    with strategy.scope():
        model = torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    def step(x):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()
    rank = strategy.local_replica_ids[0]
    def train():
        for batch in strategy.distribute_dataset(torch.ones(7, 4), global_batch_size=4):
            strategy.run(step, (batch,))
"""
TALK = """
    import os, sys, fastdist as fd
    strategy = fd.MirroredStrategy(["cpu:0", "cpu:1"])
    rank = strategy.local_replica_ids[0]
    def train():
        strategy.reduce("sum", 1.0)
"""
TF_CONFIG = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": %s}}'
END = """
    train()
    strategy.check_in_sync()
    print("in", strategy.num_replicas_in_sync, [round(v, 5) for v in model.weight[0].tolist()])
"""


class Programs:
    """Runs programs in a folder of their own; what they leave running is found."""

    def __init__(self, launcher: Launcher, folder: Path) -> None:
        self.launcher = launcher
        self.folder = folder

    def start(self, text: str, *, by: str = "script", **options: Any) -> subprocess.Popen[str]:
        text = textwrap.dedent(text)
        words = {
            "script": ["train.py"],
            "module": ["-m", "package.train"],
            "command": ["-c", text],
            "stdin": ["-"],
            "interactive": ["-i", "train.py"],
        }[by]
        (self.folder / "package").mkdir(exist_ok=True)
        (self.folder / "package" / "__init__.py").write_text("")
        for path in ("train.py", "package/train.py"):
            (self.folder / path).write_text(text)
        pipe = subprocess.PIPE
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=self.folder,
            env=self.launcher.environ | {"OMP_NUM_THREADS": "1"},
            text=True,
            **{"stdin": subprocess.DEVNULL, "stdout": pipe, "stderr": pipe, **options},
        )

    def run(
        self, text: str, *, by: str = "script", given: str = "", **options: Any
    ) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        process = self.start(text, by=by, stdin=subprocess.PIPE, **options)
        out, err = process.communicate(given, timeout=90)
        wait_until(lambda: self.launcher.left() == [])
        return process.returncode, out, err


@pytest.fixture
def programs(launcher: Launcher, tmp_path: Path) -> Programs:
    return Programs(launcher, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["command", "script", "module"])
def test_the_same_by_every_start(programs: Programs, by: str) -> None:
    """Only the first replica's output is shown, and standard input is its."""
    speaks = "\n    print('replica', rank, sys.stdin.read() if rank == 0 else '', flush=True)"
    code, out, err = programs.run(TALK + speaks + "\n    train()", by=by, given="typed")
    assert (code, out, err) == (0, "replica 0 typed\n", "")


@pytest.mark.slow
def test_trains_as_on_one_device(programs: Programs) -> None:
    code, out, err = programs.run(TRAIN + END)
    assert code == 0, err
    alone = TRAIN.replace('fd.MirroredStrategy(["cpu:0", "cpu:1"])', 'fd.OneDeviceStrategy("cpu")')
    with contextlib.redirect_stdout(io.StringIO()) as single:
        exec(textwrap.dedent(alone + END), {})
    assert out.removeprefix("in 2") == single.getvalue().removeprefix("in 1")


@pytest.mark.slow
def test_the_working_directory_and_a_second_strategy(programs: Programs) -> None:
    text = "    import os, fastdist\n    os.makedirs('data', exist_ok=True)\n    os.chdir('data')"
    again = """
    same = fd.MirroredStrategy(["cpu:0", "cpu:1"])
    central = fd.CentralStorageStrategy()  # on the devices of the replicas that run
    import subprocess
    alone = "import fastdist as fd; assert fd.init().world_size == 1"
    subprocess.run([sys.executable, "-c", alone], check=True, timeout=20)
    assert same.num_replicas_in_sync == central.num_replicas_in_sync == 2
    for devices in (["cpu"], ["cpu"] * 3):
        try:
            fd.MirroredStrategy(devices)
        except fd.errors.ClusterConfigError as error:
            assert "which an earlier strategy has started" in str(error)
        else:
            raise AssertionError(devices)
    """
    code, out, err = programs.run(
        text + TALK + again + "\n    print(os.path.basename(os.getcwd()))"
    )
    assert code == 0, err
    assert out == "data\n"


REFUSED = {
    "stdin": "is read from standard input",
    "interactive": "an interactive Python",
}


@pytest.mark.slow
@pytest.mark.parametrize("by", REFUSED)
def test_programs_that_cannot_be_started_again(programs: Programs, by: str) -> None:
    text = textwrap.dedent(TALK)
    _, _, err = programs.run(text, by=by, given=text if by == "stdin" else "")
    assert f"{REFUSED[by]}" in err
    assert "call fastdist.launch(fn, replicas=2)" in err


ENDS = {
    "reads stdin": (
        "print('asks')\ninput()",
        "EOFError",
        "only the first replica can read standard input",
    ),
    "exits": ("if 'RANK' in os.environ: sys.exit(0)", "exit code 0; it wrote nothing", ""),
    "raises": ("if 'RANK' in os.environ: raise KeyError('lost')", "KeyError: 'lost'", ""),
    "is killed": ("if 'RANK' in os.environ: os.kill(os.getpid(), 9)", "signal 9 (SIGKILL)", ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ENDS)
def test_a_replica_that_ends_before_the_strategy(programs: Programs, how: str) -> None:
    line, cause, hint = ENDS[how]
    code, _, err = programs.run(f"import os, sys\n{line}\n{textwrap.dedent(TALK)}", given="x\n")
    assert code == 1
    assert "a replica ended before it made the strategy. replica 1 of 2" in err
    assert cause in err
    assert hint in err


LATER = {
    "raises": ("raise KeyError('lost')", "KeyError: 'lost'", 1),
    "exits": ("sys.exit(5)", "replica 1 of 2: exit code 5", 1),
    "is killed": ("os.kill(os.getpid(), 9)", "killed by signal 9 (SIGKILL)", 1),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", LATER)
def test_a_replica_that_ends_amid_training(programs: Programs, how: str) -> None:
    """The first raises PeerFailureError, and shows what the other one has said."""
    line, cause, expected = LATER[how]
    code, _, err = programs.run(f"{TALK}\n    train()\n    if rank == 1: {line}\n    train()")
    assert code == expected
    assert "PeerFailureError" in err
    assert cause in err


@pytest.mark.slow
def test_an_exit_code(programs: Programs) -> None:
    code, out, err = programs.run(TALK + "\n    train()\n    sys.exit(7)")
    assert code == 7, (out, err)


@pytest.mark.slow
def test_a_replica_that_fails_after_the_last_call(programs: Programs) -> None:
    code, _, err = programs.run(
        TALK + "\n    train()\n    if rank == 1: raise KeyError('in the end')"
    )
    assert code == 1
    assert "fastdist: replica 1 of 2: exit code 1; its traceback:" in err
    assert "KeyError: 'in the end'" in err


WAITS = """
    train()
    print("ready", flush=True)
    import time
    while True:
        train()
        time.sleep(0.01)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_the_first_ends(programs: Programs, number: signal.Signals) -> None:
    process = programs.start(TALK + WAITS)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert len(programs.launcher.left()) == 2
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == (-number if number != signal.SIGINT else 1) or (
        process.returncode == -signal.SIGINT
    )
    wait_until(lambda: programs.launcher.left() == [])


@pytest.mark.slow
def test_a_model_that_only_the_first_makes(programs: Programs) -> None:
    lines = TRAIN.splitlines()
    at = next(i for i, line in enumerate(lines) if "strategy.scope()" in line)
    made = ["    " + line for line in lines[at : at + 3]]
    only = "    if strategy.local_replica_ids == (0,):"
    text = "\n".join([*lines[:at], only, *made, *lines[at + 3 :]])
    began = time.monotonic()
    code, _, err = programs.run(text + END)
    assert code == 1
    assert "NameError: name 'optimizer' is not defined" in err
    assert "PeerFailureError" in err
    assert time.monotonic() - began < 60


OPENED = """
    import fastdist as fd, os, shutil, sys
    {before}
    strategy = fd.MirroredStrategy(["cpu:0", "cpu:1"])
    strategy.reduce("sum", 1.0)
    print(fd.is_chief() == strategy.is_chief)
"""
FOLDER = "shutil.rmtree('out', True); os.mkdir('out'); file = open('out/log', 'w')"
EMPTY = "file = open('log', 'w'); file.write('lr 0.1' if fd.is_chief() else ''); file.flush()"


FILES: dict[str, str | None] = {
    FOLDER: "deleted and made anew",
    EMPTY: "emptied",
    "file = open('log', 'a'); print('lr 0.1', file=file, flush=True)": None,
    f"if fd.is_chief(): {FOLDER}; {EMPTY}": None,
    f"{EMPTY}; file.close(); file = open('log')": None,
    "import tempfile; file = tempfile.TemporaryFile(); file.write(b'1')": None,
}


@pytest.mark.slow
@pytest.mark.parametrize("before", FILES)
def test_files_opened_before_the_strategy(programs: Programs, before: str) -> None:
    message = FILES[before]
    code, out, err = programs.run(OPENED.format(before=before))
    if message is None:
        assert (code, out) == (0, "True\n"), err
    else:
        assert code == 1
        assert f"another replica has {message} {programs.folder}" in err
        assert "fastdist.is_chief()" in err


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, True),
        ({"RANK": "0", "WORLD_SIZE": "2"}, True),
        ({"RANK": "1", "WORLD_SIZE": "2"}, False),
        ({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}, False),
        ({"TF_CONFIG": TF_CONFIG % "0"}, True),
        ({"TF_CONFIG": TF_CONFIG % "1"}, False),
        ({"FASTDIST_ROSTER": '{"name": "x", "slot": 1}'}, False),
    ],
)
def test_is_chief_of_an_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: bool
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert fd.is_chief() == expected


@pytest.mark.slow
def test_a_world_that_was_made_before(programs: Programs) -> None:
    code, _, err = programs.run(TALK.replace("    strategy =", "    fd.init()\n    strategy =", 1))
    assert code == 1
    assert "make the strategy before calling fastdist.init()" in err


LAUNCH = """
    import os, sys, time, fastdist as fd
    def trained(scale):
        import torch
        strategy = fd.MirroredStrategy(["cpu:0", "cpu:1"])
        print("replica", strategy.local_replica_ids[0], flush=True)
        try:
            fd.MirroredStrategy(["cpu"] * 3)
        except fd.errors.ClusterConfigError as error:
            print(error)
        return strategy.reduce("sum", strategy.run(lambda: torch.ones(2) * scale))
    def failing(how):
        import beside  # found as here
        comm = fd.init()
        if how == "raises" and comm.rank == 1:
            raise KeyError("lost")
        if how == "is killed" and comm.rank == 1:
            os.kill(os.getpid(), 9)
        comm.barrier()
    if TRAINS:
        print(fd.launch(trained, replicas=2, kwargs={"scale": 3.0}).tolist())
    for how in ("raises", "is killed"):
        began = time.monotonic()
        try:
            fd.launch(failing, replicas=2, args=(how,))
        except Exception as error:
            print(type(error).__name__, error.args, "|", error.__cause__)
        assert time.monotonic() - began < 80
"""


@pytest.mark.slow
@pytest.mark.parametrize("by", ["stdin", "interactive"])
def test_launch(programs: Programs, by: str) -> None:
    (programs.folder / "beside.py").write_text("")
    text = f"TRAINS = {by == 'stdin'}\n{textwrap.dedent(LAUNCH)}"
    code, out, err = programs.run(text, by=by, given=text if by == "stdin" else "")
    assert code == 0, err
    if by == "stdin":
        assert "replica 0\n" in out
        assert "[6.0, 6.0]" in out
        assert "replica 1\n" not in out
        assert "MirroredStrategy got 3 devices; fastdist.launch started 2 processes" in out
    assert "KeyError ('lost',) | replica 1 of 2: exit code 1; its traceback:" in out
    assert "FastdistError ('launch: replica 1 of 2: killed by signal 9 (SIGKILL)" in out


def without_pidfd_open() -> None:
    """Make the system call fail, as before Linux 5.3, in gVisor and in some containers."""
    filters = [
        (0x20, 0, 0, 0),
        (0x15, 0, 1, 434),
        (6, 0, 0, 0x00050000 | 38),
        (6, 0, 0, 0x7FFF0000),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in filters))
    program = struct.pack("HxxxxxxQ", len(filters), ctypes.addressof(code))
    prctl = ctypes.CDLL(None).prctl
    prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    prctl(22, 2, ctypes.create_string_buffer(program))  # PR_SET_SECCOMP


def ignoring_ends() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)


ENDING = """
    import fastdist as fd, os
    def work(code):
        strategy = fd.MirroredStrategy(["cpu:0", "cpu:1"])
        strategy.reduce("sum", 1.0)
        if not strategy.is_chief:
            os._exit(code)
        return strategy.num_replicas_in_sync
    for code in (0, 3):
        try:
            print(fd.launch(work, replicas=2, args=(code,)))
        except fd.errors.FastdistError as error:
            print(error)
"""


@pytest.mark.slow
@pytest.mark.parametrize("before", [without_pidfd_open, ignoring_ends])
def test_launch_knows_how_replicas_end(programs: Programs, before: Callable[[], None]) -> None:
    code, out, err = programs.run(ENDING, preexec_fn=before)
    assert code == 0, err
    assert out.startswith("2\nlaunch: replica 1 of 2: exit code 3")


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"replicas": 0}, ValueError, "replicas must be a positive integer, got 0"),
        ({"replicas": True}, ValueError, "got True"),
        ({"fn": 3}, TypeError, "fn must be a function, got int"),
    ],
)
def test_launch_is_strict(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    import fastdist

    fn: Callable[[], None] = arguments.pop("fn", lambda: None)
    with pytest.raises(error, match=message):
        fastdist.launch(fn, **arguments)


def test_a_test_is_not_started_again() -> None:
    import fastdist

    assert "PYTEST_CURRENT_TEST" in os.environ
    with pytest.raises(fastdist.errors.ClusterConfigError, match=r"a pytest test.*launch\(fn"):
        fastdist.MirroredStrategy(["cpu:0", "cpu:1"])
