"""Clusters of pods, from Kubernetes' API."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from fastdist.cluster.resolver import SimpleClusterResolver
from fastdist.cluster.spec import ClusterSpec
from fastdist.errors import ClusterConfigError


class KubernetesClusterResolver(SimpleClusterResolver):
    """Finds the tasks of each job as the pods with the job's labels.

    Pods are ordered by name, with numbers in names compared as numbers, so that the pods of a
    StatefulSet have their ordinals as task ids. A task's address is the IP address of its pod.
    Kubernetes is asked once, by the constructor; all pods must run then.

    Follows tf.distribute.cluster_resolver.KubernetesClusterResolver. Differences: this process's
    task is an argument, and addresses belong to the pods, not to their machines.

    Examples:
        >>> import fastdist as fd
        >>> resolver = fd.cluster.KubernetesClusterResolver(  # doctest: +SKIP
        ...     {"worker": ["app=train"]}, task_type="worker", task_id=0
        ... )
    """

    __slots__ = ()

    def __init__(
        self,
        job_to_label_mapping: Mapping[str, Sequence[str]],
        *,
        task_type: str,
        task_id: int,
        port: int = 8470,
        namespace: str | None = None,
        override_client: Any = None,
    ) -> None:
        """Ask Kubernetes for the pods.

        Args:
            job_to_label_mapping: label selectors for each job, such as {"worker": ["app=train"]}.
            task_type: this process's job.
            task_id: this process's index in its job.
            port: the port that every task listens on.
            namespace: namespace of the pods; if None, all namespaces, which needs permission.
            override_client: `kubernetes.client.CoreV1Api` to use instead of one with the pod's
                service account or, outside of a cluster, with the user's kubeconfig.

        Raises:
            ClusterConfigError: a pod is not running, or the pods are not a valid cluster.
            ImportError: the package kubernetes is not installed, and no client is given.
        """
        client = _default_client() if override_client is None else override_client
        list_pods = client.list_pod_for_all_namespaces
        if namespace is not None:
            list_pods = functools.partial(client.list_namespaced_pod, namespace)
        cluster: dict[str, list[str]] = {job: [] for job in job_to_label_mapping}
        for job, selectors in job_to_label_mapping.items():
            for selector in selectors:
                pods = sorted(list_pods(label_selector=selector).items, key=_name_parts)
                cluster[job] += [_address_of(pod, selector, port) for pod in pods]
        super().__init__(ClusterSpec(cluster), task_type, task_id)


def _default_client() -> Any:
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
    return client.CoreV1Api()


def _name_parts(pod: Any) -> list[str | int]:
    """Split a pod's name, so that "pod-2" comes before "pod-10"."""
    parts = re.split(r"([0-9]+)", pod.metadata.name)
    return [int(part) if part.isdigit() else part for part in parts]


def _address_of(pod: Any, selector: str, port: int) -> str:
    if pod.status.phase != "Running" or not pod.status.pod_ip:
        raise ClusterConfigError(
            f"pod {pod.metadata.name!r} of {selector!r} is in phase {pod.status.phase!r}; "
            "expected 'Running'"
        )
    ip = pod.status.pod_ip
    return f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"
