"""Workers that train in their own time, on variables that parameter servers keep."""

from __future__ import annotations

import contextlib
import pickle
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import nn

from fastdist._config import settings
from fastdist.cluster import ClusterResolver, ClusterSpec, TFConfigClusterResolver
from fastdist.errors import ClusterConfigError, FastdistError
from fastdist.ps import Client, Keys, Server
from fastdist.ps.client.checkpoint import restore_checkpoint, save_checkpoint
from fastdist.ps.client.partition import Partitioner, RoundRobin
from fastdist.ps.coordinator.backlog import Backlog
from fastdist.ps.coordinator.shipping import Definitions
from fastdist.ps.coordinator.worker import Stopped, Worker
from fastdist.ps.model.buffers import functions_at_once
from fastdist.ps.model.bundle import Bundle, define_bundle
from fastdist.ps.model.model import ServedModel
from fastdist.ps.model.plan import Wishes, plan
from fastdist.ps.model.steps import ServedSteps
from fastdist.ps.wire.job_keys import job_keys
from fastdist.ps.worker_host import (
    ServedWorker,
    adopt_here,
    is_worker_of,
    strategy_here,
)
from fastdist.replicas.devices import every_device, usable_device
from fastdist.strategies.replicated import ReplicatedStrategy

_END_S = 2.0
_WIRES = ("float32", "bfloat16", "float16", "int8")


