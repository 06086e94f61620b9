"""Clusters of pods, from Kubernetes' API or from the names of an indexed Job."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol, final

from fastdist.cluster.environ import Environ, index
from fastdist.cluster.resolver import SimpleClusterResolver, TaskResolver, divide_among_jobs
from fastdist.cluster.spec import ClusterSpec
from fastdist.errors import ClusterConfigError


class PodLister(Protocol):
    """The methods of `kubernetes.client.CoreV1Api` that are used here."""

    def list_pod_for_all_namespaces(self, *, label_selector: str) -> Any:  # noqa: D102
        ...

    def list_namespaced_pod(self, namespace: str, *, label_selector: str) -> Any:  # noqa: D102
        ...


class KubernetesClusterResolver(TaskResolver):
    """Finds the tasks of each job as the pods with the job's labels.

    Pods are ordered by name, with numbers in names compared as numbers, so that the pods of a
    StatefulSet have their ordinals as task ids. A task's address is the IP address of its pod.
    Kubernetes is asked once, when the cluster is first needed; all pods must run then.

    Follows tf.distribute.cluster_resolver.KubernetesClusterResolver. Differences: this process's
    task is an argument, and addresses belong to the pods, not to their machines.

    Examples:
        >>> import fastdist as fd
        >>> resolver = fd.cluster.KubernetesClusterResolver(  # doctest: +SKIP
        ...     {"worker": ["app=train"]}, task_type="worker", task_id=0
        ... )
    """

    __slots__ = ("_client", "_labels", "_namespace", "_port", "_spec")

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]],
        *,
        task_type: str,
        task_id: int,
        port: int = 8470,
        namespace: str | None = None,
        override_client: PodLister | None = None,
    ) -> None:
        """Connect to Kubernetes.

        Args:
            job_to_label_mapping: label selectors for each job, such as {"worker": ["app=train"]}.
            task_type: this process's job.
            task_id: this process's index in its job.
            port: the port that every task listens on.
            namespace: namespace of the pods; if None, all namespaces, which needs permission.
            override_client: client to use instead of one with the pod's service account or,
                outside of a cluster, with the user's kubeconfig.

        Raises:
            ImportError: the package kubernetes is not installed, and no client is given.
        """
        self._labels = {job: tuple(labels) for job, labels in job_to_label_mapping.items()}
        self._task_type = task_type
        self._task_id = task_id
        self._port = port
        self._namespace = namespace
        self._client = _default_client() if override_client is None else override_client
        self._spec: ClusterSpec | None = None

    @final
    def cluster_spec(self) -> ClusterSpec:
        """Return the tasks of the cluster, as Kubernetes listed them in the first call.

        Raises:
            ClusterConfigError: a pod is not running, or the pods are not a valid cluster.
        """
        if self._spec is None:
            spec = ClusterSpec(
                {job: self._addresses(selectors) for job, selectors in self._labels.items()}
            )
            SimpleClusterResolver(spec, self._task_type, self._task_id)  # checks the task
            self._spec = spec
        return self._spec

    def _addresses(self, selectors: Sequence[str]) -> list[str]:
        addresses = []
        for selector in selectors:
            if self._namespace is None:
                pods = self._client.list_pod_for_all_namespaces(label_selector=selector)
            else:
                pods = self._client.list_namespaced_pod(self._namespace, label_selector=selector)
            for pod in sorted(pods.items, key=lambda pod: _numbers_as_numbers(pod.metadata.name)):
                if pod.status.phase != "Running" or not pod.status.pod_ip:
                    raise ClusterConfigError(
                        f"pod {pod.metadata.name!r} of {selector!r} is in phase "
                        f"{pod.status.phase!r}; expected 'Running'"
                    )
                ip = pod.status.pod_ip
                addresses.append(f"[{ip}]:{self._port}" if ":" in ip else f"{ip}:{self._port}")
        return addresses


class IndexedJobClusterResolver(SimpleClusterResolver):
    """The pods of a Kubernetes Job in Indexed completion mode: workers, or tasks of several jobs.

    Needs no access to Kubernetes' API. The `subdomain` of the Job's pods must be the name of a
    headless service that selects them; pod i then has the host name `<job>-<i>.<subdomain>`.

    Examples:
        >>> import fastdist as fd
        >>> resolver = fd.cluster.IndexedJobClusterResolver(
        ...     "train", "ranks", completions=2, environ={"JOB_COMPLETION_INDEX": "1"}
        ... )
        >>> resolver.rank, resolver.coordinator_address
        (1, 'train-0.ranks:8470')
    """

    __slots__ = ()

    def __init__(
        self,
        job_name: str,
        subdomain: str,
        completions: int,
        *,
        jobs: Mapping[str, int] | None = None,
        port: int = 8470,
        environ: Environ = os.environ,
    ) -> None:
        """Read this pod's index from JOB_COMPLETION_INDEX.

        Args:
            job_name: the Job's name.
            subdomain: the headless service's name.
            completions: the Job's `completions`, which its `parallelism` must equal.
            jobs: number of pods of each job of the cluster, such as {"chief": 1, "worker": 4,
                "ps": 2}: pod 0 is the chief. If None, all pods are workers.
            port: the port that every task listens on.
            environ: the environment to read.

        Raises:
            ClusterConfigError: JOB_COMPLETION_INDEX is missing or not below completions, the names
                do not make a host name, or the number of tasks of jobs is not completions.
        """
        hosts = [f"{job_name}-{task}.{subdomain}:{port}" for task in range(completions)]
        task_id = index(environ, "JOB_COMPLETION_INDEX", completions, f"{completions=}")
        if jobs is None:
            jobs = {"worker": completions}
        super().__init__(*divide_among_jobs(jobs, hosts, task_id, f"{completions=}"))


def _default_client() -> PodLister:
    try:
        config = import_module("kubernetes.config")
        client = import_module("kubernetes.client")
    except ImportError as error:
        raise ImportError(
            "KubernetesClusterResolver needs Kubernetes' client: pip install kubernetes"
        ) from error
    # Kubernetes sets this variable in every container.
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        config.load_incluster_config()
    else:
        config.load_kube_config()
    lister: PodLister = client.CoreV1Api()
    return lister


def _numbers_as_numbers(name: str) -> list[str | int]:
    """Return a key that sorts "pod-2" before "pod-10"."""
    return [int(part) if part.isdigit() else part for part in re.split(r"([0-9]+)", name)]
