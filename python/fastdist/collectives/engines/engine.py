"""The interface between a communicator and the engine that moves its bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, final

import numpy as np

import fastdist._core as _core
from fastdist.recorder.machines import Machine


@dataclass(frozen=True, slots=True)
class Calls:
    """The collectives of an engine; csrc/bindings/call.h lists their arguments."""

    all_reduce: Callable[..., Any]
    reduce: Callable[..., Any]
    broadcast: Callable[..., Any]
    all_gather: Callable[..., Any]
    gather: Callable[..., Any]
    scatter: Callable[..., Any]
    reduce_scatter: Callable[..., Any]
    all_to_all: Callable[..., Any]
    send: Callable[..., Any]
    recv: Callable[..., Any]
    barrier: Callable[..., Any]


OPS = tuple(field.name for field in fields(Calls))
"""The names of all collectives."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Engine(ABC):
    """One rank of a group of ranks, and the collectives between them.

    Attributes:
        key: equal on all ranks, and unlike that of other engines.
        machines: the machines of the ranks, if there are several.
        compiled: the compiled engine, over which calls on GPU arrays are compared; None for XLA's.
    """

    rank: int
    size: int
    key: str
    machines: tuple[Machine, ...] = ()
    compiled: _core.Communicator | None

    @abstractmethod
    def calls(self, timeout_s: float) -> Calls:
        """Return the collectives; `timeout_s` is for calls without `timeout`."""

    @abstractmethod
    def empty(self, nbytes: int) -> Bytes:
        """Allocate memory that collectives use with the fewest copies."""

    @abstractmethod
    def subset(self, groups: Sequence[Sequence[int]], timeout_s: float) -> Engine | None:
        """Make an engine for each group of ranks. Every rank must call, with the same groups.

        Groups are disjoint; the order within a group numbers its ranks. A rank that is in none gets
        None.
        """

    @abstractmethod
    def survivors(self, ranks: Sequence[int], timeout_s: float) -> Engine:
        """Make an engine of these ranks, each of which must call; others and this may be lost."""

    @abstractmethod
    def close(self) -> None:
        """Leave. Ranks that still wait for this rank get `PeerFailureError`."""


class CompiledEngine(Engine):
    """An engine for arrays on the CPU. Its calls are the builtins of `_core`, unwrapped."""

    compiled: _core.HostCommunicator | _core.NetCommunicator
    _groups = 0  # how many groups were made from this engine

    @final
    def calls(self, timeout_s: float) -> Calls:
        """Return the builtins of the compiled engine."""
        return Calls(**self.compiled.calls(timeout_s))

    @final
    def empty(self, nbytes: int) -> Bytes:
        """Allocate memory that the ranks of this machine share."""
        return self.compiled.empty(nbytes)

    @final
    def close(self) -> None:
        """Leave the group; peers that wait for this rank get `PeerFailureError`."""
        self.compiled.close()

    def _key_of(self, ranks: Sequence[int]) -> str:
        return f"{self.key}/{self._groups}:{','.join(map(str, ranks))}"
