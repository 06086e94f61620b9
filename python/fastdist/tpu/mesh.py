"""The devices of an XLA program, and the views of tensors from each device.

torch_xla traces one program for all devices. Outside manual sharding (torch_xla's term), a tensor
is global and laid out over the devices: either replicated, or *stacked*, with row i on device i.
`enter` converts a global tensor to manual sharding, where it stands for the part of each device, of
equal shape on all devices, and every device computes on its own part. `leave` converts it back to a
global tensor. A pair of the two costs two operations that move no data. On global tensors, XLA's
partitioner inserts the collectives that change layouts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar, cast

import numpy as np
import torch

from fastdist.errors import UnsupportedError

T = TypeVar("T", torch.Tensor, tuple[int, ...], list[float])
_AXIS = "replica"


def load_torch_xla() -> ModuleType:
    """Import torch_xla."""
    try:
        import_module("torch_xla.runtime")
        return import_module("torch_xla")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "torch_xla":
            raise
        raise ImportError(
            "TPUs need torch_xla: pip install torch==2.9.* torch_xla==2.9.*; "
            "on a machine without a TPU use fd.MirroredStrategy() instead",
            name="torch_xla",
        ) from error


@dataclasses.dataclass(frozen=True, slots=True)
class RuntimeDevices:
    """The devices of the XLA runtime."""

    kind: str  # "TPU", "CPU", …
    count: int  # of all processes
    own: tuple[int, ...]  # the numbers of this process's devices


def start_runtime() -> RuntimeDevices:
    """Start torch_xla's runtime, unless it runs already."""
    xla: Any = load_torch_xla()
    try:
        count: int = xla.runtime.global_runtime_device_count()
        names: list[str] = xla._XLAC._xla_get_runtime_devices()
        kind: str = xla.runtime.device_type()
    except Exception as error:  # a PJRT plugin may raise any error
        raise UnsupportedError(str(error).partition("\n")[0]) from error
    return RuntimeDevices(kind, count, tuple(int(name.rpartition(":")[2]) for name in names))


