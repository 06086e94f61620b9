"""Phases of training between collectives, for the records."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import IntEnum

import fastdist._core as _core


class Phase(IntEnum):
    """The phases of training. Their numbers are in the files of records (csrc/core/recorder.h)."""

    USER = 0
    FORWARD = 1
    BACKWARD = 2
    OPTIMIZER = 3
    DATA = 4
    SAVING = 5
    RENDEZVOUS = 6


enter = _core.set_phase
"""Begin a phase; returns the number of the phase before."""


@contextlib.contextmanager
def phase(which: Phase) -> Iterator[None]:
    """Return a context manager for a phase, after which the previous phase continues."""
    before = enter(which)
    try:
        yield
    finally:
        _core.end_phase(which, before)
