"""The process group: creation, splitting and shutdown."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d
from torch.distributed import DistBackendError, distributed_c10d

from fastdist.collectives.communicator import Communicator
from fastdist.collectives.init import communicator_of
from fastdist.errors import FastdistError
from fastdist.integrations.torch_backend import NAME
from fastdist.integrations.torch_backend.bootstrap import StoreBootstrap, host_of
from fastdist.integrations.torch_backend.calls import Calls, Job, Left
from fastdist.integrations.torch_backend.elsewhere import group_of_other_backend


class ProcessGroupFastdist(Calls):
    """One process group of torch.distributed; torch makes it.

    Its collectives take contiguous and other tensors, on the CPU and on GPUs. Their errors are
    `torch.distributed.DistBackendError`, with the messages of fastdist.
    """

    @classmethod
    def of_options(cls, options: Any) -> ProcessGroupFastdist:
        """Make a group from torch's options; every rank of the group must call."""
        rank, size = options.group_rank, options.group_size
        timeout_s = options.timeout.total_seconds()
        bootstrap = StoreBootstrap(options.store, rank, size, timeout_s)
        try:
            comm, ranks_here = communicator_of(bootstrap, timeout_s, host_of(options.store))
        except BaseException as error:
            bootstrap.give_up(error)
            if not isinstance(error, FastdistError):
                raise
            raise DistBackendError(str(error)) from error
        Job.most_ranks_here = max(Job.most_ranks_here, ranks_here)
        return cls(comm, options.store, timeout_s, options.group_id)

    def __init__(self, comm: Communicator, store: Any, timeout_s: float, name: str) -> None:
        super().__init__(comm, timeout_s)
        self._store = store
        self._group_name = name
        self._group_desc = ""
        self._others: dict[str, Any] = {}
        self._has_left = False

    # What torch asks a group.

    def getBackendName(self) -> str:
        """Return the name of the backend."""
        return NAME

    def getGroupName(self) -> str:
        """Return the name that torch gave the group."""
        return self._group_name

    def setGroupName(self, name: str) -> None:
        """Set the name of the group."""
        self._group_name = name

    def getGroupDesc(self) -> str:
        """Return the description that the user gave the group."""
        return self._group_desc

    def setGroupDesc(self, description: str) -> None:
        """Set the description."""
        self._group_desc = description

    def get_group_store(self) -> Any:
        """Return the store that the ranks used to find each other."""
        return self._store

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(name) for name in self._backends()]

    def _backends(self) -> dict[str, str]:
        """Return the name of the backend for each type of device."""
        try:
            config = distributed_c10d.get_backend_config(self)  # type: ignore[arg-type]
        except ValueError:  # torch is still making the group
            return {"cpu": NAME, "cuda": NAME}
        return dict(pair.split(":") for pair in config.split(","))

    def _get_backend(self, device: torch.device) -> Any:
        other = self._other_group(device)
        return self if other is None else other._get_backend(device)

    def _other_group(self, device: torch.device) -> Any:
        """Return the other backend's group for this type of device; None: this group serves it."""
        kind = device.type
        if kind not in self._others:
            backends = self._backends()
            if kind not in backends:
                raise RuntimeError(
                    f"No backend type associated with device type {kind}: this process group was "
                    f"made with {backends}, got a tensor on {device}"
                )
            self._others[kind] = None
            if backends[kind] != NAME:
                place = self._comm.rank, self._comm.world_size
                self._others[kind] = group_of_other_backend(
                    backends[kind], kind, self._store, *place, timedelta(seconds=self._timeout_s)
                )
        return self._others[kind]

    supports_splitting = True

    @property
    def options(self) -> Any:
        """The options of the group, in the form of torch's own backends."""
        return c10d.Backend.Options(NAME, timedelta(seconds=self._timeout_s))

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

        Args:
            ranks: some ranks of this group. The lists of two ranks must be equal or disjoint.
            timeout: the new group's timeout; None: this group's.
            opts: must be None.
            group_name: name of the new group, unique to it.
            group_desc: its description.
            device_types: not used; the new group serves the devices that this one serves.

        Returns:
            The group, or None on ranks that are not in it.
        """
        del opts, device_types
        ranks = sorted(ranks)
        name = group_name or f"{self._group_name}:split:{','.join(map(str, ranks))}"
        if self._comm.rank not in ranks:
            return None
        seconds = self._timeout_s if timeout is None else timeout.total_seconds()
        options = c10d._DistributedBackendOptions()
        options.store = c10d.PrefixStore(f"{name}/", self._store)
        options.group_rank, options.group_size = ranks.index(self._comm.rank), len(ranks)
        options.timeout = timedelta(seconds=seconds)
        options.group_id = name
        options.global_ranks_in_group = ranks
        made = self.of_options(options)
        made.setGroupDesc(group_desc or "")
        return made

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: sequence numbers begin at 0 on every rank."""

    def _get_sequence_number_for_group(self) -> int:
        """Return the number of collectives that this rank has called."""
        return self._made

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    set_timeout = _set_default_timeout

    def shutdown(self) -> None:
        """Wait for this rank's asynchronous collectives and sends, then leave the group.

        Ranks that still wait for this rank get an error.
        """
        if not self._has_left:
            self._comm.engine.compiled.finish()
            self._leave(self._comm.close, "shutdown")

    def abort(self) -> None:
        """Leave the group immediately, and abort calls that run on GPUs."""
        if not self._has_left:
            self._leave(self._comm.abort, "abort")

    def _leave(self, leave: Callable[[], None], name: str) -> None:
        self._has_left = True
        try:
            leave()
        except FastdistError as error:
            raise DistBackendError(str(error)) from error
        finally:
            # Free threads, memory and descriptors even if a user keeps the group.
            self._comm = self._messages = Left(self._comm.rank, self._comm.world_size)
            for completer in list(self._completers.values()):
                completer.close()
            for other in self._others.values():
                if other is not None:
                    getattr(other, name)()
