"""`fastdist run`: starts the processes of a job on this machine, all or its share of them."""

import argparse
import itertools
import json
import os
import resource
import secrets
import shutil
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import fastdist.cluster as cluster
from fastdist._config import RECORD_VARIABLES, REPLACE_VARIABLE, REPLACEABLE
from fastdist.cli.command import UsageError, add_command, count, seconds
from fastdist.cli.slow_ranks import slow_ranks_told
from fastdist.cli.tasks import (
    Machines,
    elastic_tasks,
    host_tasks,
    new_secret,
    rank_tasks,
    role_tasks,
    take_variables,
)
from fastdist.cluster.address import join_address, own_address, reserved_ports, split_address
from fastdist.cluster.crew import note
from fastdist.cluster.roster import Roster
from fastdist.errors import ClusterConfigError
from fastdist.processes.job import GRACE_S, Elastic, Job, Task
from fastdist.processes.process import StartError
from fastdist.processes.supervisor import Outcome, supervise

if TYPE_CHECKING:
    from fastdist.cluster.branch import Branch

_SPARE = str(Path(cluster.__file__).with_name("spare.py"))
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_MAX_RESTARTS = 3
_RECORD_EVERY = 100
_MAX_MACHINE_RESTARTS = 100  # of each machine of an elastic job, some seconds after each other
_PORTS = range(20_000, 32_000)
_SSH_PORT = 22
_ANSWER_S = 2.0  # that the launcher of another machine needs after its grace period

