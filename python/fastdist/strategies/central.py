"""One copy of all parameters and optimizer states, for all replicas of a machine.

Replica 0, the owner, steps for all replicas. On CPUs the copy is in memory that all replicas map;
elsewhere each replica computes with a copy of its own, and gets the owner's values after each step.
"""

from __future__ import annotations

import mmap
import os
import types
import weakref
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from fastdist.collectives.communicator import Communicator
from fastdist.errors import FastdistError, UnsupportedError
from fastdist.replicas.context import state
from fastdist.training.modules import broadcast_state, is_materialized

_ALIGNMENT_BYTES = 64


class CentralParameters:
    """The only copy of parameters and optimizer states on a machine.

    Replica 0 is the owner; `is_shared` is True if all replicas map the same memory.
    """

    def __init__(
        self, home: torch.device, device: torch.device, *, is_owner: bool, is_shared: bool
    ) -> None:
        self._home = home
        self._device = device
        self._is_owner = is_owner
        self._is_shared = is_shared
        # The owner's copy, and the address, of each parameter.
        self._copies: MutableMapping[nn.Parameter, torch.Tensor] = WeakTensorKeyDictionary()
        self._versions: list[tuple[weakref.ref[nn.Parameter], int]] = []
        self._addresses: MutableMapping[nn.Parameter, int] = WeakTensorKeyDictionary()

    def moved(self) -> list[nn.Parameter]:
        """Return parameters whose memory users have replaced, for example by `module.double()`."""
        return [p for p, address in self._addresses.items() if p.data_ptr() != address]

    def take_parameters(self, workers: Communicator, parameters: Sequence[nn.Parameter]) -> None:
        """Share or copy the owner's values to all replicas. Every replica must call."""
        ready = [p for p in parameters if is_materialized(p)]
        if not ready:
            return
        if self._is_shared:
            self._share(workers, ready)
        else:
            broadcast_state(workers, ready)
        for parameter in ready:
            self._addresses[parameter] = parameter.data_ptr()
            self._versions.append((weakref.ref(parameter), parameter._version))

    def _share(self, workers: Communicator, ready: Sequence[nn.Parameter]) -> None:
        """Make the parameters views of shared memory."""
        offsets, size = [], 0
        ready = [parameter for parameter in ready if parameter.numel()]
        for parameter in ready:
            offsets.append(size)
            nbytes = parameter.numel() * parameter.element_size()
            size += -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        memory = _shared_memory(workers, max(size, 1), self._is_owner)
        with torch.no_grad():
            for parameter, offset in zip(ready, offsets, strict=True):
                view = torch.frombuffer(
                    memory, dtype=parameter.dtype, count=parameter.numel(), offset=offset
                )
                if _is_dense(parameter):
                    shared = view.as_strided(parameter.shape, parameter.stride())
                else:
                    shared = view.view(parameter.shape)
                if self._is_owner:
                    shared.copy_(parameter)
                parameter.data = shared
        workers.barrier()

    def take_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        prepare: Callable[[torch.optim.Optimizer], None],
        workers: Callable[[], Communicator | None],
    ) -> None:
        """Make a step of all replicas' optimizers one step of the owner's optimizer.

        `prepare` raises if the optimizer must not step now; `workers` connects the replicas.
        """
        plain = optimizer.step

        def step(own: torch.optim.Optimizer, closure: Any = None) -> Any:
            replicas = workers()
            if replicas is None:
                return plain(closure)
            if closure is not None:
                raise ValueError(
                    f"{type(own).__name__}.step got a closure; under CentralStorageStrategy the "
                    "optimizer steps once for all replicas and cannot evaluate their closures"
                )
            prepare(own)
            own.__dict__["_opt_called"] = True  # schedulers check this attribute
            if state.replica is not None:
                self.require_unchanged()
            self._step(own, plain, replicas)
            self.note_versions()
            return None

        step.__dict__["_wrapped_by_lr_sched"] = True
        optimizer.__dict__["step"] = types.MethodType(step, optimizer)
        if not self._is_owner:
            optimizer.register_load_state_dict_post_hook(lambda loaded: loaded.state.clear())

    def step_once(self, workers: Communicator, step: Callable[[], None]) -> None:
        """Make one step for all replicas, by a function that changes the parameters in place.

        Every replica must call; the owner calls `step`.
        """
        if not self._is_shared:
            raise UnsupportedError(
                f"the parameters are on {self._home}, and this replica computes on {self._device}: "
                "only torch's optimizers can step there; expected all on the CPU"
            )
        workers.barrier()  # no replica computes with the parameters after this
        if self._is_owner:
            step()
        workers.barrier()
        self.note_versions()

    def note_versions(self) -> None:
        """Record the versions of the parameters, to accept all changes so far."""
        alive = {ref: parameter for ref, _ in self._versions if (parameter := ref()) is not None}
        self._versions = [(ref, parameter._version) for ref, parameter in alive.items()]

    def require_unchanged(self) -> None:
        """Check that only optimizers have changed parameters in place in `run`."""
        for ref, version in self._versions:
            parameter = ref()
            if parameter is not None and parameter._version != version:
                raise FastdistError(
                    f"a parameter of shape {tuple(parameter.shape)} was changed in place in run; "
                    "under CentralStorageStrategy all replicas share one copy, and each replica "
                    "has changed it: use strategy.update(parameter, fn), which calls fn once"
                )

    def update(
        self, workers: Communicator, parameter: torch.Tensor, call: Callable[[Any], Any]
    ) -> Any:
        """Call `call` on the owner, with the copy of a parameter; all replicas get the result."""
        workers.barrier()
        result = workers.broadcast_object(call(parameter) if self._is_owner else None)
        if not self._is_shared:
            broadcast_state(workers, [parameter])
        self.note_versions()
        return result

    def _step(
        self, optimizer: torch.optim.Optimizer, plain: Callable[..., Any], replicas: Communicator
    ) -> None:
        replicas.barrier()  # no replica computes with the parameters after this
        settings: Any = None
        if self._is_owner:
            before = _settings_of(optimizer)
            self._step_at_home(optimizer, plain)
            after = _settings_of(optimizer)
            settings = after if repr(after) != repr(before) else None
        # Some optimizers keep counters in their groups; all replicas take the owner's values.
        settings = replicas.broadcast_object(settings)
        if settings is not None and not self._is_owner:
            for group, values in zip(optimizer.param_groups, settings, strict=True):
                group.update(values)
        if not self._is_shared:
            broadcast_state(replicas, [p for g in optimizer.param_groups for p in g["params"]])

    def _step_at_home(self, optimizer: torch.optim.Optimizer, plain: Callable[..., Any]) -> None:
        """Step on the device of the copy, with parameters and gradients copied there and back."""
        if self._device == self._home:
            plain()
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        away = [(parameter, parameter.data, parameter.grad) for parameter in parameters]
        for parameter, data, grad in away:
            copy = self._copies.get(parameter)
            if copy is None or copy.dtype != data.dtype or copy.shape != data.shape:
                copy = self._copies[parameter] = data.to(self._home, copy=True)
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
    """Return True if the elements fill a block of memory in an unusual order of axes."""
    return not tensor.is_contiguous() and torch.ops.aten.is_non_overlapping_and_dense(tensor)


def _shared_memory(workers: Communicator, size: int, is_owner: bool) -> mmap.mmap:
    """Map memory of the owner on all replicas of this machine. Every replica must call."""
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
        workers.barrier()  # all replicas have opened the memory
        return memory
    finally:
        if fd >= 0:
            os.close(fd)
