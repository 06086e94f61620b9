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
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.lr_scheduler import LRScheduler

from fastdist.context import state
from fastdist.gradients import GradientHook
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

    _not_copied = frozenset({_TWINS, "step"})  # of optimizers' attributes

    def __init__(self, devices: Sequence[torch.device], first: int = 1) -> None:
        self._twin_devices = tuple(devices[first:])
        self._first = first
        self._modules: list[nn.Module] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._others: list[Any] = []
        self._tensors: list[torch.Tensor] = []  # of the modules, replica 0's
        self._values: list[object] = []  # their stamps, when replicas were alike
        self._gradients: list[GradientStamp | None] = []
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
                if isinstance(module, Variable) and _TWINS in module.__dict__:
                    previous = module.__dict__[_TWINS][len(twins[key]) - 1]
                    memo[key].assign(previous.component)
            self._twin_tensors.append(
                {
                    id(own): twin
                    for key, module in everything.items()
                    for own, twin in zip(_tensors_in(module), _tensors_in(memo[key]), strict=True)
                }
            )
        for key, module in everything.items():
            adopt_twins(module, twins[key])
            _route(module, twins[key])
        self._modules = list(roots)
        self._groups.clear()
        known = set(map(id, self._tensors))
        self._tensors = list({id(t): t for t in _tensors_of(self._modules)}.values())
        for previously, current in zip(before, self._twin_tensors, strict=True):
            for own in self._tensors:
                twin = current[id(own)]
                if twin is own:
                    continue
                _copy_hooks(own, twin)
                if own.grad is not None:
                    old = previously[id(own)].grad if id(own) in known else None
                    fits = old is not None and old.dtype == own.grad.dtype
                    twin.grad = _moved_copy(old if fits else own.grad, twin.device)
        self.note_values()

    def note_values(self) -> None:
        """Take what replica 0 holds now as what all replicas hold: a run has ended."""
        self._values = [_value_stamp(tensor) for tensor in self._tensors]
        self._gradients = [GradientStamp(tensor) for tensor in self._tensors]

    def distrust(self) -> None:
        """A run has failed in its middle: all twins take what replica 0 holds."""
        self._values = [None] * len(self._tensors)
        self._gradients = [None] * len(self._tensors)
        self._groups.clear()

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
        found: nn.Module = module if index is None else self.twins_of(module)[index]
        return found

    def twin_index(self, replica: int) -> int | None:
        """Which of the twins a replica uses; None: the users' own objects."""
        return None if replica < self._first else replica - self._first

    def twins_of(self, thing: Any) -> list[Any]:
        """The twins of a routed object."""
        found: list[Any] = thing.__dict__[_TWINS]
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
        plain = {key: value for key, value in thing.__dict__.items() if key != _TWINS}
        return copy.deepcopy(plain) if isinstance(thing, GradScaler) else plain

    def _refresh_tensors(self) -> None:
        values = [_value_stamp(tensor) for tensor in self._tensors]
        apart = local_components(self._modules) if values != self._values else set()
        for i, own in enumerate(self._tensors):
            if values[i] != self._values[i]:
                for twin in self.twin_tensors(own):
                    twin.requires_grad_(own.requires_grad)
                    if id(own) not in apart and not _share_memory(own, twin):
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


def structure_of(roots: Sequence[nn.Module]) -> list[object]:
    """What two states of modules must have in common for twins of one to fit the other."""
    found: list[object] = []
    for module in _modules_of(roots):
        found += (id(module), type(module))
        for tensor in _tensors_in(module):
            shape = tensor.shape if is_materialized(tensor) else None
            found += (id(tensor), type(tensor), tensor.dtype, shape)
    return found


def hooks_of(roots: Sequence[nn.Module]) -> list[int]:
    """The ids of the hooks that users have put at modules and their tensors."""
    found: list[int] = []
    for module in _modules_of(roots):
        for name in _MODULE_HOOKS:
            found += module.__dict__[name]
        for tensor in _tensors_in(module):
            for name in _TENSOR_HOOKS:
                found += _user_hooks(tensor, name)
    return found


