"""The values of a scope's modules, pulled from servers and sent back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from fastdist.errors import FastdistError
from fastdist.ps.client.client import Client
from fastdist.ps.client.items import Item, Ticket
from fastdist.ps.client.sharded import (
    Lookup,
    Sharded,
    ShardedRows,
    ShardedVariable,
    commit_round,
    discard_rounds,
    items_of,
)
from fastdist.ps.model.dense import ServedBuffers, ServedTensor, assign_all, exact_value
from fastdist.ps.model.embeddings import (
    EmbeddingBagCollection,
    TableLayer,
    attach_table,
    table_embeddings,
)
from fastdist.ps.model.plan import Bundle, tensors_in
from fastdist.ps.model.table import Prefetch, RowCache, ServedTable
from fastdist.ps.model.table_weight import convert_weight
from fastdist.ps.wire.specs import DenseSpec
from fastdist.training.modules import modules_of, named_parameters, structure_of


class ServedModel:
    """The modules and optimizers of one scope.

    To `initialize`, servers take this task's values.
    """

    def __init__(self, client: Client, bundle: Bundle, *, initialize: bool) -> None:
        self.bundle = bundle
        self.buffers = ServedBuffers(client, bundle.roots, bundle.concurrency)
        # Servers reject gradients that are not finite.
        self.refuses_nonfinite = any(each.spec.refuse_nonfinite for each in bundle.placements)
        self._client = client
        self._parameters: dict[int, ServedTensor] = {}  # by id
        self._tables: dict[int, ServedTable] = {}  # by the weight's id
        # What is being pulled, and for whom.
        self._pulling: tuple[list[tuple[ServedTensor | Prefetch, Lookup]], list[Ticket]] | None
        self._fixed = [_fixed_rates(optimizer) for optimizer in bundle.optimizers]
        self._given_rates: object = None
        self._given_modes: object = None
        self.collections = [
            module for module in modules_of(bundle.roots) if type(module) is EmbeddingBagCollection
        ]
        self._embeddings = {id(module.weight): module for module in table_embeddings(bundle.roots)}
        self.connect(initialize=initialize)
        self._structure = structure_of(bundle.roots)

    def connect(self, *, initialize: bool) -> None:
        """Find all values on the servers; to `initialize`, missing ones start with this task's."""
        tensors = [tensor for _, tensor in tensors_in(self.bundle.roots)]
        self._pulling = None
        for placement in self.bundle.placements:
            tensor = tensors[placement.tensor]
            if isinstance(placement.spec, DenseSpec):
                initial = exact_value(placement.spec.name, tensor) if initialize else None
                variable = ShardedVariable(self._client, placement.spec, placement.pieces, initial)
                served = ServedTensor(tensor, variable, is_buffer=placement.is_buffer)
                if placement.is_buffer:
                    self.buffers.add(served)
                else:
                    self._parameters[id(tensor)] = served
                continue
            assert isinstance(tensor, nn.Parameter)
            rows = ShardedRows(self._client, placement.spec, placement.pieces)
            if id(tensor) in self._tables:  # a checkpoint's seed may have replaced the program's
                known = self._tables[id(tensor)].sharded.spec
                rows.spec = replace(rows.spec, seed=known.seed)
            module = self._embeddings[id(tensor)]
            cache, padding = None, None
            if isinstance(module, TableLayer):
                # On the chief a cache would hide the workers' changes.
                if module.cached_rows and not initialize:
                    cache = RowCache(rows, max_rows=module.cached_rows, max_age=module.cache_age)
                if module.num_embeddings is None:
                    padding = module.padding_idx  # servers may drop this row
                if initialize and module.padding_idx is not None:
                    rows.assign([module.padding_idx], np.zeros((1, placement.spec.dim)))
            self._tables[id(tensor)] = ServedTable(tensor, rows, cache, padding)
            attach_table(module, self._tables[id(tensor)])
        owners = [
            {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            for optimizer in self.bundle.optimizers
        ]
        owned = set[int]().union(*owners)
        self._read_after = [
            [served for key, served in self._parameters.items() if key in own or key not in owned]
            for own in owners
        ]

    @property
    def sharded(self) -> list[Sharded]:
        """All variables and tables on servers."""
        everything: list[ServedTensor | ServedTable] = [
            *self._parameters.values(),
            *self._tables.values(),
            *self.buffers.all.values(),
        ]
        return [served.sharded for served in everything]

    # --- values ---------------------------------------------------------------------------------

    def begin_pull(self) -> None:
        """Request all parameters and live buffers, and prefetched rows; once until `end_pull`."""
        if self._pulling is None:
            self._begin_pull([*self._parameters.values()], ())

    def _begin_pull(self, parameters: Sequence[ServedTensor], changes: Sequence[Item]) -> None:
        live = [buffer for name, buffer in self.buffers.all.items() if name in self.buffers.live]
        tensors = [*parameters, *live]
        lookups: list[tuple[ServedTensor | Prefetch, Lookup]]
        lookups = [(served, served.sharded.lookup(served.out())) for served in tensors]
        for table in self._tables.values():
            lookups += [(known, known.lookup) for known in table.begin_reads()]
        items = items_of([lookup for _, lookup in lookups])
        self._pulling = lookups, self._client.begin_change(changes, then_read=items)

    def end_pull(self) -> None:
        """Wait for the pull, and store its values."""
        if self._pulling is None:
            return
        (lookups, tickets), self._pulling = self._pulling, None
        self._client.wait_all(tickets)
        for place, lookup in lookups:
            place.store(lookup)

    @property
    def awaits_rows(self) -> bool:
        """True if prefetched rows must be read before the next function."""
        tables = self._tables.values()
        return any(known.wanted.pulled is None for table in tables for known in table.prefetched)

    def assign_changed(self) -> None:
        """Send values that the user has changed on this task."""
        parameters = (served for served in self._parameters.values() if served.has_changed)
        assign_all(self._client, [*parameters, *self.buffers.changed()])

    # --- gradients ------------------------------------------------------------------------------

    def served_by(self, optimizer: torch.optim.Optimizer) -> list[tuple[nn.Parameter, float]]:
        """Return the optimizer's parameters, with the learning rate of each."""
        name, fixed = type(optimizer).__name__, self._fixed[self.bundle.optimizers.index(optimizer)]
        if len(optimizer.param_groups) != len(fixed):
            raise ValueError(
                f"{name} has {len(optimizer.param_groups)} groups of parameters, but servers know "
                f"the {len(fixed)} that it had when its scope ended: call add_param_group in the "
                "scope"
            )
        if _fixed_rates(optimizer) != fixed:
            raise ValueError(
                f"{name}: only lr may change after the scope has ended; parameter servers keep the "
                "other hyperparameters from then"
            )
        found = []
        for group in optimizer.param_groups:
            lr = float(group["lr"])
            if not 0 <= lr < math.inf:
                raise ValueError(f"{name}: lr must be a finite number, 0 or more, got {lr}")
            for parameter in group["params"]:
                if self.serves(parameter):
                    found.append((parameter, lr))
                elif parameter.requires_grad:  # others are frozen
                    raise ValueError(
                        f"{name} holds a parameter of shape {tuple(parameter.shape)} that is not "
                        "on the servers: it was not made in the same scope, or did not require "
                        "gradients there"
                    )
        return found

    def serves(self, parameter: torch.Tensor) -> bool:
        """Return True if a parameter's value is on servers."""
        return id(parameter) in self._parameters or id(parameter) in self._tables

    def changes(
        self, gradients: Iterable[tuple[nn.Parameter, float | None]], weight: float = 1.0
    ) -> list[Item]:
        """Return what to send for gradients of parameters, times `weight`, with learning rates."""
        return [
            item
            for parameter, lr in gradients
            for item in self._served(parameter).change(lr, weight)
        ]

    def stage(self, changes: Sequence[Item], round: int, place: int = 0) -> None:
        """Send changes, which wait for the round's commit, and have this place in its sum."""
        self._client.wait_all(self._client.begin_change(changes, round, place))

    def exchange(self, optimizer: torch.optim.Optimizer, changes: Sequence[Item]) -> None:
        """Apply changes, and take the new values of everything but other optimizers' parameters."""
        self._begin_pull(self._read_after[self.bundle.optimizers.index(optimizer)], changes)
        self.end_pull()

    def clear_gradients(self) -> None:
        """Drop all gradients, including those of earlier functions."""
        for table in self._tables.values():
            table.weight.grad = None
            table.forget()
        for served in self._parameters.values():
            served.tensor.grad = None

    def forget_rows(self, parameters: Iterable[nn.Parameter]) -> None:
        """Finish with the gradients of these parameters, applied or not."""
        for parameter in parameters:
            if id(parameter) in self._tables:
                self._tables[id(parameter)].forget()

    def commit(
        self,
        round: int,
        rates: Sequence[tuple[nn.Parameter, float]],
        weight: float,
        *,
        buffers: bool = False,
    ) -> None:
        """Apply a round's gradients for parameters, and its changes of buffers if requested."""
        things: list[tuple[Sharded, float | None]]
        things = [(self._served(parameter).sharded, lr) for parameter, lr in rates]
        if buffers:
            things += [(served.sharded, None) for served in self.buffers.all.values()]
        if not commit_round(self._client, round, things, weight=weight):
            raise FastdistError(f"round {round} of gradients was discarded by a server")

    def discard(self, round: int) -> None:
        """Drop everything that is staged in a round."""
        servers = {server for thing in self.sharded for server, _, _ in thing.parts}
        discard_rounds(self._client, servers, [round])

    def _served(self, parameter: nn.Parameter) -> ServedTensor | ServedTable:
        return self._tables.get(id(parameter)) or self._parameters[id(parameter)]

    # --- the coordinator's ----------------------------------------------------------------------

    def rates(self) -> list[list[float]]:
        """Return the learning rates of all optimizers' groups, after the checks of `served_by`."""
        for optimizer in self.bundle.optimizers:
            self.served_by(optimizer)
            optimizer.__dict__["_opt_called"] = True  # schedulers check it; workers call step
        return [[float(group["lr"]) for group in o.param_groups] for o in self.bundle.optimizers]

    def set_rates(self, rates: list[list[float]], *, is_checkpoint: bool = False) -> None:
        """Set a checkpoint's learning rates, or the chief's unless they are as last time."""
        if rates == self._given_rates and not is_checkpoint:
            return
        self._given_rates = rates
        for optimizer, own in zip(self.bundle.optimizers, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, own, strict=True):
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    def modes(self) -> list[bool]:
        """Return the flags that `train`, `eval` and `requires_grad_` set."""
        if structure_of(self.bundle.roots) != self._structure:
            raise FastdistError(
                "a module has gained or lost submodules, parameters or buffers since its scope "
                "ended, and workers do not have these changes: build the whole module in the scope"
            )
        flags = [tensor.requires_grad for _, tensor in named_parameters(self.bundle.roots)]
        return [*flags, *(module.training for module in modules_of(self.bundle.roots))]

    def set_modes(self, modes: list[bool]) -> None:
        """Set the chief's flags, unless they are the same as last time."""
        if modes == self._given_modes:
            return
        self._given_modes = modes
        flags = iter(modes)
        for _, tensor in named_parameters(self.bundle.roots):
            tensor.requires_grad_(next(flags))
        for module in modules_of(self.bundle.roots):
            module.training = next(flags)

    def convert_tables(self) -> None:
        """Move the rows of embeddings that hold any to the servers."""
        for table in self._tables.values():
            convert_weight(table)
        self._structure = structure_of(self.bundle.roots)


def _fixed_rates(optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
    return [
        {key: value for key, value in group.items() if key in optimizer.defaults and key != "lr"}
        for group in optimizer.param_groups
    ]
