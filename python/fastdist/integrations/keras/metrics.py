"""Results of metrics over all replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fastdist.collectives.communicator import Communicator
from fastdist.integrations.keras.saved import put_values, values_of


def variables_of(metrics: Sequence[Any]) -> list[Any]:
    """Return the variables of metrics, each once."""
    return list({id(v): v for metric in metrics for v in metric.variables}.values())


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
    first replica's value; all in one fused call.

    Args:
        metrics: the metrics of a model.
        workers: connects all replicas.
        others: tensors in host memory that are summed over replicas too, in place.
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