class ParameterServerStrategy(ReplicatedStrategy):
    """Variables on servers, steps on workers (tf.distribute.ParameterServerStrategy).

    All tasks run the same script. The chief goes on from here: it makes the model in `scope`, and
    a ClusterCoordinator, whose functions workers run. In a worker or parameter server this call
    does not return: the task serves until the job ends, and the process ends with code 0.

    What is made in scope is on the servers: dense parameters and buffers; and the rows of
    `nn.Embedding` and `fd.nn.Embedding`, which are pulled and pushed only where they are used. A
    worker takes the values when a function begins and after each `optimizer.step()`, which sends
    gradients and lets the servers apply the optimizer. What is changed by hand on the chief counts
    for functions that are scheduled after a `join`, and after a `join` its modules hold what the
    servers have. Only the learning rate of an optimizer may change later.

    Args:
        cluster_resolver: says the cluster and this task: chief, worker and ps tasks with their
            addresses. By default TF_CONFIG.
        variable_partitioner: cuts variables into pieces for several servers; None: they are whole.
        device: where a worker computes; by default the GPU of its number, else the CPU. A machine
            with several GPUs has a worker for each.
        max_staleness: a function begins when all but so many of those scheduled before it have
            ended (stale synchronous parallel; Ho et al., NIPS 2013); None: any time.
        synchronous: functions run in groups, one on each worker; their optimizer steps are taken
            together, with the mean of the gradients, weighted by examples.
        wire: how gradients and values travel: "float32", "bfloat16", "float16", or "int8" with a
            scale for each row, or for each few elements of dense values.
        refuse_nonfinite: a gradient with NaN or infinity is an error, and changes nothing; else
            servers count them.
        keys: of the job; by default FASTDIST_PS_KEYS, which `fastdist run` sets.

    Raises:
        ClusterConfigError: the cluster makes no sense for this, there are no keys, or this task is
            an evaluator.
        TypeError: a partitioner that is none.
        ValueError: another argument that makes no sense.
    """

    has_servers = True

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Partitioner | None = None,
        *,
        device: str | torch.device | None = None,
        max_staleness: int | None = None,
        synchronous: bool = False,
        wire: str = "float32",
        refuse_nonfinite: bool = False,
        keys: Keys | None = None,
    ) -> None:
        if max_staleness is not None and (max_staleness < 0 or synchronous):
            raise ValueError(
                f"max_staleness must be at least 0, and goes without synchronous=True; got "
                f"{max_staleness} and synchronous={synchronous}"
            )
        if wire not in _WIRES:
            raise ValueError(f"wire must be one of {', '.join(_WIRES)}, got {wire!r}")
        own = None if device is None else usable_device(device)  # in tasks that use none, too
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise TypeError(
                "variable_partitioner must be a partitioner, such as fastdist.ps.FixedShards(3), "
                f"got {variable_partitioner!r}"
            )
        resolver = cluster_resolver or TFConfigClusterResolver()
        spec = resolver.cluster_spec()
        spec.require_parameter_servers()
        task = (resolver.task_type, resolver.task_id)
        if resolver.task_type == "evaluator":
            raise ClusterConfigError(
                "the evaluator takes no part in training; it reads checkpoints, without this "
                f"strategy, in {spec!r}"
            )
        self.keys = keys or _keys()
        if resolver.task_type == "ps":
            _serve_variables(spec.task_address(*task), self.keys)
        self.synchronous = synchronous
        self.max_staleness = max_staleness
        self.worker_addresses = _addresses(spec, "worker")
        self.server_addresses = _addresses(spec, "ps")
        is_worker = resolver.task_type == "worker"
        if is_worker and own is None:
            every = every_device()
            own = every[resolver.task_id % len(every)]
        super().__init__(own if is_worker and own is not None else torch.device("cpu"))
        self.client = Client(self.server_addresses, keys=self.keys)
        self.client_lock = threading.RLock()  # a client is for one thread
        weakref.finalize(self, self.client.close)
        if is_worker:
            _serve_functions(spec.task_address(*task), self.keys, ServedWorker(self))
        for server in range(len(self.server_addresses)):
            self.client.reset(server, timeout_s=settings().rendezvous_timeout_s)
        self.definitions = Definitions()
        self.definitions.name(self, self.definitions.define(strategy_here))
        self._wishes = Wishes(wire, refuse_nonfinite, not synchronous and max_staleness is None)
        self._servers = RoundRobin(len(self.server_addresses), variable_partitioner)
        self.backlog: Backlog | None = None  # of the coordinator
        self._models: list[ServedModel] = []
        self._generation = 0

    # --- the chief's ----------------------------------------------------------------------------

    def _adopt(self, roots: Sequence[nn.Module], made: Sequence[Any]) -> None:
        super()._adopt(roots, made)
        if not roots and not made:
            return
        optimizers = tuple(thing for thing in made if isinstance(thing, torch.optim.Optimizer))
        others = tuple(thing for thing in made if not isinstance(thing, torch.optim.Optimizer))
        prefix = f"{len(self._models)}/"
        places = plan(roots, optimizers, self._servers, prefix, self._wishes)
        first = sum(len(model.bundle.optimizers) for model in self._models)
        at_once = functions_at_once(
            len(self.worker_addresses), self.max_staleness, synchronous=self.synchronous
        )
        bundle = Bundle(prefix, tuple(roots), optimizers, others, tuple(places), first, at_once)
        model = ServedModel(
            self.client,
            bundle,
            initialize=True,
            lock=self.client_lock,
        )
        model.rates()  # says whether it serves all parameters of the optimizers
        model.take_tables()
        for optimizer in optimizers:
            optimizer.state.clear()  # it is on the servers
        ServedSteps(model)
        self._models.append(model)
        define_bundle(self.definitions, bundle, adopt_here)

    def adopt_bundle(self, bundle: Bundle) -> None:
        """On a worker: modules and optimizers have come from the chief."""
        super()._adopt(bundle.roots, [*bundle.optimizers, *bundle.others])

    def in_function(self) -> AbstractContextManager[None]:
        """On a worker: what functions run in, cross-replica context."""
        return self._cross_replica()

    def _run(self, fn: Callable[..., Any], given: Any, examples: tuple[int, ...] | None) -> Any:
        if not is_worker_of(self):
            raise FastdistError(
                "run is for functions that a ClusterCoordinator schedules: the chief has no "
                "replicas"
            )
        return super()._run(fn, given, examples)

    def before_calls(self) -> bytes:
        """No function runs, and some will: what workers have to know."""
        news: dict[str, Any] = {"generation": self._generation}
        for model in self._models:
            model.assign_changed()
            news[model.bundle.prefix] = (sorted(model.buffers.live), model.rates(), model.modes())
        return pickle.dumps(news)

    def take_reports(self, reports: Sequence[bytes]) -> None:
        """What functions on workers have changed."""
        models = {model.bundle.prefix: model for model in self._models}
        for report in reports:
            for prefix, names in pickle.loads(report).items():
                models[prefix].buffers.live |= names

    def after_calls(self) -> None:
        """No function runs any more: take the values from the servers."""
        for model in self._models:
            model.begin_pull()
        for model in self._models:
            model.end_pull()

    def save(self, directory: str | Path) -> None:
        """Write all that is on the servers, with the state of optimizers, as safetensors.

        Servers write the files: all of them must see the directory. Functions that run are waited
        for, others begin afterwards: each is in the checkpoint as a whole, or not at all.
        What was there before stays valid until the new checkpoint is complete.

        Raises:
            OSError: a server could not write.
            UnavailableError: a server is gone.
        """
        with contextlib.nullcontext() if self.backlog is None else self.backlog.at_rest():
            save_checkpoint(self.client, directory, self._sharded())

    def restore(self, directory: str | Path) -> None:
        """Bring back what `save` wrote, into any number of servers.

        Also when servers were lost and are there again.

        Raises:
            FastdistError: there are functions that have not ended.
            FileNotFoundError: there is no checkpoint.
            ValueError: it lacks a variable, or has it in another shape.
            UnavailableError: a server is gone.
        """
        if self.backlog is not None and not self.backlog.is_empty:
            raise FastdistError(
                f"restore: {len(self.backlog)} scheduled functions have not ended; join first"
            )
        for model in self._models:
            model.connect(initialize=True)
        self._generation += 1
        restore_checkpoint(self.client, directory, self._sharded())
        for model in self._models:
            model.buffers.take_all()
        self.after_calls()

    def _sharded(self) -> list[Any]:
        return [sharded for model in self._models for sharded in model.sharded]

    def end_job(self) -> None:
        """Tell the servers that the job is over; those that are gone know."""
        for server in range(len(self.server_addresses)):
            with contextlib.suppress(FastdistError):
                self.client.end(server, timeout_s=_END_S)


