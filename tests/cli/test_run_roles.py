"""`fastdist run --workers --ps`: what each task is told, and what its end means for the job."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fastdist.cluster import (
    TFConfigClusterResolver,
    TorchrunClusterResolver,
    detect_launch,
    detect_resolver,
    split_address,
)
from launched import ROLES, Launcher, finish, read_lines, wait_until

Script = Callable[[str], Path]

# The chief ends, and the job with it, when all others have shown what they were given.
SHOW = """
import json, os, sys, time
print(json.dumps(dict(os.environ)), flush=True)
task = json.loads(os.environ["TF_CONFIG"])["task"]
if task["type"] != "chief":
    open(f"{os.environ['STEP']}/{task['type']}{task['index']}", "w").close()
while len(os.listdir(os.environ["STEP"])) < int(os.environ["OTHERS"]):
    time.sleep(0.01)
"""
SERVERS_AND_WORKERS = ("worker0", "worker1", "ps0")


class TestWhatTasksAreGiven:
    def environments(
        self, launcher: Launcher, step: Path, others: int, *options: str
    ) -> dict[str, dict[str, str]]:
        for path in step.iterdir():
            path.unlink()
        words = [*options, "--env", f"OTHERS={others}", sys.executable, "-c", SHOW]
        done = launcher.run(*words)
        assert done.returncode == 0, done.stderr
        lines = [line.partition(b"] ") for line in done.stdout.splitlines()]
        return {label[1:].decode(): json.loads(shown) for label, _, shown in lines}

    def test_cluster_and_place_of_each_task(self, launcher: Launcher, step: Path) -> None:
        found = self.environments(launcher, step, 5, "--workers", "2", "--ps", "2", "--evaluator")
        labels = ["chief", "evaluator", "ps 0", "ps 1", "worker 0", "worker 1"]
        assert sorted(found) == labels
        specs = set()
        for label, environ in found.items():
            resolver = detect_resolver(environ)
            assert isinstance(resolver, TFConfigClusterResolver)
            job, _, index = label.partition(" ")
            assert (resolver.task_type, resolver.task_id) == (job, int(index or 0))
            specs.add(resolver.cluster_spec())
        (spec,) = specs
        spec.require_parameter_servers()
        tasks = {job: spec.num_tasks(job) for job in spec.jobs}
        assert tasks == {"chief": 1, "worker": 2, "ps": 2, "evaluator": 1}
        addresses = [split_address(a or "") for job in spec.jobs for a in spec.job_tasks(job)]
        assert {host for host, _ in addresses} == {"127.0.0.1"}
        assert len({port for _, port in addresses}) == 6

    def test_each_job_has_a_secret(self, launcher: Launcher, step: Path) -> None:
        roles = ("--workers=1", "--ps=1")
        launcher.environ.pop("FASTDIST_SECRET", None)
        jobs = [self.environments(launcher, step, 2, *roles) for _ in range(2)]
        found = [{environ["FASTDIST_SECRET"] for environ in job.values()} for job in jobs]
        assert [len(job) for job in found] == [1, 1]
        assert found[0] != found[1]
        own = ("--env", "FASTDIST_SECRET_FILE=mine")
        environs = self.environments(launcher, step, 2, *roles, *own).values()
        assert {environ["FASTDIST_SECRET_FILE"] for environ in environs} == {"mine"}
        assert not any("FASTDIST_SECRET" in environ for environ in environs)

    def test_sockets_are_in_a_folder_of_the_job(
        self, launcher: Launcher, step: Path, tmp_path: Path
    ) -> None:
        found = self.environments(launcher, step, 2, "--workers", "1", "--ps", "1")
        (folder,) = {environ["FASTDIST_PS_FOLDER"] for environ in found.values()}
        assert not Path(folder).exists()
        launcher.environ["TMPDIR"] = str(tmp_path / ("long" * 25))  # too long for a socket's path
        Path(launcher.environ["TMPDIR"]).mkdir()
        found = self.environments(launcher, step, 2, "--workers", "1", "--ps", "1")
        assert not any(environ["FASTDIST_PS_FOLDER"] for environ in found.values())

    def test_no_task_takes_itself_for_a_rank(self, launcher: Launcher, step: Path) -> None:
        launcher.environ |= {
            "RANK": "1",
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "2",
            "FASTDIST_JOB": "outer",
            "TORCHELASTIC_RUN_ID": "outer",
            "MASTER_ADDR": "127.0.0.1",
            "OMPI_COMM_WORLD_RANK": "0",
            "OMPI_COMM_WORLD_SIZE": "1",
            "PMI_RANK": "0",
            "MPI_LOCALRANKID": "0",
            "SLURM_PROCID": "0",
            "SLURM_STEP_ID": "0",
        }
        found = self.environments(launcher, step, 2, "--workers=1", "--ps=1", "--env", "A=1")
        for environ in found.values():
            assert detect_launch(environ) is None
            assert not TorchrunClusterResolver.is_available(environ)
            assert "MASTER_ADDR" not in environ
            cores = len(os.sched_getaffinity(0))
            assert (environ["A"], environ["OMP_NUM_THREADS"]) == ("1", str(max(1, cores // 2)))

    @pytest.mark.usefixtures("step")
    def test_only_the_chief_reads_stdin(self, launcher: Launcher) -> None:
        wait = "while [ $(ls $STEP | wc -l) -lt 2 ]; do sleep 0.01; done"
        code = 'echo got $(cat); case "$TF_CONFIG" in *\'"chief", "index"\'*) '
        code += f"{wait};; *) : > $STEP/$$;; esac"
        done = launcher.run("--workers", 1, "--ps", 1, "sh", "-c", code, input=b"typed")
        assert sorted(done.stdout.splitlines()) == [
            b"[chief] got typed",
            b"[ps 0] got",
            b"[worker 0] got",
        ]

    def test_nobody_else_gets_a_port_of_the_job(
        self, launcher: Launcher, script: Script, step: Path
    ) -> None:
        path = script(ROLES + "print(os.environ['TF_CONFIG'], flush=True); wait_for('end')")
        process = launcher.start("--workers", 1, "--ps", 1, "--no-prefix", path)
        config = json.loads(read_lines(process, 1)[0])
        for addresses in config["cluster"].values():
            for address in addresses:
                with socket.socket() as other, pytest.raises(OSError, match="in use"):
                    other.bind(split_address(address))
        (step / "end").touch()
        assert finish(process).returncode == 0


class TestHowAJobEnds:
    CHIEF = "wait_for('worker0.0', 'worker1.0', 'ps0.0')\n"

    def run(
        self, launcher: Launcher, path: Path, *options: object, short_times: bool = False
    ) -> "subprocess.CompletedProcess[bytes]":
        words = ["--workers", 2, "--ps", 1, *options, path]
        return launcher.run(*words, short_times=short_times)

    @pytest.mark.usefixtures("step")
    def test_the_job_ends_with_its_chief(self, launcher: Launcher, script: Script) -> None:
        path = script(ROLES + f"if job == 'chief':\n    {self.CHIEF}    sys.exit(0)\nserve()")
        begin_s = time.monotonic()
        done = self.run(launcher, path, "--evaluator", "--grace-s", 60)
        assert (done.returncode, done.stderr) == (0, b"")
        assert time.monotonic() - begin_s < 30
        assert launcher.left() == []

    @pytest.mark.usefixtures("step")
    def test_the_exit_code_is_the_chiefs_whatever_others_return(
        self, launcher: Launcher, script: Script
    ) -> None:
        others = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))\n"
        others += "open(f'{step}/{name}.0', 'w').close()\ntime.sleep(60)"
        path = script(ROLES + f"if job == 'chief':\n    {self.CHIEF}    sys.exit(0)\n{others}")
        done = self.run(launcher, path)
        assert (done.returncode, done.stderr) == (0, b"")

    @pytest.mark.usefixtures("step")
    def test_the_chiefs_traceback_comes_last(self, launcher: Launcher, script: Script) -> None:
        path = script(
            ROLES + f"if job == 'chief':\n    {self.CHIEF}    raise KeyError('gone')\nserve()"
        )
        done = self.run(launcher, path)
        assert done.returncode == 1
        lines = done.stderr.decode().partition("fastdist run: ")[2].splitlines()
        assert lines[0] == "chief failed: exit code 1; its traceback:"
        assert lines[1] == "Traceback (most recent call last):"
        assert lines[-1] == "KeyError: 'gone'"

    @pytest.mark.usefixtures("step")
    def test_killed_chief(self, launcher: Launcher, script: Script) -> None:
        path = script(
            ROLES + f"if job == 'chief':\n    {self.CHIEF}    os.kill(os.getpid(), 9)\nserve()"
        )
        done = self.run(launcher, path)
        assert done.returncode == 137
        said = b"chief failed: killed by signal 9 (SIGKILL); it wrote nothing to stderr\n"
        assert done.stderr == b"fastdist run: " + said

    @pytest.mark.usefixtures("step")
    def test_others_that_do_not_end_are_killed_after_the_grace(
        self, launcher: Launcher, script: Script
    ) -> None:
        stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        stubborn += "open(f'{step}/{name}.0', 'w').close()\ntime.sleep(60)"
        path = script(ROLES + f"if job == 'chief':\n    {self.CHIEF}    sys.exit(0)\n{stubborn}")
        done = self.run(launcher, path, short_times=True)
        assert (done.returncode, done.stderr) == (0, b"")
        assert launcher.left() == []

    @pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_signals_are_passed_on(
        self,
        launcher: Launcher,
        script: Script,
        step: Path,
        number: signal.Signals,
        exit_code: int,
    ) -> None:
        path = script(
            ROLES + "def end(*_):\n    print('got', flush=True)\n    sys.exit(7)\n"
            f"signal.signal({int(number)}, end)\nopen(f'{{step}}/{{name}}.0', 'w').close()\n"
            "time.sleep(60)",
        )
        process = launcher.start("--workers", 2, "--ps", 1, path)
        names = ("chief0", *SERVERS_AND_WORKERS)
        wait_until(lambda: all((step / f"{name}.0").exists() for name in names))
        process.send_signal(number)
        done = finish(process)
        assert done.returncode == exit_code
        labels = [b"chief", b"ps 0", b"worker 0", b"worker 1"]
        assert sorted(done.stdout.splitlines()) == [b"[%s] got" % label for label in labels]
        assert done.stderr == f"fastdist run: stopped by {number.name}\n".encode()

    def test_killed_launcher_takes_all_along(
        self, launcher: Launcher, script: Script, step: Path
    ) -> None:
        process = launcher.start(
            "--workers", 1, "--ps", 1, "--evaluator", script(ROLES + "serve()")
        )
        wait_until(lambda: len(list(step.iterdir())) == 4)
        process.kill()
        process.wait()
        wait_until(lambda: launcher.left() == [])
        finish(process)


class TestBadInput:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--workers", "0"], "expected a number of workers from 1 to 999999, got '0'"),
            (["--ps", "two"], "expected a number of parameter servers from 1 to 999999, got 'two'"),
            (["--workers", "2"], "--workers 2 needs --ps, the number of parameter servers"),
            (["--ps", "2"], "--ps 2 needs --workers, the number of workers"),
            (["--workers", "2", "--ps", "0"], "from 1 to 999999, got '0'"),
            (["-n", "2", "--workers", "2", "--ps", "1"], "-n starts ranks"),
            (["-n", "2", "--ps", "1"], "-n starts ranks"),
            (["--evaluator"], "--evaluator needs --workers and --ps"),
            (["--grace-s", "nan"], "expected a number of seconds, got 'nan'"),
            (["--max-restarts", "-1"], "expected a number of restarts from 0 to 999999, got '-1'"),
            (
                ["--workers", "1", "--ps", "1", "--env", "TF_CONFIG={}"],
                "--env TF_CONFIG: fastdist run sets it itself, for each task",
            ),
            (
                ["--workers", "1", "--ps", "1", "--env", "RANK=0"],
                "--env RANK: tasks of a job with parameter servers are not ranks",
            ),
            (["--rdzv", "a:1"], "--rdzv needs --nnodes, the number of machines"),
            (["--node-rank", "1"], "--node-rank needs --nnodes, the number of machines"),
            (["--nnodes", "2", "--node-rank", "1"], "--nnodes 2 needs --rdzv"),
            (["--nnodes", "2", "--rdzv", "a:1"], "--nnodes 2 needs --node-rank"),
            (["--nnodes", "2", "--node_rank=0", "--rdzv", "a:1"], "2 needs -n, the same on every"),
            (
                ["--nnodes", "2", "--node-rank", "2", "--rdzv", "a:1", "-n", "1"],
                "--node-rank must be from 0 to 1, got 2",
            ),
            (["--nnodes", "2", "--rdzv", "a"], "expected 'host:port' or '[IPv6]:port'"),
            (["--nnodes", "2", "--workers", "1", "--ps", "1"], "--nnodes starts ranks"),
            (
                [
                    *("--nnodes", "2", "--node-rank", "0", "--rdzv", "a:1", "-n", "1"),
                    *("--env", "MASTER_PORT=2"),
                ],
                "--env MASTER_PORT: fastdist run sets it itself",
            ),
            (["--workers", "1", "--ps", "1", "--work", "1"], "unrecognized arguments: --work"),
        ],
    )
    def test_is_named(
        self, capfd: pytest.CaptureFixture[str], words: list[str], message: str
    ) -> None:
        from fastdist.cli.main import main

        with pytest.raises(SystemExit) as caught:  # argparse exits by itself
            sys.exit(main(["run", *words, "true"]))
        stdout, stderr = capfd.readouterr()
        assert (caught.value.code, stdout) == (2, "")
        assert message in stderr

    def test_nothing_to_run(self, capfd: pytest.CaptureFixture[str]) -> None:
        from fastdist.cli.main import main

        assert main(["run", "--workers", "1", "--ps", "1"]) == 2
        assert "nothing to run; expected a Python script" in capfd.readouterr().err

    def test_program_that_cannot_be_started(self, launcher: Launcher, tmp_path: Path) -> None:
        program = tmp_path / "program"
        program.write_text("#!/no/such/interpreter\n")
        program.chmod(0o755)
        done = launcher.run("--workers", 1, "--ps", 1, program)
        assert done.returncode == 2
        reason = f"cannot start chief: {program}: No such file or directory\n"
        assert done.stderr.decode() == f"fastdist run: {reason}"
