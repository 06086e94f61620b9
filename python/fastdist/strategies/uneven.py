"""Remembers what runs returned for batches of which replicas had unequal parts.

One replica's result is a plain tensor, which says nothing of its batch; a mean over replicas must
weigh it by its examples all the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from fastdist.replicas.per_replica import leaves


class UnevenResults:
    """The tensors that the last run returned, if its batch was uneven."""

    def __init__(self) -> None:
        self._examples: tuple[int, ...] = ()
        self._tensors: dict[int, weakref.ref[torch.Tensor]] = {}

    def note(self, results: Sequence[Any], examples: tuple[int, ...]) -> None:
        """Take over the results of a run, one for each local replica."""
        self._tensors = {}
        if examples.count(examples[0]) == len(examples):
            return
        self._examples = examples
        for leaf in leaves(list(results)):
            if isinstance(leaf, torch.Tensor):
                self._tensors[id(leaf)] = weakref.ref(leaf)

    def examples_of(self, value: Any) -> tuple[int, ...] | None:
        """How many examples each replica had where that differed; None where nothing is known."""
        known = self._tensors.get(id(value))
        return self._examples if known is not None and known() is value else None
