"""Objects that resolve to the replica whose thread uses them.

Where one process runs several replicas, each has a copy of every module, optimizer, scheduler and
gradient scaler that was made in the scope: the user's own object for replica 0, a twin for each
other one. The user's object stays what it was, but for a class that derives from its old one and,
in the thread of another replica, looks up every attribute in that replica's twin. Inside, twins
refer to each other, so that only the user's own references pay for the detour.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from fastdist.context import state

_TWINS = "_fastdist_twins"
_classes: dict[type, type] = {}


class Routing:
    """The routed objects of one strategy, and the twins of its replicas 1, 2, ….

    Args:
        devices: of all local replicas.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._modules: list[nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._others: list[Any] = []
        self._states: dict[int, Any] = {}

    def add_modules(self, roots: Sequence[nn.Module]) -> None:
        """Give modules twins, which share what the modules share among each other."""
        everything = {id(m): m for root in roots for m in root.modules()}
        twins: dict[int, list[nn.Module]] = {key: [] for key in everything}
        for device in self._devices[1:]:
            memo: dict[int, Any] = {}
            copies = copy.deepcopy(list(roots), memo)
            for root in copies:
                _move(root, device)
            for key in everything:
                twins[key].append(memo[key])
        for key, module in everything.items():
            _route(module, twins[key])
        self._modules += roots

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Give an optimizer of routed modules twins that work on the twins' parameters."""
        twins = []
        for _ in self._devices[1:]:
            twin = _bare_copy(optimizer)
            twin.__dict__.pop("step", None)  # the scheduler's wrapper, bound to the original
            twin.__dict__["_opt_called"] = True
            twins.append(twin)
        _route(optimizer, twins)
        self._optimizers.append(optimizer)

    def add_other(self, thing: LRScheduler | GradScaler) -> None:
        """Give a scheduler or scaler twins."""
        _route(thing, [_bare_copy(thing) for _ in self._devices[1:]])
        self._others.append(thing)

    def twin(self, module: nn.Module, replica: int) -> nn.Module:
        """A replica's own copy of a module: the module itself for replica 0."""
        found: nn.Module = module if replica == 0 else module.__dict__[_TWINS][replica - 1]
        return found

    def refresh(self) -> None:
        """Bring what was changed outside `run`, on replica 0's objects, to all twins."""
        for optimizer in self._optimizers:
            self._refresh_optimizer(optimizer)
        for thing in self._others:
            for twin in thing.__dict__[_TWINS]:
                fresh = {k: v for k, v in thing.__dict__.items() if k != _TWINS}
                if isinstance(thing, GradScaler):
                    fresh = copy.deepcopy(fresh)
                twin.__dict__.update(fresh)

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
        for i, twin in enumerate(optimizer.__dict__[_TWINS], start=1):
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
        twin.state = type(optimizer.state)(optimizer.state.default_factory)  # type: ignore[attr-defined,call-arg]
        for key, value in optimizer.state.items():
            if isinstance(key, torch.Tensor) and id(key) in parameters:
                own = parameters[id(key)]
                twin.state[own] = _moved_copy(value, own.device)


def _bare_copy(thing: Any) -> Any:
    twin = object.__new__(type(thing))
    twin.__dict__.update(thing.__dict__)
    return twin


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


def _routed_class(plain: type) -> type:
    if plain not in _classes:
        _classes[plain] = _make_routed_class(plain)
    return _classes[plain]


def _own_twin(thing: Any) -> Any:
    """The twin that the running thread must use; None where that is the object itself."""
    replica = state.replica
    if replica is None or replica.local_replica == 0:
        return None
    return object.__getattribute__(thing, "__dict__")[_TWINS][replica.local_replica - 1]


def _make_routed_class(plain: Any) -> type:
    class Routed(plain):  # type: ignore[misc]
        def __getattribute__(self, name: str) -> Any:
            replica = state.replica
            if replica is None or replica.local_replica == 0:
                return super().__getattribute__(name)
            return getattr(_own_twin(self), name)

        def __setattr__(self, name: str, value: Any) -> None:
            twin = _own_twin(self)
            if twin is not None:
                setattr(twin, name, value)
                return
            super().__setattr__(name, value)
            if state.replica is None and isinstance(self, nn.Module):
                _set_on_twins(self, name, value)

        def __reduce_ex__(self, protocol: Any) -> Any:
            """As an object of the plain class: copies and pickles know no strategy."""
            stripped = _bare_copy(self)
            object.__setattr__(stripped, "__class__", plain)
            stripped.__dict__.pop(_TWINS, None)
            return stripped.__reduce_ex__(protocol)

    Routed.__name__ = plain.__name__
    Routed.__qualname__ = plain.__qualname__
    Routed.__module__ = plain.__module__
    Routed.__doc__ = plain.__doc__
    return Routed


def _set_on_twins(module: nn.Module, name: str, value: Any) -> None:
    """Plain attributes (`training`, a rate) set outside `run` hold for all replicas."""
    if isinstance(value, (nn.Module, torch.Tensor)):
        return
    for twin in module.__dict__.get(_TWINS, ()):
        with contextlib.suppress(AttributeError):  # a property without a setter
            setattr(twin, name, value)


def watch_made(
    kinds: Sequence[type], note: Callable[[Any], None]
) -> contextlib.AbstractContextManager[None]:
    """While it is open, `note` gets every object of these classes that is made."""
    return _watch_made(kinds, note)


@contextlib.contextmanager
def _watch_made(kinds: Sequence[type], note: Callable[[Any], None]) -> Any:
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
