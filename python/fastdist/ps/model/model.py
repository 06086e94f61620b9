"""The values of modules that are on servers, brought here and sent back."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import nn

from fastdist.errors import FastdistError
from fastdist.ps.client.batched import Pulled, begin_pulls, begin_pushes
from fastdist.ps.client.client import Client
from fastdist.ps.client.commit import commit_round, discard_rounds
from fastdist.ps.client.requests import Pending, all_of
from fastdist.ps.client.row_cache import RowCache
from fastdist.ps.client.sharded import ShardedRows, ShardedVariable
from fastdist.ps.model.buffers import ServedBuffers
from fastdist.ps.model.bundle import Bundle
from fastdist.ps.model.dense import ServedTensor, exact_value
from fastdist.ps.model.embeddings import Table, serve, tables_in
from fastdist.ps.model.plan import tensors_in
from fastdist.ps.model.table import ServedTable
from fastdist.ps.wire.batches import SMALL_SIZE
from fastdist.ps.wire.frames import Array
from fastdist.ps.wire.specs import DenseSpec
from fastdist.training.module_structure import modules_of, structure_of
from fastdist.training.modules import named_parameters


class ServedModel:
    """What was made in one scope.

    Args:
        client: of this task.
        bundle: what was made.
        initialize: whether servers are to take the values that are here.
        lock: of the client; all models of a task share it.

    Attributes:
        bundle: what was made.
        buffers: of its modules.
    """

    def __init__(
        self,
        client: Client,
        bundle: Bundle,
        *,
        initialize: bool,
        lock: threading.RLock,
    ) -> None:
        self.bundle = bundle
        self.buffers = ServedBuffers(client, bundle.roots, bundle.at_once)
        self._client = client
        self._lock = lock
        self._parameters: dict[int, ServedTensor] = {}  # by id
        self._tables: dict[int, ServedTable] = {}  # by the weight's id
        self._pulling: tuple[list[ServedTensor], Pending[list[Pulled]]] | None = None
        self._fixed = [_fixed_rates(optimizer) for optimizer in bundle.optimizers]
        self._given_rates: object = None
        self._given_modes: object = None
        self._embeddings = {id(module.weight): module for module in tables_in(bundle.roots)}
        self.connect(initialize=initialize)
        self._structure = structure_of(bundle.roots)

    def connect(self, *, initialize: bool) -> None:
        """Find everything on the servers.

        Args:
            initialize: what is not there begins with the values that are here.
        """
        tensors = [tensor for _, tensor in tensors_in(self.bundle.roots)]
        self._pulling = None
        for place in self.bundle.places:
            tensor = tensors[place.tensor]
            if isinstance(place.spec, DenseSpec):
                initial = exact_value(place.spec.name, tensor) if initialize else None
                variable = ShardedVariable(self._client, place.spec, place.pieces, initial)
                if isinstance(tensor, nn.Parameter):
                    self._parameters[id(tensor)] = ServedTensor(tensor, variable)
                else:
                    self.buffers.add(ServedTensor(tensor, variable))
                continue
            assert isinstance(tensor, nn.Parameter)
            rows = ShardedRows(self._client, place.spec, place.pieces)
            module = self._embeddings[id(tensor)]
            cache, padding = None, None
            # On the chief a cache would hide what workers have done.
            if isinstance(module, Table) and module.cached_rows and not initialize:
                cache = RowCache(rows, max_rows=module.cached_rows, max_age=module.cache_age)
            if isinstance(module, Table) and module.num_embeddings is None:
                padding = module.padding_idx  # whose row it may drop
            self._tables[id(tensor)] = ServedTable(tensor, rows, self._lock, cache, padding)
            serve(module, self._tables[id(tensor)])
            if initialize and isinstance(module, Table) and module.padding_idx is not None:
                rows.assign([module.padding_idx], np.zeros((1, place.spec.dim), np.float32))

    @property
    def sharded(self) -> list[ShardedVariable | ShardedRows]:
        """Everything that is on servers, in the order in which it was made."""
        everything: list[ServedTensor | ServedTable] = [
            *self._parameters.values(),
            *self._tables.values(),
            *self.buffers.all.values(),
        ]
        return [served.sharded for served in everything]

    # --- values ---------------------------------------------------------------------------------

    def begin_pull(self) -> None:
        """Ask for the values of all parameters and live buffers, unless they are on their way."""
        if self._pulling is not None:
            return
        asked = [*self._parameters.values(), *self.buffers.live_ones()]
        variables, rooms = [one.sharded for one in asked], [one.room() for one in asked]
        self._pulling = asked, begin_pulls(self._client, variables, rooms)

    def end_pull(self) -> None:
        """Take the values that were asked for."""
        if self._pulling is None:
            return
        (asked, pending), self._pulling = self._pulling, None
        for served, pulled in zip(asked, pending.result(), strict=True):
            served.take(pulled)

    def assign_changed(self) -> None:
        """Send what was changed here, by hand, to the servers."""
        changed = [served for served in self._parameters.values() if served.has_changed]
        for pending in [served.begin_assign() for served in changed]:
            pending.result()
        self.buffers.assign_changed()

    # --- gradients ------------------------------------------------------------------------------

    def served_by(self, optimizer: torch.optim.Optimizer) -> list[tuple[nn.Parameter, float]]:
        """The optimizer's parameters, and the learning rate of each.

        Raises:
            ValueError: hyperparameters besides lr have changed, lr is no number of 0 or more, there
                are other groups, or a parameter is not served.
        """
        fixed = self._fixed[self.bundle.optimizers.index(optimizer)]
        if len(optimizer.param_groups) != len(fixed):
            raise ValueError(
                f"{type(optimizer).__name__} has {len(optimizer.param_groups)} groups of "
                f"parameters, and had {len(fixed)} when its scope ended, which servers go by: call "
                "add_param_group in the scope"
            )
        if _fixed_rates(optimizer) != fixed:
            raise ValueError(
                f"{type(optimizer).__name__}: parameter servers take a new lr at any time; other "
                "hyperparameters are those that it had when its scope ended"
            )
        found = []
        for group in optimizer.param_groups:
            lr = float(group["lr"])
            if not 0 <= lr < math.inf:
                raise ValueError(
                    f"{type(optimizer).__name__}: lr must be a finite number, 0 or more, got {lr}"
                )
            for parameter in group["params"]:
                if not self.serves(parameter):
                    if not parameter.requires_grad:
                        continue  # frozen: it stays as it is
                    raise ValueError(
                        f"{type(optimizer).__name__} holds a parameter of shape "
                        f"{tuple(parameter.shape)} that is not on the servers: it was not made in "
                        "the same scope, or did not require gradients there"
                    )
                found.append((parameter, lr))
        return found

    def serves(self, parameter: torch.Tensor) -> bool:
        """Whether the value of a parameter is on servers."""
        return id(parameter) in self._parameters or id(parameter) in self._tables

    @property
    def refuses_nonfinite(self) -> bool:
        """Whether servers refuse gradients that are not finite."""
        return any(place.spec.refuse_nonfinite for place in self.bundle.places)

    def is_small(self, parameter: torch.Tensor) -> bool:
        """Whether its gradient had better be sent with others."""
        return id(parameter) in self._parameters and parameter.numel() <= SMALL_SIZE

    def begin_push(
        self,
        given: Iterable[tuple[nn.Parameter, float | None]],
        round: int,
        weight: float = 1.0,
    ) -> Pending[None]:
        """Send the gradients of parameters, with learning rates, times `weight`."""
        dense, sent = [], []
        for parameter, lr in given:
            table = self._tables.get(id(parameter))
            if table is not None:
                sent.append(table.begin_push(lr, round, weight))
            else:
                gradient = _dense_gradient(parameter)
                gradient = gradient if weight == 1.0 else gradient * np.float32(weight)
                dense.append(self._parameters[id(parameter)].push_of(gradient, lr))
        return all_of(self._client, [*sent, begin_pushes(self._client, dense, round)])

    def clear_gradients(self) -> None:
        """Parameters have no gradients any more, of whatever function they were."""
        for table in self._tables.values():
            table.weight.grad = None
            table.forget()
        for served in self._parameters.values():
            served.tensor.grad = None

    def forget_rows(self, parameters: Iterable[nn.Parameter]) -> None:
        """The gradients of these have been applied, or given up."""
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
        """Apply what is staged in a round for parameters, and for buffers where they are in it.

        Raises:
            FastdistError: it has been discarded.
        """
        things: list[tuple[ShardedVariable | ShardedRows, float | None]]
        things = [(self._sharded_of(parameter), lr) for parameter, lr in rates]
        if buffers:
            things += [(served.sharded, None) for served in self.buffers.all.values()]
        if not commit_round(self._client, round, things, weight=weight).result():
            raise FastdistError(f"round {round} of gradients was discarded by a server")

    def discard(self, round: int) -> None:
        """Drop what is staged in a round."""
        servers = {server for thing in self.sharded for server, _, _ in thing.parts()}
        discard_rounds(self._client, servers, [round])

    def _sharded_of(self, parameter: nn.Parameter) -> ShardedVariable | ShardedRows:
        table = self._tables.get(id(parameter))
        return self._parameters[id(parameter)].sharded if table is None else table.sharded

    # --- the coordinator's ----------------------------------------------------------------------

    def rates(self) -> list[list[float]]:
        """The learning rates of all optimizers' groups.

        Raises:
            ValueError: another hyperparameter has changed.
        """
        for optimizer in self.bundle.optimizers:
            self.served_by(optimizer)
            optimizer.__dict__["_opt_called"] = True  # by workers; schedulers look for it here
        return [[float(group["lr"]) for group in o.param_groups] for o in self.bundle.optimizers]

    def set_rates(self, rates: list[list[float]]) -> None:
        """Take learning rates of the chief, unless they are those that it sent before."""
        if rates == self._given_rates:
            return
        self._given_rates = rates
        for optimizer, own in zip(self.bundle.optimizers, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, own, strict=True):
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    def modes(self) -> list[bool]:
        """What `train`, `eval` and `requires_grad_` have set.

        Raises:
            FastdistError: the modules have other parts than when the scope ended.
        """
        if structure_of(self.bundle.roots) != self._structure:
            raise FastdistError(
                "a module has got or lost parts since its scope ended, of which workers know "
                "nothing: make all of it in the scope"
            )
        tensors = [tensor for _, tensor in named_parameters(self.bundle.roots)]
        flags = [tensor.requires_grad for tensor in tensors]
        return [*flags, *(module.training for module in modules_of(self.bundle.roots))]

    def set_modes(self, modes: list[bool]) -> None:
        """Take modes of the chief, unless they are those that it sent before."""
        if modes == self._given_modes:
            return
        self._given_modes = modes
        given = iter(modes)
        for _, tensor in named_parameters(self.bundle.roots):
            tensor.requires_grad_(next(given))
        for module in modules_of(self.bundle.roots):
            module.training = next(given)

    def take_tables(self) -> None:
        """Give servers the rows of embeddings that hold any, and keep none here."""
        for table in self._tables.values():
            table.take_weight()
        self._structure = structure_of(self.bundle.roots)


def _dense_gradient(parameter: nn.Parameter) -> Array:
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        gradient = gradient.to_dense()
    return np.asarray(gradient.detach().float().cpu().numpy())


def _fixed_rates(optimizer: torch.optim.Optimizer) -> list[dict[str, object]]:
    """The hyperparameters that are fixed."""
    return [
        {key: value for key, value in group.items() if key in optimizer.defaults and key != "lr"}
        for group in optimizer.param_groups
    ]
