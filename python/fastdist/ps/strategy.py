"""Training on workers, with variables on parameter servers."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from fastdist._config import settings
from fastdist.checkpoints.checkpoint import keep
from fastdist.checkpoints.files import read_index
from fastdist.cluster import ClusterResolver, ClusterSpec, TFConfigClusterResolver
from fastdist.collectives.hints import refuse_keywords
from fastdist.errors import (
    ClusterConfigError,
    DamagedCheckpointError,
    FastdistError,
    UnsupportedError,
)
from fastdist.link.addresses import MAX_FOLDER_BYTES, is_local
from fastdist.processes.cgroups import usable_memory_bytes
from fastdist.ps.client.checkpoint import (
    check_checkpoint,
    has_checkpoint,
    remove_checkpoint,
    restore_checkpoint,
    save_checkpoint,
    write_files,
)
from fastdist.ps.client.client import Client
from fastdist.ps.client.partition import Partitioner, RoundRobin
from fastdist.ps.coordinator.backlog import Backlog
from fastdist.ps.coordinator.shipping import Definitions
from fastdist.ps.coordinator.worker import Stopped, Worker
from fastdist.ps.model.model import ServedModel
from fastdist.ps.model.plan import Bundle, define_bundle, plan
from fastdist.ps.model.steps import ServedSteps
from fastdist.ps.server.server import Server
from fastdist.ps.worker_host import ServedWorker, adopt_on_worker, this_strategy, worker_of
from fastdist.recorder.place import check_private
from fastdist.recorder.recording import record_task
from fastdist.recorder.ring import SERVER
from fastdist.replicas.devices import every_device, usable_device
from fastdist.strategies.replicated import ReplicatedStrategy
from fastdist.training.modules import modules_of

_END_S = 2.0
_NO_REPLICAS = (
    "run must be called in a function that a ClusterCoordinator schedules; the chief has no replica"
)
_NO_CLUSTER = (
    "ParameterServerStrategy needs a job of several tasks: start the program with `fastdist run "
    "--workers 4 --ps 2 train.py`, or set TF_CONFIG in each task, such as "
    '{"cluster": {"chief": ["host0:2222"], "worker": ["host1:2222", "host2:2222"], "ps": '
    '["host3:2222"]}, "task": {"type": "worker", "index": 0}}'
)
_WIRES = ("float32", "bfloat16", "float16", "int8")


class ParameterServerStrategy(ReplicatedStrategy):
    """Trains on workers, with variables on servers (tf.distribute.ParameterServerStrategy).

    All tasks run the same script. On the chief the constructor returns: the chief makes the model
    in `scope`, and a ClusterCoordinator, whose functions workers run. On a worker or parameter
    server the constructor does not return: the task serves until the job ends, and the process
    exits with code 0.

    Everything made in scope is on the servers: dense parameters and buffers, and the rows of
    `nn.Embedding` and `fd.nn.Embedding`, of which only those in use are pulled and pushed. A
    worker pulls values when a function begins and after each `optimizer.step()`, which sends
    gradients and makes the servers apply the optimizer. Changes by hand on the chief take effect
    for functions that are scheduled after a `join`; after a `join`, the chief's modules hold the
    servers' values. Only the learning rate of an optimizer may change later.

    Args:
        cluster_resolver: the cluster and this task: chief, worker and ps tasks with their
            addresses. By default TF_CONFIG.
        variable_partitioner: a function that cuts variables into pieces; None leaves them whole.
        device: the device of a worker; by default the GPU of its number, else the CPU. A machine
            with several GPUs has a worker for each.
        max_staleness: a function begins once all but this many of the functions scheduled before
            it have ended (stale synchronous parallel; Ho et al., NIPS 2013); None for no limit.
        synchronous: run functions in groups, one on each worker; their optimizer steps are taken
            together, with the mean of the gradients, weighted by examples.
        wire: encoding of gradients and values in messages: "float32", "bfloat16", "float16", or
            "int8" with a scale for each row, or for every 1024 elements of dense values.
        refuse_nonfinite: a gradient with NaN or infinity is an error, and changes nothing;
            otherwise servers only count them.

    Raises:
        ClusterConfigError: the cluster lacks a task, there is no secret, this task is an evaluator,
            or FASTDIST_PS_FOLDER is not for this cluster.
        PermissionError: others than this user may open FASTDIST_PS_FOLDER.
        TypeError: the partitioner is not callable.
        ValueError: another argument is out of range.
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
        **unknown: NoReturn,
    ) -> None:
        refuse_keywords("ParameterServerStrategy", unknown)
        if max_staleness is not None and (max_staleness < 0 or synchronous):
            raise ValueError(
                f"max_staleness must be at least 0, and requires synchronous=False; got "
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
        if cluster_resolver is None and not TFConfigClusterResolver.is_available():
            raise ClusterConfigError(_NO_CLUSTER)
        resolver = cluster_resolver or TFConfigClusterResolver()
        spec = resolver.cluster_spec()
        spec.require_parameter_servers()
        task = (resolver.task_type, resolver.task_id)
        if resolver.task_type == "evaluator":
            raise ClusterConfigError(
                "the evaluator must not create this strategy: it reads checkpoints, for example "
                f"with fastdist.ps.load; the cluster is {spec!r}"
            )
        folder = settings().ps_folder
        if folder is not None:
            _check_folder(Path(folder), spec)
        _record(spec, *task)
        if resolver.task_type == "ps":
            _run_server(_address(spec, *task))
        self.synchronous = synchronous
        self.max_staleness = max_staleness
        self.worker_addresses = _addresses(spec, "worker")
        self.server_addresses = _addresses(spec, "ps")
        is_worker = resolver.task_type == "worker"
        if is_worker and own is None:
            every = every_device()
            own = every[resolver.task_id % len(every)]
        super().__init__(
            own if is_worker and own is not None else torch.device("cpu"),
            refuses_run=None if is_worker else _NO_REPLICAS,
        )
        self.is_chief = not is_worker
        self.client = Client(self.server_addresses)
        weakref.finalize(self, self.client.close)
        if is_worker:
            _run_worker(_address(spec, *task), ServedWorker(self))
        for server in range(len(self.server_addresses)):
            self.client.reset(server, timeout_s=settings().rendezvous_timeout_s)
        self.definitions = Definitions()
        self.definitions.name(self, self.definitions.define(this_strategy))
        self._plan = functools.partial(
            plan,
            wire=wire,
            refuse_nonfinite=refuse_nonfinite,
            allows_stale_rows=not synchronous and max_staleness is None,
        )
        self._servers = RoundRobin(len(self.server_addresses), variable_partitioner)
        self.backlog: Backlog | None = None  # of the coordinator
        # Returns the last coordinator that was made, if it lives.
        self.coordinator: Callable[[], Any] = lambda: None
        self._models: list[ServedModel] = []
        self._generation = 0

    def prefetch(self, batch: Any, layer: nn.Module | None = None) -> None:
        """Ask for the rows of a batch that a later step needs, from within a function.

        The next `optimizer.step()` or function brings them along with the dense values, in the same
        messages, and `forward` of that batch asks no server again. The rows are as recent as the
        dense values: results are the same as without.

        Args:
            batch: the features of an `fd.nn.EmbeddingBagCollection` of the scope, as its `forward`
                takes them: alone, or in nested tuples, lists and dicts. For an embedding or bag
                given as `layer`: the tensor of ids.
            layer: the layer that looks the batch up; None: all collections of the scope.

        Raises:
            FastdistError: called outside a function that runs on a worker.
            IndexError: an id is beyond its table.
            TypeError: ids are not integers, or the layer is no embedding.
            ValueError: the batch has no such features, or some of them only.
        """
        worker = worker_of(self)
        if worker is None:
            raise FastdistError(
                "prefetch must be called in a function that a ClusterCoordinator schedules"
            )
        worker.prefetch(batch, layer)

    # --- the chief's ----------------------------------------------------------------------------

    def _adopt(self, roots: Sequence[nn.Module], made: Sequence[Any]) -> None:
        super()._adopt(roots, made)
        if self.is_chief and (roots or made):
            self._put_on_servers(roots, made)

    def _put_on_servers(self, roots: Sequence[nn.Module], made: Sequence[Any]) -> None:
        optimizers = tuple(thing for thing in made if isinstance(thing, torch.optim.Optimizer))
        others = tuple(thing for thing in made if not isinstance(thing, torch.optim.Optimizer))
        prefix = f"{len(self._models)}/"
        placements = self._plan(roots, optimizers, self._servers, prefix)
        first = sum(len(model.bundle.optimizers) for model in self._models)
        most = len(self.worker_addresses) if self.max_staleness is None else self.max_staleness + 1
        concurrency = 1 if self.synchronous else min(len(self.worker_addresses), most)
        bundle = Bundle(
            prefix, tuple(roots), optimizers, others, tuple(placements), first, concurrency
        )
        model = ServedModel(self.client, bundle, initialize=True)
        model.rates()  # raises if an optimizer has parameters that are not on the servers
        model.convert_tables()
        for optimizer in optimizers:
            optimizer.state.clear()  # the servers keep it
            optimizer.register_state_dict_pre_hook(_refuse_state)
        ServedSteps(model)
        self._models.append(model)
        keep([*modules_of(roots), *optimizers], self)
        define_bundle(self.definitions, bundle, adopt_on_worker)

    def before_calls(self) -> bytes:
        """Return a state update for workers before functions run; equal if nothing has changed."""
        state_update: dict[str, Any] = {"generation": self._generation}
        with self.client.lock:
            for model in self._models:
                model.assign_changed()
                state_update[model.bundle.prefix] = (
                    sorted(model.buffers.live),
                    model.rates(),
                    model.modes(),
                )
        return pickle.dumps(state_update)

    def apply_reports(self, reports: Sequence[bytes]) -> None:
        """Apply the state updates of workers."""
        models = {model.bundle.prefix: model for model in self._models}
        for report in reports:
            for prefix, names in pickle.loads(report).items():
                models[prefix].buffers.live |= names

    def after_calls(self) -> None:
        """Pull the servers' values, after all functions have ended."""
        with self.client.lock:
            for model in self._models:
                model.begin_pull()
            for model in self._models:
                model.end_pull()

    def save(self, directory: str | Path, state: Any = None) -> None:
        """Write everything on the servers, with the state of optimizers, as safetensors.

        Servers write the files: all of them must see the directory. Running functions are waited
        for, and others begin afterwards: the checkpoint has each function as a whole, or not at
        all. The previous checkpoint stays valid until the new one is complete.

        Args:
            directory: the checkpoint's directory.
            state: the program's own, such as its step and metrics: anything that JSON can hold.

        Raises:
            FastdistError: called in a function that runs on a worker.
            OSError: a server could not write.
            TypeError: JSON cannot hold the state.
            UnavailableError: a server is gone.
        """
        self.require_chief("strategy.save")
        with self._paused(), self.client.lock:
            save_checkpoint(self.client, directory, self._sharded(), state=state)

    def restore(self, directory: str | Path) -> Any:
        """Restore a checkpoint that `save` wrote, into any number of servers.

        Also restores servers that were lost and restarted.

        Returns:
            The state that `save` was given.

        Raises:
            FastdistError: scheduled functions have not ended, or called in one of them.
            FileNotFoundError: there is no checkpoint.
            ValueError: the checkpoint lacks a variable, or has it in another shape.
            UnavailableError: a server is gone.
        """
        self._connect_again()
        return self._restore(directory)

    def _restore(self, directory: str | Path, *, is_checked: bool = False) -> Any:
        self._generation += 1
        with self.client.lock:
            things = self._sharded()
            state = restore_checkpoint(self.client, directory, things, is_checked=is_checked)
            for model in self._models:
                model.buffers.live |= model.buffers.all.keys()
            self.after_calls()
        return state

    def write_files(self, directory: Path) -> Any:
        """Write everything on the servers into a checkpoint of `fd.Checkpoint`, and the rates."""
        self.require_chief("Checkpoint.save")
        rates = [model.rates() for model in self._models]
        with self._paused(), self.client.lock:
            return {**write_files(self.client, self._sharded(), directory), "rates": rates}

    def check_files(self, directory: Path) -> None:
        """Check every byte of what `write_files` has written."""
        self._connect_again()
        try:
            check_checkpoint(self.client, directory, self._sharded())
        except FileNotFoundError as error:
            raise DamagedCheckpointError(str(error)) from error

    def read_files(self, directory: Path) -> None:
        """Restore what `write_files` has written."""
        self._restore(directory, is_checked=True)
        saved = read_index(directory).others.get("rates", [])  # `save` writes none
        for model, rates in zip(self._models, saved, strict=False):
            model.set_rates(rates, is_checkpoint=True)

    def _paused(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext() if self.backlog is None else self.backlog.paused()

    def _connect_again(self) -> None:
        """Find all values on the servers, before they are restored."""
        self.require_chief("strategy.restore")
        if self.backlog:
            raise FastdistError(
                f"restore: {len(self.backlog)} scheduled functions have not ended; join first"
            )
        with self.client.lock:
            for model in self._models:
                model.connect(initialize=True)

    def has_saved(self, directory: str | Path) -> bool:
        """Return True if the directory has a checkpoint that `save` wrote."""
        return has_checkpoint(directory)

    def remove(self, directory: str | Path) -> None:
        """Remove a checkpoint that `save` wrote; other files in the directory are not touched."""
        self.require_chief("strategy.remove")
        remove_checkpoint(directory)

    def require_chief(self, call: str) -> None:
        """Raise FastdistError on a worker; `call` names what is for the chief."""
        if worker_of(self) is not None:
            raise FastdistError(
                f"{call} was called in a function on a worker; call it on the chief, outside of "
                "functions (for a checkpoint, after coordinator.join())"
            )

    def _sharded(self) -> list[Any]:
        return [sharded for model in self._models for sharded in model.sharded]

    def end_job(self) -> None:
        """Tell the servers that the job is over; servers that are gone are ignored."""
        for server in range(len(self.server_addresses)):
            with contextlib.suppress(FastdistError):
                self.client.end(server, timeout_s=_END_S)


def _record(spec: ClusterSpec, job: str, index: int) -> None:
    """Let `fastdist why` tell what this task waits for."""
    tasks = [(each, i) for each in ("chief", "worker", "ps") for i in range(spec.num_tasks(each))]
    names = {"chief": "chief", "ps": f"{SERVER} {index}"}
    job_name = " ".join(_addresses(spec, "ps"))
    record_task(names.get(job, f"{job} {index}"), tasks.index((job, index)), len(tasks), job_name)


def _run_server(address: str) -> NoReturn:
    signal.signal(signal.SIGTERM, _stop)
    limit = usable_memory_bytes() // 4
    with Server(_bind_address(address), max_staged_bytes=limit) as server:
        server.ended.wait()
        if server.failure is not None:
            raise FastdistError("the parameter server failed, and ends") from server.failure
    sys.exit(0)


def _run_worker(address: str, host: ServedWorker) -> NoReturn:
    signal.signal(signal.SIGTERM, _stop)
    Worker(_bind_address(address), host).serve()
    sys.exit(0)


def _stop(*_: object) -> NoReturn:
    raise Stopped(0)


def _addresses(spec: ClusterSpec, job: str) -> tuple[str, ...]:
    return tuple(_address(spec, job, i) for i in range(spec.num_tasks(job)))


def _address(spec: ClusterSpec, job: str, index: int) -> str:
    """Return where a task listens: in the job's folder, if it has one, or at its address."""
    folder = settings().ps_folder
    return f"ipc://{folder}/{job}-{index}" if folder else f"tcp://{spec.task_address(job, index)}"


def _check_folder(folder: Path, spec: ClusterSpec) -> None:
    tasks = ((job, i) for job in ("chief", "worker", "ps") for i in range(spec.num_tasks(job)))
    hosts = sorted({spec.task_address(*task).rpartition(":")[0] for task in tasks})
    if len(hosts) > 1:
        raise ClusterConfigError(
            f"FASTDIST_PS_FOLDER={folder} is for tasks of one machine, but the cluster has tasks "
            f"on {', '.join(hosts)}: unset it, so that they use TCP"
        )
    if not folder.is_absolute() or len(os.fsencode(folder)) > MAX_FOLDER_BYTES:
        raise ClusterConfigError(
            f"FASTDIST_PS_FOLDER={folder} must be an absolute path of up to {MAX_FOLDER_BYTES} "
            "bytes: the paths of sockets are limited"
        )
    check_private(folder)


def _bind_address(address: str) -> str:
    """Return the address to bind: all interfaces, unless the host is this machine's own."""
    if is_local(address):
        return address.replace("//localhost:", "//127.0.0.1:")
    return f"tcp://*:{address.rpartition(':')[2]}"


def _refuse_state(optimizer: torch.optim.Optimizer) -> None:
    raise UnsupportedError(
        f"the state of this {type(optimizer).__name__} is on the parameter servers: save it, with "
        "all values, by strategy.save(directory), and restore it by strategy.restore(directory)"
    )
