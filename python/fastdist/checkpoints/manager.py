"""A series of checkpoints in a directory: saved, restored, and followed by evaluators."""

from __future__ import annotations

import atexit
import concurrent.futures
import errno
import functools
import re
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from fastdist.checkpoints import files
from fastdist.checkpoints.agreement import Ranks, broadcast_result, run_on_all
from fastdist.checkpoints.checkpoint import Checkpoint, copy_to_cpu
from fastdist.checkpoints.directory_lock import DirectoryLock
from fastdist.checkpoints.files import PartFiles
from fastdist.collectives.init import exit_with
from fastdist.errors import DamagedCheckpointError

_NAME = re.compile(r"checkpoint-\d+")
_ENDED = ".ended"
_POLL_S = 0.5
_Found = tuple[Path | None, bool]  # a new checkpoint, and True if no other will come


class CheckpointManager:
    """Saves a series of checkpoints into a directory, and restores the newest complete one.

    One job uses a directory at a time. Every replica makes a manager and makes the same calls,
    outside `run`; replica 0 reads and writes, and the others get the values from it, so that only
    the machine of replica 0 needs the directory.

    Args:
        directory: the directory, created if it does not exist.
        max_to_keep: number of checkpoints; older ones are removed. None: keep all.

    Raises:
        ValueError: max_to_keep is less than 1.

    Examples:
        >>> import tempfile
        >>> import fastdist as fd, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> checkpoint = fd.Checkpoint(model=model, step=7)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with fd.CheckpointManager(folder, max_to_keep=3) as manager:
        ...         manager.restore(checkpoint)  # None: there is no checkpoint yet
        ...         manager.save(checkpoint, checkpoint.step).name
        'checkpoint-7'
    """

    def __init__(self, directory: str | Path, *, max_to_keep: int | None = 5) -> None:
        if max_to_keep is not None and max_to_keep < 1:
            raise ValueError(f"max_to_keep must be at least 1, or None, got {max_to_keep}")
        self.directory = Path(directory).absolute()
        self._max_to_keep = max_to_keep
        self._ranks: Ranks | None = None  # of the last checkpoint
        self._lock: DirectoryLock | None = None
        self._writing: Future[None] | None = None
        self._staged = Staging()

    def __repr__(self) -> str:
        return f"<fastdist.CheckpointManager of {self.directory}>"

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self.close()
        else:  # other replicas may be in another call
            self.release()

    @property
    def checkpoints(self) -> list[Path]:
        """The checkpoints in the directory, oldest first. Their bytes are not checked."""
        return list_checkpoints(self.directory)

    @property
    def latest(self) -> Path | None:
        """The newest checkpoint in the directory, whose bytes are not checked; None without one."""
        return next(reversed(self.checkpoints), None)

    def save(
        self, checkpoint: Checkpoint, number: int | None = None, *, async_op: bool = False
    ) -> Path:
        """Save a checkpoint. Every replica must call.

        Args:
            checkpoint: the checkpoint to save.
            number: a number that orders the checkpoints and names the directory; by default the
                part "step" if it is an int, otherwise one more than the newest. The same number
                again replaces it.
            async_op: return when the tensors are copied, and write in a thread (parameter servers
                write their files before `save` returns). At most one checkpoint is written at a
                time: the next call, `wait`, `close` and the end of the program wait for it. The
                calls raise its error; the program exits with code 1.

        Returns:
            The checkpoint's directory, which exists once it is complete.

        Raises:
            OSError: the disk is full, the directory cannot be written, or another job uses it.
                Existing checkpoints are unchanged.
            ValueError: there is a checkpoint with a greater number.
            TypeError: a state holds an object of a type that cannot be saved.
        """
        if number is None:
            step = getattr(checkpoint, "step", None)
            number = step if type(step) is int else None
        self._ranks = checkpoint.ranks()
        with self._ranks.communicator() as workers:
            path = broadcast_result(workers, lambda: self._place(number))

            def write(parts: Mapping[str, PartFiles]) -> None:
                write_all = functools.partial(
                    files.write, path, parts, files.start_checksums(parts), checkpoint.write_others
                )
                if async_op and checkpoint.keeper is None:
                    self._later(lambda: files.delete(self._write(write_all)))
                elif old := self._write(write_all):
                    self._later(lambda: files.delete(old))

            checkpoint.collect(workers, self._staged.copy if async_op else copy_to_cpu, write)
        return path

    def restore(self, checkpoint: Checkpoint) -> Path | None:
        """Restore the newest complete checkpoint, and torch's generators. Every replica must call.

        A damaged checkpoint is renamed (`damaged-checkpoint-1200`), a warning says what is wrong,
        and the previous one is used. A directory that this user may only read is left as it is.

        Returns:
            The path; None if there is no checkpoint, and then nothing is changed.

        Raises:
            OSError: another job uses the directory, or the newest checkpoint cannot be read now:
                too many open files, no memory, an error of the disk or of permissions.
            ValueError: the newest complete checkpoint is of another model, or from a newer release.
        """
        parts: dict[str, PartFiles] = {}

        def find() -> Path | None:
            may_write = self._may_write()
            self._finish()
            for path in reversed(self.checkpoints):
                try:
                    parts.update(checkpoint.read(path))
                except DamagedCheckpointError as error:
                    if may_write:
                        files.set_damaged_aside(path)
                    warnings.warn(f"{error}; trying the checkpoint before", stacklevel=5)
                else:
                    return path
            return None

        self._ranks = checkpoint.ranks()
        with self._ranks.communicator() as workers:
            path = broadcast_result(workers, find)
            if path is not None:
                checkpoint.load(workers, path, lambda: parts, with_random=True)
        return path

    def wait(self) -> None:
        """Wait until the checkpoint that is being written is flushed. Every replica must call.

        Raises:
            OSError: it could not be written.
        """
        if self._ranks is not None:
            with self._ranks.communicator() as workers:
                run_on_all(workers, self._finish)

    def close(self) -> None:
        """Call `wait`, and let other jobs use the directory. Every replica must call."""
        try:
            self.wait()
        finally:
            self.release()

    def release(self) -> None:
        """Wait for the writing thread, and let other jobs use the directory.

        For one replica alone, after a failure; it calls no collective.
        """
        if self._writing is not None:
            concurrent.futures.wait([self._writing])
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        self._staged.clear()  # the traceback of a failed save may hold it

    def belong_to(self, checkpoint: Checkpoint) -> None:
        """Join the other replicas' later calls, without a save or restore; no collective."""
        self._ranks = checkpoint.ranks()

    def remove_all(self) -> None:
        """Remove all checkpoints, oldest first. Every replica must call, after a save or restore.

        Raises:
            OSError: another job uses the directory.
        """
        assert self._ranks is not None
        with self._ranks.communicator() as workers:
            broadcast_result(workers, self._remove_all)

    def end(self) -> None:
        """Declare the end of the job to evaluators. Every replica must call, after the last save.

        This ends `fd.checkpoints_iterator`. A job that uses the directory later withdraws the end.

        Raises:
            OSError: another job uses the directory, or it cannot be written.
        """
        self.wait()
        assert self._ranks is not None
        with self._ranks.communicator() as workers:
            broadcast_result(workers, self._end)

    # --- on rank 0 ------------------------------------------------------------------------------

    def _finish(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            concurrent.futures.wait([writing])
            _started.remove(writing)
            writing.result()

    def _end(self) -> None:
        self._own_directory()
        (self.directory / _ENDED).touch()

    def _remove_all(self) -> None:
        self._own_directory()
        self._finish()
        files.delete(files.set_aside(path) for path in self.checkpoints)

    def _own_directory(self) -> None:
        if self._lock is None:
            self._lock = DirectoryLock(self.directory)
            files.tidy(self.directory)
            (self.directory / _ENDED).unlink(missing_ok=True)

    def _may_write(self) -> bool:
        """Take the lock; return False if the directory exists and may only be read."""
        try:
            self._own_directory()
        except OSError as error:
            is_read_only = error.errno in (errno.EROFS, errno.EACCES, errno.EPERM)
            if not is_read_only or not self.directory.is_dir():
                raise
            return False
        return True

    def _place(self, number: int | None) -> Path:
        self._own_directory()
        self._finish()
        newest = self.latest
        last = -1 if newest is None else number_of(newest)
        if number is None:
            number = last + 1
        if number < max(last, 0):
            raise ValueError(
                f"the number of a checkpoint must not fall: got {number}, and {newest} exists; "
                "remove it, or use another directory"
            )
        return self.directory / f"checkpoint-{number}"

    def _write(self, write: Callable[[], None]) -> list[Path]:
        """Write a checkpoint, and set old ones aside."""
        write()
        if self._max_to_keep is None:
            return []
        return [files.set_aside(old) for old in self.checkpoints[: -self._max_to_keep]]

    def _later(self, task: Callable[[], None]) -> None:
        """Run a task in a thread; the interpreter waits for the task before it exits."""
        done: Future[None] = Future()

        def run() -> None:  # no executor, which takes no work once the main thread has ended
            try:
                task()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        threading.Thread(target=run, name="fastdist-checkpoint").start()
        _started.append(done)
        self._writing = done


def list_checkpoints(directory: Path) -> list[Path]:
    """Return the checkpoints in a directory, oldest first; their bytes are not checked."""
    if not directory.is_dir():
        return []
    found = [path for path in directory.iterdir() if _NAME.fullmatch(path.name)]
    return sorted(found, key=number_of)


def number_of(path: Path) -> int:
    """Return the number of a manager's checkpoint."""
    return int(path.name.rpartition("-")[2])


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
        is_over = (directory / _ENDED).exists()  # before listing: the last one must be listed
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


_started: list[Future[None]] = []  # tasks of threads whose failures no call has raised yet


def _tell_failures() -> None:
    """Report, after the threads have ended, failures that no call has raised."""
    for task in _started:
        if task.done() and (error := task.exception()):  # a forked child has no threads
            traceback.print_exception(error)
            exit_with(1)


atexit.register(_tell_failures)


_COPY_THREADS = 4  # one thread does not reach the memory's bandwidth


class Staging:
    """Copies the tensors of a checkpoint's parts to the CPU, into memory that is kept for reuse."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], torch.Tensor] = {}

    def copy(self, part: str, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return copies of a part's tensors, which the next call for this part overwrites."""
        staged = {}
        for name, tensor in tensors.items():
            kept = self._kept.get((part, name))
            if kept is None or kept.shape != tensor.shape or kept.dtype != tensor.dtype:
                kept = torch.empty(
                    tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda"
                )
                self._kept[part, name] = kept
            staged[name] = kept
        with ThreadPoolExecutor(_COPY_THREADS) as pool:
            list(pool.map(torch.Tensor.copy_, staged.values(), tensors.values()))
        return staged

    def clear(self) -> None:
        """Release the memory."""
        self._kept.clear()
