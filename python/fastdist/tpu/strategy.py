"""TPUStrategy: replicas on the cores of a TPU, in one program traced by torch_xla."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from fastdist.cluster.launch import detect_launch, note_launch
from fastdist.cluster.tpu import TPUClusterResolver
from fastdist.collectives.autograd import as_floating, check_joinable
from fastdist.collectives.communicator import Communicator
from fastdist.collectives.init import init
from fastdist.errors import ClusterConfigError, UnsupportedError
from fastdist.replicas.context import ReplicaContext
from fastdist.replicas.cross_replica import (
    Axes,
    CrossReplicaOp,
    Weight,
    gather_values,
    reduce_values,
)
from fastdist.replicas.per_replica import PerReplica, map_structure, shares
from fastdist.replicas.variables import Variable
from fastdist.strategies.base import Strategy
from fastdist.tpu.adopted import AdoptedModules
from fastdist.tpu.engine import SpmdEngine
from fastdist.tpu.gradients import TracedGradients
from fastdist.tpu.mesh import Mesh, start_runtime
from fastdist.tpu.runs import TracedRuns
from fastdist.tpu.stacked import MeshCopy, is_stacked
from fastdist.training.contributions import GradientReduction

_NO_TIMEOUT_S = 1e9


class TPUStrategy(Strategy):
    """Trains on every core of a TPU (tf.distribute.TPUStrategy).

    `run` calls its function once, traces its operations on tensors, and executes the trace as one
    program on all cores, each with its own part of the batch. A value that differs between replicas
    is therefore a tensor, including `replica_id_in_sync_group`; Python's `if` and `print` execute
    once for all replicas.

    The devices are those of PJRT: `PJRT_DEVICE=CPU CPU_NUM_DEVICES=4` makes four devices of a CPU.

    Args:
        resolver: the resolver of the slice's hosts, each of which runs the program; by default the
            environment names them, if PJRT finds devices of several hosts.
        steps_per_execution: the number of runs that are traced into one program. The program is
            executed with the last of them; results that are read earlier are computed separately.
        gradient_reduction: the option of `CommunicationOptions`.

    Attributes:
        compilations: the number of programs compiled for runs, and of repeated compilations.

    Raises:
        ImportError: torch_xla is not installed.
        UnsupportedError: no TPU can be initialised.
        ClusterConfigError: the resolver names other hosts than the slice has.

    Examples:
        >>> import fastdist as fd
        >>> strategy = fd.TPUStrategy()  # doctest: +SKIP
    """

    def __init__(
        self,
        resolver: TPUClusterResolver | None = None,
        *,
        steps_per_execution: int = 1,
        gradient_reduction: GradientReduction = "mean",
    ) -> None:
        if steps_per_execution < 1:
            raise ValueError(f"steps_per_execution must be positive, got {steps_per_execution}")
        if gradient_reduction not in ("mean", "sum"):
            raise ValueError(
                f'gradient_reduction must be "mean" or "sum", got {gradient_reduction!r}'
            )
        self._mesh, self._hosts = find_slice(resolver)
        replicas = self._mesh.size
        hosts = self._hosts
        worker, workers = (0, 1) if hosts is None else (hosts.rank, hosts.world_size)
        super().__init__(
            [self._mesh.device] * (replicas // workers), worker=worker, workers=workers
        )
        self._make_copy = partial(MeshCopy, self._mesh)
        self._adopted = AdoptedModules(self._mesh, self._hosts)
        self._communicator: Communicator | None = None
        self._gradients: TracedGradients | None = None
        if replicas > 1:
            peers = None if hosts is None else hosts.engine
            self._communicator = Communicator(SpmdEngine(self._mesh, peers), _NO_TIMEOUT_S)
            self._gradients = TracedGradients(self._adopted, self._communicator, gradient_reduction)
        self._steps = steps_per_execution
        self._runs = TracedRuns(
            self,
            self._mesh,
            self._adopted,
            self._communicator,
            self._gradients,
            steps_per_execution,
            self._to_host,
        )
        self.compilations = self._runs.compilations

    def __repr__(self) -> str:
        return (
            f"<fastdist.TPUStrategy {self.num_replicas_in_sync} replicas, "
            f"{self._mesh.size} {self._mesh.kind} devices>"
        )

    def _adopt(self, roots: Sequence[nn.Module], made: Sequence[Any]) -> None:
        self._runs.metrics.adopt(roots, self.num_replicas_in_sync)
        self._adopted.adopt(roots, made)

    def communicator(self) -> AbstractContextManager[Communicator | None]:
        """Return a context manager around communication of the hosts; None with one host."""
        return nullcontext(self._hosts)

    # --- running --------------------------------------------------------------------------------

    def _run(
        self, fn: Callable[..., Any], given: Any, batch: PerReplica[Any] | None, weight: Weight
    ) -> Any:
        if weight is not None:
            self._weigh(None, weight)
        return self._runs.run(fn, given, None if batch is None else batch.examples)

    def _weigh(self, context: ReplicaContext | None, weight: Weight) -> None:
        raise UnsupportedError(
            "weight is not supported on TPUs; divide a sum by "
            'get_replica_context().all_reduce("mean", count) in the function'
        )

    def _merge(self, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        return self._runs.merge(fn, args, kwargs)

    def synchronize(self) -> None:
        """Execute the runs that wait because of `steps_per_execution`."""
        self._runs.synchronize()

    def no_sync(self) -> AbstractContextManager[None]:
        """Do nothing: each backward reduces its gradients, with the same sums in the end."""
        return nullcontext()

    # --- values of all replicas -----------------------------------------------------------------

    def _reduce(self, op: CrossReplicaOp, value: Any, axis: Axes) -> Any:
        return map_structure(lambda leaf: self._reduce_leaf(op, leaf, axis), value)

    def _gather(self, value: Any, axis: int) -> Any:
        return map_structure(lambda leaf: self._gather_leaf(leaf, axis), value)

    def _reduce_leaf(self, op: CrossReplicaOp, value: Any, axis: Axes) -> Any:
        if isinstance(value, Variable):
            value = PerReplica(self.local_results(value))
        if not is_stacked(value) or (value.values[0].sizes is not None and axis is not None):
            values: list[Any] = list(self.local_results(value))
            if len(values) != len(self.devices):
                values = values * len(self.devices)
            weights = self._weights(op, value, axis)
            own = None if weights is None else self._mesh.own(weights)
            return self._runs.computed(reduce_values(self._hosts, op, values, axis, own))
        tensor = value.values[0].tensor
        if op == "mean":
            tensor = as_floating(tensor)
        weights = self._weights(op, value, axis)
        if weights is not None:
            shape = (-1, *(1,) * (tensor.dim() - 1))
            share = torch.tensor(weights, dtype=tensor.dtype).view(shape).to(tensor.device)
            return self._runs.computed(torch.where(share > 0, tensor * share, 0).sum(0))
        along = 0 if axis is None else (0, axis % (tensor.dim() - 1) + 1)
        reduction = getattr(torch, {"min": "amin", "max": "amax"}.get(op, op))
        return self._runs.computed(reduction(tensor, along))

    def _weights(self, op: str, value: Any, axis: Axes) -> list[float] | None:
        examples = value.examples if type(value) is PerReplica else None
        if op != "mean" or axis is not None or examples is None:
            return None
        # With several steps per execution, even and uneven batches must share one program.
        if self._steps == 1:
            return shares(examples)
        return [count / sum(examples) for count in examples]

    def _gather_leaf(self, value: Any, axis: int) -> torch.Tensor:
        if not is_stacked(value) or value.values[0].sizes is not None:
            return gather_values(self._hosts, self.local_results(value), axis)
        tensor = value.values[0].tensor
        axis = check_joinable([tuple(tensor.shape[1:])] * self._mesh.size, axis)
        return self._runs.computed(torch.cat(list(tensor), axis))

    def _to_host(self, given: Any) -> Any:
        """Copy the values of all replicas to the CPU of every host."""
        self.synchronize()

        def fetched(leaf: Any) -> Any:
            if not is_stacked(leaf):
                return leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf
            own = self.local_results(leaf)
            if self._hosts is None:
                return PerReplica(own)
            everyone = self._hosts.all_gather_object(own)
            return PerReplica(tuple(value for values in everyone for value in values))

        return map_structure(fetched, given)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the values of this host's replicas, in order; results of `run` are on the CPU."""
        if isinstance(value, Variable):
            return tuple(self._adopted.values(value))
        if is_stacked(value):
            stacked = value.values[0]
            rows = [row.squeeze(0) for row in self._mesh.rows(stacked.tensor)]
            if stacked.sizes is None:
                return tuple(rows)
            pairs = zip(rows, self._mesh.local, strict=True)
            return tuple(row[: stacked.sizes[replica]] for row, replica in pairs)
        return value.values if type(value) is PerReplica else (value,)

    def update(
        self,
        variable: nn.Parameter | Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `fn(component, *args, **kwargs)`, traced once for all replicas.

        A parameter has one component, which `fn` must change equally on all replicas.
        """

        def call(*own_args: Any, **own_kwargs: Any) -> Any:
            component = variable.component if isinstance(variable, Variable) else variable
            with torch.no_grad():
                return fn(component, *own_args, **own_kwargs)

        return self._runs.run(call, (tuple(args), kwargs or {}), None)

    def check_in_sync(self) -> None:
        """Check that parameters and buffers have the same bits on every device."""
        self._adopted.require_in_sync()


def find_slice(resolver: TPUClusterResolver | None) -> tuple[Mesh, Communicator | None]:
    """Return all devices of PJRT, and a communicator of the hosts; None if there is one host.

    Every host of a slice must call.
    """
    asked = os.environ.get("PJRT_DEVICE")
    try:
        devices = start_runtime()
    except UnsupportedError as error:
        raise UnsupportedError(_not_found(asked, resolver, str(error))) from error
    if devices.kind == "CPU" and not asked:
        raise UnsupportedError(_not_found(asked, resolver, "PJRT fell back to the CPU"))
    is_whole = len(devices.own) == devices.count
    if resolver is None and not is_whole:
        resolver = TPUClusterResolver()
    if resolver is not None and is_whole != (resolver.num_hosts == 1):
        raise ClusterConfigError(
            f"PJRT finds {devices.count} {devices.kind} devices, {len(devices.own)} of them on "
            f"this host; expected devices of {resolver.num_hosts} hosts, which {resolver.source} "
            "names. Start the program on every host of the slice, in the environment of its TPU VM"
        )
    if resolver is None or is_whole:
        return Mesh(), None
    rank, size, launch = resolver.rank, resolver.world_size, detect_launch()
    hosts = init(rank=rank, world_size=size, address=resolver.coordinator_address)
    note_launch(launch)
    everyone: list[tuple[int, ...]] = hosts.all_gather_object(devices.own)
    if len({len(own) for own in everyone}) > 1:
        counts = ", ".join(f"{len(own)} on host {host}" for host, own in enumerate(everyone))
        raise ClusterConfigError(f"all hosts must have equally many devices, got {counts}")
    return Mesh(everyone), hosts


def _not_found(asked: str | None, resolver: TPUClusterResolver | None, why: str) -> str:
    devices = [path for path in ("/dev/accel0", "/dev/vfio/0") if os.path.exists(path)]
    said = "" if resolver is None else f", {resolver.source}"
    return (
        f"no TPU could be initialised: {why}. Looked for PJRT_DEVICE (found {asked!r}), "
        f"the device files of TPUs (found {devices or 'none'}){said}. On a TPU VM: pip install "
        "torch==2.9.* 'torch_xla[tpu]==2.9.*' and PJRT_DEVICE=TPU. Without a TPU use "
        "fd.MirroredStrategy() instead, or virtual devices: PJRT_DEVICE=CPU CPU_NUM_DEVICES=4"
    )
