"""The cluster from TF_CONFIG, the variable of TensorFlow programs and their launchers."""

import json
import os
import re
from collections.abc import Sequence
from typing import Any

from fastdist.cluster.environ import Environ
from fastdist.cluster.resolver import SimpleClusterResolver
from fastdist.cluster.spec import ClusterSpec
from fastdist.errors import ClusterConfigError

VARIABLE = "TF_CONFIG"
_EXAMPLE = '{"cluster": {"worker": ["host:port", …]}, "task": {"type": "worker", "index": 0}}'
_INDEX = re.compile(r"[0-9]{1,9}")


class TFConfigClusterResolver(SimpleClusterResolver):
    """Reads the cluster and this process's task from the JSON in TF_CONFIG.

    For example `{"cluster": {"chief": ["a:2222"], "worker": ["b:2222", "c:2222"]}, "task": {"type":
    "worker", "index": 0}}`. The task may be an evaluator that the cluster does not list.

    Follows tf.distribute.cluster_resolver.TFConfigClusterResolver.

    Examples:
        >>> import fastdist as fd, json
        >>> cluster = {"worker": ["a:2222", "b:2222"]}
        >>> value = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}})
        >>> fd.cluster.TFConfigClusterResolver(environ={"TF_CONFIG": value}).rank
        1
    """

    __slots__ = ()

    def __init__(self, environ: Environ = os.environ) -> None:
        """Read TF_CONFIG from an environment.

        Raises:
            ClusterConfigError: TF_CONFIG is not set, malformed, or the task is not in the cluster.
        """
        text = environ.get(VARIABLE, "")
        if not text.strip():
            raise ClusterConfigError(f"{VARIABLE} is not set; expected {_EXAMPLE}")
        try:
            config = json.loads(text, object_pairs_hook=_without_repetition)
            spec, task_type, task_id = _parsed(config)
        except (ValueError, RecursionError) as error:
            raise ClusterConfigError(f"{error}; {VARIABLE}={text!r}, expected {_EXAMPLE}") from None
        except ClusterConfigError as error:
            raise ClusterConfigError(f"{VARIABLE}: {error}") from None
        try:
            super().__init__(spec, task_type, task_id)
        except ClusterConfigError as error:
            raise ClusterConfigError(f"the task of {VARIABLE}: {error}") from None

    @staticmethod
    def is_available(environ: Environ = os.environ) -> bool:
        """Return True if TF_CONFIG is set and not empty."""
        return bool(environ.get(VARIABLE, "").strip())


def served_tasks(workers: int, servers: int) -> list[tuple[str, int]]:
    """Return job and index of a chief, workers and parameter servers."""
    return [
        ("chief", 0),
        *(("worker", index) for index in range(workers)),
        *(("ps", index) for index in range(servers)),
    ]


def tf_configs(tasks: Sequence[tuple[str, int]], addresses: Sequence[str]) -> list[str]:
    """Return the TF_CONFIG of each task, given as job and index, of a cluster of these tasks."""
    cluster: dict[str, list[str]] = {}
    for (job, _), address in zip(tasks, addresses, strict=True):
        cluster.setdefault(job, []).append(address)
    return [
        json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
        for job, index in tasks
    ]


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object; refuse a repeated name, which would hide the first value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"a name that comes twice in {{{', '.join(name for name, _ in pairs)}}}")
    return found


def _parsed(config: object) -> tuple[ClusterSpec, str, int]:
    fields = _object(config, "the whole")
    cluster = _object(fields.get("cluster"), "cluster")
    task = _object(fields.get("task"), "task")
    task_type = task.get("type")
    if not isinstance(task_type, str):
        raise ValueError(f"task type: {task_type!r}; expected a string")
    return ClusterSpec(cluster), task_type, _index(task.get("index"))


def _object(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name}: {value!r}; expected an object")
    return value


def _index(value: object) -> int:
    # TensorFlow calls int() and thus accepts "0" for 0.
    if isinstance(value, str) and _INDEX.fullmatch(value):
        return int(value)
    if type(value) is not int or value < 0:
        raise ValueError(f"task index: {value!r}; expected 0, 1, 2, …")
    return value
