"""Objects that resolve to the replica whose thread uses them.

Where one process runs several replicas, each has a copy of every module, optimizer, scheduler and
gradient scaler that was made in the scope: the user's own object for replica 0 (but where variables
are kept on a device that does not compute), a twin for each other one. The user's object stays what
it was, but for a class that derives from its old one and, in the thread of another replica, looks
up every attribute in that replica's twin. Inside, twins refer to each other, so that only the
user's own references pay for the detour.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from fastdist.errors import FastdistError
from fastdist.replicas.variables import Variable, local_components, note_component
from fastdist.strategies.routed_class import TWINS, bare_copy, route
from fastdist.strategies.tensor_stamps import GradientStamp, share_memory, value_stamp
from fastdist.training.metrics import adopt_twins, is_adopted
from fastdist.training.module_structure import buffers_of, copy_hooks, tensors_in, tensors_of


class Routing:
    """The routed objects of one strategy, and the twins of its replicas.

    Args:
        devices: of all local replicas.
        first: the first replica that has twins; those before it use the users' own objects.
    """

    _not_copied = frozenset({TWINS, "step"})  # of optimizers' attributes

    def __init__(self, devices: Sequence[torch.device], first: int = 1) -> None:
        self._twin_devices = tuple(devices[first:])
        self._first = first
        self._modules: list[nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._others: list[Any] = []
        self._tensors: list[torch.Tensor] = []  # of the modules, replica 0's
        self._values: list[object] = []  # their stamps, when replicas were alike
        self._gradients: list[GradientStamp | None] = []
        self._beside: dict[int, list[torch.Tensor]] = {}  # buffers of the same module, by id
        self._groups: dict[int, object] = {}  # of optimizers, as their twins have them
        self._twin_tensors: list[dict[int, torch.Tensor]] = [{} for _ in self._twin_devices]

    def set_modules(self, roots: Sequence[nn.Module]) -> None:
        """Give modules twins, all anew where some have them already.

        Twins share among each other what the modules share among each other.
        """
        before, self._twin_tensors = self._twin_tensors, []
        everything = {id(m): m for root in roots for m in root.modules()}
        twins: dict[int, list[nn.Module]] = {key: [] for key in everything}
        for i, device in enumerate(self._twin_devices):
            memo = self._memo(roots, i) | _metric_twins(everything.values(), i)
            copies = copy.deepcopy(list(roots), memo)
            for root in copies:
                _move(root, device)
            for key, module in everything.items():
                twins[key].append(memo[key])
                if isinstance(module, Variable) and TWINS in module.__dict__:
                    previous = module.__dict__[TWINS][len(twins[key]) - 1]
                    memo[key].assign(previous.component)
                    note_component(memo[key])
            self._twin_tensors.append(
                {
                    id(own): twin
                    for key, module in everything.items()
                    for own, twin in zip(tensors_in(module), tensors_in(memo[key]), strict=True)
                }
            )
        for key, module in everything.items():
            adopt_twins(module, twins[key])
            route(module, twins[key])
        self._modules = list(roots)
        self._groups.clear()
        known = set(map(id, self._tensors))
        self._tensors = list({id(t): t for t in tensors_of(self._modules)}.values())
        groups = [buffers_of([module], recurse=False) for module in everything.values()]
        self._beside = {id(buffer): group for group in groups for buffer in group}
        for previously, current in zip(before, self._twin_tensors, strict=True):
            for own in self._tensors:
                twin = current[id(own)]
                if twin is own:
                    continue
                copy_hooks(own, twin)
                if own.grad is not None:
                    old = previously[id(own)].grad if id(own) in known else None
                    fits = old is not None and old.dtype == own.grad.dtype
                    twin.grad = _moved_copy(old if fits else own.grad, twin.device)
        self.note_values()

    def note_values(self) -> None:
        """Take what replica 0 holds now as what all replicas hold: a run has ended."""
        self._values = [self._stamp(tensor) for tensor in self._tensors]
        self._gradients = [GradientStamp(tensor) for tensor in self._tensors]

    def _stamp(self, tensor: torch.Tensor) -> object:
        """Of a buffer with those beside it: batch_norm leaves a trace in its count alone."""
        return [value_stamp(one) for one in self._beside.get(id(tensor), (tensor,))]

    def distrust(self) -> None:
        """A run has failed in its middle: all twins take what replica 0 holds."""
        self._values = [None] * len(self._tensors)
        self._gradients = [None] * len(self._tensors)
        self._groups.clear()

    def require_same_rates(self) -> None:
        """Check that the replicas' optimizers go on with the same hyperparameters.

        Raises:
            FastdistError: they do not; the message names the first that differs.
        """
        for optimizer in self._optimizers:
            first, *others = [optimizer] * self._first + self.twins_of(optimizer)
            for replica, other in enumerate(others, start=1):
                difference = _difference(first.param_groups, other.param_groups)
                if difference is None:
                    continue
                raise FastdistError(
                    f"{type(optimizer).__name__} has {difference[0]} on replica 0 and "
                    f"{difference[1]} on replica {replica}: set it alike on all, and make the "
                    "schedulers that run uses inside `with strategy.scope():`",
                    (replica,),
                )

    def _memo(self, roots: Sequence[nn.Module], twin: int) -> dict[int, Any]:
        """What a twin is to share instead of having a copy: by id, what it gets."""
        return {}

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer of routed modules twins that work on the twins' parameters."""
        twins = []
        for _ in self._twin_devices:
            twin = bare_copy(optimizer)
            if "step" in twin.__dict__:  # a scheduler's wrapper, bound to the original
                twin.__dict__["step"] = _tracked_step(twin)
            twins.append(twin)
        route(optimizer, twins)
        self._optimizers.append(optimizer)

    def add_other(self, thing: LRScheduler | GradScaler) -> None:
        """Give a scheduler or scaler twins."""
        route(thing, [bare_copy(thing) for _ in self._twin_devices])
        self._others.append(thing)

    def optimizer_twins(self) -> list[torch.optim.Optimizer]:
        """Of all optimizers."""
        return [twin for optimizer in self._optimizers for twin in self.twins_of(optimizer)]

    def twin(self, module: nn.Module, replica: int) -> nn.Module:
        """A replica's own copy of a module: the module itself for a replica without twins."""
        index = self.twin_index(replica)
        found: nn.Module = module if index is None else self.twins_of(module)[index]
        return found

    def twin_index(self, replica: int) -> int | None:
        """Which of the twins a replica uses; None: the users' own objects."""
        return None if replica < self._first else replica - self._first

    def twins_of(self, thing: Any) -> list[Any]:
        """The twins of a routed object."""
        found: list[Any] = thing.__dict__[TWINS]
        return found

    def twin_tensors(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The twins of a parameter or buffer of the users' modules."""
        return [twins[id(tensor)] for twins in self._twin_tensors]

    def refresh(self, stepped: set[int]) -> None:
        """Bring what was changed outside `run`, on replica 0's objects, to all twins.

        Args:
            stepped: ids of optimizers that have changed their state too.
        """
        self._refresh_tensors()
        for optimizer in self._optimizers:
            self._refresh_optimizer(optimizer, id(optimizer) in stepped)
        for thing in self._others:
            for twin in self.twins_of(thing):
                twin.__dict__.update(self.plain_state(thing))

    def plain_state(self, thing: LRScheduler | GradScaler) -> dict[str, Any]:
        """What another one of its kind needs to go on like it."""
        plain = {key: value for key, value in thing.__dict__.items() if key != TWINS}
        return copy.deepcopy(plain) if isinstance(thing, GradScaler) else plain

    def _refresh_tensors(self) -> None:
        values = [self._stamp(tensor) for tensor in self._tensors]
        apart = local_components(self._modules) if values != self._values else set()
        for i, own in enumerate(self._tensors):
            if values[i] != self._values[i]:
                for twin in self.twin_tensors(own):
                    twin.requires_grad_(own.requires_grad)
                    if id(own) not in apart and not share_memory(own, twin):
                        with torch.no_grad():
                            twin.copy_(own)
            stamp = self._gradients[i]
            if stamp is None or stamp.is_stale(own):
                for twin in self.twin_tensors(own):
                    twin.grad = _moved_copy(own.grad, twin.device)
                self._gradients[i] = GradientStamp(own)
        self._values = values

    def _refresh_optimizer(self, optimizer: torch.optim.Optimizer, stepped: bool) -> None:
        groups = optimizer.param_groups
        mark = id(optimizer.state), [[id(p) for p in group["params"]] for group in groups]
        stale = stepped or mark != self._groups.get(id(optimizer))
        for twin, parameters in zip(self.twins_of(optimizer), self._twin_tensors, strict=True):
            if stale:
                self._copy_optimizer(optimizer, twin, parameters)
            for group, mirror in zip(groups, twin.param_groups, strict=True):
                mirror.update(
                    (k, _moved_copy(v, v.device) if isinstance(v, torch.Tensor) else v)
                    for k, v in group.items()
                    if k != "params"
                )
        self._groups[id(optimizer)] = mark

    def _copy_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        twin: torch.optim.Optimizer,
        parameters: dict[int, torch.Tensor],
    ) -> None:
        shared = {k for k in optimizer.__dict__ if k.endswith("_hooks")} | self._not_copied
        own = {k: v for k, v in optimizer.__dict__.items() if k not in shared}
        # What refers to a parameter refers to the twin's in the copy.
        twin.__dict__.update(copy.deepcopy(own, dict(parameters)))