class Mesh:
    """All devices of the XLA runtime in one dimension, ordered by process.

    With one device, tensors are not partitioned and `enter` and `leave` do nothing. With several
    processes (one per host of a TPU slice), each process traces and runs the same program, and
    writes and reads the rows of its own devices.

    Args:
        processes: the numbers of each process's devices; this process only by default.

    Attributes:
        local: the positions of this process's devices in the mesh.
        device: torch's device, which stands for all devices.
    """

    def __init__(self, processes: Sequence[Sequence[int]] | None = None) -> None:
        devices = start_runtime()
        processes = [devices.own] if processes is None else processes
        order = [number for own in processes for number in own]
        if sorted(order) != list(range(devices.count)) or list(devices.own) not in map(
            list, processes
        ):
            raise UnsupportedError(
                f"the XLA runtime has {devices.count} devices, {list(devices.own)} of them in this "
                f"process; expected the devices of all processes, got {list(map(list, processes))}"
            )
        self.size = devices.count
        self.kind = devices.kind
        first = order.index(devices.own[0])
        self.local = range(first, first + len(devices.own))
        xla = load_torch_xla()
        runtime: Any = xla.runtime
        if self.size > 1 and not runtime.is_spmd():
            runtime.use_spmd()
        self.device: torch.device = xla.device()
        self._bindings: Any = xla._XLAC
        self._model: Any = import_module("torch_xla.core.xla_model")
        self._metrics: Any = import_module("torch_xla.debug.metrics")
        self._shardings: dict[tuple[int, bool], Any] = {}
        self._manual: Any = None
        if self.size > 1:
            spmd: Any = import_module("torch_xla.distributed.spmd")
            self._spmd = spmd
            self._mesh: Any = spmd.Mesh(np.array(order), (self.size,), (_AXIS,))
            self._manual = self._bindings.OpSharding([], [], [], spmd.ShardingType.MANUAL)

    def __repr__(self) -> str:
        return f"<{self.size} {self.kind} devices of XLA>"

    # --- placing --------------------------------------------------------------------------------

    def replicate(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy a tensor to every device."""
        return self._placed(self._sent(tensor), stacked=False)

    def stack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a tensor of shape (size, …) from rows of this process. Thread-safe."""
        if self.size == 1:
            return self._sent(tensor)
        if tensor.device.type == "xla" and self.is_whole:
            return self._placed(tensor.detach(), stacked=True)
        return self._sent_rows(tensor.detach().cpu().contiguous())

    def _sent_rows(self, own: torch.Tensor) -> torch.Tensor:
        # torch_xla's minibatch: row i goes to device i of this process.
        axes = (_AXIS, *(None,) * (own.dim() - 1))
        spec = self._spmd.ShardingSpec(self._mesh, axes, minibatch=True)
        (sent,) = self._model.send_cpu_data_to_device([own], str(self.device), spec)
        return cast(torch.Tensor, sent)

    def _placed(self, tensor: torch.Tensor, stacked: bool) -> torch.Tensor:
        if self.size > 1:
            self._bindings._xla_mark_sharding(tensor, self._sharding(tensor.dim(), stacked))
        return tensor

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """Send a tensor to the devices as data, at once.

        `to` would first make an empty tensor, which another thread's compilation could include, and
        would turn a scalar 0 or 1 into a constant.
        """
        if self.size > 1 or tensor.device.type == "xla":
            return tensor.detach().to(self.device)
        own = tensor.detach().contiguous()
        (sent,) = self._model.send_cpu_data_to_device([own], str(self.device))
        return cast(torch.Tensor, sent)

    @property
    def is_whole(self) -> bool:
        """True if all devices belong to this process."""
        return len(self.local) == self.size

    def own(self, entries: T) -> T:
        """Select the entries of this process's devices from one entry per device."""
        return entries[self.local[0] : self.local[-1] + 1]

    def shared(self, tensor: torch.Tensor) -> torch.Tensor:
        """Lay out a result of stacked tensors so that every process can read it."""
        return tensor if self.is_whole else self._placed(tensor, stacked=False)

    def rows(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Copy the row of each of this process's devices to the CPU; all of a replicated tensor."""
        if self.size == 1:
            return [tensor.detach().cpu()]
        self._bindings._xla_sync_multi([tensor], [], True, True)
        shards = self._bindings._get_local_shards([tensor.detach()])[0]
        return [shard for shard, _ in shards]

    # --- manual sharding ------------------------------------------------------------------------

    def enter(self, tensor: torch.Tensor, stacked: bool = False) -> torch.Tensor:
        """Return each device's part of a tensor: a row if stacked, else the whole tensor."""
        if self.size > 1:
            tensor = self._placed(tensor.detach(), stacked)
            tensor = self._bindings._spmd_full_to_shard_shape(tensor)
        return tensor.squeeze(0) if stacked else tensor

    def leave(self, tensor: torch.Tensor, stacked: bool = False) -> torch.Tensor:
        """Make a global tensor of each device's tensor, of shape (size, …) if stacked.

        If not stacked, the devices' tensors must be equal, which is not checked.
        """
        if stacked:
            return self.leave_joined(tensor.unsqueeze(0))
        if tensor.requires_grad:
            tensor = tensor.detach()
        return tensor if self.size == 1 else self._left(tensor, False, tensor.shape)

    def leave_joined(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a global tensor of the devices' tensors, joined along axis 0."""
        if self.size == 1:
            return tensor.detach()
        shape = (self.size * tensor.shape[0], *tensor.shape[1:])
        return self._left(tensor.detach(), True, shape)

    def _left(self, tensor: torch.Tensor, stacked: bool, shape: Sequence[int]) -> torch.Tensor:
        self._bindings._mark_manual_sharding(tensor, self._manual)
        full: torch.Tensor = self._bindings._spmd_shard_to_full_shape(
            tensor, self._sharding(tensor.dim(), stacked), list(shape), tensor.dtype
        )
        return full

    def all_reduce(self, op: str, tensor: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Reduce the devices' tensors by XLA's "sum", "min" or "max", and multiply by `scale`."""
        if self.size == 1:
            return tensor.clone() if scale == 1.0 else tensor * scale
        groups = [list(range(self.size))]
        reduced: torch.Tensor = self._bindings._xla_spmd_all_reduce(op, tensor, scale, groups)
        return reduced

    # --- running --------------------------------------------------------------------------------

    def sync(self, tensors: Sequence[torch.Tensor]) -> None:
        """Compile the program of these tensors if it is new, and start it."""
        own = [tensor for tensor in tensors if tensor.device.type == "xla"]
        if own:
            self._bindings._xla_sync_multi(own, [], False, True)

    def step(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sync at the end of a run; with one device, in-place changes reuse the memory."""
        if self.size == 1:  # as torch_xla.sync, which also reads the environment
            self._bindings._xla_step_marker(str(self.device), [], wait=False, reset_scope=True)
            self._model._run_step_closures()
        else:
            self.sync(tensors)

    def seed(self, seed: int) -> None:
        """Seed the random numbers of global tensors, by a value that is no constant of programs."""
        self._bindings._xla_set_rng_seed(seed & (2**63 - 1), str(self.device))

    def compiles(self) -> int:
        """Return the number of programs that this process has compiled."""
        return self._metrics.counter_value("UncachedCompile") or 0

    def _sharding(self, axes: int, stacked: bool) -> Any:
        key = axes, stacked
        if key not in self._shardings:
            spec = (_AXIS if stacked else None, *(None,) * (axes - 1)) if axes else ()
            self._shardings[key] = self._mesh.get_op_sharding(spec)
        return self._shardings[key]
