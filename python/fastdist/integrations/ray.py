"""Runs a function on a Ray cluster, as the ranks of a job or as the tasks of a cluster spec.

    from fastdist.integrations import ray as on_ray

    losses = on_ray.run(train, ranks=8, gpus=1)            # every rank's result
    total = on_ray.run(train, workers=4, ps=2)             # the chief's result

Ray places the processes, and carries the function, its arguments and results. Lost processes are
started again. The function runs as under `fastdist run`.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from fastdist._config import SECRET_VARIABLE
from fastdist.cluster.launch import rank_variables
from fastdist.cluster.tf_config import VARIABLE as TF_CONFIG
from fastdist.cluster.tf_config import served_tasks, tf_configs
from fastdist.errors import ClusterConfigError, PeerFailureError

try:
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError:
    raise ImportError("fastdist.integrations.ray needs Ray: pip install ray") from None

T = TypeVar("T")
_CAUSE_WAIT_S = 5.0


def run(
    function: Callable[..., T],
    *,
    ranks: int | None = None,
    workers: int | None = None,
    ps: int | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    cpus: float = 1.0,
    gpus: float = 0.0,
    resources: Mapping[str, float] | None = None,
    placement: str = "PACK",
    max_restarts: int = 0,
    timeout: float = 300.0,
) -> list[T] | T:
    """Call a function in processes of a Ray cluster, and return what it returns.

    Args:
        function: the function to call in every process; Ray must be able to pickle it.
        ranks: number of ranks of one communicator, with RANK, WORLD_SIZE and the others set.
        workers: number of workers beside a chief, instead of `ranks`; TF_CONFIG is set.
        ps: number of parameter servers, with `workers`.
        args: positional arguments of the function.
        kwargs: keyword arguments of the function.
        cpus: CPUs of each process.
        gpus: GPUs of each process; Ray shows each process its own.
        resources: other resources of each process.
        placement: Ray's placement strategy: "PACK" on few nodes, "SPREAD", "STRICT_PACK" on one
            node or "STRICT_SPREAD".
        max_restarts: the maximum number of restarts. If a rank is lost, all ranks are started again
            and call the function again; a lost worker or parameter server restarts alone.
        timeout: seconds to wait until the cluster has room.

    Returns:
        The results of all ranks, in their order; the chief's result with `workers` and `ps`.

    Raises:
        ValueError: neither `ranks` nor `workers` and `ps` are given, or both.
        ClusterConfigError: the cluster has no room for the processes.
        Exception: the error of the rank that failed first.
    """
    if (ranks is None) == (workers is None) or (workers is None) != (ps is None):
        raise ValueError(
            f"expected ranks=, or workers= and ps=, got ranks={ranks}, workers={workers}, ps={ps}"
        )
    if workers is None or ps is None:
        roles = []
    elif workers < 1 or ps < 1:
        raise ValueError(f"expected at least one worker and one server, got {workers} and {ps}")
    else:
        roles = served_tasks(workers, ps)
    count = ranks if ranks is not None else len(roles)
    if count < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    bundle = {"CPU": cpus, **({"GPU": gpus} if gpus else {}), **(resources or {})}
    group = placement_group([bundle] * count, strategy=placement)
    try:
        if not group.wait(timeout):
            raise ClusterConfigError(
                f"the Ray cluster has no room for {count} processes with {bundle} each "
                f"({placement}) within {timeout:g} s; `ray status` shows what it has"
            )
        call = function, tuple(args), dict(kwargs or {})
        if roles:
            made = [_start(group, i, bundle, max_restarts) for i in range(count)]
            result: T = _run_roles(made, roles, call)
            return result
        while True:
            made = [_start(group, i, bundle, 0) for i in range(count)]
            try:
                return _run_ranks(made, call)
            except RayActorError:
                if max_restarts == 0:
                    raise
            max_restarts -= 1
            for process in made:
                ray.kill(process)
    finally:
        remove_placement_group(group)  # ends the processes


class _Process:
    def place(self) -> tuple[str, str, int]:
        """Return the node, its IP address, and a port that is free there."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        return ray.get_runtime_context().get_node_id(), host, port

    def call(self, environment: Mapping[str, str], call: tuple[Any, ...]) -> Any:
        """Set the environment and call the function."""
        os.environ.update(environment)
        function, args, kwargs = call
        return function(*args, **kwargs)


def _start(group: Any, index: int, bundle: Mapping[str, float], max_restarts: int) -> Any:
    other = {name: n for name, n in bundle.items() if name not in ("CPU", "GPU")}
    kind = ray.remote(_Process).options(
        num_cpus=bundle["CPU"],
        num_gpus=bundle.get("GPU", 0),
        resources=other or None,
        max_restarts=max_restarts,
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=index
        ),
    )
    return kind.remote()


def _run_ranks(processes: Sequence[Any], call: tuple[Any, ...]) -> list[Any]:
    places = _places(processes)
    pending = [
        process.call.remote(environment, call)
        for process, environment in zip(processes, _environments(places), strict=True)
    ]
    return _results(pending)


def _places(processes: Sequence[Any]) -> list[tuple[str, str, int]]:
    """Return the places of processes, also of those that Ray is restarting."""
    asked = [process.place.options(max_task_retries=-1).remote() for process in processes]
    places: list[tuple[str, str, int]] = ray.get(asked)
    return places


def _environments(places: Sequence[tuple[str, str, int]]) -> list[dict[str, str]]:
    """Return each rank's variables, as `fastdist run` sets them."""
    nodes = [node for node, _, _ in places]
    _, host, port = places[0]
    shared = {SECRET_VARIABLE: secrets.token_hex(32), "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    job = secrets.token_hex(16)
    return [
        shared | rank_variables(rank, len(nodes), nodes[:rank].count(node), nodes.count(node), job)
        for rank, node in enumerate(nodes)
    ]


def _results(pending: Sequence[Any]) -> list[Any]:
    """Wait for all calls; raise the error of the process that failed first, if any has."""
    left = list(pending)
    errors: list[Exception] = []
    deadline = float("inf")
    while left and time.monotonic() < deadline:
        limit_s = min(deadline - time.monotonic(), 3600.0)
        ready, left = ray.wait(left, timeout=limit_s)
        for one in ready:
            try:
                ray.get(one, timeout=10)
            except GetTimeoutError:
                left.append(one)
            except (RayActorError, RayTaskError) as error:
                errors.append(error)
                deadline = min(deadline, time.monotonic() + _CAUSE_WAIT_S)
        if any(not isinstance(error, PeerFailureError) for error in errors):
            break
    # Ranks that fail because another one was lost raise PeerFailureError.
    causes = [error for error in errors if not isinstance(error, PeerFailureError)]
    if errors:
        raise (causes + errors)[0]
    return list(ray.get(pending))


def _run_roles(
    processes: Sequence[Any], roles: Sequence[tuple[str, int]], call: tuple[Any, ...]
) -> Any:
    places = _places(processes)
    configs = tf_configs(roles, [f"{host}:{port}" for _, host, port in places])
    secret = secrets.token_hex(32)
    calls = []
    for process, (role, _), config in zip(processes, roles, configs, strict=True):
        environment = {TF_CONFIG: config, SECRET_VARIABLE: secret}
        # Ray calls the function again in a worker or a server that was started again.
        again = 0 if role == "chief" else -1
        calls.append(process.call.options(max_task_retries=again).remote(environment, call))
    return ray.get(calls[0])
