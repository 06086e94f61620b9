"""The modules and optimizers that belong to a strategy, kept alike on all its replicas."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from fastdist.collectives.communicator import Communicator
from fastdist.replicas.context import state
from fastdist.replicas.variables import Variable, local_components, own
from fastdist.strategies.central_routing import CentralRouting
from fastdist.strategies.communicators import Links
from fastdist.strategies.options import CommunicationOptions
from fastdist.strategies.routing import Routing
from fastdist.training.buffers import BufferSync
from fastdist.training.gradients import GradientSync
from fastdist.training.in_sync import require_in_sync
from fastdist.training.lazy_modules import when_initialized
from fastdist.training.module_structure import hooks_of, structure_of
from fastdist.training.modules import (
    broadcast_state,
    named_buffers,
    named_parameters,
    require_same_structure,
    root_of_each_parameter,
    sparse_parameters,
)
from fastdist.training.optimizer_steps import OptimizerSteps

_living: weakref.WeakSet[Members] = weakref.WeakSet()  # of strategies with replicas


class Members:
    """What was made in the scope of a strategy, or passed to `mirror`.

    Args:
        devices: of this process's replicas.
        replica_ids: theirs.
        replicas: how many there are in all.
        options: how to communicate.
        home: keep one copy of all parameters, on this device; None: one for each replica.

    Attributes:
        syncs: for each local replica, what reduces its gradients; empty where there is one in all.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        replica_ids: tuple[int, ...],
        replicas: int,
        options: CommunicationOptions,
        home: torch.device | None = None,
    ) -> None:
        self.local_replica_ids = replica_ids
        self.num_replicas_in_sync = replicas
        self._links = Links()
        self.syncs: list[GradientSync] = []
        self._home = home or devices[0]
        self._devices = devices
        self._options = options
        self._roots: list[nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._steps = OptimizerSteps(options.gradient_reduction)
        self._routing: Routing | None = None
        if len(devices) > 1 or devices[0] != self._home:
            if home is None:
                self._routing = Routing(devices)
            else:
                self._routing = CentralRouting(devices, home, self._steps.require_allowed)
        self._tensors: list[torch.Tensor] = []  # that all workers have agreed on
        self._structure: list[object] = []
        self._hooks: list[int] = []

    def adopt(self, links: Links, roots: Sequence[nn.Module], made: Sequence[Any]) -> None:
        """Take modules, and optimizers, schedulers and scalers. Every worker must call.

        Raises:
            FastdistError: the modules differ between workers.
            ValueError: a module belongs to another strategy.
        """
        self._links = links
        self.refresh()
        self._require_free(roots)
        for root in roots:
            root.to(self._home)
        known = set(map(id, self._roots))
        added = [root for root in roots if id(root) not in known]
        optimizers = [thing for thing in made if isinstance(thing, torch.optim.Optimizer)]
        if roots:
            self._set_modules([*self._roots, *added])
        if self._routing is not None:
            for optimizer in optimizers:
                self._routing.add_optimizer(optimizer)
            for thing in made:
                if not isinstance(thing, torch.optim.Optimizer):
                    self._routing.add_other(thing)
        self._optimizers += optimizers
        self.connect(links)
        for root in roots:
            for module in root.modules():
                if isinstance(module, Variable):
                    own(module, self)

    def _require_free(self, roots: Sequence[nn.Module]) -> None:
        if not self._has_replicas:
            return
        if self._taken(roots) is not None:
            gc.collect()  # strategies that nobody refers to any more
        if (name := self._taken(roots)) is not None:
            raise ValueError(
                f"{name} belongs to another strategy, which still exists: delete that one, or "
                "give this one a copy.deepcopy of the module"
            )
        _living.add(self)

    def _taken(self, roots: Sequence[nn.Module]) -> str | None:
        """The name of a parameter that another strategy's replicas have."""
        taken = {id(t) for other in _living if other is not self for t in other._tensors}
        return next((name for name, own in named_parameters(roots) if id(own) in taken), None)

    @property
    def _has_replicas(self) -> bool:
        return self.num_replicas_in_sync > 1 or self.is_routed

    def _set_modules(self, roots: list[nn.Module]) -> None:
        """Check that all workers have these modules; give what is new in them rank 0's values."""
        named = [*named_parameters(roots), *named_buffers(roots)]
        if self.workers is not None:
            require_same_structure(self.workers, named)
            known = set(map(id, self._tensors))
            broadcast_state(self.workers, [t for _, t in named if id(t) not in known])
        self._roots = roots
        self._tensors = [tensor for _, tensor in named]
        if self._routing is not None:
            self._routing.set_modules(roots)

    def connect(self, links: Links) -> None:
        """Reduce gradients through these communicators from now on."""
        self._links = links
        for sync in self.syncs:
            sync.close()
        self.syncs = [
            self._gradient_sync(replica, communicator)
            for replica, communicator in enumerate(links.gradients)
        ]
        parameters = [
            parameter
            for replica in range(len(self._devices))
            for _, parameter in named_parameters([*self._roots, *self._roots_of(replica)])
        ]
        if self.syncs:
            for replica in range(len(self._devices)):
                when_initialized(self._roots_of(replica), self._share_lazy)
        twins = self._routing.optimizer_twins() if self._routing is not None else []
        self._steps.watch([*self._optimizers, *twins], parameters, self.syncs)
        self._structure = structure_of(self._roots)
        self.note_values()

    @property
    def workers(self) -> Communicator | None:
        """All processes; None where there is only this one."""
        return self._links.workers

    @property
    def is_routed(self) -> bool:
        """Whether replicas use other objects than the users' own."""
        return self._routing is not None

    @property
    def is_central(self) -> bool:
        """Whether there is one copy of each parameter."""
        return isinstance(self._routing, CentralRouting)

    def refresh(self) -> None:
        """Bring what was changed outside `run` to all replicas. Every worker must call."""
        if not self._has_replicas:
            return
        changed = structure_of(self._roots) != self._structure
        if self._routing is not None:
            changed = changed or hooks_of(self._roots) != self._hooks
        if changed:
            self._set_modules(self._roots)
            self.connect(self._links)
        if self._routing is not None:
            self._routing.refresh(self._steps.taken_outside)
        self._steps.taken_outside.clear()

    def recover(self, links: Links) -> None:
        """A run has failed in its middle: take what replica 0 holds, and connect anew."""
        self.connect(links)
        if self._routing is not None:
            self._routing.distrust()

    def steps_by(self, fn: Any) -> bool:
        """Whether a function is the routing's own, which brings what it changes by itself."""
        return self._routing is not None and getattr(fn, "__self__", None) is self._routing

    def require_same_rates(self) -> None:
        """Check that the optimizers of this process's replicas have the same hyperparameters.

        Raises:
            FastdistError: they do not.
        """
        if self._routing is not None:
            self._routing.require_same_rates()

    def note_values(self) -> None:
        """A run has ended well: what replica 0 holds is what all replicas hold."""
        if self._routing is not None:
            self._routing.note_values()
            self._hooks = hooks_of(self._roots)

    def components(self, thing: nn.Parameter | Variable) -> list[torch.Tensor]:
        """The tensor of a member's parameter or variable, on each local replica."""
        if isinstance(thing, Variable):
            return [variable.component for variable in self.variables(thing)]
        if self._routing is None or self.is_central:
            return [thing]
        return [thing, *self._routing.twin_tensors(thing)]

    def twins_of(self, thing: Any) -> list[Any]:
        """The copies of a module or optimizer that other replicas of this process use."""
        return [] if self._routing is None else self._routing.twins_of(thing)

    def twin_index(self, replica: int) -> int | None:
        """Which of the twins a local replica uses; None: the users' own objects."""
        return None if self._routing is None else self._routing.twin_index(replica)

    def variables(self, variable: Variable) -> list[Variable]:
        """A variable on each local replica."""
        if self._routing is None:
            return [variable]
        twins = [self._routing.twin(variable, i) for i in range(len(self._devices))]
        return cast(list[Variable], twins)

    def require_in_sync(self, workers: Communicator | None) -> None:
        """Check that all replicas hold the same bits. Every worker must call.

        Raises:
            FastdistError: they differ.
        """
        replicas = []
        for replica in range(len(self._devices)):
            roots = self._roots_of(replica)
            apart = local_components(roots)
            named = [*named_parameters(roots), *named_buffers(roots)]
            replicas.append([(name, tensor) for name, tensor in named if id(tensor) not in apart])
        require_in_sync(workers, replicas)

    def _share_lazy(self, module: nn.Module) -> None:
        """A lazy module has made its parameters: all replicas take those of replica 0."""
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        replica = 0 if state.replica is None else state.replica.local_replica
        if state.replica is not None:
            broadcast_state(self._links.context[replica], tensors)
        elif self.workers is not None:
            broadcast_state(self.workers, tensors)
        self.syncs[replica].watch()

    def _gradient_sync(self, replica: int, communicator: Communicator) -> GradientSync:
        roots = self._roots_of(replica)
        return GradientSync(
            communicator,
            self._links.context[replica],
            named_parameters(roots),
            root_of_each_parameter(roots),
            sparse_parameters(roots),
            BufferSync(communicator, roots),
            reduction=self._options.gradient_reduction,
            bucket_bytes=self._options.bucket_bytes,
            compress=self._options.compress,
            on_one_device=self._options.implementation == "reduce_to_one_device",
            in_run_only=len(self._devices) > 1,
        )

    def _roots_of(self, replica: int) -> list[nn.Module]:
        if self._routing is None:
            return self._roots
        return [self._routing.twin(root, replica) for root in self._roots]
