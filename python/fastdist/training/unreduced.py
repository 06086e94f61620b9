"""Compares what runs change without a backward, which would have reduced and compared it.

A step by gradients of torch.autograd.grad or torch.func, or an update by hand, has this replica's
own gradients, unless the function has averaged them.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fastdist.collectives.communicator import Communicator
from fastdist.errors import CollectiveMismatchError, FastdistError
from fastdist.training.contributions import ReducedParameter
from fastdist.training.parameter_sample import (
    Element,
    element_of,
    first_difference,
    scattered,
)
from fastdist.training.step_record import StepRecord

_ELEMENTS = 16


class UnreducedRuns:
    """The runs of one replica."""

    def __init__(
        self, parameters: Sequence[ReducedParameter], workers: Communicator, record: StepRecord
    ) -> None:
        self._parameters = parameters
        self._workers = workers
        self._record = record
        self._runs = 0
        self._turn = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Return a context manager around a run on copies, of which it looks at some parameters.

        Every replica must call, if the run changes parameters.
        """
        self._runs += 1
        apart = -(-len(self._parameters) // _ELEMENTS) or 1
        some = [reduced.ref for reduced in self._parameters[self._runs % apart :: apart]]
        before = _versions(some)
        yield
        record = self._record
        is_reduced = record.has_reduced or record.has_stepped
        if not is_reduced and _versions(some) != before:
            self._compare("")

    def require_reduced(self) -> None:
        """Check the gradients of a step that one replica takes for all. Every replica must call."""
        if not self._record.is_reduced:
            self._compare("the gradient of ")
            self._record.is_reduced = True

    def _compare(self, of: str) -> None:
        try:  # a call that no other is like, since other replicas may not be here
            self._workers.all_reduce(np.zeros(_ELEMENTS, np.int8), "max")
        except CollectiveMismatchError as error:
            raise FastdistError(
                "a run without backward has changed parameters on this replica, and not on others, "
                "which make another call: updates by hand, and weights that are loaded in run, "
                f"must be the same on all replicas. {error}",
                error.ranks,
            ) from None
        everyone = self._workers.all_gather_object(list(self._elements(bool(of))))
        for other, theirs in enumerate(everyone):
            found = first_difference(everyone[0], theirs, is_exact=self._record.is_exact)
            if found is not None:
                raise FastdistError(
                    f"{of}{found[0].what} is {found[0].value:.9g} on replica 0 and "
                    f"{found[1].value:.9g} on replica {other}, in a run without backward. "
                    "backward() reduces gradients over the replicas; those of torch.autograd.grad "
                    "and torch.func, and updates by hand, are this replica's own: average them "
                    "first, by replica = fastdist.get_replica_context() and "
                    'replica.all_reduce("mean", [replica.relative_weight * g for g in gradients])',
                    (other,),
                )

    def _elements(self, of_gradients: bool) -> Iterator[Element]:
        """Yield elements of parameters or their gradients, others each time."""
        self._turn += 1
        for number in range(_ELEMENTS if self._parameters else 0):
            at = self._turn * _ELEMENTS + number
            reduced = self._parameters[at % len(self._parameters)]
            parameter = reduced.ref()
            tensor = parameter.grad if of_gradients and parameter is not None else parameter
            is_trained = parameter is not None and parameter.requires_grad
            if is_trained and tensor is not None and not tensor.is_sparse and tensor.numel():
                yield element_of(reduced, "", tensor, scattered(at) % tensor.numel())


def _versions(refs: Sequence[weakref.ref[torch.nn.Parameter]]) -> list[int]:
    # Others may be a replica's own, such as Keras' variables of metrics.
    return [p._version for ref in refs if (p := ref()) is not None and p.requires_grad]
