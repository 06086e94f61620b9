"""Runs a function in new processes, one per replica of a strategy; meant for notebooks."""

from __future__ import annotations

import codecs
import contextlib
import json
import os
import pickle
import secrets
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastdist.cluster.launch import detect_launch, note_launch
from fastdist.cluster.replicas import rank_environment
from fastdist.errors import FastdistError
from fastdist.processes.children import Children
from fastdist.processes.process import Process, StartError

_FAILED_END_S = 3.0
_STOP_S = 2.0


def launch(
    fn: Callable[..., Any],
    *,
    replicas: int | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Call a function in one new process per replica, and return the first replica's result.

    These processes are the replicas of strategies that `fn` makes. The output of the first replica
    is printed here. Functions that are defined in a notebook work.

    Args:
        fn: a function that makes a strategy and trains; cloudpickle must pickle it and its result.
        replicas: number of processes; None: one for each GPU, or one on a machine without GPUs.
        args: positional arguments of `fn`.
        kwargs: keyword arguments of `fn`.

    Returns:
        The result of replica 0.

    Raises:
        ImportError: cloudpickle is not installed.
        ValueError: replicas is not positive.
        TypeError: fn is not callable.
        FastdistError: a replica could not be started, was killed, or ended early.
        BaseException: the exception that `fn` raised on the first replica that failed, with its
            traceback.

    Examples:
        >>> import fastdist as fd
        >>> def count():
        ...     return fd.MirroredStrategy(["cpu:0", "cpu:1"]).num_replicas_in_sync
        >>> fd.launch(count, replicas=2)
        2
    """
    try:
        import cloudpickle  # type: ignore[import-untyped]
    except ImportError:
        raise ImportError(
            "fastdist.launch needs cloudpickle: pip install cloudpickle", name="cloudpickle"
        ) from None
    if replicas is None:
        from fastdist.replicas.devices import every_device

        replicas = len(every_device())
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
        raise ValueError(f"launch: replicas must be a positive integer, got {replicas!r}")
    if not callable(fn):
        raise TypeError(f"launch: fn must be a function, got {type(fn).__name__}")
    job = secrets.token_hex(16)
    shown = _Shown()
    children = Children(shown.put)
    with tempfile.TemporaryDirectory(prefix="fastdist-") as folder:
        call = Path(folder, "call")
        call.write_bytes(cloudpickle.dumps((fn, tuple(args), dict(kwargs or {}))))
        Path(folder, "path").write_text(json.dumps(sys.path))
        try:
            children.start(
                [f"replica {i} of {replicas}" for i in range(replicas)],
                [sys.executable, "-m", "fastdist.replicas.launch", folder],
                [
                    {"PYTHONHASHSEED": os.environ.get("PYTHONHASHSEED", "0")}
                    | rank_environment(i, replicas, i, replicas, job)
                    for i in range(replicas)
                ],
            )
            children.wait(None, until_failure=True)
            children.wait(_FAILED_END_S)
        except StartError as error:
            raise FastdistError(f"launch: {error}") from None
        finally:
            children.stop(_STOP_S)
        if shown.error is not None:
            raise shown.error
        return _result(folder, children)


class _Shown:
    """Decodes UTF-8 and writes the text to `sys.stdout`, which a notebook shows."""

    def __init__(self) -> None:
        self.error: Exception | None = None  # of writing; the replicas continue without output
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def put(self, data: bytes) -> None:
        if self.error is None:
            try:
                sys.stdout.write(self._decoder.decode(data))
                sys.stdout.flush()
            except Exception as error:  # for example, a closed pipe
                self.error = error


def _result(folder: str, children: Children) -> Any:
    failed = [child for child in children.ended if child.status]
    failed.sort(key=lambda child: (child.is_consequence, (child.status or 0) < 0))
    if failed:
        raise _failure(folder, failed[0], children)
    try:
        return pickle.loads(Path(folder, "result.0").read_bytes())
    except FileNotFoundError:
        raise FastdistError(
            f"launch: no result; {children.processes[0].describe()}", (0,)
        ) from None


def _failure(folder: str, child: Process, children: Children) -> BaseException:
    replica = children.processes.index(child)
    error: object = None
    # It was killed, or its error cannot be pickled, or not be made anew: for example, one whose
    # class has an __init__ that takes other arguments.
    with contextlib.suppress(Exception):
        error = pickle.loads(Path(folder, f"error.{replica}").read_bytes())
    if not isinstance(error, BaseException):
        return FastdistError(f"launch: {child.describe()}", (replica,))
    error.__cause__ = FastdistError(child.describe(), (replica,))
    return error


def _call(folder: Path, replica: int) -> int:
    """In a new process, call the function pickled in the folder; write its result or error."""
    import cloudpickle

    launch = detect_launch()
    assert launch is not None
    note_launch(replace(launch, launcher="fastdist.launch"))
    sys.path[:] = json.loads((folder / "path").read_text())
    try:
        fn, args, kwargs = pickle.loads((folder / "call").read_bytes())
        result = fn(*args, **kwargs)
        if replica == 0:
            (folder / "result.0").write_bytes(cloudpickle.dumps(result))
    except BaseException as error:
        traceback.print_exc()
        with contextlib.suppress(Exception):  # the error cannot be pickled
            data = cloudpickle.dumps(error.with_traceback(None))
            (folder / f"error.{replica}").write_bytes(data)
        return error.code if isinstance(error, SystemExit) and type(error.code) is int else 1
    return 0


if __name__ == "__main__":
    sys.exit(_call(Path(sys.argv[1]), int(os.environ["RANK"])))