_STARTS = ("-n", "--ranks", "--nproc-per-node", "--nproc_per_node", "--workers", "--ps")
_PYTHON_SUFFIXES = (".py", ".pyc", ".pyz")
_TARGET = "{script.py | -m module | program}"
_DESCRIPTION = """\
Starts N ranks on this machine and waits for them. When a rank fails, the
others are stopped and its traceback is shown last. Ctrl-C is sent to all
ranks; a second Ctrl-C kills them.

The environment of each rank has RANK, WORLD_SIZE, LOCAL_RANK,
LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as under torchrun. Rank 0 reads
the standard input.

With --nnodes, starts this machine's N ranks of a job on several machines: the
same command is run on each machine, with its own --node-rank. Rank 0, on the
machine with --node-rank 0, listens at the address --rdzv, which all machines
must reach. When a rank fails, the ranks of other machines that wait for it
fail too.

With --hosts, does that on all machines, by ssh: N ranks on each, in this
directory and with this Python, which all machines must have. When a machine's
ranks fail, those of the others are stopped.

With --min and --max, starts an elastic job: a process that fails is started
again, and the others go on without it meanwhile, if at least --min are left.
The program must be made for it, by fastdist.Elastic or
fastdist.init(elastic=True). With --hosts, the ranks are shared out among these
machines; with --nnodes MIN:MAX, N run on each, of which --node-rank 0 must not
be lost. Other machines may be lost, and come back.

With --keep N, a job keeps N ranks: those of a machine that is lost are started
again on the others, which takes longer and changes no bit of the results. Each
rank computes with one thread, or T by --env OMP_NUM_THREADS=T. On several
machines by --hosts, or by --nnodes M, where --node-rank 0 must not be lost.

With --workers and --ps, starts a job with parameter servers instead: a chief,
W workers, P parameter servers and, with --evaluator, an evaluator. All tasks
run the same script. The environment of each task has TF_CONFIG. The tasks talk
over sockets in FASTDIST_PS_FOLDER, which only this user can open; by TCP, with
a secret of this job, if its path is too long for sockets. The chief reads the
standard input, and the job ends when the chief ends; other tasks that fail are
restarted. When the chief has ended, the other tasks, including the evaluator,
get SIGTERM, and SIGKILL if they still run after --grace-s.
"""
_EPILOG = """\
exit code:
  0               if all ranks, or the chief, return 0
  its exit code   of the rank that failed first, or of the chief; 128 + signal
                  if it was killed. 75 (EX_TEMPFAIL) says that the job has saved
                  its state and can be started again
  128 + signal    if a signal stopped fastdist run
  2               if a process could not be started

examples:
  fastdist run -n 4 train.py --epochs 10
  fastdist run --nproc-per-node 4 train.py --epochs 10
  fastdist run -n 2 -m package.train
  fastdist run --env OMP_NUM_THREADS=4 ./program
  fastdist run --nnodes 2 --node-rank 0 --rdzv 10.0.0.1:29500 -n 4 train.py
  fastdist run --hosts node1,node2 -n 4 train.py
  fastdist run -n 4 --replace gloo ddp_on_gloo.py
  fastdist run --min 2 --max 4 train.py
  fastdist run --workers 4 --ps 2 --evaluator train.py
"""
_HELP = {
    "--nnodes": "number of machines, each of which starts -n ranks; needs --node-rank and --rdzv. "
    "MIN:MAX: an elastic job, whose machines may come and go",
    "--node-rank": "number of this machine, from 0",
    "--rdzv": "address of the machine with --node-rank 0; rank 0 listens there, or this command if "
    "the job is elastic",
    "--hosts": "start -n ranks on each of these machines, by ssh without a password; rank 0 is on "
    "the first one, at its name or at --rdzv",
    "--ends-with-stdin": argparse.SUPPRESS,
    "--min": "ranks may come and go; with fewer than N the job waits, or fails if no restarts are "
    "left; needs --max",
    "--max": "number of ranks to start; needs --min",
    "--keep": "ranks may be lost, and are started again on the machines that are left, so that "
    "there are N",
    "--workers": "number of workers; needs --ps",
    "--ps": "number of parameter servers; needs --workers",
    "--evaluator": "also start an evaluator; needs --workers",
    "--max-restarts": "how often to start all ranks again when a rank has failed (default: 0); "
    f"with --min, how often a rank, in total (default: {_MAX_RESTARTS} for each); with --workers, "
    "the number of restarts, in total, of workers, parameter servers and the evaluator that fail "
    f"(default: {_MAX_RESTARTS})",
    "--grace-s": "seconds that ranks have to end after Ctrl-C or SIGTERM, to save a checkpoint for "
    f"example, until they are killed (default: {GRACE_S:g})",
    "--env": "set a variable in every process's environment; may be repeated",
    "--replace": "programs that ask torch.distributed for this backend, or for none on a machine "
    "without GPUs, get fastdist, unchanged",
    "--no-prefix": "do not begin each line of output with the name of its rank or task",
    "--trace": "write a trace of the ranks: collectives, and phases of a strategy's steps; "
    "fastdist trace and https://ui.perfetto.dev show it. On several machines each writes its own: "
    "FILE's name gets the machine's number",
    "--record": "write digests of a strategy's gradients, parameters and optimizers' states, and "
    "fail if replicas differ; fastdist compare-runs compares two files. The same on all machines; "
    "that of rank 0 has the file",
    "--record-every": f"steps between two records (default: {_RECORD_EVERY})",
    "-m": "run a module, as `python -m` does",
    "command": "a Python script, a module after -m, or a program; then its arguments",
}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `run` to the `fastdist` command."""
    parser = add_command(
        subparsers,
        "run",
        "run:run",
        (StartError, ClusterConfigError, ImportError),
        help="start the processes of a job on this machine",
        usage=f"fastdist run [options] {_TARGET} [argument]...",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    ranks = f"number of ranks (default: this process's cores, {len(os.sched_getaffinity(0))})"
    torchrun = ("--nproc-per-node", "--nproc_per_node")
    parser.add_argument(
        "-n", "--ranks", *torchrun, dest="ranks", metavar="N", type=count("ranks"), help=ranks
    )

    def add(*names: str, **options: Any) -> None:
        parser.add_argument(*names, help=_HELP[names[0]], **options)

    add("--nnodes", metavar="M", type=_machines, default=(None, 1))
    add("--node-rank", "--node_rank", metavar="I", type=count("a machine", least=0))
    rendezvous = ("--rdzv-endpoint", "--rdzv_endpoint")
    add("--rdzv", *rendezvous, dest="rdzv", metavar="HOST:PORT", type=_address)
    add("--hosts", metavar="A,B,...", type=_hosts)
    add("--ends-with-stdin", action="store_true")
    add("--min", metavar="N", type=count("ranks"))
    add("--max", metavar="N", type=count("ranks"))
    add("--keep", metavar="N", type=count("ranks"))
    add("--workers", metavar="W", type=count("workers"))
    add("--ps", metavar="P", type=count("parameter servers"))
    add("--evaluator", action="store_true")
    add("--max-restarts", metavar="N", type=count("restarts", least=0))
    add("--grace-s", metavar="SECONDS", type=seconds, default=GRACE_S)
    add("--env", metavar="K=V", type=_assignment, action="append", default=[])
    add("--replace", choices=REPLACEABLE)
    add("--no-prefix", dest="prefix", action="store_false")
    add("--trace", metavar="FILE", type=Path)
    add("--record", metavar="FILE", type=Path)
    add("--record-every", metavar="K", type=count("steps"))
    add("-m", dest="is_module", action="store_true")
    command = parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="command", help=_HELP["command"]
    )
    # shtab.FILE, so that shells complete names of files.
    vars(command)["complete"] = {"bash": "_shtab_compgen_files", "zsh": "_files", "tcsh": "f"}


def run(arguments: argparse.Namespace) -> int:
    """Run the job; return its exit code."""
    arguments.least_nodes, arguments.nnodes = arguments.nnodes
    _check_options(arguments)
    if arguments.least_nodes is not None:
        arguments.min = arguments.least_nodes * arguments.ranks
        arguments.max = arguments.nnodes * arguments.ranks
    if arguments.replace is not None:
        _check_replacing(arguments)
        arguments.env.append((REPLACE_VARIABLE, arguments.replace))
    record = None
    record_every: int = arguments.record_every or _RECORD_EVERY
    if arguments.record is not None:
        record = _record(arguments, record_every)
    elif arguments.record_every is not None:
        raise UsageError("--record-every needs --record FILE")
    _say_what_comes_first(arguments)
    outcome = _run_with_restarts(arguments)
    if record is not None and not outcome.has_failed:
        _say_if_nothing_is_recorded(record, record_every)
    return outcome.exit_code


def _run_with_restarts(arguments: argparse.Namespace) -> Outcome:
    run_once = _run_here
    if arguments.hosts is not None:
        run_once = _run_on_hosts if arguments.min is None else _run_elastic_hosts
    starts_all_again = arguments.workers is None and arguments.min is None
    most = (arguments.max_restarts or 0) if starts_all_again else 0
    for restart in range(1, most + 1):
        outcome = run_once(arguments)
        if not outcome.has_failed:
            return outcome
        note(f"restarting all ranks (restart {restart} of {most})")
    return run_once(arguments)


def _run_here(arguments: argparse.Namespace) -> Outcome:
    user = take_variables() if arguments.ends_with_stdin else dict(arguments.env)
    with ExitStack() as stack:
        roster: Roster | Branch | None = None
        elastic = None
        if arguments.min is not None:
            roster = _roster(arguments)
            stack.callback(roster.close)
            least = arguments.min if arguments.nnodes == 1 and arguments.keep is None else 1
            elastic = Elastic(least, roster.has_begun, roster.finish)
        launcher = ""
        if arguments.nnodes > 1:
            from fastdist.cli.answering import answering  # only where it is used

            launcher = stack.enter_context(answering(*arguments.rdzv))
        tasks = stack.enter_context(_tasks(arguments, launcher, roster, user))
        command = _program(arguments.command, arguments.is_module, tasks[0].environment)
        if arguments.keep is not None:
            command = [sys.executable, "-IS", _SPARE, *command]
        restarts = arguments.max_restarts
        if restarts is None:
            restarts = _MAX_RESTARTS * (1 if elastic is None else len(tasks))
        job = Job(
            command,
            tasks,
            len(tasks) * arguments.nnodes,
            max_restarts=restarts,
            elastic=elastic,
            grace_s=arguments.grace_s,
            prefix=arguments.prefix,
            ends_with_stdin=arguments.ends_with_stdin,
        )
        with _traced(arguments), slow_ranks_told():
            outcome = supervise(job)
        if isinstance(roster, Roster) and outcome.exit_code == 0:
            with suppress(KeyboardInterrupt):
                roster.await_branches()
        elif not isinstance(roster, Roster | None):
            roster.end(outcome.has_failed)
        if outcome.first is not None:
            _note_first(*outcome.first)
        return outcome


def _program(words: Sequence[str], is_module: bool, environment: Mapping[str, str]) -> list[str]:
    """Return the command that each process of a job runs.

    The first word is a script, a program or, as after `python -m`, a module.
    """
    words = words[1:] if words[:1] == ["--"] else words
    if not words:
        wanted = "a module" if is_module else "a Python script, -m and a module, or a program"
        raise UsageError(f"nothing to run; expected {wanted}")
    target, *rest = words
    if is_module:
        return [sys.executable, "-m", target, *rest]
    if os.path.exists(target):
        if os.path.isdir(target) or target.endswith(_PYTHON_SUFFIXES):
            return [sys.executable, target, *rest]
        # Without a slash, the name would be looked up in PATH.
        return [target if "/" in target else f"./{target}", *rest]
    program = shutil.which(target, path=environment.get("PATH")) if "/" not in target else None
    if program is None:
        raise UsageError(f"no such file or program: {target!r}")
    return [program, *rest]


def _roster(arguments: argparse.Namespace) -> "Roster | Branch":
    """Begin the roster of an elastic job, or this machine's part in it."""
    if arguments.nnodes == 1:
        return _own_roster(arguments)
    host, port = arguments.rdzv
    # Where --hosts has started this launcher, `_run_elastic_hosts` keeps the roster.
    if arguments.node_rank == 0 and not arguments.ends_with_stdin:
        return _own_roster(arguments, f"tcp://*:{port}")
    from fastdist.cluster.branch import Branch  # and numpy

    return Branch(f"tcp://{join_address(host, port)}", arguments.ranks, _give_up)


