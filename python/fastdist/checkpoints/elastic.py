"""Training that continues when ranks join or leave."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
from torch import nn

from fastdist.checkpoints.checkpoint import Checkpoint, may_refuse
from fastdist.checkpoints.files import PartFiles
from fastdist.checkpoints.manager import CheckpointManager, Staging
from fastdist.collectives.communicator import Communicator
from fastdist.collectives.init import default_communicator, elastic_member, must_regroup
from fastdist.errors import CollectiveTimeoutError, LostRankError
from fastdist.strategies.replicated import ReplicatedStrategy

T = TypeVar("T")
_log = logging.getLogger("fastdist")
_MOST_FAILURES = 100  # in a row, without a commit between; the launcher limits lost ranks


class WorldChangedError(BaseException):
    """Leaves the training function; not an Exception, which the function might handle."""


class Elastic:
    """Runs a training function again, from its last commit, when ranks come or go.

    It is for jobs under `fastdist run --min 2 --max 4`; without, `run` only restores from `manager`
    and calls the function, and `commit` does nothing. Until `run`, each rank is alone, so that none
    waits for another that starts. When a rank is lost, the others leave `train`, go back to the
    last commit, divide the same global batches among fewer replicas, and call `train` again; a new
    rank joins at a commit. So results are those of one device, up to rounding.

    `train` must continue from the checkpoint's state. To continue within an epoch, datasets must be
    parts of the checkpoint. `run` is called once; what follows it is not protected.

    Args:
        strategy: a `MirroredStrategy` or `MultiWorkerMirroredStrategy`.
        checkpoint: the shared state, restored to the last commit when a step is lost. Gradients are
            not part of it.
        manager: the manager to restore from when the job begins. If `train` saves to it, the work
            outlasts the loss of all ranks.

    Examples:
        >>> import fastdist as fd, torch
        >>> strategy = fd.MirroredStrategy(["cpu:0"])
        >>> with strategy.scope():
        ...     model = torch.nn.Linear(2, 1)
        >>> batches = strategy.distribute_dataset(torch.ones(8, 2), global_batch_size=4)
        >>> checkpoint = fd.Checkpoint(model=model, data=batches, step=0)
        >>> elastic = fd.Elastic(strategy, checkpoint)
        >>> def train():
        ...     for batch in batches:
        ...         strategy.run(model, args=(batch,))
        ...         checkpoint.step += 1
        ...         elastic.commit()
        >>> elastic.run(train)
        >>> checkpoint.step
        2
    """

    def __init__(
        self,
        strategy: ReplicatedStrategy,
        checkpoint: Checkpoint,
        manager: CheckpointManager | None = None,
    ) -> None:
        if not isinstance(strategy, ReplicatedStrategy):
            raise TypeError(
                "Elastic: expected a MirroredStrategy or MultiWorkerMirroredStrategy, got "
                f"{type(strategy).__name__}"
            )
        self._strategy = strategy
        self._checkpoint = checkpoint
        self._manager = manager
        self._staging = Staging()
        self._saved: dict[str, PartFiles] = {}
        self._commits = 0
        self._replicas_before = 1

    def commit(self) -> None:
        """Keep the checkpoint's state in memory, and let ranks that wait join.

        Every replica must call, outside `run` of the strategy, between steps. Costs a copy of the
        state, and twice its memory. If copying takes long compared with a step, commit every few
        steps; a lost rank then costs up to that many steps.
        """
        if not self._strategy.is_elastic:
            return
        if self._strategy.has_left:  # the function has continued after an error
            raise WorldChangedError("a collective has failed since the last commit")
        self._keep()
        self._commits += 1
        if must_regroup(default_communicator()):
            raise WorldChangedError

    def run(self, train: Callable[[], T]) -> T:
        """Call `train` until it returns, from the last commit each time; return its result.

        Raises:
            PeerFailureError: it was raised 100 times in a row without a commit between. The same
                holds for the error that `commit` raises if `train` swallowed the failure.
            RuntimeError: `run` was called before; a rank that comes later would not know that.
            Exception: what `train` raises on this rank, which leaves the job; the others continue.
        """
        if not self._strategy.is_elastic:
            if self._manager is not None:
                self._manager.restore(self._checkpoint)
            return train()

        def train_from_commit() -> T:
            self._take_over()
            return train()

        return self._repeat(train_from_commit)

    def _repeat(self, train: Callable[[], T]) -> T:
        """Regroup and call a function, which calls `_take_over`, until no rank is lost in it."""
        member = elastic_member()
        assert member is not None
        if member.has_run:
            raise RuntimeError(
                "Elastic.run, or Keras' fit in an elastic job, was called twice; train in one call"
            )
        member.has_run = True
        self._strategy.adopt_new()  # later, ranks that join would have more to adopt than others
        failures, reached = 0, -1
        while True:
            try:
                self._replicas_before = self._strategy.num_replicas_in_sync
                member.progress = self._commits
                self._strategy.regroup()
                result = train()
                default_communicator().barrier()  # if a rank is lost now, all train again
            except (LostRankError, WorldChangedError) as error:
                failures = failures + 1 if self._commits == reached else 1
                reached = self._commits
                if failures == _MOST_FAILURES:
                    raise
                if isinstance(error, CollectiveTimeoutError):
                    member.report(error.ranks)
                _log.info("going back to commit %d: %s", self._commits, error)
            else:
                member.finish()
                return result

    def _take_over(self) -> None:
        """Take over the state of the ranks that have committed most."""
        world = default_communicator()
        commits = world.all_gather(np.array([self._commits])).tolist()
        newest = commits[0]  # the roster sorts by progress, most first
        if self._manager is not None:
            self._manager.belong_to(self._checkpoint)
            if world.rank:
                self._manager.release()  # the directory lock, for rank 0
        if not newest:
            if self._manager is not None:
                self._manager.restore(self._checkpoint)
            self._keep()
        if newest and min(commits) == newest:
            self._restore(None)
        else:
            self._strategy.broadcast(self._own_tensors())
            self._restore(world)
            self._keep()
        self._commits = max(1, newest)
        if self._strategy.is_chief and newest:
            now = self._strategy.num_replicas_in_sync
            _log.warning(
                "%d replicas train now, %d before; they go on from commit %d",
                now,
                self._replicas_before,
                newest - 1,  # the first commit is the initial state
            )

    def _keep(self) -> None:
        """Copy the state of this rank."""
        self._checkpoint.collect(None, self._staging.copy, self._saved.update)

    def _own_tensors(self) -> set[int]:
        """Return the ids of the tensors of the checkpoint's modules."""
        parts = (getattr(self._checkpoint, name) for name in self._checkpoint.names)
        modules = [part for part in parts if isinstance(part, nn.Module)]
        return {id(t) for module in modules for t in (*module.parameters(), *module.buffers())}

    def _restore(self, workers: Communicator | None) -> None:
        """Restore this rank's copy, or that of rank 0 of `workers`."""
        self._checkpoint.load(workers, Path(), self._copies, with_random=True)

    def _copies(self) -> dict[str, PartFiles]:
        """Return the kept parts; clones of tensors that the restored part might keep."""
        copies = {}
        for name, part in self._saved.items():
            tensors = part.tensors
            restored = getattr(self._checkpoint, name, None)
            if not isinstance(restored, nn.Module) or may_refuse(restored):
                tensors = {key: tensor.clone() for key, tensor in tensors.items()}
            copies[name] = PartFiles(part.encoded, tensors, part.class_name)
        return copies
