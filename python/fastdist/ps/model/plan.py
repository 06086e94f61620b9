"""Plans which values of a scope go to servers, how servers update them, and what workers get."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fastdist.ps.client.partition import Piece, RoundRobin
from fastdist.ps.coordinator.shipping import Definitions
from fastdist.ps.model.dense import exact_value
from fastdist.ps.model.embeddings import TableLayer, table_embeddings
from fastdist.ps.model.row_wise_adagrad import RowWiseAdagrad
from fastdist.ps.model.table_weight import TableWeight, table_weight
from fastdist.ps.wire.specs import DenseSpec, RowsSpec, RuleSpec
from fastdist.training.frameworks import inner_modules, state_of
from fastdist.training.modules import is_materialized, modules_of, named_buffers, named_parameters

# Buffers add up the workers' changes; a parameter without an optimizer stays as it is.
_ADD = RuleSpec("SGD", {"lr": 1.0})
_FREEZE = RuleSpec("SGD", {"lr": 0.0})
# Options of optimizers that do not change the result.
_IGNORED = frozenset({"foreach", "fused", "capturable", "differentiable"})
_OF_TORCH = ("SGD", "Adagrad", "Adam", "AdamW", "RMSprop")
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class Placement:
    """A value, and the servers that keep it."""

    tensor: int  # its number in `tensors_in`
    spec: DenseSpec | RowsSpec
    pieces: tuple[Piece, ...]
    is_buffer: bool  # also for a parameter that its layer uses as one


def tensors_in(roots: Sequence[nn.Module]) -> list[tuple[str, torch.Tensor]]:
    """Return parameters in the order of their creation, then buffers; each once, with a name."""
    return [*named_parameters(roots), *named_buffers(roots)]


def plan(
    roots: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.Optimizer],
    servers: RoundRobin,
    prefix: str,
    *,
    wire: str,
    refuse_nonfinite: bool,
    allows_stale_rows: bool,
) -> list[Placement]:
    """Place all trained parameters and all buffers of modules on servers.

    `allows_stale_rows`: workers may use rows that others have changed since.
    """
    rules = _rules(optimizers)
    tables = {id(module.weight): module for module in table_embeddings(roots)}
    modules = [module for root in roots for module in inner_modules(root)]
    buffers = {id(tensor) for module in modules for tensor in state_of(module).values()}
    placements = []
    for number, (name, tensor) in enumerate(tensors_in(roots)):
        if not is_materialized(tensor):
            raise ValueError(
                f"{name} is lazy: call its module once in the scope to give it a shape"
            )
        is_buffer = id(tensor) in buffers
        if not _is_served(name, tensor, is_buffer):
            continue
        rule = _ADD if is_buffer else rules.get(id(tensor), _FREEZE)
        spec: DenseSpec | RowsSpec
        if id(tensor) in tables:
            module = tables[id(tensor)]
            spec = RowsSpec(prefix + name, tensor.shape[1], rule, tensor.shape[0])
            if isinstance(module, TableLayer):
                if module.cached_rows and not allows_stale_rows:
                    raise ValueError(
                        f"{name} has cached_rows={module.cached_rows}: cached rows may be some "
                        "lookups old, but synchronous=True and max_staleness promise that a step "
                        "sees earlier steps"
                    )
                spec = dataclasses.replace(module.spec, name=spec.name, rule=rule)
        else:
            if rule.name == RowWiseAdagrad.__name__:
                raise ValueError(
                    f"{name} is dense, but {rule.name} updates rows of embeddings: give its "
                    "parameter to another optimizer, such as torch.optim.Adagrad"
                )
            spec = DenseSpec(prefix + name, tuple(tensor.shape), rule)
        if not is_buffer:  # buffers are sums: a narrow encoding would lose small changes
            spec = dataclasses.replace(spec, wire=wire, refuse_nonfinite=refuse_nonfinite)
        if isinstance(spec, RowsSpec) and spec.rows is None:
            pieces = servers.everywhere()
        else:
            pieces = servers.place(tuple(tensor.shape), tensor.element_size())
        placements.append(Placement(number, spec, pieces, is_buffer))
    return placements


def _rules(optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, RuleSpec]:
    rules: dict[int, RuleSpec] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rule = _rule_of(optimizer, group)
            for parameter in group["params"]:
                if id(parameter) in rules:
                    raise ValueError(
                        f"a parameter of shape {tuple(parameter.shape)} has two optimizers; "
                        "parameter servers apply only one"
                    )
                rules[id(parameter)] = rule
    return rules


def _rule_of(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> RuleSpec:
    """Return the update rule for one group of parameters; raise ValueError if there is none."""
    name = type(optimizer).__name__
    if type(optimizer) not in (RowWiseAdagrad, *(getattr(torch.optim, kind) for kind in _OF_TORCH)):
        raise ValueError(
            f"parameter servers cannot apply {name}; expected one of {', '.join(_OF_TORCH)} of "
            "torch.optim, or fd.ps.RowWiseAdagrad for embeddings"
        )
    options = {
        key: value.item() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key in optimizer.defaults and key not in _IGNORED  # others have added other keys
    }
    if options.pop("amsgrad", False):
        raise ValueError(
            f"parameter servers apply {name} with amsgrad=False, got {group['amsgrad']!r}"
        )
    if options.pop("decoupled_weight_decay", False) and name != "AdamW":
        raise ValueError(f"{name} with decoupled_weight_decay=True is AdamW: use torch.optim.AdamW")
    rule = RuleSpec(name, options)
    rule.make()  # raises for an invalid option
    return rule


def _is_served(name: str, tensor: torch.Tensor, is_buffer: bool) -> bool:
    if is_buffer:
        if tensor.dtype == torch.int64 and tensor.numel() == 1:
            exact_value(name, tensor)  # raises if servers cannot keep it
            return True
        return tensor.dtype in _FLOATS
    if not tensor.requires_grad:
        return False
    if tensor.dtype not in _FLOATS:
        raise ValueError(
            f"{name} has dtype {tensor.dtype}; parameter servers keep float32, and accept float16 "
            "and bfloat16"
        )
    return True


@dataclass(frozen=True, slots=True, eq=False)
class Bundle:
    """Modules and optimizers of one scope, and the placement of their values."""

    prefix: str  # what the names of its values begin with
    roots: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Optimizer, ...]
    others: tuple[Any, ...]  # schedulers and gradient scalers
    placements: tuple[Placement, ...]
    first_optimizer: int  # the number of the first optimizer, counted over all scopes
    concurrency: int  # functions that may change the values without knowing of each other

    def parts(self) -> list[Any]:
        """Return all objects that functions may refer to, in the same order on all tasks."""
        tensors = [tensor for _, tensor in tensors_in(self.roots)]
        return [*modules_of(self.roots), *self.optimizers, *self.others, *tensors]


def define_bundle(
    definitions: Definitions, bundle: Bundle, adopt: Callable[[Bundle], list[Any]]
) -> None:
    """Define a bundle, which `adopt` takes on each worker; functions refer to its parts."""
    tensors = [tensor for _, tensor in tensors_in(bundle.roots)]
    hollow = {
        id(tensors[placement.tensor]): _reduce_without_values(tensors[placement.tensor])
        for placement in bundle.placements
        if not placement.is_buffer
    }
    definition = definitions.define(
        functools.partial(adopt, bundle), replacements=hollow, is_state=True
    )
    for number, part in enumerate(bundle.parts()):
        definitions.name(part, definition, number)


def _reduce_without_values(parameter: torch.Tensor) -> tuple[Any, ...]:
    shape, dtype = tuple(parameter.shape), parameter.dtype
    if isinstance(parameter, TableWeight):
        return table_weight, (*shape, dtype)
    return _zeros, (shape, dtype)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=dtype))
