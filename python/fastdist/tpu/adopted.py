"""The modules and optimizers of a strategy whose replicas are the devices of one XLA program.

The user's objects are kept. Outside `run`, their tensors are replicated over the mesh; while a run
is traced, each tensor stands for the tensor of each device. ON_READ variables, which may differ
between replicas, are stacked between runs, and the user's object shows the value of replica 0.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fastdist.collectives.communicator import Communicator
from fastdist.errors import UnsupportedError
from fastdist.replicas.variables import Variable, local_components, own
from fastdist.tpu.mesh import Mesh
from fastdist.tpu.padding import tensors_in
from fastdist.training.contributions import GradientHook
from fastdist.training.modules import (
    broadcast_state,
    is_materialized,
    modules_of,
    named_buffers,
    named_parameters,
    require_in_sync,
    require_same_structure,
)

_OTHER_FIRST_STEP = ("LBFGS", "SparseAdam")
_TENSOR_HOOKS = {
    "_backward_hooks": torch.Tensor.register_hook,
    "_post_accumulate_grad_hooks": torch.Tensor.register_post_accumulate_grad_hook,
}


class AdoptedModules:
    """The modules and optimizers that were made in the scope or passed to `mirror`.

    `hosts` has one rank per process of the mesh; it is None if there is one process.
    """

    def __init__(self, mesh: Mesh, hosts: Communicator | None = None) -> None:
        self.num_replicas_in_sync = mesh.size
        self.local_replica_ids = tuple(mesh.local)
        self._hosts = hosts
        self.roots: list[nn.Module] = []
        self.parameters: list[tuple[str, nn.Parameter]] = []
        self._mesh = mesh
        self._optimizers: list[torch.optim.Optimizer] = []
        self._buffers: list[tuple[str, torch.Tensor]] = []  # equal on all replicas
        self._locals: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # buffer, stacked values
        self._structure: list[int] = []
        self.has_batch_norm = False

    def adopt(self, roots: Sequence[nn.Module], made: Sequence[Any]) -> None:
        """Move modules and the states of optimizers to the devices."""
        named = [*named_parameters(roots), *named_buffers(roots)]
        for name, tensor in named:
            if not is_materialized(tensor):
                raise UnsupportedError(
                    f"{name} belongs to a lazy module and has no shape yet: call the model once "
                    "before it is adopted, so that it makes its parameters"
                )
        self._move(named)
        known = set(map(id, self.roots))
        self.roots += [root for root in roots if id(root) not in known]
        self._look()
        for thing in made:
            if isinstance(thing, torch.optim.Optimizer):
                self._optimizers.append(thing)
                _make_states(thing, self._mesh.replicate)
        own(roots, self)

    def _move(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        """Move new tensors to the devices, with the values of the first process."""
        new = [(name, tensor) for name, tensor in named if tensor.device.type != "xla"]
        if self._hosts is not None:
            require_same_structure(self._hosts, new)
            broadcast_state(self._hosts, [tensor for _, tensor in new])
        for _, tensor in new:
            self._replicate(tensor)

    def _replicate(self, tensor: torch.Tensor) -> None:
        """Move a tensor to the devices in place: the Python object stays the same."""
        moved = self._mesh.replicate(tensor)
        if isinstance(tensor, nn.Parameter):
            moved = nn.Parameter(moved, tensor.requires_grad)
        if tensor.grad is not None:
            moved.grad = self._mesh.replicate(tensor.grad)
        _copy_hooks(tensor, moved)
        moved.__dict__.update(tensor.__dict__)
        torch.utils.swap_tensors(tensor, moved)  # type: ignore[no-untyped-call]

    def refresh(self) -> None:
        """Move tensors that were made or changed outside `run` to the devices."""
        structure = _ids_in(self.roots)
        if structure != self._structure:
            self._structure = structure
            self._look()
            self._move([*self.parameters, *named_buffers(self.roots)])

    def _look(self) -> None:
        self.parameters = named_parameters(self.roots)
        apart = local_components(self.roots) if self.num_replicas_in_sync > 1 else set()
        named = named_buffers(self.roots)
        self._buffers = [each for each in named if id(each[1]) not in apart]
        self.has_batch_norm = any(
            isinstance(module, _BatchNorm) for root in self.roots for module in root.modules()
        )
        for _, buffer in named:
            known = self._locals.get(id(buffer))
            if id(buffer) in apart and (known is None or known[0] is not buffer):
                rows = buffer.detach().cpu().expand(len(self.local_replica_ids), *buffer.shape)
                self._locals[id(buffer)] = buffer, self._mesh.stack(rows.contiguous())

    # --- around a run ---------------------------------------------------------------------------

    def enter(self) -> None:
        """Make all tensors stand for the tensors of each device."""
        if self._mesh.size == 1:
            return
        enter = self._mesh.enter
        with torch.no_grad():
            for tensor in self._replicated():
                tensor.data = enter(tensor)
            for buffer, stacked in self._locals.values():
                buffer.data = enter(stacked, True)
            for _, parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad = enter(parameter.grad)

    def leave(self) -> list[torch.Tensor]:
        """Undo `enter`; return the tensors to compute."""
        if self._mesh.size == 1:
            return []
        leave, made = self._mesh.leave, []
        with torch.no_grad():
            for tensor in self._replicated():
                tensor.data = leave(tensor)
                made.append(tensor)
            for key, (buffer, _) in self._locals.items():
                stacked = leave(buffer, True)
                self._locals[key] = buffer, stacked
                buffer.data = self._mesh.shared(stacked[0])
                made.append(stacked)
            for _, parameter in self.parameters:
                if parameter.grad is not None:
                    parameter.grad = leave(parameter.grad)
                    made.append(parameter.grad)
        return made

    def _replicated(self) -> Iterator[torch.Tensor]:
        for _, tensor in [*self.parameters, *self._buffers]:
            yield tensor
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                yield from (v for v in group.values() if _is_on_devices(v))
            for values in optimizer.state.values():
                yield from filter(_is_on_devices, tensors_in(values))

    def tensor_ids(self) -> set[int]:
        """Return the ids of all tensors that `leave` converts."""
        grads = [id(p.grad) for _, p in self.parameters if p.grad is not None]
        own = [id(buffer) for buffer, _ in self._locals.values()]
        return {*map(id, self._replicated()), *grads, *own}

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the current values, if the program fails to run."""
        if self._mesh.size == 1:
            return lambda: None
        with torch.no_grad():
            kept = [(tensor, tensor.detach()) for tensor in self._replicated()]
            gradients = [(parameter, parameter.grad) for _, parameter in self.parameters]
        stacked = dict(self._locals)

        def restore() -> None:
            with torch.no_grad():
                for tensor, data in kept:
                    tensor.data = data
            for parameter, grad in gradients:
                parameter.grad = grad
            self._locals.update(stacked)

        return restore

    # --- the interface that variables use -------------------------------------------------------

    def connect(self) -> Communicator | None:
        """Return what connects the processes of the mesh; None if there is one."""
        return self._hosts

    def values(self, variable: Variable) -> list[torch.Tensor]:
        """Return copies of a variable's values, one per local replica, on the CPU."""
        known = self._locals.get(id(variable.component))
        if known is None:
            value = variable.component.detach().cpu()
            return [value.clone() for _ in self.local_replica_ids]
        rows = self._mesh.rows(known[1])
        return [row.reshape(variable.component.shape).clone() for row in rows]

    def write(self, variable: Variable, write: Callable[[int, Variable], None]) -> None:
        """Call `write` for a copy of each local replica's variable; send the copies' values."""
        when, how = variable.synchronization, variable.aggregation
        copies = [
            Variable(value, synchronization=when, aggregation=how)
            for value in self.values(variable)
        ]
        for local, written in enumerate(copies):
            write(local, written)
        component, values = variable.component, [written.component for written in copies]
        with torch.no_grad():
            if id(component) in self._locals:
                stacked = self._mesh.stack(torch.stack(values))
                self._locals[id(component)] = component, stacked
            component.data = self._mesh.replicate(values[0])

    def require_in_sync(self) -> None:
        """Check that parameters and buffers have the same bits on all devices."""
        self.refresh()
        replicas: list[list[tuple[str, torch.Tensor]]] = [[] for _ in self.local_replica_ids]
        for name, tensor in [*self.parameters, *self._buffers]:
            for replica, row in zip(replicas, self._mesh.rows(tensor), strict=False):
                replica.append((name, row))
        require_in_sync(self._hosts, replicas)


