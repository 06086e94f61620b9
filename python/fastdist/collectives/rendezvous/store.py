"""Torch's TCPStore, for the rendezvous of ranks on several machines."""

from __future__ import annotations

import contextlib
import datetime
import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fastdist.errors import ClusterConfigError, FastdistError

_CONNECT_S = 1.0
_RETRY_S = 0.05
_TELL_S = 1.5
_PATIENCE = datetime.timedelta(seconds=2)  # of one attempt, which may take twice as long
# Stores are kept: a store ends with its last reference, and the next `init` needs it.
_stores: list[Any] = []


def open_store(
    host: str,
    port: int,
    prefix: str,
    rank: int,
    timeout_s: float,
    refuse_other_job: Callable[[Any], None] | None,
    is_given_up: Callable[[], bool],
) -> Any:
    """Open the store, or connect to it; return a view whose keys have this prefix.

    If another process opens the store, `refuse_other_job` is None. Else it is called with the store
    of another job, in a thread, if that job has the port: its ranks might join this job's.
    """
    distributed = _c10d()
    listens = refuse_other_job is not None
    patience = datetime.timedelta(seconds=max(1.0, timeout_s))
    options: dict[str, Any] = {"wait_for_workers": False}
    if listens:
        options |= {"is_master": True, "multi_tenant": True, "timeout": patience}
        listener = _listen(host, port)
        if listener is not None:  # else torch.distributed has opened a store in this process
            options["master_listen_fd"] = listener.detach()
    try:
        if listens:
            store = distributed.TCPStore(host, port, None, **options)
        else:
            store = _connect(host, port, timeout_s, is_given_up)
            store.set_timeout(patience)
    except (RuntimeError, ValueError, OSError) as error:
        reason = str(error).partition("\n")[0]
        if "EADDRINUSE" in str(error):
            reason = "another job or program uses the port; give each job a port of its own"
            if refuse_other_job is not None:
                _call_with_other_job(host, port, prefix, refuse_other_job)
        raise ClusterConfigError(
            f"rendezvous: rank {rank} cannot {'open' if listens else 'reach'} the store at "
            f"{host}:{port} within {timeout_s:g} s: {reason}",
            (0,),
        ) from None
    _stores.append(store)
    return with_prefix(store, prefix)


def await_told(store: Any, key: str, posted: Sequence[str]) -> None:
    """Keep rank 0, which may hold the store, until the ranks that came know why it gives up.

    Each has set its key in `posted`, and adds 1 to `key` as soon as it knows.
    """
    arrived = sum(bool(store.check([each])) for each in posted)
    until = time.monotonic() + _TELL_S
    while store.add(key, 0) < arrived and time.monotonic() < until:
        time.sleep(_RETRY_S)


def with_prefix(store: Any, prefix: str) -> Any:
    """Return a view of the store whose keys have this prefix."""
    return _c10d().PrefixStore(prefix, store)


def _connect(host: str, port: int, timeout_s: float, is_given_up: Callable[[], bool]) -> Any:
    """Connect to the store, by short attempts once a process listens.

    TCPStore may wait for twice its timeout. A thread that comes back from it while the interpreter
    ends would abort the process.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = deadline - time.monotonic()
        try:
            socket.create_connection((host, port), max(0.01, min(left_s, _CONNECT_S))).close()
            return _c10d().TCPStore(host, port, None, timeout=_PATIENCE, wait_for_workers=False)
        except (OSError, RuntimeError):
            if left_s <= _RETRY_S or is_given_up():
                raise
        time.sleep(_RETRY_S)


def _call_with_other_job(
    host: str, port: int, prefix: str, function: Callable[[Any], None]
) -> None:
    def call() -> None:
        with contextlib.suppress(RuntimeError, ValueError):
            other = _c10d().TCPStore(host, port, None, timeout=_PATIENCE)
            function(with_prefix(other, prefix))

    # In a thread, since it never ends if the program at the port is no store and says nothing.
    thread = threading.Thread(target=call, daemon=True, name="fastdist refusal")
    thread.start()
    thread.join(_PATIENCE.total_seconds())


def _listen(host: str, port: int) -> socket.socket | None:
    """Open a socket that listens at this address only; return None if the address is in use."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ClusterConfigError(f"rendezvous: cannot resolve {host!r}: {error}") from None
    listener = socket.socket(family, kind)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise ClusterConfigError(
            f"rendezvous: rank 0 cannot listen at {host}:{port}: {error.strerror}; expected an "
            "address of the machine of rank 0",
            (0,),
        ) from None
    return listener


@contextlib.contextmanager
def telling_loss(rank: int, where: str = "") -> Iterator[None]:
    """Tell that the store was lost, in place of the errors that torch raises then."""
    try:
        yield
    except FastdistError:
        raise
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        text = f"rendezvous: rank {rank} lost the store{where}: {reason}"
        raise ClusterConfigError(text, (0,)) from None


def _c10d() -> Any:
    try:
        import torch.distributed
    except ImportError:
        raise ImportError(
            "ranks on several machines meet in torch's TCPStore: pip install torch, or start them "
            "by mpiexec and pass fastdist.init(bootstrap=) an mpi4py communicator"
        ) from None
    if not torch.distributed.is_available():
        raise ImportError(
            "ranks on several machines meet in torch's TCPStore, which this build of torch lacks"
        )
    return torch._C._distributed_c10d  # torch.distributed exports only a part of it