def _own_roster(arguments: argparse.Namespace, address: str | None = None) -> Roster:
    machines = arguments.nnodes if arguments.hosts is None else len(arguments.hosts)
    with_spares = 0 if arguments.keep is None else machines
    try:
        return Roster(arguments.min, arguments.max, address, _give_up, with_spares)
    except OSError as error:
        if address is None:
            raise
        raise UsageError(f"cannot listen at {error.strerror}: choose another --rdzv") from None


def _give_up(why: str) -> None:
    note(why)
    os.kill(os.getpid(), signal.SIGTERM)


def _note_first(pid: int, status: int) -> None:
    """Note the end of the process that failed first; tell what it did if it could not itself."""
    from fastdist.recorder.endings import note_end  # numpy: only when it is needed
    from fastdist.recorder.speaking import obituary

    note_end(pid, status)
    if status < 0 and (why := obituary(pid)):
        note(why)


@contextmanager
def _traced(arguments: argparse.Namespace) -> Iterator[None]:
    """Write a trace of the job that runs inside: trace.1.json for the second machine."""
    path: Path | None = arguments.trace
    if path is None:
        yield
        return
    if arguments.nnodes > 1:
        path = path.with_name(f"{path.stem}.{arguments.node_rank}{path.suffix}")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--trace {path}: there is no folder {path.absolute().parent}")
    # numpy takes longer to import than the launcher to start.
    from fastdist.recorder.collector import Collector
    from fastdist.recorder.trace_file import write_trace

    try:
        write_trace(path, [])
    except OSError as error:
        raise UsageError(f"--trace {path}: {error.strerror}") from None
    collector = Collector()
    try:
        yield
    finally:
        ranks = collector.stop()
        try:
            write_trace(path, ranks)
            note(f"wrote {path}; see it by: fastdist trace {path}")
        except OSError as error:
            note(f"cannot write {path}: {error.strerror}")


