"""Answers `fastdist why` of other machines about the ranks of this one, in a thread."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress

from fastdist.cluster.address import join_address, own_address
from fastdist.errors import ClusterConfigError
from fastdist.recorder.elsewhere import answer_to, key_of
from fastdist.recorder.questions import answer

_MOST_AT_ONCE = 64
_PLACE_S = 1.0  # that a question may wait for others
_QUESTION_S = 2.0

_log = logging.getLogger("fastdist")


@contextmanager
def answering(host: str, port: int) -> Iterator[str]:
    """Answer questions while the job runs inside, whose rank 0 listens at `host` and `port`.

    Yields the "ip:port" that other machines ask; "" if the network of this machine is not up.
    """
    try:
        ip = own_address(host, port)
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        listener = socket.create_server((ip, 0), family=family)
    except (ClusterConfigError, OSError) as error:
        _log.info("other machines cannot ask about this job: %s", error)
        yield ""
        return
    listening = threading.Thread(target=_listen, args=(listener,), daemon=True)
    listening.start()
    try:
        yield join_address(ip, listener.getsockname()[1])
    finally:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        listening.join()
        listener.close()


class _Shared:
    """Answers all that ask the same at the same time with one look at the ranks."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], Future[str]] = {}
        self._lock = threading.Lock()

    def answer_to(self, job: str, about: str) -> str:
        with self._lock:
            is_first = (job, about) not in self._running
            future = self._running.setdefault((job, about), Future())
        if is_first:
            try:
                future.set_result(answer_to(job, about))
            except Exception as error:
                future.set_exception(error)
            with self._lock:
                del self._running[job, about]
        return future.result()


def _listen(listener: socket.socket) -> None:
    places = threading.Semaphore(_MOST_AT_ONCE)
    shared = _Shared()
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        if places.acquire(timeout=_PLACE_S):
            threading.Thread(target=_answer, args=(connection, places, shared), daemon=True).start()
        else:
            connection.close()


def _answer(connection: socket.socket, places: threading.Semaphore, shared: _Shared) -> None:
    with connection:
        try:
            answer(connection, key_of, shared.answer_to, _QUESTION_S)
        except Exception:
            _log.debug("a question was not answered", exc_info=True)
        finally:
            places.release()
