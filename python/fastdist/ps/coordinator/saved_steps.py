"""Steps that outlive servers and the chief: saved now and then, and repeated from the last save."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from fastdist._config import settings
from fastdist.errors import UnavailableError

_MOST_RESTORES = 3  # without a save between them
_RETRY_S = 0.2


class Saves(Protocol):
    """The strategy, as it is used here."""

    def save(self, directory: str | Path, state: Any = None) -> None:
        """Write everything on the servers, with the program's state."""

    def restore(self, directory: str | Path) -> Any:
        """Restore what `save` wrote; return the program's state."""

    def has_saved(self, directory: str | Path) -> bool:
        """True if there is a checkpoint."""


def saved_steps(
    strategy: Saves,
    run: Callable[[int], None],
    *,
    steps: int,
    directory: str | Path,
    save_every: int,
    state: dict[str, Any],
) -> Iterator[int]:
    """Take steps up to a number, and yield after each piece; see `ClusterCoordinator.run`.

    Args:
        strategy: saves and restores.
        run: takes a number of steps, and waits for their end even if one has failed.
        steps: the number of steps.
        directory: the checkpoint's directory.
        save_every: steps of a piece.
        state: saved with each checkpoint, and replaced by what is restored.

    Raises:
        ValueError: the checkpoint is another program's.
    """
    if strategy.has_saved(directory):
        _restore(strategy, directory, state)
    else:
        state["step"] = 0
        strategy.save(directory, state)
    restores = 0
    while state["step"] < steps:
        count = min(save_every, steps - state["step"])
        try:
            run(count)
            state["step"] += count
            yield state["step"]
            strategy.save(directory, state)
            restores = 0
        except UnavailableError:
            restores += 1
            if restores > _MOST_RESTORES:
                raise
            _restore(strategy, directory, state)


def _restore(strategy: Saves, directory: str | Path, state: dict[str, Any]) -> None:
    """Restore the checkpoint, once all servers are there."""
    end_s = time.monotonic() + settings().rendezvous_timeout_s
    while True:
        try:
            restored = strategy.restore(directory)
            break
        except UnavailableError:
            if time.monotonic() > end_s:
                raise
            time.sleep(_RETRY_S)
    if not isinstance(restored, dict) or "step" not in restored:
        raise ValueError(
            f"{directory} has no checkpoint of ClusterCoordinator.run: its state is {restored!r}, "
            'expected a dict with "step"'
        )
    state.clear()
    state.update(restored)
