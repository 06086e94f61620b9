"""`fastdist run --hosts`: ranks on several machines by ssh, which a script stands in for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from held_ports import free_port
from machines import Network, network

pytest.importorskip("torch.distributed")
__all__ = ["network"]  # a fixture

SSH = """\
#!/bin/sh
# Takes ssh's options, and runs the command here, or in the network namespace called like the host.
while [ "${1#-}" != "$1" ]; do case $1 in -o) shift 2;; *) shift;; esac; done
host=$1; shift
echo "$*" >> commands
case $host in
  fd*) exec ip netns exec "$host" sh -c "$*";;
  here*) exec sh -c "$*";;
  *) echo "ssh: Could not resolve hostname $host" >&2; exit 255;;
esac
"""

CODE = """
    import os, sys, time, numpy as np, fastdist as fd
    assert os.environ["FASTDIST_RENDEZVOUS_TIMEOUT_S"] == "77"  # as on the launcher's machine
    assert len(os.environ["FASTDIST_SECRET"]) == 64  # made for the job
    comm = fd.init(timeout=20)
    total = comm.all_reduce(np.array([comm.rank + 1.0]))[0]
    print(total, os.environ["GREETING"], os.getcwd(), type(comm.engine).__name__, flush=True)
    if sys.argv[1] == "fails" and comm.rank == 1: raise ValueError("the cause")
    if sys.argv[1] == "sleeps":
        open(f"rank{comm.rank}", "w").write(str(os.getpid()))
        time.sleep(60)
    comm.barrier()
"""


def start(folder: Path, hosts: str, host: str, *arguments: str) -> subprocess.Popen[str]:
    (folder / "bin").mkdir(exist_ok=True)
    ssh = folder / "bin" / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(0o755)
    env = os.environ | {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    env["FASTDIST_RENDEZVOUS_TIMEOUT_S"] = "77"
    env.pop("FASTDIST_SECRET", None)
    options = ["--hosts", hosts, "--rdzv", f"{host}:{free_port()}", "-n", "1"]
    run = [sys.executable, "-m", "fastdist", "run", *options, "--env", "GREETING=good day"]
    program = [sys.executable, "-c", textwrap.dedent(CODE), *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*run, *program], cwd=folder, env=env, text=True, stdout=pipe, stderr=pipe
    )


@pytest.mark.slow
def test_ranks_by_ssh(tmp_path: Path) -> None:
    job = start(tmp_path, "here1,here2", "127.0.0.1", "ends")
    out, err = job.communicate(timeout=60)
    line = f"3.0 good day {tmp_path} HostEngine"
    assert (sorted(out.splitlines()), job.returncode) == ([f"[0] {line}", f"[1] {line}"], 0), err
    commands = (tmp_path / "commands").read_text()
    assert commands.count("fastdist run") == 2
    for hidden in ("FASTDIST_RENDEZVOUS_TIMEOUT_S=", "FASTDIST_SECRET=", "good day"):
        assert hidden not in commands  # every user of the machine sees command lines


@pytest.mark.slow
def test_a_failing_machine_ends_the_job(tmp_path: Path) -> None:
    job = start(tmp_path, "here1,here2", "127.0.0.1", "fails")
    _, err = job.communicate(timeout=60)
    assert job.returncode == 1
    assert "rank 1 of 2 failed first" in err
    assert "machine here2 of 2 failed first: exit code 1" in err
    assert err.endswith("ValueError: the cause\n")


@pytest.mark.slow
def test_an_unknown_machine(tmp_path: Path) -> None:
    job = start(tmp_path, "here1,nowhere", "127.0.0.1", "ends")
    _, err = job.communicate(timeout=60)
    assert job.returncode == 255
    assert "machine nowhere of 2 failed first: exit code 255" in err
    assert err.endswith("Could not resolve hostname nowhere\n")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ranks_end_with_the_launcher(tmp_path: Path, number: int) -> None:
    job = start(tmp_path, "here1,here2", "127.0.0.1", "sleeps")
    files = [tmp_path / f"rank{rank}" for rank in range(2)]
    until = time.monotonic() + 40
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < until
        assert job.poll() is None
        time.sleep(0.05)
    job.send_signal(number)
    job.communicate(timeout=20)
    until = time.monotonic() + 15
    while any(Path(f"/proc/{file.read_text()}").exists() for file in files):
        assert time.monotonic() < until, "ranks outlive the launcher"
        time.sleep(0.05)


def test_ranks_on_two_machines(network: Network, tmp_path: Path) -> None:
    job = start(tmp_path, ",".join(network.names), network.addresses[0], "ends")
    out, err = job.communicate(timeout=60)
    line = f"3.0 good day {tmp_path} NetEngine"
    assert (sorted(out.splitlines()), job.returncode) == ([f"[0] {line}", f"[1] {line}"], 0), err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--hosts", "a,b"], "--hosts needs -n"),
        (["--hosts", "a,a", "-n", "1"], "expected different names of machines, got 'a,a'"),
        (["--hosts", "a,,b", "-n", "1"], "expected different names of machines"),
        (["--hosts", "a,-oProxyCommand=x", "-n", "1"], "expected different names of machines"),
        (["--hosts", "a,b", "-n", "1", "--nnodes", "2"], "--hosts starts all machines"),
        (["--hosts", "a,b", "--workers", "1", "--ps", "1"], "--hosts starts ranks"),
        (["--hosts", "a,b", "-n", "1"], "expected {script.py"),
    ],
    ids=" ".join,
)
def test_wrong_options(options: list[str], message: str) -> None:
    program = [] if message.startswith("expected {") else ["train.py"]
    run = [sys.executable, "-m", "fastdist", "run", *options, *program]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert message in done.stderr
