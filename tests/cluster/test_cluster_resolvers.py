"""Resolvers: which cluster and which task they read from what a launcher or user set."""

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fastdist.cluster import (
    ClusterResolver,
    ClusterSpec,
    KubernetesClusterResolver,
    MPIClusterResolver,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    TorchrunClusterResolver,
    detect_resolver,
)
from fastdist.errors import ClusterConfigError

CLUSTER = {
    "chief": ["c:1"],
    "worker": ["w0:1", "w1:1"],
    "ps": ["p:1"],
    "evaluator": ["e:1"],
}
ENTRIES = {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "node0", "MASTER_PORT": "29400"}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "4"}
HYDRA = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0"}
SRUN = {
    "SLURM_PROCID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_NODEID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
    "SLURM_JOB_NODELIST": "node[0-1]",
}


def tf_config(cluster: Any = CLUSTER, task_type: Any = "worker", index: Any = 0) -> dict[str, str]:
    config = {"cluster": cluster, "task": {"type": task_type, "index": index}}
    return {"TF_CONFIG": json.dumps(config)}


def refusal(resolve: Callable[[], object]) -> str:
    with pytest.raises(ClusterConfigError) as caught:
        resolve()
    return str(caught.value)


class OwnScheduler(ClusterResolver):
    """The least that a resolver of a user's own must say."""

    def cluster_spec(self) -> ClusterSpec:
        return ClusterSpec(CLUSTER)

    @property
    def task_type(self) -> str:
        return "worker"

    @property
    def task_id(self) -> int:
        return 1


def test_a_resolver_of_ones_own() -> None:
    resolver = OwnScheduler()
    assert (resolver.rank, resolver.world_size) == (2, 3)
    assert (resolver.is_chief, resolver.coordinator_address) == (False, "c:1")


@pytest.mark.parametrize(
    ("cluster", "task", "rank", "world_size", "coordinator", "is_chief"),
    [
        (CLUSTER, ("chief", 0), 0, 3, "c:1", True),
        (CLUSTER, ("worker", 0), 1, 3, "c:1", False),
        (CLUSTER, ("worker", 1), 2, 3, "c:1", False),
        (CLUSTER, ("ps", 0), None, 3, "c:1", False),
        (CLUSTER, ("evaluator", 0), None, 3, "c:1", False),
        ({"chief": ["c:1"], "worker": ["w:1"]}, ("evaluator", 0), None, 2, "c:1", False),
        ({"worker": ["w0:1", "w1:1"]}, ("worker", 0), 0, 2, "w0:1", True),
        ({"worker": ["w0:1", "w1:1"]}, ("worker", 1), 1, 2, "w0:1", False),
        ({"worker": ["w:1"], "ps": ["p:1"]}, ("ps", 0), None, 1, "w:1", False),
        ({"chief": ["c:1"], "ps": ["p:1"]}, ("chief", 0), 0, 1, "c:1", True),
        ({"worker": ["[::1]:5"]}, ("worker", 0), 0, 1, "[::1]:5", True),
    ],
)
def test_places_by_tf_config_and_by_hand(
    cluster: Any,
    task: tuple[str, int],
    rank: int | None,
    world_size: int,
    coordinator: str,
    is_chief: bool,
) -> None:
    spec = ClusterSpec(cluster)
    for resolver in (
        SimpleClusterResolver(spec, *task),
        TFConfigClusterResolver(tf_config(cluster, *task)),
    ):
        assert resolver.cluster_spec() == spec
        assert (resolver.task_type, resolver.task_id) == task
        assert (resolver.rank, resolver.world_size) == (rank, world_size)
        assert (resolver.coordinator_address, resolver.is_chief) == (coordinator, is_chief)


def test_tf_config_as_tensorflow_takes_it() -> None:
    resolver = TFConfigClusterResolver(tf_config({"worker": ["w0:1", "w1:1"]}, "worker", "1"))
    assert (resolver.rank, resolver.world_size) == (1, 2)


