"""The modules and optimizers that belong to a strategy, kept equal on all its replicas.

References to them are weak: a model that the user drops is released and takes no part in later
steps. Replicas may release it at different times, so their communication does not depend on it.
"""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from fastdist._config import recording
from fastdist.collectives.communicator import Communicator
from fastdist.errors import FastdistError, UnsupportedError
from fastdist.replicas.context import state
from fastdist.replicas.per_replica import PerReplica
from fastdist.replicas.random_streams import CommonStream
from fastdist.replicas.variables import Variable, local_components, own
from fastdist.strategies.central import CentralParameters
from fastdist.training.buffers import BufferedModule, BufferSync, buffered_modules
from fastdist.training.communicators import (
    CommunicationOptions,
    ReplicaCommunicators,
    connect_replicas,
)
from fastdist.training.contributions import Accumulation, ReducedParameter
from fastdist.training.digests import StepDigests
from fastdist.training.first_runs import FirstRuns
from fastdist.training.frameworks import inner_modules, state_of
from fastdist.training.gradients import GradientSync
from fastdist.training.modules import (
    broadcast_state,
    is_materialized,
    named_buffers,
    named_parameters,
    require_in_sync,
    require_same_settings,
    require_same_structure,
    sparse_parameters,
    structure_of,
    when_initialized,
)
from fastdist.training.optimizer_steps import OptimizerSteps
from fastdist.training.outside import OutsideParameters, watch_parts
from fastdist.training.parameter_sample import ParameterSample
from fastdist.training.sharded import ShardedStep, require_own_groups

_living: weakref.WeakSet[AdoptedModules] = weakref.WeakSet()  # in jobs of several replicas


@dataclass(slots=True, eq=False)
class _Model:
    """A root module, as it was when the replicas last compared it."""

    number: int  # in this strategy; the same on all replicas
    root: weakref.ref[nn.Module]
    buffered: list[BufferedModule] = field(default_factory=list)
    # Those that it shares with another model have the same place.
    parameters: list[ReducedParameter] = field(default_factory=list)
    tensors: dict[int, weakref.ref[torch.Tensor]] = field(default_factory=dict)  # by id
    structure: list[object] = field(default_factory=list)  # the result of `structure_of`

    @property
    def is_alive(self) -> bool:
        """True while the module or one of its parameters exists."""
        return self.root() is not None or any(
            reduced.ref() is not None for reduced in self.parameters
        )