_MODULE_HOOKS = (
    "_forward_pre_hooks",
    "_forward_hooks",
    "_backward_pre_hooks",
    "_backward_hooks",
)
_TENSOR_HOOKS = {
    "_backward_hooks": torch.Tensor.register_hook,
    "_post_accumulate_grad_hooks": torch.Tensor.register_post_accumulate_grad_hook,
}


def _user_hooks(tensor: torch.Tensor, name: str) -> dict[int, Any]:
    hooks = (getattr(tensor, name) or {}) if is_materialized(tensor) else {}
    return {key: hook for key, hook in hooks.items() if not isinstance(hook, GradientHook)}


def _copy_hooks(own: torch.Tensor, twin: torch.Tensor) -> None:
    for name, register in _TENSOR_HOOKS.items():
        for hook in _user_hooks(own, name).values():
            register(twin, hook)  # type: ignore[no-untyped-call]


def _metric_twins(modules: Iterable[nn.Module], i: int) -> dict[int, Any]:
    """What metrics have counted outlives their modules' twins; for deepcopy to take."""
    groups = [list(module.modules()) for module in modules if is_adopted(module)]
    return {
        id(part): part.__dict__[_TWINS][i]
        for parts in groups
        if all(_TWINS in part.__dict__ for part in parts)
        for part in parts
    }


def _modules_of(roots: Sequence[nn.Module]) -> Iterator[nn.Module]:
    seen: set[nn.Module] = set()
    for root in roots:
        yield from (module for _, module in root.named_modules(seen))


def _tensors_in(module: nn.Module) -> list[torch.Tensor]:
    named = (module.__dict__["_parameters"], module.__dict__["_buffers"])
    return [tensor for tensors in named for tensor in tensors.values() if tensor is not None]


def buffers_of(roots: Sequence[nn.Module]) -> list[torch.Tensor]:
    """The buffers of modules that are not lazy ones' to come."""
    named = [buffer for module in _modules_of(roots) for buffer in module._buffers.values()]
    return [buffer for buffer in named if buffer is not None and is_materialized(buffer)]


def _tensors_of(roots: Sequence[nn.Module]) -> list[torch.Tensor]:
    return [tensor for module in _modules_of(roots) for tensor in _tensors_in(module)]


def _value_stamp(tensor: torch.Tensor) -> object:
    """Changes with the values, and with `requires_grad`."""
    address = tensor.data_ptr() if is_materialized(tensor) else None
    return tensor._version, address, tensor.requires_grad


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


def _share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    ready = is_materialized(one) and is_materialized(other)
    return ready and one.data_ptr() == other.data_ptr()


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


def _moved_copy(value: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if value is None else value.detach().to(device, copy=True)


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
            if name == "__class__":
                return plain  # for pickle, copy, and what derives classes from it
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

        def __delattr__(self, name: str) -> None:
            twin = _own_twin(self)
            if twin is None:
                super().__delattr__(name)
            else:
                delattr(twin, name)

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
    registered = (module._parameters, module._buffers, module._modules)
    if name == "__class__" or any(name in names for names in registered):
        return
    if is_state(module, name):
        return
    for twin in module.__dict__.get(_TWINS, ()):
        with contextlib.suppress(AttributeError):  # a property without a setter
            if twin is not module:
                setattr(twin, name, value)


@contextlib.contextmanager
def watch_made(kinds: Sequence[type], note: Callable[[Any], None]) -> Iterator[None]:
    """While it is open, `note` gets every object of these classes that is made, once or more.

    Subclasses are watched too: not all of them call the `__init__` that they inherit.
    """

    def watched(original: Any) -> Any:
        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            note(self)

        return __init__

    originals = {kind: kind.__dict__["__init__"] for kind in _with_own_init(kinds)}
    for kind, original in originals.items():
        kind.__init__ = watched(original)  # type: ignore[misc]
    try:
        yield
    finally:
        for kind, original in originals.items():
            kind.__init__ = original  # type: ignore[misc]


def _with_own_init(kinds: Sequence[type]) -> Iterator[type]:
    for kind in kinds:
        if "__init__" in kind.__dict__:
            yield kind
        yield from _with_own_init(kind.__subclasses__())