@pytest.mark.parametrize(
    ("environ", "messages"),
    [
        ({}, ["TF_CONFIG is not set; expected {"]),
        ({"TF_CONFIG": " "}, ["TF_CONFIG is not set"]),
        ({"TF_CONFIG": "{"}, ["TF_CONFIG='{', expected {", "line 1"]),
        ({"TF_CONFIG": "[" * 100_000}, ["TF_CONFIG='[[["]),
        ({"TF_CONFIG": "[]"}, ["the whole: []; expected an object"]),
        ({"TF_CONFIG": "{}"}, ["cluster: None; expected an object"]),
        ({"TF_CONFIG": '{"cluster": ["a:1"]}'}, ["cluster: ['a:1']; expected an object"]),
        ({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'}, ["task: None; expected an object"]),
        (
            {"TF_CONFIG": '{"cluster": {"worker": ["a:1"], "worker": ["b:1"]}, "task": {}}'},
            ["a name that comes twice in {worker, worker}"],
        ),
        (tf_config(task_type=None), ["task type: None; expected a string"]),
        (tf_config(task_type=["worker"]), ["task type: ['worker']"]),
        (tf_config(task_type="master"), ["unknown job 'master'", "ClusterSpec({'chief': ['c:1']"]),
        (tf_config(index=None), ["task index: None; expected 0, 1, 2"]),
        (tf_config(index=1.0), ["task index: 1.0"]),
        (tf_config(index=True), ["task index: True"]),
        (tf_config(index=-1), ["task index: -1"]),
        (tf_config(index="one"), ["task index: 'one'"]),
        (tf_config(index=2), ["no worker 2; expected an index from 0 to 1", "'w1:1'"]),
        (tf_config({"worker": ["a:1"]}, "ps"), ["task of TF_CONFIG: job 'ps' has no tasks"]),
        (tf_config({"worker": ["a:1"]}, "chief"), ["job 'chief' has no tasks"]),
        (tf_config({"worker": ["a:1", "a:1"]}), ["worker 0 and worker 1 have the same address"]),
        (tf_config({**CLUSTER, "chief": ["a:1", "b:1"]}), ["TF_CONFIG: 2 chiefs", "'b:1'"]),
        (tf_config({"worker": ["a"]}), ["worker 0: malformed address 'a'"]),
        (tf_config({"worker": {"0": "a:1"}}), ["tasks of job 'worker'", "a list of addresses"]),
        (tf_config({"worker": "a:1"}), ["expected a list of addresses"]),
        (tf_config({}), ["no tasks"]),
    ],
)
def test_bad_tf_config(environ: dict[str, str], messages: list[str]) -> None:
    shown = refusal(lambda: TFConfigClusterResolver(environ))
    assert [message for message in messages if message not in shown] == []


def test_simple_refuses_a_task_outside_of_the_cluster() -> None:
    spec = ClusterSpec({"worker": ["a:1"]})
    assert "no worker 1" in refusal(lambda: SimpleClusterResolver(spec, "worker", 1))
    assert "job 'ps' has no tasks" in refusal(lambda: SimpleClusterResolver(spec, "ps", 0))


MASTER = {"MASTER_ADDR": "node0", "MASTER_PORT": "29400"}


@pytest.mark.parametrize(
    "resolver",
    [
        TorchrunClusterResolver(ENTRIES),
        MPIClusterResolver(environ={**OPEN_MPI, **MASTER}),
        MPIClusterResolver(environ={**HYDRA, **MASTER}),
        MPIClusterResolver(
            "node0:29400", environ={**HYDRA, "MASTER_ADDR": "n", "MASTER_PORT": "1"}
        ),
    ],
)
def test_launchers_tell_the_address_of_rank_0_only(resolver: ClusterResolver) -> None:
    assert (resolver.task_type, resolver.task_id, resolver.is_chief) == ("worker", 2, False)
    assert (resolver.rank, resolver.world_size) == (2, 4)
    assert resolver.coordinator_address == "node0:29400"
    assert resolver.cluster_spec().job_tasks("worker") == ("node0:29400", None, None, None)


@pytest.mark.parametrize(
    "master", [{}, {"MASTER_ADDR": "n"}, {"MASTER_ADDR": "", "MASTER_PORT": "1"}]
)
def test_an_address_is_missed_only_when_it_is_needed(master: dict[str, str]) -> None:
    launched = {"RANK": "0", "WORLD_SIZE": "4"}
    for resolver in (
        TorchrunClusterResolver({**launched, **master}),
        MPIClusterResolver(environ={**OPEN_MPI, **master}),
    ):
        assert resolver.world_size == 4
        shown = refusal(lambda resolver=resolver: resolver.coordinator_address)
        assert "MASTER_ADDR and MASTER_PORT" in shown
        assert "ClusterSpec({'worker': [None, None, None, None]})" in shown


def test_master_addr_may_be_ipv6() -> None:
    resolver = TorchrunClusterResolver({**ENTRIES, "MASTER_ADDR": "fe80::1"})
    assert resolver.coordinator_address == "[fe80::1]:29400"


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({**ENTRIES, "RANK": "4"}, "RANK='4'; expected an integer from 0 to 3, as WORLD_SIZE='4'"),
        ({**ENTRIES, "RANK": "x"}, "RANK='x'; expected an integer"),
        ({**ENTRIES, "WORLD_SIZE": "0"}, "WORLD_SIZE='0'; expected an integer of at least 1"),
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"WORLD_SIZE": "4"}, "RANK is not set"),
        ({**ENTRIES, "MASTER_PORT": "0"}, "MASTER_ADDR='node0', MASTER_PORT='0': malformed"),
        ({**ENTRIES, "MASTER_ADDR": "a:1"}, "MASTER_ADDR='a:1', MASTER_PORT='29400': malformed"),
        ({**ENTRIES, "MASTER_ADDR": "a b"}, "MASTER_ADDR='a b'"),
        ({**ENTRIES, "WORLD_SIZE": "9999999999"}, "9999999999 ranks; expected at most 1048576"),
    ],
)
def test_bad_torchrun_variables(environ: dict[str, str], message: str) -> None:
    assert message in refusal(lambda: TorchrunClusterResolver(environ))


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({}, "neither OMPI_COMM_WORLD_RANK nor PMI_RANK"),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, "neither OMPI_COMM_WORLD_RANK nor PMI_RANK"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE is not set"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "4"}, "as OMPI_COMM_WORLD_SIZE='4'"),
        ({**HYDRA, "PMI_SIZE": "1"}, "PMI_RANK='2'; expected an integer from 0 to 0"),
        ({**HYDRA, "MASTER_ADDR": "a", "MASTER_PORT": "x"}, "MASTER_PORT='x'"),
    ],
)
def test_bad_mpi_variables(environ: dict[str, str], message: str) -> None:
    assert message in refusal(lambda: MPIClusterResolver(environ=environ))


