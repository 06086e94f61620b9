"""The devices of an XLA program, and tensors as each of them sees its own.

torch_xla traces one program for all devices. Outside of what it calls manual sharding a tensor is
one, laid over the devices in some way: here either replicated, or *stacked*, where row i is what
device i has. `enter` gives what each device has as a tensor of its own, of the same shape on all,
and what is computed from it is computed by every device alone; `leave` makes one tensor of that
again. Each pair costs two operations that move nothing. Between them, XLA's partitioner inserts
whatever collective brings one layout into another.
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
    """torch_xla.

    Raises:
        ImportError: it is not installed.
    """
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
class XlaDevices:
    """What the XLA runtime has.

    Attributes:
        kind: "TPU", "CPU", ….
        count: how many devices there are, with those of other processes.
        own: the numbers of this process's.
    """

    kind: str
    count: int
    own: tuple[int, ...]


def start_runtime() -> XlaDevices:
    """Start torch_xla's runtime, if it has not been.

    Raises:
        ImportError: torch_xla is not installed.
        UnsupportedError: the runtime cannot start.
    """
    xla: Any = load_torch_xla()
    try:
        count: int = xla.runtime.global_runtime_device_count()
        names: list[str] = xla._XLAC._xla_get_runtime_devices()
        kind: str = xla.runtime.device_type()
    except Exception as error:  # whatever a plugin of PJRT raises
        raise UnsupportedError(str(error).partition("\n")[0]) from error
    return XlaDevices(kind, count, tuple(int(name.rpartition(":")[2]) for name in names))


class XlaMesh:
    """All devices of the XLA runtime in a row, process by process.

    With one device nothing is partitioned, and `enter` and `leave` are no operations. Where there
    are several processes (one for each host of a TPU slice), each of them traces and runs the same
    program, brings its own devices' rows and reads them.

    Args:
        is_manual: False leaves partitioning to XLA: `enter` gives the tensor as it is, and what
            `leave` is given becomes replicated.
        processes: the numbers of each process's devices; by default there is this one alone.

    Attributes:
        size: how many devices.
        local: the places of this process's devices among them.
        device: torch's one name for all of them.
        kind: "TPU", "CPU", ….

    Raises:
        ImportError: torch_xla is not installed.
        UnsupportedError: the runtime cannot start, or has other devices than those.
    """

    def __init__(
        self, is_manual: bool = True, processes: Sequence[Sequence[int]] | None = None
    ) -> None:
        self._is_manual = is_manual
        devices = start_runtime()
        processes = [devices.own] if processes is None else processes
        order = [number for own in processes for number in own]
        if sorted(order) != list(range(devices.count)) or list(devices.own) not in map(
            list, processes
        ):
            raise UnsupportedError(
                f"the XLA runtime has {devices.count} devices, of which {list(devices.own)} are "
                f"this process's; expected those of all processes, got {list(map(list, processes))}"
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
        self.groups = [list(range(self.size))]
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
        """A copy of a tensor on every device."""
        return self._placed(self._sent(tensor), stacked=False)

    def stack(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of shape (size, …) whose row i is on device i; from any thread.

        Args:
            tensor: this process's rows.
        """
        if self.size == 1:
            return self._sent(tensor)
        if tensor.device.type != "xla":
            return self._sent_rows(tensor.detach().contiguous())
        if self.is_whole:
            return self._placed(tensor.detach(), stacked=True)
        return self._sent_rows(tensor.detach().cpu())

    def _sent_rows(self, own: torch.Tensor) -> torch.Tensor:
        # What torch_xla calls a minibatch: row i goes to this process's device i.
        axes = (_AXIS, *(None,) * (own.dim() - 1))
        spec = self._spmd.ShardingSpec(self._mesh, axes, minibatch=True)
        (sent,) = self._model.send_cpu_data_to_device([own], str(self.device), spec)
        return cast(torch.Tensor, sent)

    def split(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor cut among the devices along axis 0 where they divide it, else replicated."""
        stacked = tensor.dim() > 0 and tensor.shape[0] % self.size == 0
        return self._placed(tensor.detach().to(self.device), stacked=stacked)

    def _placed(self, tensor: torch.Tensor, stacked: bool) -> torch.Tensor:
        if self.size > 1:
            self._bindings._xla_mark_sharding(tensor, self._sharding(tensor.dim(), stacked))
        return tensor

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor on the devices as data, at once.

        `to` makes an empty one first: a program that another thread has compiled meanwhile would
        have it, too. Of a lone 0 or 1 it would make a constant.
        """
        if self.size > 1 or tensor.device.type == "xla":
            return tensor.detach().to(self.device)
        own = tensor.detach().contiguous()
        (sent,) = self._model.send_cpu_data_to_device([own], str(self.device))
        return cast(torch.Tensor, sent)

    @property
    def is_whole(self) -> bool:
        """Whether all devices are this process's."""
        return len(self.local) == self.size

    def own(self, entries: T) -> T:
        """Of one entry for each device, this process's."""
        return entries[self.local[0] : self.local[-1] + 1]

    def shared(self, tensor: torch.Tensor) -> torch.Tensor:
        """A result of stacked tensors, laid out so that every process can read it."""
        return tensor if self.is_whole else self._placed(tensor, stacked=False)

    def rows(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """What each of this process's devices holds, on the CPU: its row, or all if replicated."""
        if self.size == 1:
            return [tensor.detach().cpu()]
        self._bindings._xla_sync_multi([tensor], [], True, True)
        shards = self._bindings._get_local_shards([tensor.detach()])[0]
        return [shard for shard, _ in shards]

    # --- in the view of each device -------------------------------------------------------------

    def enter(self, tensor: torch.Tensor, stacked: bool = False) -> torch.Tensor:
        """What each device has of a tensor: its row of a stacked one, all of another."""
        if self.size > 1 and self._is_manual:
            tensor = self._placed(tensor.detach(), stacked)
            tensor = self._bindings._spmd_full_to_shard_shape(tensor)
        return tensor.squeeze(0) if stacked else tensor

    def leave(self, tensor: torch.Tensor, stacked: bool = False) -> torch.Tensor:
        """One tensor of what each device has: shape (size, …) if stacked.

        Otherwise devices must hold the same; nobody looks whether they do.
        """
        if tensor.requires_grad:
            tensor = tensor.detach()
        if stacked:
            tensor = tensor.unsqueeze(0)
        if self.size == 1:
            return tensor
        if not self._is_manual:
            return self._placed(tensor, stacked=False)
        shape = list(tensor.shape)
        if stacked:
            shape[0] = self.size
        return self._left(tensor, stacked, shape)

    def leave_joined(self, tensor: torch.Tensor) -> torch.Tensor:
        """One tensor of what each device has, joined along axis 0."""
        if self.size == 1:
            return tensor.detach()
        shape = [self.size * tensor.shape[0], *tensor.shape[1:]]
        return self._left(tensor.detach(), True, shape)

    def enter_part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Each device's part of a tensor along axis 0, which the devices divide."""
        if self.size == 1:
            return tensor
        tensor = self._placed(tensor.detach(), True)
        part: torch.Tensor = self._bindings._spmd_full_to_shard_shape(tensor)
        return part

    def _left(self, tensor: torch.Tensor, stacked: bool, shape: Sequence[int]) -> torch.Tensor:
        self._bindings._mark_manual_sharding(tensor, self._manual)
        full: torch.Tensor = self._bindings._spmd_shard_to_full_shape(
            tensor, self._sharding(tensor.dim(), stacked), shape, tensor.dtype
        )
        return full

    def all_reduce(self, op: str, tensor: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """Reduce what each device has, of XLA's "sum", "min" and "max", and multiply."""
        if self.size == 1:
            return tensor.clone() if scale == 1.0 else tensor * scale
        reduced: torch.Tensor = self._bindings._xla_spmd_all_reduce(op, tensor, scale, self.groups)
        return reduced

    # --- running --------------------------------------------------------------------------------

    def sync(self, tensors: Sequence[torch.Tensor]) -> None:
        """Compile what these tensors are made of, where it is new, and start to compute them."""
        own = [tensor for tensor in tensors if tensor.device.type == "xla"]
        if own:
            self._bindings._xla_sync_multi(own, [], False, True)

    def step(self, tensors: Sequence[torch.Tensor]) -> None:
        """`sync` at the end of a run; what one device has changed in place, it changes in place."""
        if self.size == 1:  # as torch_xla.sync, which looks at four variables of the environment
            self._bindings._xla_step_marker(str(self.device), [], wait=False, reset_scope=True)
            self._model._run_step_closures()
        else:
            self.sync(tensors)

    def seed(self, seed: int) -> None:
        """Of the random numbers that are drawn outside of `enter`; a value, not a constant."""
        self._bindings._xla_set_rng_seed(seed & (2**63 - 1), str(self.device))

    def compiles(self) -> int:
        """How many programs were compiled in this process until now."""
        return self._metrics.counter_value("UncachedCompile") or 0

    def program_of(self, tensors: Sequence[torch.Tensor]) -> str:
        """The HLO that `sync` of these tensors would compile, before XLA optimizes it."""
        text: str = self._bindings._get_xla_tensors_hlo(list(tensors))
        return text

    def _sharding(self, axes: int, stacked: bool) -> Any:
        key = axes, stacked
        if key not in self._shardings:
            spec = (_AXIS if stacked else None, *(None,) * (axes - 1)) if axes else ()
            self._shardings[key] = self._mesh.get_op_sharding(spec)
        return self._shardings[key]
