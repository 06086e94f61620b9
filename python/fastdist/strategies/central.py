"""One copy of all parameters and optimizer states, for all replicas of a machine.

The copy belongs to replica 0, the owner, whose optimizer steps for all. Where replicas compute on
the device of the copy and that is the CPU, the copy lies in memory that all of them map: their
parameters are views of it. Elsewhere each replica computes with a copy of its own, and gets the
owner's values after each step.
"""

from __future__ import annotations

import mmap
import os
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fastdist.collectives.communicator import Communicator
from fastdist.errors import FastdistError
from fastdist.replicas.context import state
from fastdist.training.modules import broadcast_state, is_materialized

_ALIGNMENT_BYTES = 64


class CentralParameters:
    """Parameters and optimizers of which the machine has one copy.

    Args:
        home: device of the copy.
        device: where this replica computes.
        is_owner: True in replica 0.
        is_shared: True if all replicas map the same memory.
    """

    def __init__(
        self, home: torch.device, device: torch.device, *, is_owner: bool, is_shared: bool
    ) -> None:
        self._home = home
        self._device = device
        self._is_owner = is_owner
        self._is_shared = is_shared
        self._copies: dict[int, torch.Tensor] = {}  # the owner's, by id of the parameter
        self._versions: list[tuple[weakref.ref[nn.Parameter], int]] = []
        self._addresses: dict[int, tuple[weakref.ref[nn.Parameter], int]] = {}  # by id

    def moved(self) -> list[nn.Parameter]:
        """The parameters whose memory users have replaced, by `module.double()`, say."""
        known = [(ref(), address) for ref, address in self._addresses.values()]
        return [p for p, address in known if p is not None and p.data_ptr() != address]

    def take_parameters(self, workers: Communicator, parameters: Sequence[nn.Parameter]) -> None:
        """Give all replicas the owner's values. Every replica must call."""
        ready = [p for p in parameters if is_materialized(p)]
        if not ready:
            return
        if self._is_shared:
            self._share(workers, ready)
        else:
            broadcast_state(workers, ready)
        for parameter in ready:
            ref = weakref.ref(parameter)
            self._addresses[id(parameter)] = ref, parameter.data_ptr()
            self._versions.append((ref, parameter._version))

    def _share(self, workers: Communicator, ready: Sequence[nn.Parameter]) -> None:
        """Make the parameters views of memory of the owner."""
        offsets, size = [], 0
        for parameter in ready:
            offsets.append(size)
            nbytes = parameter.numel() * parameter.element_size()
            size += -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        memory = _shared_memory(workers, max(size, 1), self._is_owner)
        with torch.no_grad():
            for parameter, offset in zip(ready, offsets, strict=True):
                view = torch.frombuffer(
                    memory, dtype=parameter.dtype, count=max(parameter.numel(), 1), offset=offset
                )[: parameter.numel()]
                layout = parameter.data.stride() if _is_dense(parameter) else None
                shared = (
                    view.view(parameter.shape)
                    if layout is None
                    else view.as_strided(parameter.shape, layout)
                )
                if self._is_owner:
                    shared.copy_(parameter)
                parameter.data = shared
        workers.barrier()

    def take_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        require_allowed: Callable[[torch.optim.Optimizer], None],
        workers: Callable[[], Communicator | None],
    ) -> None:
        """From now on one step of all replicas' optimizers is one step of the owner's.

        Args:
            optimizer: made in the scope, on every replica.
            require_allowed: raises where the optimizer must not step now.
            workers: gives the communicator of all replicas.
        """
        plain = optimizer.step

        def step(own: torch.optim.Optimizer, closure: Any = None) -> Any:
            replicas = workers()
            if replicas is None:
                return plain(closure)
            if closure is not None:
                raise ValueError(
                    f"{type(own).__name__}.step got a closure; under CentralStorageStrategy the "
                    "optimizer steps once for all replicas and cannot evaluate them anew"
                )
            require_allowed(own)
            own.__dict__["_opt_called"] = True  # which schedulers look for
            if state.replica is not None:
                self.require_unchanged()
            self._step(own, plain, replicas)
            self.note_versions()
            return None

        step.__dict__["_wrapped_by_lr_sched"] = True
        optimizer.__dict__["step"] = types.MethodType(step, optimizer)
        if not self._is_owner:
            optimizer.register_load_state_dict_post_hook(lambda loaded: loaded.state.clear())

    def note_versions(self) -> None:
        """Remember the parameters as they are: what has changed them has done so once."""
        alive = {ref: parameter for ref, _ in self._versions if (parameter := ref()) is not None}
        self._versions = [(ref, parameter._version) for ref, parameter in alive.items()]

    def require_unchanged(self) -> None:
        """Check that `run` has changed no parameter in place but by optimizers.

        Raises:
            FastdistError: this replica has, and so have the others: all have changed the one copy.
        """
        for ref, version in self._versions:
            parameter = ref()
            if parameter is not None and parameter._version != version:
                raise FastdistError(
                    f"a parameter of shape {tuple(parameter.shape)} was changed in place in run; "
                    "under CentralStorageStrategy all replicas have one copy of it, which each of "
                    "them has changed: use strategy.update(parameter, fn), which calls fn once"
                )

    def update(
        self, workers: Communicator, parameter: torch.Tensor, call: Callable[[Any], Any]
    ) -> Any:
        """Call with the one copy of a parameter; every replica gets the result."""
        workers.barrier()
        result = workers.broadcast_object(call(parameter) if self._is_owner else None)
        if not self._is_shared:
            broadcast_state(workers, [parameter])
        self.note_versions()
        return result

    def _step(
        self,
        optimizer: torch.optim.Optimizer,
        plain: Callable[..., Any],
        replicas: Communicator,
    ) -> None:
        replicas.barrier()  # nobody computes with the parameters any more
        settings: Any = None
        if self._is_owner:
            before = _settings_of(optimizer)
            self._step_at_home(optimizer, plain)
            after = _settings_of(optimizer)
            settings = after if repr(after) != repr(before) else None
        # Some optimizers count in their groups; all replicas go on with the owner's.
        settings = replicas.broadcast_object(settings)
        if settings is not None and not self._is_owner:
            for group, values in zip(optimizer.param_groups, settings, strict=True):
                group.update(values)
        if not self._is_shared:
            broadcast_state(replicas, [p for g in optimizer.param_groups for p in g["params"]])

    def _step_at_home(self, optimizer: torch.optim.Optimizer, plain: Callable[..., Any]) -> None:
        """Step where the copy is: parameters and gradients go there and back."""
        if self._device == self._home:
            plain()
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        away = [(parameter, parameter.data, parameter.grad) for parameter in parameters]
        for parameter, data, grad in away:
            copy = self._copies.get(id(parameter))
            if copy is None or copy.dtype != data.dtype or copy.shape != data.shape:
                copy = self._copies[id(parameter)] = data.to(self._home, copy=True)
            else:
                copy.copy_(data)
            parameter.grad = None
            parameter.data = copy
            parameter.grad = None if grad is None else grad.to(self._home)
        try:
            plain()
        finally:
            for parameter, data, grad in away:
                data.copy_(parameter.data)
                parameter.grad = None
                parameter.data = data
                parameter.grad = grad


def _settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


def _is_dense(tensor: torch.Tensor) -> bool:
    """True if the elements fill a block of memory, in any order of axes."""
    return not tensor.is_contiguous() and torch.ops.aten.is_non_overlapping_and_dense(tensor)


def _shared_memory(workers: Communicator, size: int, is_owner: bool) -> mmap.mmap:
    """Memory of the owner that all replicas of this machine map. Every replica must call."""
    fd = os.memfd_create("fastdist-central") if is_owner else -1
    try:
        if is_owner:
            os.ftruncate(fd, size)
        path = workers.broadcast_object(f"/proc/{os.getpid()}/fd/{fd}")
        if not is_owner:
            try:
                fd = os.open(path, os.O_RDWR)
            except OSError as error:
                raise FastdistError(
                    f"replica {workers.rank} cannot map the parameters of replica 0: {error}"
                ) from None
        memory = mmap.mmap(fd, size)
        workers.barrier()  # all have opened it
        return memory
    finally:
        if fd >= 0:
            os.close(fd)