def _run_on_hosts(arguments: argparse.Namespace) -> Outcome:
    hosts = arguments.hosts
    host = hosts[0].rpartition("@")[2]
    # A port that other jobs on these machines hardly have; nobody can look there beforehand.
    rdzv = arguments.rdzv or (host, secrets.choice(_PORTS))
    places = [
        ("--nnodes", len(hosts), "--node-rank", number, "-n", arguments.ranks)
        for number in range(len(hosts))
    ]
    return supervise(_job_on_hosts(arguments, rdzv, places))


def _run_elastic_hosts(arguments: argparse.Namespace) -> Outcome:
    hosts, least = arguments.hosts, arguments.min
    os.environ |= new_secret(os.environ)
    given, port = arguments.rdzv or (None, "*")
    with closing(_own_roster(arguments, f"tcp://*:{port}")) as roster:
        try:
            own = given or own_address(hosts[0].rpartition("@")[2], _SSH_PORT)
        except ClusterConfigError as error:
            raise UsageError(f"{error}; --rdzv says where machines reach this one") from None
        most = max(2, len(hosts))  # 1:1 would not be elastic
        shares = [len(range(number, arguments.max, len(hosts))) for number in range(len(hosts))]
        needed = next(n for n in range(1, len(hosts) + 1) if sum(shares[:n]) >= least)
        counts: list[tuple[object, ...]] = [(f"1:{most}", "-n", share) for share in shares]
        if arguments.keep is not None:
            needed, counts = 1, [(most, "--keep", arguments.keep)] * len(hosts)
        places = [("--node-rank", i, "--nnodes", *count) for i, count in enumerate(counts)]
        elastic = Elastic(needed, roster.has_begun, roster.finish)
        return supervise(_job_on_hosts(arguments, (own, roster.port), places, elastic))