def _serve_variables(address: str, keys: Keys) -> NoReturn:
    signal.signal(signal.SIGTERM, _stop)
    with Server(_bindable(address), keys=keys) as server:
        server.ended.wait()
    sys.exit(0)


def _serve_functions(address: str, keys: Keys, host: ServedWorker) -> NoReturn:
    signal.signal(signal.SIGTERM, _stop)
    worker = Worker(_bindable(address), keys, host)
    try:
        worker.serve()
    finally:
        worker.close()
    sys.exit(0)


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    del number, frame
    raise Stopped(0)


def _keys() -> Keys:
    keys = job_keys()
    if keys is None:
        raise ClusterConfigError(
            "no keys: start the job by `fastdist run --workers W --ps P`, or make keys by "
            "`fastdist keys` and give them to all tasks as FASTDIST_PS_KEYS"
        )
    return keys


def _addresses(spec: ClusterSpec, job: str) -> tuple[str, ...]:
    return tuple(f"tcp://{spec.task_address(job, i)}" for i in range(spec.num_tasks(job)))


def _bindable(address: str) -> str:
    """Where to listen: names and addresses beyond this machine stand for all its interfaces."""
    host, _, port = address.rpartition(":")
    if host in ("localhost", "127.0.0.1", "[::1]"):
        return f"tcp://{host.replace('localhost', '127.0.0.1')}:{port}"
    return f"tcp://*:{port}"
