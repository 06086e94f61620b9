"""The process group: creation, splitting, reconfiguration and shutdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import DistBackendError, distributed_c10d

from fastdist._config import replaced_backend
from fastdist.errors import FastdistError
from fastdist.integrations.torch_backend.calls import Calls, Left, backend_errors
from fastdist.integrations.torch_backend.meeting import (
    Handle,
    communicator_in_store,
    communicator_of_handles,
)
from fastdist.integrations.torch_backend.name import NAME
from fastdist.integrations.torch_backend.work import Done
from fastdist.recorder.encoding import encode


class _Options(c10d.Backend.Options):
    """Options that torch can copy, as `dist.split_group` does."""

    def __deepcopy__(self, memo: Any) -> _Options:
        return _Options(self.backend, self._timeout)


class ProcessGroupFastdist(Calls):
    """One process group of torch.distributed; torch makes it.

    Its collectives take contiguous and non-contiguous tensors, on the CPU and on GPUs. Their errors
    are `torch.distributed.DistBackendError`, with the messages of fastdist.
    """

    @classmethod
    def of_store(
        cls, store: Any, rank: int, size: int, timeout_s: float, name: str
    ) -> ProcessGroupFastdist:
        """Make a group whose rendezvous is in a store that only it uses; every rank must call."""
        made = cls(store, rank, size, timeout_s, name)
        with backend_errors():
            made._begin(*communicator_in_store(store, rank, size, timeout_s))
        return made

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float, name: str) -> None:
        super().__init__(rank, size, timeout_s)
        self._store = store
        self._group_name = name
        self._others: dict[str, Any] = {}
        self._handle = Handle.of_group(store)

    # Methods that torch calls.

    def getBackendName(self) -> str:
        return NAME

    def getGroupName(self) -> str:
        return self._group_name

    def setGroupName(self, name: str) -> None:
        self._group_name = name

    def get_group_store(self) -> Any:
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(name) for name in self._backends() or ("cpu", "cuda")]

    def _backends(self) -> dict[str, str]:
        """Return the backend's name for each type of device; empty until torch knows the group."""
        try:
            config = distributed_c10d.get_backend_config(self)  # type: ignore[arg-type]
        except (ValueError, TypeError):  # torch does not know the group, or not yet
            return {}
        return dict(pair.split(":") for pair in config.split(","))

    def _get_backend(self, device: torch.device) -> Any:
        other = self._other_group(device)
        return self if other is None else other._get_backend(device)

    def _other_group(self, device: torch.device) -> Any:
        """Return the other backend's group for this type of device; None: this group serves it."""
        kind = device.type
        if kind not in self._others:
            backends = self._backends()
            if not backends and kind in ("cpu", "cuda"):
                return None
            if kind not in backends:
                raise RuntimeError(
                    f"No backend type associated with device type {kind}: this process group was "
                    f"made with {backends}, got a tensor on {device}"
                )
            self._others[kind] = None
            if backends[kind] not in (NAME, replaced_backend()):
                self._others[kind] = self._group_of(backends[kind], kind)
        return self._others[kind]

    def _group_of(self, name: str, kind: str) -> Any:
        """Make a process group of torch's "nccl" or "gloo" for one type of device."""
        store = c10d.PrefixStore(f"{kind}/{name}/", self._store)
        rank, size, timeout = self.rank(), self.size(), timedelta(seconds=self._timeout_s)
        backend: Any
        if name == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            backend = dist.ProcessGroupNCCL(store, rank, size, options)
            type_ = dist.ProcessGroup.BackendType.NCCL
        elif name == "gloo":
            backend = dist.ProcessGroupGloo(store, rank, size, timeout)
            type_ = dist.ProcessGroup.BackendType.GLOO
        else:
            raise ValueError(
                f'beside "{NAME}", a process group takes "nccl" and "gloo", got "{name}" for {kind}'
            )
        backend._set_sequence_number_for_group()
        group = dist.ProcessGroup(store, rank, size)
        group._set_default_backend(type_)
        group._register_backend(torch.device(kind), type_, backend)
        return group

    supports_splitting = True

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Do nothing: the ranks' GPUs connect at the first call.

        torch calls this for `init_process_group(device_id=...)` before it knows the group, which
        may have another backend for GPUs.
        """

    @property
    def options(self) -> Any:
        """The options of the group, in the form of torch's own backends."""
        return _Options(NAME, timedelta(seconds=self._timeout_s))

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks; torch calls it for Gloo, whose place this group may take."""
        del wait_all_ranks  # errors always name all ranks that are missing
        with backend_errors():
            self._comm.barrier(timeout=self._seconds(timeout))

    def _seconds(self, timeout: timedelta | None) -> float:
        return self._timeout_s if timeout is None else timeout.total_seconds()

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> ProcessGroupFastdist | None:
        """Make a group of some of the ranks; every rank must call, with its own group's ranks.

        The lists of two ranks must be equal or disjoint; ranks that are not in theirs get None. The
        new group serves the devices that this one serves.
        """
        del opts, device_types
        ranks = sorted(ranks)
        name = group_name or f"{self._group_name}:split:{','.join(map(str, ranks))}"
        if self._comm.rank not in ranks:
            return None
        store, seconds = c10d.PrefixStore(f"{name}/", self._store), self._seconds(timeout)
        made = self.of_store(store, ranks.index(self._comm.rank), len(ranks), seconds, name)
        made._set_group_desc(group_desc or "")  # type: ignore[attr-defined]
        return made

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: sequence numbers begin at 0 on every rank."""

    def _get_sequence_number_for_group(self) -> int:
        return self._made

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    set_timeout = _set_default_timeout

    # Reconfiguration, as torch 2.14 defines it.

    @property
    def supports_reconfigure(self) -> bool:
        """True unless another backend serves one of the types of devices."""
        return set(self._backends().values()) <= {NAME, replaced_backend()}

    def get_reconfigure_handle(self) -> str:
        """Return the text by which other ranks find this one; it stays the same."""
        return encode(self._handle)

    def reconfigure(self, opts: Any) -> Done:
        """Leave the ranks of this group, and continue with others, each of which must call.

        Ranks of one machine rendezvous without a store, and ranks on several machines through the
        store of the first handle's group. The rank and the number of ranks are new; the group's
        name, its timeout and its handle stay. Groups that were made from this one are unchanged.

        `opts` are torch's ReconfigureOptions: the handles of all ranks, a list in the order of the
        ranks or a set; a uuid that was not used before; a timeout, or None for the group's.
        """
        if not self.supports_reconfigure:
            raise RuntimeError(
                f"only a process group of one backend can be reconfigured, got {self._backends()}"
            )
        ordered = sorted(opts.handles) if isinstance(opts.handles, set) else opts.handles
        handles = [Handle.decode(text) for text in ordered]
        self.abort()
        self._others.clear()
        own, seconds = self._handle, self._seconds(opts.timeout)
        with backend_errors():
            self._begin(*communicator_of_handles(handles, own, opts.uuid, self._store, seconds))
        return Done([])

    def failure(self) -> DistBackendError | None:
        """Return the error that ended the group's communicator, or None if it still works.

        Losing a rank between calls does not end it: the calls that have ended are valid.
        """
        try:
            self._comm.engine.compiled.check_usable()
        except FastdistError as error:
            return DistBackendError(str(error))
        except DistBackendError as error:  # of `Left`
            return error
        return None

    def get_error(self) -> Any:
        """Return torch's `ErrorType`: SUCCESS, or COMM_ERROR if the communicator has ended."""
        kinds = c10d.ErrorType
        return kinds.SUCCESS if self.failure() is None else kinds.COMM_ERROR

    def shutdown(self) -> None:
        """Wait for this rank's asynchronous collectives and sends, then leave the group.

        Ranks that still wait for this rank get an error.
        """
        if type(self._comm) is not Left:
            self._comm.engine.compiled.finish()
            self._leave(self._comm.close, "shutdown")

    def abort(self) -> None:
        """Leave the group immediately, and abort calls that run on GPUs."""
        if type(self._comm) is not Left:
            self._leave(self._comm.abort, "abort")

    def _leave(self, leave: Callable[[], None], name: str) -> None:
        try:
            with backend_errors():
                leave()
        finally:
            # Free threads, memory and descriptors even if a user keeps the group.
            self._comm = self._recv = Left(self._comm.rank, self._comm.world_size, "is closed")
            for completer in list(self._completers.values()):
                completer.close()
            for other in self._others.values():
                if other is not None:
                    getattr(other, name)()
