"""Saves a checkpoint and exits for a restart when the machine is about to be taken away."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np

from fastdist.checkpoints.checkpoint import Checkpoint
from fastdist.checkpoints.manager import CheckpointManager

_POLL_S = 1.0
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_FAILED = 2


class PreemptionCheckpointHandler:
    """Saves a checkpoint and exits after any replica is told to end, at the same step on all.

    SIGTERM or SIGUSR1 tells a replica to end; they do nothing else while the handler is open.

    Make it on every replica, in the main thread, after `manager.restore`, and call
    `save_if_preempted` after every step.

    A launcher that is told to restart (`fastdist run --max-restarts`, torchrun, Slurm's requeue)
    starts the job again, which restores the checkpoint.

    Args:
        manager: the manager that saves.
        checkpoint: the checkpoint to save.
        watcher: a function that returns True when the end is near, for clouds that announce it
            in another way; called every second, in a thread.
        exit_code: exit code of the process; by default EX_TEMPFAIL, "try again later".

    Raises:
        ValueError: not made in the main thread.

    Examples:
        >>> import tempfile
        >>> import fastdist as fd, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> checkpoint = fd.Checkpoint(model=model, step=0)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     manager = fd.CheckpointManager(folder)
        ...     with fd.PreemptionCheckpointHandler(manager, checkpoint) as handler:
        ...         for _ in range(3):
        ...             checkpoint.step += 1
        ...             handler.save_if_preempted()  # nobody told the job to end
        ...     manager.close()
        >>> checkpoint.step
        3
    """

    def __init__(
        self,
        manager: CheckpointManager,
        checkpoint: Checkpoint,
        *,
        watcher: Callable[[], bool] | None = None,
        exit_code: int = os.EX_TEMPFAIL,
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("PreemptionCheckpointHandler must be made in the main thread")
        self._manager = manager
        self._checkpoint = checkpoint
        self._exit_code = exit_code
        self._ranks = checkpoint.ranks()
        self._told = np.zeros(1, np.uint8)
        self._is_told = False
        self._failure: BaseException | None = None
        self._before: dict[signal.Signals, Any] = {
            number: signal.signal(number, self._on_signal) for number in _SIGNALS
        }
        self._ended = threading.Event()
        if watcher is not None:
            threading.Thread(target=self._watch, args=[watcher], daemon=True).start()

    def __enter__(self) -> PreemptionCheckpointHandler:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def save_if_preempted(self) -> None:
        """Save and exit if any replica was told to end. Every replica must call, outside `run`.

        Costs one collective of one byte.

        Raises:
            SystemExit: the checkpoint is saved, and the process must exit.
            OSError: the checkpoint could not be saved.
            BaseException: the exception of this replica's watcher; RuntimeError on the others.
        """
        self._told[0] = self._is_told if self._failure is None else _FAILED
        with self._ranks.communicator() as workers:
            if workers is not None:
                workers.all_reduce(self._told, "max")
        if self._told[0] == _FAILED:
            raise self._failure or RuntimeError("the watcher of another replica has failed")
        if self._told[0]:
            self._manager.save(self._checkpoint)
            self._manager.close()
            raise SystemExit(self._exit_code)

    def close(self) -> None:
        """Restore the signals' earlier handlers."""
        self._ended.set()
        while self._before:
            number, before = self._before.popitem()
            signal.signal(number, before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._is_told = True

    def _watch(self, watcher: Callable[[], bool]) -> None:
        try:
            while not self._ended.wait(_POLL_S):
                if watcher():
                    self._is_told = True
                    return
        except BaseException as error:
            self._failure = error
