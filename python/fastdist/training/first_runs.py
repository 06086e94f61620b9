"""Warns of two mistakes that show in a strategy's first runs, though no replica fails.

The batches of a plain DataLoader, given to `run`, are the same on all replicas, which then do the
same work. And a loss that is a mean over tokens or class weights needs `run`'s `weight`, unless all
replicas have equally many per example. A hash of the batch, or of that number, travels with the
first gradients, one number per bit, so that it needs no call of its own.
"""

from __future__ import annotations

import contextlib
import warnings
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from fastdist.replicas.context import state
from fastdist.replicas.per_replica import PerReplica, leaves, select
from fastdist.training.graphed import is_capturing
from fastdist.training.modules import tensor_digest
from fastdist.training.patched import replaced

_RUNS = 3  # runs whose batches are compared
_LOSSES = 10  # runs whose losses are compared
_NODES = 100  # of a loss's graph that are searched
_MEAN = 1  # torch's reduction
_ENGINE = "_engine_run_backward"
_SAMPLE = 4096  # elements of a tensor that are hashed
_UNEVEN = (
    "the loss is a mean over the positions that count (ignore_index) or over the weights of "
    "classes, of which the replicas have different numbers per example: the mean of their "
    "gradients is not the gradient of the global batch. Pass that number as weight: "
    "strategy.run(step, args=(batch,), weight=fastdist.map(lambda labels: (labels != -100).sum(), "
    "labels))"
)
_SAME = (
    f"run got the same tensors on all replicas in its first {_RUNS} runs, so every replica does "
    "the same work, unless the function takes its own part of them: strategy.distribute_dataset("
    "dataset, global_batch_size=…) divides batches among the replicas, and takes a DataLoader too"
)


class FirstRuns:
    """The batches and losses of one replica's first runs."""

    def __init__(self) -> None:
        self._left = _RUNS
        self._losses_left = _LOSSES
        self._own: int | None = None  # examples in a divided batch
        self._all = 0  # in those of all replicas
        self._hash: int | None = None
        self._sent: int | None = None
        self._seen: set[int] = set()
        self._found: list[str] = []  # warnings to give

    @contextlib.contextmanager
    def watching(self, given: Any, batch: PerReplica[Any] | None, replica: int) -> Iterator[None]:
        """Return a context manager around a run, and what it is given: args, kwargs, a batch."""
        self._hash = self._own = None
        plain = vars(torch.autograd)[_ENGINE]

        def run_backward(roots: Any, *args: Any, **kwargs: Any) -> Any:
            replica = state.replica
            if replica is not None and not replica.is_weighed and kwargs.get("accumulate_grad"):
                self._look(roots)
            return plain(roots, *args, **kwargs)

        looking: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if batch is not None and batch.examples is not None:
            self._own, self._all = batch.examples[replica], sum(batch.examples)
            if self._losses_left:
                looking = replaced(torch.autograd, _ENGINE, run_backward)
        elif self._left and (tensors := list(_tensors(select(given)))):
            self._hash = zlib.crc32(b"".join(map(_digest, tensors)))
        with looking:
            yield

    def _look(self, losses: Any) -> None:
        """Hash how much the means in the losses count per example."""
        if is_capturing():
            return
        counts = _counts_of_means(losses)
        if counts and self._own:
            # A loss that compares the gathered examples of all replicas counts all everywhere.
            per_example = [
                "all" if count == self._all else f"{count / self._own:.6g}" for count in counts
            ]
            self._hash = zlib.crc32(repr(per_example).encode())

    def take(self) -> int | None:
        """Return the run's hash, None without one; `hash_bits` prepares it for `compare`."""
        self._sent, self._hash = self._hash, None
        return self._sent

    def compare(self, total: torch.Tensor, one_of_all: float) -> None:
        """Compare the sum or mean over replicas of the hash's bits with that of ones."""
        having, *counts = total.tolist()
        is_same = all(count in (0.0, one_of_all) for count in counts)
        if self._own is not None:
            if self._losses_left and having == one_of_all and not is_same:
                self._losses_left = 0
                self._found.append(_UNEVEN)
            self._losses_left = max(0, self._losses_left - 1)
            return
        if not having or not self._left:
            return
        self._left -= 1
        if having != one_of_all or not is_same:
            self._left = 0
            return
        assert self._sent is not None
        self._seen.add(self._sent)
        if not self._left and len(self._seen) == _RUNS:  # constant arguments are no batches
            self._found.append(_SAME)

    def report(self, is_chief: bool) -> None:
        """Warn, once and on one replica, of what was found."""
        found, self._found = self._found, []
        for message in found if is_chief else ():
            warnings.warn(message, stacklevel=6)  # the line that calls run


def _counts_of_means(losses: Any) -> list[float]:
    """Return what each mean of negative log likelihoods in the graph near the losses counts."""
    waiting: list[Any] = [loss.grad_fn for loss in losses if isinstance(loss, torch.Tensor)]
    seen: set[Any] = set()
    counts = []
    while waiting and len(seen) < _NODES:
        node = waiting.pop(0)  # those near the losses first
        if node is None or node in seen:
            continue
        seen.add(node)
        if not node.name().startswith("NllLoss"):
            waiting += [following for following, _ in node.next_functions]
        elif node._saved_reduction == _MEAN:
            counts.append(float(node._saved_total_weight))
    return counts


def _tensors(given: Any) -> Iterator[torch.Tensor | np.ndarray[Any, Any]]:
    """Yield the dense arrays of several elements in a structure."""
    for leaf in leaves(given):
        if isinstance(leaf, Mapping):  # such as transformers' BatchEncoding
            yield from _tensors(dict(leaf))
        elif isinstance(leaf, np.ndarray):
            if leaf.size > 1 and leaf.dtype.kind in "biuf":
                yield leaf
        elif isinstance(leaf, torch.Tensor):
            is_plain = leaf.layout is torch.strided and not leaf.is_quantized
            if is_plain and leaf.numel() > 1 and not leaf.is_complex():
                yield leaf


def _digest(array: torch.Tensor | np.ndarray[Any, Any]) -> bytes:
    flat = array.reshape(-1)
    sample = flat[:: -(-len(flat) // _SAMPLE)]
    kind = f"{array.dtype}{tuple(array.shape)}".encode()
    if isinstance(sample, torch.Tensor):
        return kind + tensor_digest(sample)
    return kind + sample.tobytes()
