"""Objects that resolve to the replica whose thread uses them.

Where one process runs several replicas, each has a copy of every module, optimizer, scheduler and
gradient scaler that was made in the scope: the user's own object for replica 0 (but where variables
are kept on a device that does not compute), a twin for each other one. The user's object stays what
it was, but for a class that derives from its old one and, in the thread of another replica, looks
up every attribute in that replica's twin. Inside, twins refer to each other, so that only the
user's own references pay for the detour.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from fastdist.context import state
from fastdist.metrics import adopt_twins, is_adopted, is_state
from fastdist.modules import is_materialized
from fastdist.variables import Variable, local_components

_TWINS = "_fastdist_twins"
_classes: dict[type, type] = {}


class Routing:
    """The routed objects of one strategy, and the twins of its replicas.

    Args:
        devices: of all local replicas.
        first: the first replica that has twins; those before it use the users' own objects.
    """

    def __init__(self, devices: Sequence[torch.device], first: int = 1) -> None:
        self._twin_devices = tuple(devices[first:])
        self._first = first
        self._modules: list[nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._others: list[Any] = []
        self._states: dict[int, Any] = {}
        self._tensors: list[torch.Tensor] = []  # of the modules, replica 0's
        self._versions: list[tuple[type, int]] = []
        self._gradients: list[GradientStamp] = []

    def add_modules(self, roots: Sequence[nn.Module]) -> None:
        """Give modules twins."""
        self._make_twins(roots)
        self._modules += roots
        self.note_values()

    def note_values(self) -> None:
        """Take what replica 0 holds now as what all replicas hold: a run has ended."""
        self._tensors = _tensors_of(self._modules)
        self._versions = _versions_of(self._tensors)
        self._gradients = list(map(GradientStamp, self._tensors))

    def _make_twins(self, roots: Sequence[nn.Module]) -> None:
        """Twins share among each other what the modules share among each other."""
        everything = {id(m): m for root in roots for m in root.modules()}
        twins: dict[int, list[nn.Module]] = {key: [] for key in everything}
        for i, device in enumerate(self._twin_devices):
            memo = self._memo(roots, i) | _metric_twins(everything.values(), i)
            copies = copy.deepcopy(list(roots), memo)
            for root in copies:
                _move(root, device)
            for key, module in everything.items():
                twins[key].append(memo[key])
                if isinstance(module, Variable) and _TWINS in module.__dict__:
                    previous = module.__dict__[_TWINS][len(twins[key]) - 1]
                    memo[key].assign(previous.component)
        for key, module in everything.items():
            adopt_twins(module, twins[key])
            _route(module, twins[key])

    def _memo(self, roots: Sequence[nn.Module], twin: int) -> dict[int, Any]:
        """What a twin is to share instead of having a copy: by id, what it gets."""
        return {}

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer of routed modules twins that work on the twins' parameters."""
        twins = []
        for _ in self._twin_devices:
            twin = _bare_copy(optimizer)
            if "step" in twin.__dict__:  # a scheduler's wrapper, bound to the original
                twin.__dict__["step"] = _tracked_step(twin)
            twins.append(twin)
        _route(optimizer, twins)
        self._optimizers.append(optimizer)

    def add_other(self, thing: LRScheduler | GradScaler) -> None:
        """Give a scheduler or scaler twins."""
        _route(thing, [_bare_copy(thing) for _ in self._twin_devices])
        self._others.append(thing)

    def optimizer_twins(self) -> list[torch.optim.Optimizer]:
        """Of all optimizers."""
        return [twin for optimizer in self._optimizers for twin in self.twins_of(optimizer)]

    def twin(self, module: nn.Module, replica: int) -> nn.Module:
        """A replica's own copy of a module: the module itself for a replica without twins."""
        index = self.twin_index(replica)
        found: nn.Module = module if index is None else module.__dict__[_TWINS][index]
        return found

    def twin_index(self, replica: int) -> int | None:
        """Which of the twins a replica uses; None: the users' own objects."""
        return None if replica < self._first else replica - self._first

    def refresh(self) -> bool:
        """Bring what was changed outside `run`, on replica 0's objects, to all twins.

        Returns:
            Whether twins had to be made anew, because tensors of the modules were replaced.
        """
        remade = self._refresh_modules()
        for optimizer in self._optimizers:
            self._refresh_optimizer(optimizer)
        for thing in self._others:
            for twin in self.twins_of(thing):
                twin.__dict__.update(self.plain_state(thing))
        return remade

    def twins_of(self, thing: Any) -> list[Any]:
        """The twins of a routed object."""
        found: list[Any] = thing.__dict__[_TWINS]
        return found

    def plain_state(self, thing: LRScheduler | GradScaler) -> dict[str, Any]:
        """What another one of its kind needs to go on like it."""
        plain = {key: value for key, value in thing.__dict__.items() if key != _TWINS}
        return copy.deepcopy(plain) if isinstance(thing, GradScaler) else plain

    def _refresh_modules(self) -> bool:
        tensors = _tensors_of(self._modules)
        versions = _versions_of(tensors)
        replaced = list(map(id, tensors)) != list(map(id, self._tensors)) or [
            kind for kind, _ in versions
        ] != [kind for kind, _ in self._versions]
        if replaced:
            self._make_twins(self._modules)
            self._states.clear()
        else:
            self._bring(tensors, versions)
        self._tensors, self._versions = tensors, versions
        return replaced

    def _bring(self, tensors: list[torch.Tensor], versions: list[tuple[type, int]]) -> None:
        """Copy values and gradients that have changed to the twins."""
        stale = [g.is_stale(tensor) for g, tensor in zip(self._gradients, tensors, strict=True)]
        if versions == self._versions and not any(stale):
            return
        apart = local_components(self._modules)
        for index, device in enumerate(self._twin_devices):
            twins = _tensors_of([root.__dict__[_TWINS][index] for root in self._modules])
            with torch.no_grad():
                for i, (own, twin) in enumerate(zip(tensors, twins, strict=True)):
                    if versions[i] != self._versions[i] and id(own) not in apart:
                        twin.copy_(own)
                    if stale[i]:
                        twin.grad = None if own.grad is None else own.grad.to(device, copy=True)
        self._gradients = list(map(GradientStamp, tensors))

    def parameter_twins(self, replica: int) -> dict[int, nn.Parameter]:
        """By the id of each parameter of the users' modules: the replica's own."""
        return {
            id(own): other
            for root in self._modules
            for own, other in zip(
                root.parameters(), self.twin(root, replica).parameters(), strict=True
            )
        }

    def _refresh_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        groups = optimizer.param_groups
        reloaded = self._states.get(id(optimizer)) is not optimizer.state
        for i, twin in enumerate(self.twins_of(optimizer), start=self._first):
            stale = reloaded or [len(g["params"]) for g in twin.param_groups] != [
                len(g["params"]) for g in groups
            ]
            if stale:
                self._copy_optimizer(optimizer, twin, self.parameter_twins(i))
            for group, mirror in zip(groups, twin.param_groups, strict=True):
                mirror.update((k, v) for k, v in group.items() if k != "params")
        self._states[id(optimizer)] = optimizer.state

    def _copy_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        twin: torch.optim.Optimizer,
        parameters: dict[int, nn.Parameter],
    ) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in parameters:
                    raise ValueError(
                        "an optimizer made in the strategy's scope holds a parameter of shape "
                        f"{tuple(parameter.shape)} that was not: make its module in the scope, or "
                        "pass it to strategy.mirror"
                    )
        twin.param_groups = [
            {**group, "params": [parameters[id(p)] for p in group["params"]]}
            for group in optimizer.param_groups
        ]
        self._copy_state(optimizer, twin, parameters)

    def _copy_state(
        self,
        optimizer: torch.optim.Optimizer,
        twin: torch.optim.Optimizer,
        parameters: dict[int, nn.Parameter],
    ) -> None:
        twin.state = type(optimizer.state)(optimizer.state.default_factory)
        for key, value in optimizer.state.items():
            if isinstance(key, torch.Tensor) and id(key) in parameters:
                own = parameters[id(key)]
                twin.state[own] = _moved_copy(value, own.device)


