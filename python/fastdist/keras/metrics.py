"""Values of variables, results of metrics, and logs of a step, over all replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import keras
import torch

from fastdist.collectives.communicator import Communicator
from fastdist.replicas.context import state


def weigh_means(metrics: Sequence[Any]) -> None:
    """Let a `Mean` of losses, each of a batch, count a replica's loss by its share of the batch.

    Other updates have a value for each example, or a weight.
    """
    for metric in metrics:
        is_mean = type(metric).update_state is keras.metrics.Mean.update_state
        if is_mean and "update_state" not in vars(metric):
            call = partial(_update_mean, metric.update_state)
            object.__setattr__(metric, "update_state", call)


def _update_mean(plain: Callable[..., Any], values: Any, sample_weight: Any = None) -> Any:
    context = state.replica
    if context is not None and sample_weight is None and keras.ops.ndim(values) == 0:
        sample_weight = context.relative_weight
    return plain(values, sample_weight=sample_weight)


def variables_of(metrics: Sequence[Any]) -> list[Any]:
    """Return the variables of metrics, each once."""
    return list({id(v): v for metric in metrics for v in metric.variables}.values())


def values_of(variables: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors of Keras variables."""
    return [variable.value.detach() for variable in variables]


def put_values(variables: Sequence[Any], values: Sequence[torch.Tensor]) -> None:
    """Set Keras variables in place."""
    with torch.no_grad():
        for variable, value in zip(variables, values, strict=True):
            variable.value.copy_(value)


@contextlib.contextmanager
def unchanged(metrics: Sequence[Any]) -> Iterator[None]:
    """Return a context manager that undoes changes of the metrics' variables at its end."""
    variables = variables_of(metrics)
    before = [value.clone() for value in values_of(variables)]
    try:
        yield
    finally:
        put_values(variables, before)


@contextlib.contextmanager
def combined(
    metrics: Sequence[Any], workers: Communicator, others: Sequence[torch.Tensor] = ()
) -> Iterator[None]:
    """Return a context manager in which the metrics' variables have the values of all replicas.

    Every replica must call. Variables are reduced by their `aggregation`: "sum", "mean", or the
    first replica's value; all in one fused call. `others`, in host memory, are summed in place.
    """
    variables = variables_of(metrics)
    parts = [_part(variable, workers) for variable in variables]
    for tensors in (parts, list(others)):  # the variables may be on GPUs
        if tensors:
            workers.all_reduce(tensors)
    with unchanged(metrics):
        put_values(variables, parts)
        yield


def _part(variable: Any, workers: Communicator) -> torch.Tensor:
    """Return this replica's summand of a variable."""
    value: torch.Tensor = variable.value.detach().clone(memory_format=torch.contiguous_format)
    if variable.aggregation == "sum":
        return value
    if variable.aggregation == "mean":
        return value.double() / workers.world_size
    return value if workers.rank == 0 else torch.zeros_like(value)


def global_logs(
    logs: dict[str, Any],
    metrics: list[Any],
    results: Callable[[], dict[str, Any]],
    workers: Communicator,
    examples: tuple[int, ...] | None,
) -> dict[str, Any]:
    """Return the logs of a step over all replicas. Every replica must call.

    A log that is the result of one of the model's metrics becomes the metric's result over all
    replicas. Other numbers become means, weighted by the examples of the step.

    Args:
        logs: the step's result on this replica; all replicas have the same names.
        results: a function that computes the results of the metrics from their variables.
        examples: the examples of each replica in this step; None if all weigh the same.
    """
    logs = dict(flattened(logs))
    names = [name for name in sorted(logs) if is_number(logs[name])]
    numbers = torch.tensor([float(logs[name]) for name in names], dtype=torch.float64)
    own = {name: float(value) for name, value in results().items() if is_number(value)}
    candidates = sorted(own)
    values = torch.tensor([own[name] for name in candidates], dtype=torch.float64)
    matches = (numbers[:, None] == values).double()
    share = 1 / workers.world_size
    if examples is not None:
        share = examples[workers.rank] / max(1, sum(examples))
    if not share:  # metrics have not counted the borrowed example
        matches.fill_(1.0)
    means = numbers * share if share else torch.zeros_like(numbers)
    with combined(metrics, workers, [means, matches]):
        whole = results()
    found = dict(zip(names, means.tolist(), strict=True))
    for i, name in enumerate(names):
        equal = [c for k, c in enumerate(candidates) if matches[i, k] == workers.world_size]
        if equal:
            found[name] = whole[name if name in equal else equal[0]]
    return logs | found


def flattened(logs: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the values of logs; the results of metrics may be dicts, as Keras takes them."""
    for name, value in logs.items():
        if isinstance(value, dict):
            yield from flattened(value)
        else:
            yield name, value


def is_number(value: Any) -> bool:
    """Return True if a value of the logs is a number."""
    return isinstance(value, (int, float)) or getattr(value, "shape", None) == ()