def _job_on_hosts(
    arguments: argparse.Namespace,
    rdzv: tuple[str, int],
    places: Sequence[Sequence[object]],
    elastic: Elastic | None = None,
) -> Job:
    there = ["--grace-s", str(arguments.grace_s)]
    there += ["--no-prefix"] * (not arguments.prefix) + ["-m"] * arguments.is_module
    if arguments.trace is not None:
        there += ["--trace", str(arguments.trace)]
    if elastic is not None and arguments.max_restarts is not None:
        there += ["--max-restarts", str(arguments.max_restarts)]
    if not arguments.command:
        raise UsageError(f"expected {_TARGET}")
    there += arguments.command
    user = dict(arguments.env)
    tasks = host_tasks(arguments.hosts, places, there, rdzv, user, is_elastic=elastic is not None)
    return Job(
        (),
        tasks,
        len(tasks),
        max_restarts=_MAX_MACHINE_RESTARTS * len(tasks),
        elastic=elastic,
        grace_s=arguments.grace_s + _ANSWER_S,
        prefix=False,  # the launchers on the machines begin each line with its rank
    )


def _check_options(arguments: argparse.Namespace) -> None:
    workers, servers = arguments.workers, arguments.ps
    if arguments.keep is not None:
        _check_keeping(arguments)
    elif arguments.min is not None or arguments.max is not None:
        _check_elastic(arguments)
    elif workers is None and servers is None:
        if arguments.evaluator:
            raise UsageError("--evaluator needs --workers and --ps")
        _check_machines(arguments)
    elif arguments.least_nodes or arguments.nnodes > 1 or arguments.hosts is not None:
        option = "--hosts" if arguments.hosts is not None else "--nnodes"
        raise UsageError(f"{option} starts ranks; start each parameter server by itself")
    elif arguments.ranks is not None:
        raise UsageError("-n starts ranks, --workers and --ps start a job without ranks; use one")
    elif servers is None:
        raise UsageError(f"--workers {workers} needs --ps, the number of parameter servers")
    elif workers is None:
        raise UsageError(f"--ps {servers} needs --workers, the number of workers")