def _ids_in(roots: Sequence[nn.Module]) -> list[int]:
    """Return the ids of all modules, parameters and buffers. Called in every run."""
    found: list[int] = []
    for module in modules_of(roots):
        found.append(id(module))
        found += map(id, module._parameters.values())
        found += map(id, module._buffers.values())
    return found


def _copy_hooks(source: torch.Tensor, target: torch.Tensor) -> None:
    """Register the hooks that users have put on `source` on `target` too."""
    for name, register in _TENSOR_HOOKS.items():
        hooks = (getattr(source, name) or {}) if is_materialized(source) else {}
        for hook in hooks.values():
            if not isinstance(hook, GradientHook):
                register(target, hook)  # type: ignore[no-untyped-call]


def _is_on_devices(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "xla"


# --- states of optimizers ------------------------------------------------------------------------


class _Recorded(dict[Any, Any]):
    """The state of a parameter, with the first value of each entry."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[Any, Any] = {}

    def __setitem__(self, key: Any, value: Any) -> None:
        is_tensor = isinstance(value, torch.Tensor)
        self.first.setdefault(key, value.detach().clone() if is_tensor else value)
        super().__setitem__(key, value)


def _make_states(
    optimizer: torch.optim.Optimizer, place: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Make the states of an optimizer before its first step, so that all steps share one program.

    torch's optimizers make their states in the first step, mostly as zeros. A program that makes
    states differs from a program that reads them and would be compiled for one step only.
    Therefore a twin of the optimizer takes one step on CPU copies of the parameters with zero
    gradients, and the first values that it writes to its states become the states of the optimizer.

    No states are made for optimizers outside torch, or if the first step is a different computation
    (SGD with dampening, LBFGS); their first step is compiled separately.

    Args:
        place: moves a tensor to the parameters' device. Scalars (tensors without axes) stay on the
            CPU, where optimizers read them.
    """
    for parameters in optimizer.state.values():
        for key, value in parameters.items():
            if isinstance(value, torch.Tensor) and value.dim():
                parameters[key] = place(value)
    if optimizer.state or not _may_begin_with_states(optimizer):
        return
    twin, originals = _twin(optimizer)
    twin.step()
    for parameter, recorded in twin.state.items():
        optimizer.state[originals[id(parameter)]] = {
            key: place(value) if isinstance(value, torch.Tensor) and value.dim() else value
            for key, value in recorded.first.items()
        }


def _may_begin_with_states(optimizer: torch.optim.Optimizer) -> bool:
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim") or kind.__name__ in _OTHER_FIRST_STEP:
        return False
    return not any(
        group.get("dampening") or group.get("capturable") or group.get("fused")
        for group in optimizer.param_groups
    )


def _twin(optimizer: torch.optim.Optimizer) -> tuple[Any, dict[int, nn.Parameter]]:
    originals: dict[int, nn.Parameter] = {}
    twin: Any = copy.copy(optimizer)  # without hooks, and without a scheduler's wrapper of `step`
    twin.state = defaultdict(_Recorded)
    twin.param_groups = []
    for group in optimizer.param_groups:
        copies = []
        for parameter in group["params"]:
            own = nn.Parameter(parameter.detach().cpu().clone(), parameter.requires_grad)
            if parameter.requires_grad:
                own.grad = torch.zeros_like(own)
            originals[id(own)] = parameter
            copies.append(own)
        # With weight decay, SGD's first momentum would include a share of the parameters.
        twin.param_groups.append({**group, "params": copies, "weight_decay": 0.0})
    return twin, originals
