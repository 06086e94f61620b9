"""Python processes that start in milliseconds: forks of a server that has imported torch.

The test processes of a run share one server, which the first call of `python` or `start` starts.
The server imports the packages that ranks need and runs a single thread without a communicator;
every process is a fork of it with arguments, environment, working directory and file descriptors of
its own.

`python(*arguments, ...)` replaces `subprocess.Popen([sys.executable, "-W", "error", *arguments])`,
except that
- the processes of one server share the seed of string hashes,
- `/proc/PID/environ` and `/proc/PID/cmdline` show the server's,
- BLAS and OpenMP run one thread, whatever the environment says.
A test that depends on these starts its processes with `subprocess`.

The processes of a test process end with it, even if it is killed; the server ends with the last.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Packages that are not installed are left out.
PRELOADED = (
    "numpy",
    "ml_dtypes",
    "cloudpickle",
    "pytest",
    "cryptography",
    "torch",
    "torch.distributed",
    "torch._dynamo",  # which optimizers import at their first step
    "sklearn.datasets",
    "torchmetrics",
    "keras",
    "fastdist",
)
_ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # jemalloc in pyarrow, which scikit-learn imports through pandas where both are installed
    "JE_ARROW_MALLOC_CONF": "background_thread:false",
}
_MAX_REQUEST_BYTES = 1 << 18
_MAX_DESCRIPTORS = 64
_INT = struct.Struct("i")
_PR_SET_PDEATHSIG = 1
_CLONE_NEWNET = 0x40000000
_START_S = 150
_TAKEN = 3  # exit code of a server that finds another one

# --- in the test process ------------------------------------------------------------------------


def python(*arguments: str, netns: str = "", **options: Any) -> ForkedPython:
    """Start Python with warnings as errors.

    Args:
        arguments: `"-c", code`, `"-m", module` or the path of a script, then the program's own.
        netns: the network namespace of the process; "" for the namespace of the test process.
        options: stdin, stdout, stderr, text, env, cwd and pass_fds of `subprocess.Popen`.
    """
    return ForkedPython(arguments, netns, **options)


class ForkedPython(subprocess.Popen[Any]):
    """A process of the server, with the methods of a child of the test process."""

    def __init__(self, arguments: Sequence[str], netns: str, **options: Any) -> None:
        self._netns = netns
        self._status: socket.socket | None = None
        super().__init__(arguments, **options)

    def _execute_child(self, *given: Any) -> None:
        # The arguments before restore_signals are the same in Python 3.11 to 3.14.
        arguments, _, _, _, pass_fds, cwd, env, _, _, _, *pipes = given[:16]
        standard = [pipes[0], pipes[3], pipes[5]]
        request = {
            "arguments": list(arguments),
            "environment": dict(os.environ if env is None else env),
            "directory": os.getcwd() if cwd is None else os.fspath(cwd),
            "netns": self._netns,
            "descriptors": [0, 1, 2, *pass_fds],
        }
        self._status, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            descriptors = [own if fd == -1 else fd for own, fd in enumerate(standard)]
            sent = [theirs.fileno(), *descriptors, *pass_fds]
            socket.send_fds(_server(), [json.dumps(request).encode()], sent)
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        answer = self._status.recv(_INT.size)
        if not answer:
            raise OSError("the fork server has ended")
        (self.pid,) = _INT.unpack(answer)
        self._child_created = True

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        self._read_status(0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        self._read_status(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return self.returncode

    def _read_status(self, timeout_s: float | None) -> None:
        """Read the exit status if the process ends in time."""
        status = self._status
        if self.returncode is not None or status is None:
            return
        poll = select.poll()
        poll.register(status, select.POLLIN)
        if not poll.poll(None if timeout_s is None else max(0.0, timeout_s * 1000)):
            return
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self.returncode is None:
                answer = status.recv(_INT.size)
                # Without the server, the kernel has killed the process.
                ended = os.waitstatus_to_exitcode(_INT.unpack(answer)[0]) if answer else -9
                self.returncode = ended
                status.close()


_lock = threading.Lock()
_started: subprocess.Popen[bytes] | None = None
_started_s = -1.0
_control: socket.socket | None = None


# Errors, but for what torch says of the interpreter's release.
_WARNINGS = ("-W", "error", "-W", "ignore:Guards may run slower on Python 3.13.0")


def start() -> None:
    """Start the server unless another test process of this run has done so; do not wait for it."""
    global _started, _started_s
    # The one that was there may have ended with its last client before this process came.
    is_due = time.monotonic() > _started_s + 1 and (not _started or _started.poll() == _TAKEN)
    if is_due and _connected() is None:
        _started_s = time.monotonic()
        _started = subprocess.Popen(
            [sys.executable, *_WARNINGS, __file__, _run_id(), str(os.getpid())],
            env=os.environ | _ONE_THREAD,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
        atexit.register(_end, _started)


def _server() -> socket.socket:
    """The control socket of the server, which the first call starts."""
    with _lock:
        deadline = time.monotonic() + _START_S
        while (control := _connected()) is None:
            start()
            if _started is not None and _started.poll() not in (None, _TAKEN):
                raise OSError(f"the fork server has ended with {_started.returncode}")
            if time.monotonic() > deadline:
                raise OSError(f"the fork server did not start within {_START_S} s")
            time.sleep(0.02)
        return control


def _connected() -> socket.socket | None:
    """The control socket; None while there is no server."""
    global _control
    if _control is None:
        control = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            control.connect(_address(_run_id()))
        except OSError:
            control.close()
        else:
            _control = control
    return _control


def _end(process: subprocess.Popen[bytes]) -> None:
    if os.getpid() == _owner:
        if _control is not None:
            _control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)


def _run_id() -> str:
    return os.environ.get("PYTEST_XDIST_TESTRUNUID", str(_owner))


def _address(run: str) -> str:
    return f"\0fastdist-tests-{os.getuid()}-{run}"


_owner = os.getpid()

# --- in the server ------------------------------------------------------------------------------


def _preload() -> None:
    for name in PRELOADED:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    tasks = Path("/proc/self/task").iterdir()
    threads = [(task / "comm").read_text().strip() for task in tasks]
    if len(threads) != 1:
        raise RuntimeError(f"a fork server must run one thread, got {threads}")
    gc.collect()
    gc.freeze()  # collections in the forks leave the server's pages shared


def _serve(listener: socket.socket, starter: int) -> tuple[dict[str, Any], list[int]]:
    """Fork for each request, and report exit statuses; in a fork, return its request.

    Answers to a request are the process id and, later, the wait status. A server without clients
    ends if the process `starter` has ended, which may be before this call.
    """
    server = os.getpid()
    prctl = ctypes.CDLL(None).prctl
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    clients: set[socket.socket] = set()
    while True:
        if not clients and os.getppid() != starter:
            os._exit(0)
        for key, _ in selector.select(None if clients else 1.0):
            if key.fileobj is listener:
                client, _ = listener.accept()
                if _user_of(client) == os.getuid():
                    clients.add(client)
                    selector.register(client, selectors.EVENT_READ)
            elif key.fileobj in clients:
                client = key.fileobj  # type: ignore[assignment]
                message, fds = b"", []
                with contextlib.suppress(ConnectionResetError):
                    message, fds, _, _ = socket.recv_fds(
                        client, _MAX_REQUEST_BYTES, _MAX_DESCRIPTORS
                    )
                if not message:
                    selector.unregister(client)
                    clients.remove(client)
                    client.close()
                    _kill_processes_of(selector, client)
                    if not clients:
                        os._exit(0)
                    continue
                status, *given = fds
                pid = os.fork()
                if pid == 0:
                    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
                    if os.getppid() != server:
                        os._exit(1)
                    _close_all_of(selector)
                    os.close(status)
                    return json.loads(message), given
                for fd in given:
                    os.close(fd)
                watched = os.pidfd_open(pid)
                selector.register(watched, selectors.EVENT_READ, (pid, status, client))
                _tell(status, pid)
            else:
                pid, status, _ = key.data
                _tell(status, os.waitpid(pid, 0)[1])
                selector.unregister(key.fd)
                os.close(key.fd)
                os.close(status)


def _user_of(client: socket.socket) -> int:
    size = 3 * _INT.size
    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(struct.unpack("3i", credentials)[1])


def _kill_processes_of(selector: selectors.BaseSelector, client: socket.socket) -> None:
    for key in selector.get_map().values():
        if key.data is not None and key.data[2] is client:
            os.kill(key.data[0], signal.SIGKILL)


def _tell(status: int, value: int) -> None:
    with contextlib.suppress(BrokenPipeError):  # the test has dropped the process
        os.write(status, _INT.pack(value))


def _close_all_of(selector: selectors.BaseSelector) -> None:
    for key in list(selector.get_map().values()):
        if key.data is None:
            key.fileobj.close()  # type: ignore[union-attr]
        else:
            os.close(key.fd)
            os.close(key.data[1])
    selector.close()


# --- in a fork ----------------------------------------------------------------------------------


def _take_descriptors(given: list[int], numbers: list[int]) -> None:
    beyond = max(numbers) + 1
    moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, beyond) for fd in given]
    for fd in given:
        os.close(fd)
    for fd, number in zip(moved, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)


def _enter(netns: str) -> None:
    fd = os.open(f"/run/netns/{netns}", os.O_RDONLY)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(fd, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"cannot enter network namespace {netns}")
    os.close(fd)


def _run(arguments: list[str], path: list[str]) -> None:
    """Run a program as `python *arguments` does.

    Args:
        path: entries of `sys.path` after the first.
    """
    sys.orig_argv = [sys.executable, *_WARNINGS, *arguments]
    kind, *rest = arguments
    if kind == "-m":
        name, *sys.argv[1:] = rest
        sys.path[:] = [os.getcwd(), *path]
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind == "-c":
        code, *others = rest
        sys.argv = ["-c", *others]
        sys.path[:] = ["", *path]
        exec(compile(code, "<string>", "exec"), main.__dict__)
    else:
        sys.argv = arguments
        sys.path[:] = [str(Path(kind).resolve().parent), *path]
        main.__file__ = kind
        exec(compile(Path(kind).read_bytes(), kind, "exec"), main.__dict__)


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the test process ends the server
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(_address(sys.argv[1]))
    except OSError:
        listener.close()
        sys.exit(_TAKEN)
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    installed = [entry for entry in sys.path[1:] if entry not in before]
    _preload()
    listener.listen()
    request, given = _serve(listener, int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _take_descriptors(given, request["descriptors"])
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["directory"])
    if request["netns"]:
        _enter(request["netns"])
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()  # the forks would share it
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    _run(request["arguments"], [entry for entry in entries if entry] + installed)


if __name__ == "__main__":
    _main()