def _check_replacing(arguments: argparse.Namespace) -> None:
    from importlib import metadata  # only where it is used

    environment = os.environ | dict(arguments.env)
    if environment.get(_AUTOLOAD) == "0":
        raise UsageError(f"--replace needs torch to load fastdist, which {_AUTOLOAD}=0 forbids")
    if not metadata.entry_points(group="torch.backends", name="fastdist"):
        raise UsageError("--replace needs fastdist to be installed by pip: torch cannot find it")


def _record(arguments: argparse.Namespace, every: int) -> Path | None:
    """Tell the ranks where to write digests; return the file if this launcher begins it."""
    path: Path = arguments.record.absolute()
    here = arguments.max or arguments.ranks or len(os.sched_getaffinity(0))
    machines = arguments.nnodes if arguments.hosts is None else len(arguments.hosts)
    if arguments.workers is not None or max(here, machines) == 1:
        raise UsageError("--record compares replicas: it needs at least two ranks, without --ps")
    if arguments.hosts is None and not path.parent.is_dir():
        raise UsageError(f"--record {path}: there is no folder {path.parent}")
    values = str(path), str(every), secrets.token_hex(8)
    arguments.env += zip(RECORD_VARIABLES, values, strict=True)
    if arguments.hosts is not None or arguments.node_rank:
        return None
    with suppress(OSError):  # the ranks tell why
        path.write_text(json.dumps({"run": values[-1]}) + "\n")
    return path


def _say_if_nothing_is_recorded(path: Path, every: int) -> None:
    with suppress(OSError, ValueError):
        if path.is_file() and len(path.read_text().splitlines()) == 1:
            note(
                f"--record {path}: no step was recorded; strategies record each {every}th run in "
                "which an optimizer steps (--record-every)"
            )


def _check_elastic(arguments: argparse.Namespace) -> None:
    least, most = arguments.min, arguments.max
    if least is None or most is None:
        raise UsageError("--min and --max belong together: the least and the most ranks")
    if least > most:
        raise UsageError(f"--min must be at most --max, got {least} and {most}")
    others = {
        "-n": arguments.ranks,
        "--workers": arguments.workers,
        "--ps": arguments.ps,
        "--nnodes": arguments.least_nodes or (arguments.nnodes > 1 or None),
        "--evaluator": arguments.evaluator or None,
        "--node-rank": arguments.node_rank,
        "--rdzv": None if arguments.hosts is not None else arguments.rdzv,
    }
    for option, value in others.items():
        if value is not None:
            raise UsageError(
                f"--min and --max are the ranks of an elastic job on this machine or on --hosts; "
                f"{option} does not go with them"
            )
    if arguments.hosts is not None and most < len(arguments.hosts):
        raise UsageError(f"--max {most} leaves one of the {len(arguments.hosts)} machines empty")


def _check_keeping(arguments: argparse.Namespace) -> None:
    others = {
        "-n": arguments.ranks,
        "--min and --max": arguments.min or arguments.max,
        "--workers and --ps": arguments.workers or arguments.ps,
        "--nnodes MIN:MAX": arguments.least_nodes,
        "--evaluator": arguments.evaluator or None,
    }
    for option, value in others.items():
        if value is not None:
            raise UsageError(f"--keep {arguments.keep} is the number of ranks; leave {option} out")
    arguments.ranks = arguments.min = arguments.max = arguments.keep
    _check_machines(arguments)


def _say_what_comes_first(arguments: argparse.Namespace) -> None:
    """Note an option that seems to be for this command, and is the program's."""
    target, *rest = arguments.command or ["--"]
    if (arguments.ranks, arguments.workers, arguments.max) != (None,) * 3 or target == "--":
        return
    for option, value in itertools.pairwise(rest):
        if option in _STARTS and value.isdigit():
            program = f"-m {target}" if arguments.is_module else target
            note(
                f"{option} {value} goes to {target}; options of fastdist run come first: "
                f"fastdist run {option} {value} {program}"
            )
            return