def _metric_twins(modules: Iterable[nn.Module], i: int) -> dict[int, Any]:
    """What metrics have counted outlives their modules' twins; for deepcopy to take."""
    groups = [list(module.modules()) for module in modules if is_adopted(module)]
    return {
        id(part): part.__dict__[TWINS][i]
        for parts in groups
        if all(TWINS in part.__dict__ for part in parts)
        for part in parts
    }


def _tracked_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """What schedulers make of `step`, to see whether it was called before their own."""
    step = type(optimizer).step.__get__(optimizer)

    def tracked(*args: Any, **kwargs: Any) -> Any:
        optimizer.__dict__["_opt_called"] = True
        return step(*args, **kwargs)

    tracked.__dict__["_wrapped_by_lr_sched"] = True
    return tracked


def _difference(
    groups: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]
) -> tuple[str, str] | None:
    """What differs first between the hyperparameters of two replicas."""
    if len(groups) != len(others):
        return f"{len(groups)} groups", f"{len(others)}"
    for group, other in zip(groups, others, strict=True):
        for key, value in group.items():
            if key != "params" and not _same(value, other.get(key)):
                return f"{key}={value}", f"{key}={other.get(key)}"
    return None


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other.to(one.device))
    return bool(one == other)


def _moved_copy(value: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if value is None else value.detach().to(device, copy=True)


def _move(module: nn.Module, device: torch.device) -> None:
    if device.type != "cpu":
        module.to(device)
