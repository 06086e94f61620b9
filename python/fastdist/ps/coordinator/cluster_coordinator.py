"""Schedules functions on the workers of a parameter-server job."""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fastdist._config import settings
from fastdist.collectives.arguments import to_integer
from fastdist.errors import FastdistError, UnavailableError
from fastdist.ps.coordinator.backlog import Backlog
from fastdist.ps.coordinator.dispatcher import Dispatcher
from fastdist.ps.coordinator.per_worker import PerWorkerDataset
from fastdist.ps.coordinator.remote_value import RemoteValue, identity
from fastdist.ps.coordinator.shipping import (
    parts_of_arguments,
    parts_of_function,
    pickle_or_explain,
)
from fastdist.replicas.per_replica import map_structure

_MOST_RESTORES = 3  # of `run`, without a save between them
_RETRY_S = 0.2


class ClusterCoordinator:
    """Schedules functions on any free worker (tf.distribute.coordinator.ClusterCoordinator).

    A function runs at least once: if its worker is lost, another one gets it. Workers may come
    back, and may come late. A function is pickled once, when it is first scheduled, with the
    values that it closes over; modules, optimizers and variables of the strategy's scope, datasets
    and the strategy itself become the worker's own there. The first error that a function raises
    is raised by the next `schedule`, `join` or `done`; functions that have not begun are
    cancelled, and the coordinator continues. Several threads may use it.

    Args:
        strategy: a ParameterServerStrategy.
        max_queued: the limit for unfinished scheduled functions; `schedule` waits above it.
        seed: the seed of the workers' random numbers, which differ between workers.
    """

    # Uses of the strategy, which is a layer above: worker_addresses, synchronous, max_staleness,
    # definitions, backlog, coordinator; require_chief, before_calls, apply_reports, after_calls,
    # end_job, save, restore and has_saved.
    def __init__(self, strategy: Any, *, max_queued: int = 1024, seed: int = 0) -> None:
        if to_integer(max_queued, "max_queued") < 1:
            raise ValueError(f"max_queued must be at least 1, got {max_queued}")
        if not 0 <= to_integer(seed, "seed") < 1 << 64:
            raise ValueError(f"seed must be from 0 to 2**64 - 1, got {seed}")
        if not getattr(strategy, "has_servers", False):
            raise TypeError(
                "a ClusterCoordinator needs a ParameterServerStrategy, got "
                f"{type(strategy).__name__}"
            )
        strategy.require_chief("ClusterCoordinator")
        self.strategy = strategy
        strategy.coordinator = weakref.ref(self)
        self._definitions = strategy.definitions
        self._backlog = strategy.backlog = Backlog(max_queued, strategy.max_staleness)
        self._is_idle = True
        self._lock = threading.RLock()  # guards _is_idle; several threads may schedule and join
        self._pid = os.getpid()
        self._no_arguments = self._definitions.dumps(((), {}))
        self._dispatcher = Dispatcher(strategy, self._backlog, seed)
        weakref.finalize(self, self._dispatcher.close, is_end=False)
        self._at_exit = functools.partial(_close, weakref.ref(self))
        atexit.register(self._at_exit)

    def close(self) -> None:
        """End the job: workers and servers stop. Called automatically when the program ends.

        Functions that have not ended are given up: call `join` first. A forked child's call does
        nothing.
        """
        if os.getpid() != self._pid:
            return
        atexit.unregister(self._at_exit)
        self._dispatcher.close(is_end=True)
        # If a worker belongs to a later coordinator, the servers do too.
        if not any(link.is_replaced for link in self._dispatcher.links):
            self.strategy.end_job()

    def __enter__(self) -> ClusterCoordinator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError("a ClusterCoordinator cannot be used in functions that it schedules")

    @property
    def workers(self) -> list[int]:
        """The indexes of the workers that are connected."""
        return [i for i, link in enumerate(self._dispatcher.links) if link.is_ready]

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> RemoteValue:
        """Schedule a call of `fn` on a worker; returns at once, unless `max_queued` functions wait.

        Args:
            fn: the function.
            args: its arguments, a tuple or list, pickled now. Per-worker datasets, iterators and
                values become those of the worker; remote values are waited for, and replaced by
                their values.
            kwargs: its keyword arguments, treated as `args`.

        Returns:
            The future result.

        Raises:
            ValueError: args is not a tuple or list.
            TypeError: fn is not callable, kwargs is not a dict with names, or something cannot be
                pickled, which the message names.
            BaseException: an earlier function raised it.
        """
        _check_call(fn, args, kwargs)
        try:
            function = self._definitions.function(fn)
            arguments = self._no_arguments
            if args or kwargs:
                given = tuple(args), kwargs or {}
                parts = parts_of_arguments(*given)
                arguments = pickle_or_explain(self._definitions.dumps, given, "a call", parts)
        except Exception:
            self._backlog.raise_failure()  # an earlier function's error may be the cause
            raise
        with self._lock:
            if self._is_idle:
                self._dispatcher.state_update = self.strategy.before_calls()
                self._is_idle = False
            value = self._backlog.put(function, *arguments)
        self._dispatcher.wake()
        return value

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        steps: int,
        directory: str | Path,
        save_every: int = 1000,
        state: dict[str, Any] | None = None,
    ) -> Iterator[int]:
        """Schedule `fn` until it has ended `steps` times, whatever servers are lost meanwhile.

        Begins with the checkpoint in `directory` if there is one. After every `save_every` calls,
        once they have ended, yields the number of calls that have ended in all; modules of the
        scope then hold the servers' values. Saves a checkpoint when the loop continues. If a server
        is lost, waits for `fastdist run` to start it again, restores the last checkpoint, and
        repeats the calls since then. The data of workers does not go back.

        Args:
            fn: the function.
            args: its arguments, as for `schedule`.
            kwargs: its keyword arguments.
            steps: the number of calls, those of earlier starts of the program included.
            directory: the checkpoint's directory, which all servers and the chief see.
            save_every: calls between two checkpoints.
            state: the program's own, saved in checkpoints: anything that JSON can hold. What is
                restored replaces its contents; `state["step"]` is the number of calls.

        Raises:
            ValueError: steps is negative, save_every is not positive, or the checkpoint is none of
                `run`.
            UnavailableError: a server has not come back within FASTDIST_RENDEZVOUS_TIMEOUT_S, or
                calls have failed several times after a restore.
            BaseException: a function raised it.
        """
        if to_integer(steps, "steps") < 0:
            raise ValueError(f"steps must be 0 or more, got {steps}")
        if to_integer(save_every, "save_every") < 1:
            raise ValueError(f"save_every must be at least 1, got {save_every}")
        _check_call(fn, args, kwargs)
        schedule = functools.partial(self.schedule, fn, args, kwargs)
        state = {} if state is None else state
        return self._saved_steps(schedule, steps, Path(directory), save_every, state)

    def _saved_steps(
        self,
        schedule: Callable[[], RemoteValue],
        steps: int,
        directory: Path,
        save_every: int,
        state: dict[str, Any],
    ) -> Iterator[int]:
        if self.strategy.has_saved(directory):
            self._restore(directory, state)
        else:
            state["step"] = 0
            self.strategy.save(directory, state)
        restores = 0
        while state["step"] < steps:
            count = min(save_every, steps - state["step"])
            try:
                try:
                    for _ in range(count):
                        schedule()
                finally:
                    self.join()  # also the calls that run beside one that has failed
                state["step"] += count
                yield state["step"]
                self.strategy.save(directory, state)
                restores = 0
            except UnavailableError:
                restores += 1
                if restores > _MOST_RESTORES:
                    raise
                self._restore(directory, state)

    def _restore(self, directory: Path, state: dict[str, Any]) -> None:
        """Restore the checkpoint, once all servers are there."""
        end_s = time.monotonic() + settings().rendezvous_timeout_s
        while True:
            try:
                restored = self.strategy.restore(directory)
                break
            except UnavailableError:
                if time.monotonic() > end_s:
                    raise
                time.sleep(_RETRY_S)
        if not isinstance(restored, dict) or "step" not in restored:
            raise ValueError(
                f"{directory} has no checkpoint of ClusterCoordinator.run: its state is "
                f'{restored!r}, expected a dict with "step"'
            )
        state.clear()
        state.update(restored)

    def join(self) -> None:
        """Wait until all scheduled functions have ended.

        Then modules of the scope hold the servers' values.

        Raises:
            BaseException: the first function that failed raised it.
        """
        try:
            self._backlog.join()
        finally:
            self._end_calls()

    def done(self) -> bool:
        """Return True if all scheduled functions have ended.

        Raises:
            BaseException: the first function that failed raised it.
        """
        return self._backlog.is_done()

    def fetch(self, values: Any, timeout: float | None = None) -> Any:
        """Wait for remote values, and return their results in the same structure.

        Args:
            values: a remote value, or a tuple, list or dict of remote values; other leaves are
                returned unchanged.
            timeout: seconds to wait for each remote value.

        Raises:
            BaseException: one of the functions raised it.
        """
        return map_structure(
            lambda leaf: leaf.fetch(timeout) if isinstance(leaf, RemoteValue) else leaf, values
        )

    def create_per_worker_dataset(self, dataset_fn: Callable[[], Any] | Any) -> PerWorkerDataset:
        """Create a dataset on each worker.

        Args:
            dataset_fn: a function that makes the dataset on the worker, when it is first used there
                and after each restart of the worker; or a dataset, which is copied to each worker.

        Returns:
            An argument for scheduled functions; `iter` of it makes an iterator on each worker.

        Raises:
            TypeError: it cannot be pickled; the message names the part.
        """
        name = getattr(dataset_fn, "__qualname__", type(dataset_fn).__name__)
        make = dataset_fn if callable(dataset_fn) else functools.partial(identity, dataset_fn)
        dataset = PerWorkerDataset(self._definitions)
        definition = pickle_or_explain(
            self._definitions.define, make, name, parts_of_function(dataset_fn)
        )
        self._definitions.name(dataset, definition)
        return dataset

    def _end_calls(self) -> None:
        with self._lock:
            if self._backlog:  # another thread has scheduled more functions
                return
            reports, self._dispatcher.reports = self._dispatcher.reports, []
            try:
                self.strategy.apply_reports(reports)
            except Exception as error:
                raise FastdistError(f"a worker's state update cannot be read: {error!r}") from error
            if not self._is_idle:
                self._is_idle = True
                self.strategy.after_calls()


def _check_call(fn: object, args: object, kwargs: object) -> None:
    if not callable(fn):
        raise TypeError(f"schedule: fn must be callable, got {type(fn).__name__}")
    if not isinstance(args, (tuple, list)):
        raise ValueError(f"schedule: args must be a tuple or list, got {type(args).__name__}")
    if not isinstance(kwargs, dict | None):
        raise TypeError(f"schedule: kwargs must be a dict, got {type(kwargs).__name__}")
    for name in kwargs or ():
        if not isinstance(name, str):
            raise TypeError(f"schedule: the names of kwargs must be str, got {name!r}")


def _close(known: weakref.ref[ClusterCoordinator]) -> None:
    coordinator = known()
    if coordinator is not None:
        coordinator.close()
