"""Waits for the checkpoints of another job, for evaluators."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fastdist.checkpoints.manager import has_ended, list_checkpoints, number_of

_POLL_S = 0.5
_Found = tuple[Path | None, bool]  # a new checkpoint, and True if no other will come


def checkpoints_iterator(
    directory: str | Path, *, timeout_s: float | None = None
) -> Iterator[Path]:
    """Yield each complete checkpoint of a `CheckpointManager` as soon as it exists, oldest first.

    The directory is read without its lock, and may not exist yet. The iterator begins with existing
    checkpoints. It ends when no new one has appeared for `timeout_s`, or when the job has ended
    (`CheckpointManager.end`) and all were yielded. If checkpoints are removed while they are used,
    increase `max_to_keep` (tf.train.checkpoints_iterator).

    Args:
        directory: the manager's directory.
        timeout_s: seconds to wait for a new checkpoint; None: forever.

    Raises:
        ValueError: timeout_s is negative.

    Examples:
        >>> import tempfile
        >>> import fastdist as fd, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     manager = fd.CheckpointManager(folder)
        ...     path = manager.save(fd.Checkpoint(model=model), 1)
        ...     manager.end()  # the job has ended
        ...     [path.name for path in fd.checkpoints_iterator(folder)]
        ...     manager.close()
        ['checkpoint-1']
    """
    if timeout_s is not None and timeout_s < 0:
        raise ValueError(f"timeout_s must not be negative, got {timeout_s}")
    return checkpoints_after(-1, Path(directory).absolute(), timeout_s, lambda look: look())


def checkpoints_after(
    last: int,
    directory: Path,
    timeout_s: float | None,
    agree: Callable[[Callable[[], _Found]], _Found],
) -> Iterator[Path]:
    """Yield the checkpoints after number `last`; `agree` returns what a function finds."""
    since = time.monotonic()

    def look() -> _Found:
        is_over = has_ended(directory)  # before listing, so that the last checkpoint is listed
        newer = (path for path in list_checkpoints(directory) if number_of(path) > last)
        is_late = timeout_s is not None and time.monotonic() - since >= timeout_s
        return next(newer, None), is_over or is_late

    while True:
        path, is_over = agree(look)
        if path is not None:
            last = number_of(path)
            yield path
            since = time.monotonic()
        elif is_over:
            return
        else:
            time.sleep(_POLL_S)
