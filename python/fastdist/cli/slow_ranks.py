"""Tells, once in a job, that the ranks wait for one of them again and again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fastdist.cluster.crew import note

_AFTER_S = 60.0  # the first steps are slower than the others
_LOOK_S = 5.0
_LEAST_SHARE = 0.8  # of the collectives in which a rank was waited for
_LEAST_COST = 0.05  # of the time


@contextmanager
def slow_ranks_told() -> Iterator[None]:
    """Look at the job inside after a minute; write to stderr if one rank is slow."""
    has_ended = threading.Event()
    thread = threading.Thread(target=_look, args=(has_ended,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def _look(has_ended: threading.Event) -> None:
    if has_ended.wait(_AFTER_S):
        return
    # numpy takes longer to import than the launcher to start.
    from fastdist.recorder.collector import Collector
    from fastdist.recorder.timeline import find_late

    collector = Collector()
    job_ended = has_ended.wait(_LOOK_S)
    ranks = collector.stop()
    late = next(iter(find_late(ranks)), None)
    if job_ended or late is None or late.share < _LEAST_SHARE:
        return
    if late.cost_s * late.count > _LEAST_COST * _LOOK_S:
        note(f"{late}; fastdist run --trace shows more")