def test_mpi_refuses_a_malformed_coordinator_address() -> None:
    shown = refusal(lambda: MPIClusterResolver("node0", environ=OPEN_MPI))
    assert "malformed address 'node0'" in shown


@pytest.mark.parametrize(
    ("environ", "resolver"),
    [
        ({**tf_config(), **ENTRIES, **OPEN_MPI, **SRUN}, "TFConfigClusterResolver"),
        ({**ENTRIES, **OPEN_MPI, **SRUN}, "TorchrunClusterResolver"),
        ({**ENTRIES, "TF_CONFIG": ""}, "TorchrunClusterResolver"),
        ({**ENTRIES, "FASTDIST_JOB": "ab"}, "TorchrunClusterResolver"),
        ({**OPEN_MPI, **SRUN}, "MPIClusterResolver"),
        ({**HYDRA, **SRUN}, "MPIClusterResolver"),
        ({**SRUN, "PMI_RANK": "2", "PMI_SIZE": "4"}, "SlurmClusterResolver"),
        ({**SRUN, "WORLD_SIZE": "4"}, "SlurmClusterResolver"),
        ({**SRUN, "SLURM_STEP_ID": "4294967291"}, None),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, None),
        ({"MASTER_ADDR": "node0", "WORLD_SIZE": "1"}, None),
        ({"JOB_COMPLETION_INDEX": "0"}, None),
        ({}, None),
    ],
)
def test_detection(environ: dict[str, str], resolver: str | None) -> None:
    detected = detect_resolver(environ)
    assert (None if detected is None else type(detected).__name__) == resolver


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"TF_CONFIG": "{}", **ENTRIES}, "cluster: None"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE='2' is set but RANK is not"),
        ({"TORCHELASTIC_RUN_ID": "run"}, "RANK is not set"),
        ({"FASTDIST_JOB": "ab"}, "RANK is not set"),
    ],
)
def test_detection_never_skips_what_is_malformed(environ: dict[str, str], message: str) -> None:
    assert message in refusal(lambda: detect_resolver(environ))