def _check_machines(arguments: argparse.Namespace) -> None:
    machines, own = arguments.nnodes, arguments.node_rank
    if arguments.hosts is not None:
        if machines > 1 or own is not None:
            raise UsageError(
                "--hosts starts all machines, --nnodes only this one; use one. An elastic job on "
                "--hosts takes --min and --max"
            )
        if arguments.ranks is None:
            raise UsageError("--hosts needs -n, the number of ranks on each machine")
        return
    if machines == 1 and arguments.least_nodes is None:
        for option, value in (("--node-rank", own), ("--rdzv", arguments.rdzv)):
            if value is not None:
                raise UsageError(f"{option} needs --nnodes, the number of machines")
        return
    for option, value in (
        ("--node-rank", own),
        ("--rdzv", arguments.rdzv),
        ("-n, the same on every machine", arguments.ranks),
    ):
        if value is None:
            count = machines if arguments.least_nodes is None else "MIN:MAX"
            raise UsageError(f"--nnodes {count} needs {option}")
    if arguments.max_restarts and arguments.least_nodes is None and arguments.keep is None:
        raise UsageError(
            "--max-restarts starts all ranks again, --nnodes only those of this machine; use "
            "--hosts"
        )
    if own >= machines:
        raise UsageError(f"--node-rank must be from 0 to {machines - 1}, got {own}")


@contextmanager
def _tasks(
    arguments: argparse.Namespace,
    launcher: str,
    roster: "Roster | Branch | None",
    user: dict[str, str],
) -> Iterator[list[Task]]:
    """Yield the tasks of the job; reserve their ports until the context is closed."""
    machines = None
    if arguments.nnodes > 1:
        host, port = arguments.rdzv
        if not isinstance(roster, Roster | None):
            host = own_address(host, port)
        machines = Machines(arguments.nnodes, arguments.node_rank, host, port, launcher)
    if roster is not None:
        most = arguments.max if machines is None else arguments.ranks
        threads = None if arguments.keep is None else 1
        _check_open_files(most)
        yield elastic_tasks(most, roster.name, user, machines, threads=threads)
        return
    if arguments.workers is None:
        ranks = arguments.ranks or len(os.sched_getaffinity(0))
        yield rank_tasks(ranks, user, machines)
        return
    from fastdist.link.addresses import MAX_FOLDER_BYTES

    tasks = 1 + arguments.workers + arguments.ps + arguments.evaluator
    with ExitStack() as stack:
        try:
            ports = stack.enter_context(reserved_ports(tasks))
        except OSError as error:
            raise UsageError(f"cannot get {tasks} ports: {error.strerror}") from None
        folder = stack.enter_context(TemporaryDirectory(prefix="fastdist-run-"))  # mode 0700
        if len(os.fsencode(folder)) > MAX_FOLDER_BYTES:
            folder = ""  # by TCP
        yield role_tasks(arguments.workers, arguments.ps, arguments.evaluator, ports, folder, user)


def _check_open_files(ranks: int) -> None:
    """Refuse an elastic job whose roster could not hold each rank's connection and pidfd."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 4 * ranks + 24  # with each rank's outputs, and other files
    if limit != resource.RLIM_INFINITY and needed > limit:
        raise UsageError(
            f"{ranks} ranks need {needed} open files, the limit is {limit}; see ulimit -n"
        )


def _machines(text: str) -> tuple[int | None, int]:
    """Parse "M" or "MIN:MAX"; the least number is None in a job that is not elastic."""
    least, colon, most = text.partition(":")
    parse = count("machines")
    if not colon:
        return None, parse(least)
    found = parse(least), parse(most)
    if found[0] <= found[1]:
        return found
    raise argparse.ArgumentTypeError(f"expected MIN:MAX, with MIN at most MAX, got {text!r}")


def _address(text: str) -> tuple[str, int]:
    try:
        return split_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _hosts(text: str) -> list[str]:
    hosts = text.split(",")
    if all(host and not host.startswith("-") for host in hosts) and len(set(hosts)) == len(hosts):
        return hosts
    raise argparse.ArgumentTypeError(f"expected different names of machines, got {text!r}")


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE, got {text!r}")
    return name, value