class AdoptedModules:
    """The modules and optimizers made in the scope of a strategy, or passed to `mirror`.

    `world` has one rank per replica; it is None if there is one replica. `central` owns the only
    copy of all parameters; None if every replica has a copy.
    """

    def __init__(
        self,
        device: torch.device,
        world: Communicator | None,
        options: CommunicationOptions,
        central: CentralParameters | None,
    ) -> None:
        self.sync: GradientSync | None = None  # None in a job of one replica
        self.communicators: ReplicaCommunicators | None = None
        self._device = device
        self._options = options
        self._central = central
        self._models: list[_Model] = []
        self._adopted = 0  # number of models so far
        self._places = 0  # number of their parameters
        self._buffer_places = 0
        self._accumulation = Accumulation()
        self._buffers = BufferSync([], 0)
        self._in_order: list[weakref.ref[torch.optim.Optimizer]] = []
        self._steps = OptimizerSteps(
            options.gradient_reduction,
            is_sharded=options.shard_optimizer,
            has_one_copy=central is not None,
        )
        self._record = self._steps.record
        self._first_runs = FirstRuns()
        self._outside = OutsideParameters(self.has)
        if (found := recording()) is not None:
            self._record.digests = StepDigests(found, options.shard_optimizer)
        self._take_place(world)

    def _take_place(self, world: Communicator | None) -> None:
        rank, replicas = (0, 1) if world is None else (world.rank, world.world_size)
        self.local_replica_ids: tuple[int, ...] = (rank,)
        self.num_replicas_in_sync = replicas
        self._world = world
        self.is_connected = False
        if replicas > 1:
            self._steps.begin()

    def adopt(self, roots: Sequence[nn.Module], made: Sequence[Any]) -> None:
        """Adopt modules and optimizers. Every replica must call."""
        self.refresh()
        self._release()
        self._require_free(roots)
        for root in roots:
            root.to(self._device)
        known = {id(model.root()) for model in self._models}
        added = [
            _Model(self._adopted + i, weakref.ref(root))
            for i, root in enumerate(root for root in roots if id(root) not in known)
        ]
        self._adopted += len(added)
        optimizers = [thing for thing in made if isinstance(thing, torch.optim.Optimizer)]
        new = [optimizer for optimizer in optimizers if optimizer not in self._steps.optimizers]
        self._models += added
        self._compare(added)
        if self._options.shard_optimizer:
            require_own_groups(optimizers)
        for optimizer in new:
            if self._central is not None:
                self._central.take_optimizer(optimizer, self._prepare_central, self.connect)
            elif self._options.shard_optimizer:
                ShardedStep(optimizer, _weakly(self.connect), self._options.overlap)
        self._in_order += map(weakref.ref, new)
        self._steps.optimizers.update(optimizers)
        self._use_communicators()
        own(roots, self)

    def _prepare_central(self, optimizer: torch.optim.Optimizer) -> None:
        """Check that an optimizer of the only copy may step. Every replica must call."""
        self._steps.prepare(optimizer)
        if state.replica is not None:
            self._record.require_reduced()
            self._record.note_step()

    def _release(self) -> None:
        """Forget the models that no replica has any more. Every replica must call."""
        alive = np.array([model.is_alive for model in self._models], np.uint8)
        workers = self.connect()
        if workers is not None and len(alive):
            workers.all_reduce(alive, "max")
        self._models = [
            model for model, is_alive in zip(self._models, alive, strict=True) if is_alive
        ]

    def _require_free(self, roots: Sequence[nn.Module]) -> None:
        if self.num_replicas_in_sync == 1:
            return
        _refuse_layers(roots)
        if self._taken(roots) is not None:
            gc.collect()  # collects unreferenced strategies
        if (name := self._taken(roots)) is not None:
            raise ValueError(
                f"{name} belongs to another strategy, which still exists: delete that strategy, or "
                "use a copy.deepcopy of the module"
            )
        _living.add(self)

    def _taken(self, roots: Sequence[nn.Module]) -> str | None:
        """Return the name of a parameter that belongs to another strategy; None if none does."""
        others = [other for other in _living if other is not self]
        return next(
            (name for name, p in named_parameters(roots) if any(o.has(p) for o in others)), None
        )

    def has(self, tensor: torch.Tensor) -> bool:
        """Return True for a parameter or buffer of these modules."""
        found = (model.tensors.get(id(tensor)) for model in self._models)
        return any(ref is not None and ref() is tensor for ref in found)

    def _compare(self, models: Sequence[_Model]) -> None:
        """Check that replicas have equal models, and broadcast rank 0's values of new tensors."""
        alive = _alive(models)
        roots = [root for _, root in alive]
        named = [*named_parameters(roots), *named_buffers(roots)]
        new = [tensor for _, tensor in named if not self.has(tensor)]
        workers = self.connect()
        if workers is not None:
            require_same_structure(workers, named)
            modules = [module for root in roots for module in inner_modules(root)]
            state = {id(t) for module in modules for t in state_of(module).values()}
            self._take_values(workers, new, state)
            require_same_settings(workers, roots)
        for model, root in alive:
            parameters_of = named_parameters([root])
            sparse = sparse_parameters([root])
            model.parameters = [
                self._reduced_parameter(model.number, name, parameter, id(parameter) in sparse)
                for name, parameter in parameters_of
            ]
            both = [*parameters_of, *named_buffers([root])]
            model.tensors = {id(tensor): weakref.ref(tensor) for _, tensor in both}
            model.structure = structure_of([root])
            model.buffered = [self._buffered_module(module) for module in buffered_modules([root])]
        if workers is not None:
            when_initialized(roots, self._share_lazy)

    def watch_parts(self, parts: Sequence[Any]) -> None:
        """Refuse these parts of batches as input of BatchNorms outside `run`."""
        if self.num_replicas_in_sync > 1:
            modules = [each.ref() for model in self._models for each in model.buffered]
            watch_parts(parts, [module for module in modules if module is not None])

    def _use_communicators(self) -> None:
        """Reduce gradients through the communicators of now."""
        communicators = self.communicators
        reduced, record = list(self._reduced()), self._record
        record.watch(reduced, None if communicators is None else communicators.replicas)
        if self.sync is not None:
            self.sync.close()
            self.sync = None
        buffered = {b.place: b for model in self._models for b in model.buffered}  # each once
        self._buffers = BufferSync(
            list(buffered.values()), self._buffer_places, self._buffers.examples
        )
        if communicators is not None:
            is_one_machine = not communicators.replicas.engine.machines
            record.is_exact = is_one_machine and self._device.type == "cpu"
            if self._central is None:
                with_states = [] if self._options.shard_optimizer else self._in_order
                record.sample = ParameterSample(reduced, with_states)
            if self._device.type == "cuda":
                communicators = replace(communicators, overlaps=True)
            self.sync = GradientSync(
                communicators,
                self._options,
                reduced,
                self._places,
                self._adopted > 1,
                self._accumulation,
                self._buffers,
                record,
                self._first_runs,
            )
            if record.digests is not None:
                record.digests.watch(reduced, communicators.replicas, record.is_exact)
        refs = (reduced.ref for model in self._models for reduced in model.parameters)
        parameters = [parameter for ref in refs if (parameter := ref()) is not None]
        self._steps.watch(parameters, self.sync)

    def move(self, world: Communicator | None) -> None:
        """Belong to other replicas from now on; what is under way is dropped."""
        self.communicators = None
        self._use_communicators()
        self._accumulation = Accumulation()
        self._buffers = BufferSync([], 0)
        self._take_place(world)
        for model in self._models:
            for buffered in model.buffered:
                buffered.seen, buffered.is_written = None, False
            for reduced in model.parameters:
                if (parameter := reduced.ref()) is not None:
                    parameter.grad = None

    def _reduced_parameter(
        self, number: int, name: str, parameter: nn.Parameter, is_sparse: bool
    ) -> ReducedParameter:
        """Describe a parameter; one that is known keeps its place."""
        known = (reduced for model in self._models for reduced in model.parameters)
        place = next((reduced.place for reduced in known if reduced.ref() is parameter), None)
        if place is None:
            place = self._places
            self._places += 1
        shape = parameter.shape if is_materialized(parameter) else torch.Size([0])
        ref = weakref.ref(parameter)
        return ReducedParameter(name, ref, number, place, shape, parameter.dtype, is_sparse)

    def _buffered_module(self, module: nn.Module) -> BufferedModule:
        """Describe a module with buffers; one that is known keeps its place."""
        known = (buffered for model in self._models for buffered in model.buffered)
        found = next((buffered for buffered in known if buffered.ref() is module), None)
        if found is None:
            self._buffer_places += 1
            return BufferedModule.of(self._buffer_places - 1, module)
        found.specs = BufferedModule.of(found.place, module).specs
        return found

    def _reduced(self) -> Iterator[ReducedParameter]:
        """Yield every parameter once, as part of the first model that contains it."""
        places = {r.place: r for model in reversed(self._models) for r in model.parameters}
        for model in self._models:
            yield from (r for r in model.parameters if places[r.place] is r)

    def connect(self) -> Communicator | None:
        """Return the replicas' communicator, made again after a failure; None with one replica.

        Every replica must call.
        """
        if self._world is not None and not self.is_connected:
            self.communicators = connect_replicas(self._world, self._options)
            self.is_connected = True
            self._use_communicators()
        return None if self.communicators is None else self.communicators.replicas

    def leave(self) -> None:
        """Abort the communicators after a failure; waiting replicas get PeerFailureError.

        Every replica that gets the error does the same, and connects again with its next call.
        """
        if self.communicators is not None and self.is_connected:
            self.is_connected = False
            self.communicators.abort()

    def refresh(self) -> None:
        """Adopt modules and tensors that users have replaced or added. Every replica must call."""
        alive = _alive(self._models)
        changed = [model for model, root in alive if structure_of([root]) != model.structure]
        if changed:
            self._compare(changed)
            self._use_communicators()
        if self._central is not None and (workers := self.connect()) is not None:
            self._central.take_parameters(workers, self._central.moved())

    @contextlib.contextmanager
    def run(
        self, fn: Callable[..., Any], given: Any, batch: PerReplica[Any] | None, seed: int
    ) -> Iterator[None]:
        """Return a context manager around the user's function."""
        self._outside.watch(fn, given)
        workers = None if self._central is None else self.connect()
        if self._central is not None and workers is not None:
            workers.barrier()  # after what replicas have written between runs
            self._central.note_versions()
        origin = None if batch is None else batch.origin
        (replica,) = self.local_replica_ids
        watching = self._first_runs.watching(given, batch, replica)
        steps = self._steps.run(CommonStream(self._device, seed), origin)
        has_copies = self._central is None
        unreduced = self._record.requiring_backward() if has_copies else contextlib.nullcontext()
        with watching, steps, unreduced:
            yield
        if self._central is not None and workers is not None:
            self._central.require_unchanged()
            workers.barrier()  # no replica writes while another one computes
        if self._record.digests is not None:
            in_order = self._in_order if has_copies else ()
            self._record.digests.end_run(self.connect(), [ref() for ref in in_order])
        self._first_runs.report(replica == 0)
        self._buffers.report(replica == 0)

    def note_step(self) -> None:
        """Note that an optimizer which is not torch's is about to step."""
        if self._record.digests is not None:
            self._record.digests.note_step()

    def end_runs(self) -> None:
        """Do what runs without a backward have left to be done. Every replica must call."""
        self._record.compare_data()
        self.average_buffers()

    def average_buffers(self) -> None:
        """Average the buffers that runs without backward have written. Every replica must call."""
        if self.sync is not None:
            self.sync.average_buffers()

    def broadcast(self, workers: Communicator, but: Collection[int]) -> None:
        """Take rank 0's values of all tensors but those with these ids. Every rank must call."""
        roots = [root for _, root in _alive(self._models)]
        named = [*named_parameters(roots), *named_buffers(roots)]
        broadcast_state(workers, [tensor for _, tensor in named if id(tensor) not in but])

    def update(self, variable: nn.Parameter | Variable, call: Callable[[Any], Any]) -> Any:
        """Call `call` with the component of a variable. Every replica must call."""
        component = variable.component if isinstance(variable, Variable) else variable
        workers = self.connect()
        if workers is not None and not self.has(component):
            raise ValueError(
                "update: expected a parameter of a module, or a fastdist.Variable, that was made "
                f"in the strategy's scope, got {type(variable).__name__} of shape "
                f"{tuple(component.shape)}"
            )
        if self._central is None or workers is None or isinstance(variable, Variable):
            return call(component)
        return self._central.update(workers, component, call)

    def values(self, variable: Variable) -> list[torch.Tensor]:
        """Return the value of this process's replica."""
        return [variable.component]

    def write(self, variable: Variable, write: Callable[[int, Variable], None]) -> None:
        """Call `write` for this process's replica."""
        write(0, variable)

    def require_in_sync(self) -> None:
        """Check that all replicas hold bitwise equal tensors. Every replica must call."""
        named = []
        for model, root in _alive(self._models):
            apart = local_components([root])
            prefix = f"{type(root).__name__}[{model.number}]." if self._adopted > 1 else ""
            named += [
                (prefix + name, tensor)
                for name, tensor in [*named_parameters([root]), *named_buffers([root])]
                if id(tensor) not in apart
            ]
        require_in_sync(self.connect(), [named])

    def _share_lazy(self, module: nn.Module) -> None:
        """Take replica 0's values of the tensors that a lazy module has made."""
        if (workers := self.connect()) is not None:
            own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
            self._take_values(workers, own)
        if self.sync is not None:
            self.sync.watch()

    def _take_values(
        self, workers: Communicator, tensors: Sequence[torch.Tensor], state: Collection[int] = ()
    ) -> None:
        """Take rank 0's values; of parameters, but those with ids in `state`, the only copy."""
        if self._central is None:
            broadcast_state(workers, tensors)
            return
        central = [t for t in tensors if isinstance(t, nn.Parameter) and id(t) not in state]
        ids = set(map(id, central))
        broadcast_state(workers, [tensor for tensor in tensors if id(tensor) not in ids])
        self._central.take_parameters(workers, central)


