"""Which values of modules go to servers, and what servers are to do with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fastdist.ps.client.partition import Piece, RoundRobin
from fastdist.ps.model.dense import exact_value
from fastdist.ps.model.embeddings import Table, tables_in
from fastdist.ps.model.rules import rule_of
from fastdist.ps.wire.specs import DenseSpec, RowsSpec, RuleSpec
from fastdist.training.modules import is_materialized, named_buffers, named_parameters

# A buffer's rule adds what each worker has changed; a parameter without an optimizer stays.
_ADD = RuleSpec("SGD", {"lr": 1.0})
_STAY = RuleSpec("SGD", {"lr": 0.0})
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Wishes:
    """What holds for all values of a job.

    Attributes:
        wire: how they travel: "float32", "bfloat16", "float16" or "int8".
        refuse_nonfinite: whether gradients with NaN or infinity are errors.
        may_be_old: whether workers may use rows that others have changed since.
    """

    wire: str = "float32"
    refuse_nonfinite: bool = False
    may_be_old: bool = True


@dataclass(frozen=True, slots=True)
class Place:
    """A value, and the servers that keep it.

    Attributes:
        tensor: its number among the parameters and buffers of the modules.
        spec: what it is.
        pieces: where its rows are.
    """

    tensor: int
    spec: DenseSpec | RowsSpec
    pieces: tuple[Piece, ...]


def tensors_in(roots: Sequence[nn.Module]) -> list[tuple[str, torch.Tensor]]:
    """Parameters in the order in which they were made, then buffers; each once, with a name."""
    return [*named_parameters(roots), *named_buffers(roots)]


def plan(
    roots: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    servers: RoundRobin,
    prefix: str,
    wishes: Wishes,
) -> list[Place]:
    """Where everything that is trained, and what BatchNorm and its like count, is to be.

    Raises:
        ValueError: something that servers cannot keep, or an optimizer that they cannot apply.
    """
    rules = _rules(optimizers)
    tables = {id(module.weight): module for module in tables_in(roots)}
    places = []
    for number, (name, tensor) in enumerate(tensors_in(roots)):
        if not is_materialized(tensor):
            raise ValueError(
                f"{name} is lazy: call its module once in the scope, so that it has a shape"
            )
        if not _is_served(name, tensor):
            continue
        is_parameter = isinstance(tensor, nn.Parameter)
        rule = rules.get(id(tensor), _STAY) if is_parameter else _ADD
        spec: DenseSpec | RowsSpec
        if id(tensor) in tables:
            _check_cache(name, tables[id(tensor)], wishes)
            spec = _rows_spec(tables[id(tensor)], prefix + name, rule)
        else:
            spec = DenseSpec(prefix + name, tuple(tensor.shape), rule)
        # Buffers are added up, and must not lose what is small.
        travels = wishes if is_parameter else Wishes()
        spec = dataclasses.replace(
            spec, wire=travels.wire, refuse_nonfinite=travels.refuse_nonfinite
        )
        if isinstance(spec, RowsSpec) and spec.rows is None:
            pieces = servers.everywhere()
        else:
            pieces = servers.place(tuple(tensor.shape), tensor.element_size())
        places.append(Place(number, spec, pieces))
    return places


def _check_cache(name: str, module: nn.Module, wishes: Wishes) -> None:
    if isinstance(module, Table) and module.cached_rows and not wishes.may_be_old:
        raise ValueError(
            f"{name} has cached_rows={module.cached_rows}, rows that may be some lookups old; "
            "synchronous=True and max_staleness promise that a step sees those before it"
        )


def _rows_spec(module: nn.Module, name: str, rule: RuleSpec) -> RowsSpec:
    if not isinstance(module, Table):
        weight = module.weight
        assert isinstance(weight, torch.Tensor)
        return RowsSpec(name, weight.shape[1], rule, weight.shape[0])
    return RowsSpec(
        name,
        module.embedding_dim,
        rule,
        module.num_embeddings,
        module.initializer,
        module.seed,
        module.storage,
        module.max_rows,
        module.max_age,
    )


def _rules(optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, RuleSpec]:
    rules: dict[int, RuleSpec] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rule = rule_of(optimizer, group)
            for parameter in group["params"]:
                if id(parameter) in rules:
                    raise ValueError(
                        f"a parameter of shape {tuple(parameter.shape)} has two optimizers; a "
                        "parameter server applies one"
                    )
                rules[id(parameter)] = rule
    return rules


def _is_served(name: str, tensor: torch.Tensor) -> bool:
    if not isinstance(tensor, nn.Parameter):
        if tensor.dtype == torch.int64 and tensor.numel() == 1:
            exact_value(name, tensor)  # says whether it can be kept
            return True
        return tensor.dtype in _FLOATS
    if not tensor.requires_grad:
        return False
    if tensor.dtype not in _FLOATS:
        raise ValueError(
            f"{name} is of {tensor.dtype}; parameter servers keep float32, and take float16 and "
            "bfloat16"
        )
    return True