def pod(name: str, ip: str | None, phase: str = "Running") -> SimpleNamespace:
    return SimpleNamespace(
        metadata=SimpleNamespace(name=name), status=SimpleNamespace(pod_ip=ip, phase=phase)
    )


class Pods:
    """A Kubernetes client whose pods are given, by selector; counts how often it is asked."""

    def __init__(self, **pods: list[SimpleNamespace]) -> None:
        self.pods = pods
        self.asked: list[tuple[str | None, str]] = []

    def list_pod_for_all_namespaces(self, *, label_selector: str) -> Any:
        return self._list(None, label_selector)

    def list_namespaced_pod(self, namespace: str, *, label_selector: str) -> Any:
        return self._list(namespace, label_selector)

    def _list(self, namespace: str | None, selector: str) -> Any:
        self.asked.append((namespace, selector))
        return SimpleNamespace(items=self.pods[selector])


def kubernetes(client: Pods, task_id: int = 0, **options: Any) -> KubernetesClusterResolver:
    return KubernetesClusterResolver(
        {"worker": list(client.pods)},
        task_type="worker",
        task_id=task_id,
        override_client=client,
        **options,
    )


def test_kubernetes_pods_in_the_order_of_their_numbers() -> None:
    client = Pods(a=[pod(f"w-{i}", f"10.0.0.{i}") for i in (10, 2, 1)], b=[pod("x", "fe80::1")])
    resolver = kubernetes(client, task_id=2, port=5)
    assert resolver.cluster_spec() == ClusterSpec(
        {"worker": ["10.0.0.1:5", "10.0.0.2:5", "10.0.0.10:5", "[fe80::1]:5"]}
    )
    assert (resolver.rank, resolver.world_size, resolver.is_chief) == (2, 4, False)
    assert resolver.coordinator_address == "10.0.0.1:5"
    assert client.asked == [(None, "a"), (None, "b")]


def test_kubernetes_in_a_namespace() -> None:
    client = Pods(a=[pod("w", "10.0.0.1")])
    assert kubernetes(client, namespace="mine").coordinator_address == "10.0.0.1:8470"
    assert client.asked == [("mine", "a")]


@pytest.mark.parametrize(
    ("pods", "message"),
    [
        ([pod("w-0", None, "Pending")], "pod 'w-0' of 'a' is in phase 'Pending'"),
        ([pod("w-0", "10.0.0.1"), pod("w-1", "10.0.0.2", "Failed")], "pod 'w-1' of 'a'"),
        ([], "no tasks"),
        ([pod("w-0", "10.0.0.1"), pod("w-1", "10.0.0.1")], "have the same address"),
        ([pod("w-0", "10.0.0.1")], "no worker 1; expected an index from 0 to 0"),
    ],
)
def test_kubernetes_pods_that_make_no_cluster(pods: list[SimpleNamespace], message: str) -> None:
    assert message in refusal(lambda: kubernetes(Pods(a=pods), task_id=1).rank)


def test_kubernetes_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(ImportError, match="pip install kubernetes"):
        KubernetesClusterResolver({"worker": ["a"]}, task_type="worker", task_id=0)