def _alive(models: Sequence[_Model]) -> list[tuple[_Model, nn.Module]]:
    """Return the models whose root modules exist, with these."""
    return [(model, root) for model in models if (root := model.root()) is not None]


def _weakly(connect: Callable[[], Communicator | None]) -> Callable[[], Communicator | None]:
    """Return `connect` for an optimizer, which must not keep its strategy alive."""
    ref = weakref.WeakMethod(connect)

    def call() -> Communicator | None:
        method = ref()
        if method is None:
            raise FastdistError(
                "the strategy of this optimizer is gone, whose replicas have its states: keep the "
                "strategy as long as the optimizer"
            )
        return method()

    return call


def _refuse_layers(roots: Sequence[nn.Module]) -> None:
    """Refuse layers that would make replicas drift apart."""
    has_groups = torch.distributed.is_available() and torch.distributed.is_initialized()
    named = ((root, *each) for root in roots for each in root.named_modules())
    for root, name, module in named:
        place = name or type(root).__name__
        if isinstance(module, nn.SyncBatchNorm) and not has_groups:
            raise UnsupportedError(
                f"{place} is torch's SyncBatchNorm, which knows torch's process groups alone and "
                "would normalize each replica's part by itself: use fd.nn.SyncBatchNorm, or "
                "model = fd.nn.SyncBatchNorm.convert(model)"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise UnsupportedError(
                f"{place} is an {type(module).__name__} with max_norm, whose forward changes the "
                "rows of this replica's examples, so that replicas drift apart: leave max_norm "
                "out, and renormalize the weight after each step, as by torch.renorm in "
                "torch.no_grad()"
            )
