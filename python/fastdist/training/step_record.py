"""Compares what keeps replicas equal, each time that gradients are reduced.

That is: the number of the run and of the backward in it, the sizes of the global batch's parts and
where it comes from, the optimizers' steps since the last reduction with their hyperparameters, and
a sample of parameters. A hash of all travels with the gradients, one number per bit, so that every
replica sees a difference.

A run that changes parameters without a backward, by gradients of torch.autograd.grad or torch.func
or by hand, is compared by itself.
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fastdist.collectives.communicator import Communicator
from fastdist.errors import CollectiveMismatchError, FastdistError
from fastdist.replicas.per_replica import Origin
from fastdist.training.contributions import ReducedParameter
from fastdist.training.digests import StepDigests
from fastdist.training.parameter_sample import (
    Element,
    ParameterSample,
    element_of,
    first_difference,
    scattered,
)

_NO_ORIGIN = Origin(0, 0, (), 0, 0)
_ELEMENTS = 16  # that are compared after a run without backward
_EXPLAINED_S = 30.0  # all replicas have just ended the same call
_SAME_DATA = (
    "All replicas must have the same data in the same order, of which each takes its part: give "
    "splits and shuffles a seed, sort lists of files, and number classes by sorted(set(…)); where "
    "each replica has its own data, use distribute_datasets_from_function"
)
_SAME_BATCHES = "All replicas must take the same batches"
_OTHER_STEPS = "replicas have taken different optimizer steps before this backward"
_SAME_STEPS = (
    "All replicas need the same hyperparameters; a scheduler that steps by the loss needs the loss "
    "of all replicas, by all_reduce of the replica context in run, or by strategy.reduce outside"
)
_Fact = tuple[str, Any, str]  # words that name a value, the value, what to do where it differs


@dataclass(slots=True)
class _Steps:
    """Steps of one replica: a hash of all, their number, and the last."""

    code: int = 0
    count: int = 0
    name: str = "no optimizer"
    settings: list[list[tuple[str, Any]]] = field(default_factory=list)  # of each group

    def facts(self) -> Iterator[_Fact]:
        """Yield what all replicas must have in common."""
        for number, group in enumerate(self.settings):
            of = "" if len(self.settings) == 1 else f" of group {number}"
            for key, value in group:
                yield f"{_OTHER_STEPS}: {self.name}'s {key}{of}", repr(value), _SAME_STEPS
        count = f"{self.count} (the last of {self.name})"
        yield f"{_OTHER_STEPS}: their number", count, _SAME_STEPS
        yield f"{_OTHER_STEPS}: a hash of all", self.code, _SAME_STEPS


class StepRecord:
    """The record of one replica."""

    def __init__(self) -> None:
        self.sample: ParameterSample | None = None  # of elements to compare
        self.digests: StepDigests | None = None  # of recorded steps
        self.is_exact = True  # False allows elements to differ by rounding
        self._sent = _Steps()
        self.has_reduced = False  # by a backward of the present run
        self.is_reduced = False  # gradients were reduced since the last step
        self.has_stepped = False  # by gradients that were reduced, in the present run
        self._origin: Origin | None = None
        self.watch([], None)

    def watch(self, parameters: Sequence[ReducedParameter], workers: Communicator | None) -> None:
        """Set the parameters and the replicas, and forget the runs and steps so far.

        Every replica must call.
        """
        self._parameters, self._workers = parameters, workers
        self._taken = _Steps()
        self._run = self._backward = self._turn = 0
        self._unseen: Origin | None = None  # of the first run on a dataset's epoch

    def begin_run(self, origin: Origin | None) -> None:
        """Count a run that begins, on a batch of this origin."""
        self._run += 1
        self._backward = 0
        self.has_reduced = self.has_stepped = False
        self._origin = origin
        if origin is not None and origin.step == 0:
            self._unseen = origin

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Record a step with the optimizer's present hyperparameters."""
        taken = self._taken
        taken.name, taken.settings = type(optimizer).__name__, _settings(optimizer)
        taken.code = zlib.crc32(f"{taken.name}{taken.settings}".encode(), taken.code)
        taken.count += 1
        self.note_step()

    def note_backward(self) -> None:
        """Note that a backward has reduced gradients."""
        self.has_reduced = self.is_reduced = True
        self._unseen = None  # it travels with the gradients

    def note_step(self) -> None:
        """Note that gradients are used."""
        self.has_stepped |= self.is_reduced
        self.is_reduced = False

    @contextlib.contextmanager
    def requiring_backward(self) -> Iterator[None]:
        """Return a context manager around a run on copies, of which it looks at some parameters.

        Every replica must call, if the run changes parameters without a backward.
        """
        apart = -(-len(self._parameters) // _ELEMENTS) or 1
        some = [reduced.ref for reduced in self._parameters[self._run % apart :: apart]]
        before = _versions(some)
        yield
        if not (self.has_reduced or self.has_stepped) and _versions(some) != before:
            self._compare_unreduced("")

    def require_reduced(self) -> None:
        """Check the gradients of a step that one replica takes for all. Every replica must call."""
        if not self.is_reduced:
            self._compare_unreduced("the gradient of ")
            self.is_reduced = True

    def _compare_unreduced(self, of: str) -> None:
        workers = self._workers
        if workers is None:
            return
        try:  # a call that no other is like, since other replicas may not be here
            workers.all_reduce(np.zeros(_ELEMENTS, np.int8), "max")
        except CollectiveMismatchError as error:
            raise FastdistError(
                "a run without backward has changed parameters on this replica, and not on others, "
                "which make another call: updates by hand, and weights that are loaded in run, "
                f"must be the same on all replicas. {error}",
                error.ranks,
            ) from None
        everyone = workers.all_gather_object(list(self._elements(bool(of))))
        for other, theirs in enumerate(everyone):
            found = first_difference(everyone[0], theirs, is_exact=self.is_exact)
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

    def take(self, weights: tuple[float, ...] | None) -> int:
        """Return the hash for `hash_bits`, and start a new record of steps."""
        self._backward += 1
        self._sent, self._taken = self._taken, _Steps()
        values = b"" if self.sample is None else self.sample.take()
        epoch, step, _, code, data = self._origin or _NO_ORIGIN
        # The hash of numbers is the same in every process; None's is not.
        numbers = hash((self._run, self._backward, weights or (), epoch, step, code, data))
        return zlib.crc32(values, self._sent.code) ^ numbers & 0xFFFFFFFF

    def require_equal(self, total: torch.Tensor, weights: tuple[float, ...] | None) -> None:
        """Check the sum or mean over replicas of the hash's bits. Every replica must call."""
        all_alike, *counts = total.tolist()
        if not all(count in (0.0, all_alike) for count in counts):
            self.explain(weights)

    def explain(self, weights: tuple[float, ...] | None) -> None:
        """Compare the records of all replicas themselves. Every replica must call."""
        assert self._workers is not None
        own_facts = [*_facts_of(weights, self._origin), *self._sent.facts()]
        sampled = [] if self.sample is None else self.sample.elements()
        own = ((self._run, self._backward), own_facts, sampled)
        runs, facts, elements = zip(
            *self._workers.all_gather_object(own, timeout=_EXPLAINED_S), strict=True
        )
        _require_same_runs(runs)
        _require_same(facts)
        self._require_same_values(elements)

    def compare_data(self) -> None:
        """Compare the data of an epoch whose runs have no backward. Every replica must call."""
        origin, self._unseen = self._unseen, None
        workers = self._workers
        if origin is None or workers is None:
            return
        own = [origin.epoch, origin.step, origin.code, origin.data]
        found = workers.all_gather(np.array([own]))
        if not (found == found[0]).all():
            _require_same(workers.all_gather_object(list(_facts_of(None, origin))))

    def _require_same_values(self, everyone: Sequence[Sequence[Element]]) -> None:
        for other, elements in enumerate(everyone[1:], 1):
            found = first_difference(everyone[0], elements, is_exact=self.is_exact)
            if found is None:
                continue
            mine, theirs = found
            values = [_value_of(each, mine) for each in everyone]
            alone = [i for i, value in enumerate(values) if values.count(value) == 1]
            is_clear = len(values) > 2 and len(alone) == 1 and len(set(values)) == 2
            who = f", where replica {alone[0]} alone differs" if is_clear else ""
            raise FastdistError(
                f"the replicas have drifted apart: {mine.what} is {mine.value:.9g} on replica 0, "
                f"{theirs.value:.9g} on replica {other}{who}, in run {self._run}. What "
                "changes parameters must be the same on all replicas: "
                "random numbers drawn in run differ (draw outside of run, or from a generator with "
                "one seed), and weights are loaded on every replica, or before the scope ends",
                (alone[0] if is_clear else other,),
            )


def _versions(refs: Sequence[weakref.ref[torch.nn.Parameter]]) -> list[int]:
    # Others may be a replica's own, such as Keras' variables of metrics.
    return [p._version for ref in refs if (p := ref()) is not None and p.requires_grad]


def _value_of(elements: Sequence[Element], like: Element) -> float | None:
    place = like.place, like.key, like.index
    return next((e.value for e in elements if (e.place, e.key, e.index) == place), None)


def _require_same_runs(at: Sequence[tuple[int, int]]) -> None:
    """Compare the numbers of runs, and of the backwards in them."""
    if len(set(at)) == 1:
        return
    ahead, behind = at.index(max(at)), at.index(min(at))
    in_one_run = at[ahead][0] == at[behind][0]
    places = [
        f"backward {backward} of run {run}" if in_one_run else f"run {run}" for run, backward in at
    ]
    culprit = behind if in_one_run else ahead
    run = "" if in_one_run else ", or made a run that others did not make"
    raise FastdistError(
        f"replica {ahead} is in {places[ahead]}, replica {behind} in {places[behind]}: replica "
        f"{culprit} has left out a backward{run}, so gradients of different losses met. All "
        "replicas must make the same runs and backwards; to leave out a batch, they must decide "
        "alike, by all_reduce of the replica context: if any loss is not finite, all return",
        (culprit,),
    )


def _facts_of(weights: tuple[float, ...] | None, origin: Origin | None) -> Iterator[_Fact]:
    """Yield what all replicas' batches must have in common, in order of importance."""
    size = "not divided by distribute_dataset"
    if weights is not None:
        size = f"{sum(weights)} examples, {list(weights)}"
    yield "global batches have different sizes: this one", size, _SAME_BATCHES
    if origin is None:
        return
    for name, value in origin.settings:
        yield f"replicas have different datasets: {name}", value, _SAME_DATA
    step = f"step {origin.step} of epoch {origin.epoch}"
    yield "replicas compute on parts of different global batches: this one", step, _SAME_BATCHES
    if origin.data >= 0:
        of_some = "replicas have other examples at the same places of their data: a hash of some"
        yield of_some, origin.data, _SAME_DATA


def _require_same(everyone: Sequence[Sequence[_Fact]]) -> None:
    """Raise FastdistError for the first fact that differs; one that a replica lacks does not."""
    values = [{name: value for name, value, _ in facts} for facts in everyone]
    for name, mine, advice in everyone[0]:
        for other, theirs in enumerate(each.get(name, mine) for each in values):
            if theirs != mine:
                raise FastdistError(
                    f"{name} is {mine} on replica 0, {theirs} on replica {other}. {advice}",
                    (other,),
                )


def hash_bits(*codes: int | None) -> torch.Tensor:
    """Return a one, seven zeros and the 32 bits of each hash, to be added up over replicas.

    There are zeros in place of None.
    """
    data = [bytes(5) if code is None else b"\x80" + code.to_bytes(4, "big") for code in codes]
    bits = np.unpackbits(np.frombuffer(b"".join(data), np.uint8))
    return torch.from_numpy(bits.astype(np.float32))


def _settings(optimizer: torch.optim.Optimizer) -> list[list[tuple[str, Any]]]:
    return [
        [(key, _plain(value)) for key, value in group.items() if key != "params"]
        for group in optimizer.param_groups
    ]


def _plain(value: Any) -> Any:
    """Return a value whose repr is equal on all replicas; None for a value on a device."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else None
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    return value if isinstance(value, (int, float, str)) else None