def _metric_twins(modules: Iterable[nn.Module], i: int) -> dict[int, Any]:
    """What metrics have counted outlives their modules' twins; for deepcopy to take."""
    groups = [list(module.modules()) for module in modules if is_adopted(module)]
    return {
        id(part): part.__dict__[_TWINS][i]
        for parts in groups
        if all(_TWINS in part.__dict__ for part in parts)
        for part in parts
    }


def _tensors_of(modules: Sequence[nn.Module]) -> list[torch.Tensor]:
    return [
        tensor
        for root in modules
        for module in root.modules()
        for named in (module._parameters, module._buffers)
        for tensor in named.values()
        if tensor is not None
    ]


def buffers_of(modules: Sequence[nn.Module]) -> list[torch.Tensor]:
    """The buffers of modules, in order, as often as they occur."""
    return [
        buffer
        for root in modules
        for module in root.modules()
        for buffer in module._buffers.values()
        if buffer is not None and is_materialized(buffer)
    ]


class GradientStamp:
    """Remembers a tensor's gradient, without keeping it."""

    __slots__ = ("_grad", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        grad = tensor.grad
        self._grad = None if grad is None else weakref.ref(grad)
        self._version = 0 if grad is None else grad._version

    def is_stale(self, tensor: torch.Tensor) -> bool:
        """Whether the gradient is another one by now, or has other values."""
        grad = tensor.grad
        if grad is None or self._grad is None:
            return grad is not None or self._grad is not None
        return self._grad() is not grad or self._version != grad._version


def _versions_of(tensors: Sequence[torch.Tensor]) -> list[tuple[type, int]]:
    return [(type(tensor), tensor._version) for tensor in tensors]


def _bare_copy(thing: Any) -> Any:
    twin = object.__new__(type(thing))
    twin.__dict__.update(thing.__dict__)
    return twin


def _tracked_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """What schedulers make of `step`, to see whether it was called before their own."""
    step = type(optimizer).step.__get__(optimizer)

    def tracked(*args: Any, **kwargs: Any) -> Any:
        optimizer.__dict__["_opt_called"] = True
        return step(*args, **kwargs)

    tracked.__dict__["_wrapped_by_lr_sched"] = True
    return tracked


def _moved_copy(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone() if value.dim() == 0 else value.clone().to(device)
    if isinstance(value, dict):
        return {key: _moved_copy(item, device) for key, item in value.items()}
    return copy.deepcopy(value)


def _move(module: nn.Module, device: torch.device) -> None:
    if device.type != "cpu":
        module.to(device)


def _route(thing: Any, twins: list[Any]) -> None:
    thing.__dict__[_TWINS] = twins
    object.__setattr__(thing, "__class__", _routed_class(type(thing)))


def _routed_class(kind: type) -> type:
    if kind in _classes.values():
        return kind
    if kind not in _classes:
        _classes[kind] = _make_routed_class(kind)
    return _classes[kind]


def _own_twin(thing: Any) -> Any:
    """The twin that the running thread must use; None where that is the object itself."""
    replica = state.replica
    if replica is None or replica.twin is None:
        return None
    twin = object.__getattribute__(thing, "__dict__")[_TWINS][replica.twin]
    return None if twin is thing else twin


def _make_routed_class(plain: Any) -> type:
    class Routed(plain):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            replica = state.replica
            if replica is None or replica.twin is None:
                return super().__getattribute__(name)
            twin = _own_twin(self)
            return super().__getattribute__(name) if twin is None else getattr(twin, name)

        def __setattr__(self, name: str, value: Any) -> None:
            twin = _own_twin(self)
            if twin is not None:
                setattr(twin, name, value)
                return
            if name == "__class__":  # a lazy module that has become another
                value = _routed_class(value)
            super().__setattr__(name, value)
            if state.replica is None and isinstance(self, nn.Module):
                _set_on_twins(self, name, value)

        def __reduce_ex__(self, protocol: Any) -> Any:
            """As an object of the plain class: copies and pickles know no strategy."""
            stripped = _bare_copy(self)
            object.__setattr__(stripped, "__class__", plain)
            stripped.__dict__.pop(_TWINS, None)
            del protocol  # later ones check that the class is the object's
            return stripped.__reduce_ex__(1)

    Routed.__name__ = plain.__name__
    Routed.__qualname__ = plain.__qualname__
    Routed.__module__ = plain.__module__
    Routed.__doc__ = plain.__doc__
    return Routed


def _set_on_twins(module: nn.Module, name: str, value: Any) -> None:
    """Plain attributes (`training`, a rate) set outside `run` hold for all replicas."""
    if isinstance(value, (nn.Module, torch.Tensor)) or name == "__class__":
        return
    if is_state(module, name):
        return
    for twin in module.__dict__.get(_TWINS, ()):
        with contextlib.suppress(AttributeError):  # a property without a setter
            if twin is not module:
                setattr(twin, name, value)


@contextlib.contextmanager
def watch_made(kinds: Sequence[type], note: Callable[[Any], None]) -> Iterator[None]:
    """While it is open, `note` gets every object of these classes that is made."""
    originals = [kind.__dict__["__init__"] for kind in kinds]

    def watched(original: Any) -> Any:
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            note(self)

        return __init__

    for kind, original in zip(kinds, originals, strict=True):
        kind.__init__ = watched(original)  # type: ignore[misc]
    try:
        yield
    finally:
        for kind, original in zip(kinds, originals, strict=True):
            kind.__init__ = original  # type: ignore[misc]
