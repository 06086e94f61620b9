"""The hosts of a TPU slice: by environment variables, a TPU VM's metadata, or as given."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import final
from urllib.request import Request, urlopen

from fastdist.cluster.address import join_address
from fastdist.cluster.environ import Environ, index
from fastdist.cluster.resolver import SimpleClusterResolver
from fastdist.cluster.spec import ClusterSpec
from fastdist.errors import ClusterConfigError

_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/"
_METADATA_TIMEOUT_S = 2.0
# Their hosts are this machine: Colab's and Kaggle's TPU VMs name no others.
_NOTEBOOKS = ("COLAB_TPU_ADDR", "TPU_NAME")
_WORKER_ID = ("TPU_WORKER_ID", "CLOUD_TPU_TASK_ID")

ReadMetadata = Callable[[str], str | None]


class TPUClusterResolver(SimpleClusterResolver):
    """The hosts of a TPU slice, each of them a worker with all the cores that are attached to it.

    What says who they are, in this order:

    - `worker_hostnames`, as given;
    - TPU_WORKER_HOSTNAMES and TPU_WORKER_ID, which GKE sets in its pods and users elsewhere;
    - COLAB_TPU_ADDR or TPU_NAME of a notebook (Colab, Kaggle): this machine alone. A TPU_NAME
      that is an address, of the old kind of TPU that is a server elsewhere, is refused;
    - the metadata of a Cloud TPU VM: `worker-network-endpoints` and `agent-worker-number`.

    Follows tf.distribute.cluster_resolver.TPUClusterResolver, whose `tpu` argument names a server
    to connect to; a program on a TPU VM runs beside its cores instead, once on every host.

    Attributes:
        source: in words, what said so.
    """

    __slots__ = ("source",)

    def __init__(
        self,
        worker_hostnames: Sequence[str] | None = None,
        worker_id: int | None = None,
        *,
        port: int = 29500,
        environ: Environ = os.environ,
        read_metadata: ReadMetadata | None = None,
    ) -> None:
        """Finds the hosts.

        Args:
            worker_hostnames: names or IP addresses of all hosts, in the order of their ids.
            worker_id: which of them this is; may be left out where there is one.
            port: where the first host waits for the others; TPUs' own are 8470 to 8480.
            environ: the environment to read.
            read_metadata: gives an attribute of the machine's metadata, None where there is none;
                by default asks Google's metadata server, for up to 2 s.

        Raises:
            ClusterConfigError: nothing says who the hosts are, or what says it makes no sense.
        """
        read = _read_metadata if read_metadata is None else read_metadata
        hosts, task, self.source = _find(worker_hostnames, worker_id, environ, read)
        try:
            spec = ClusterSpec({"worker": [join_address(host, port) for host in hosts]})
        except ValueError as error:
            raise ClusterConfigError(f"{self.source}: {error}") from None
        super().__init__(spec, "worker", task)

    @staticmethod
    def is_available(environ: Environ = os.environ) -> bool:
        """Whether the environment names TPU hosts; a TPU VM's metadata is not asked."""
        return any(environ.get(name) for name in ("TPU_WORKER_HOSTNAMES", *_NOTEBOOKS))

    @property
    @final
    def num_hosts(self) -> int:
        """Machines with cores of the slice, each of which runs the program once."""
        return self.world_size


def _find(
    given: Sequence[str] | None, worker_id: int | None, environ: Environ, read: ReadMetadata
) -> tuple[list[str], int, str]:
    if given is not None:
        if not given:
            raise ClusterConfigError("worker_hostnames is empty; expected a host at least")
        if worker_id is None and len(given) > 1:
            raise ClusterConfigError(
                f"worker_hostnames names {len(given)} hosts; expected worker_id to say which one "
                "this is"
            )
        return list(given), worker_id or 0, "worker_hostnames"
    if environ.get("TPU_WORKER_HOSTNAMES"):
        return _of_environment(environ)
    for name in _NOTEBOOKS:
        if environ.get(name):
            return _of_notebook(name, environ[name])
    endpoints = read("worker-network-endpoints")
    if endpoints is None:
        raise ClusterConfigError(
            "no TPU hosts found: TPU_WORKER_HOSTNAMES, COLAB_TPU_ADDR and TPU_NAME are not set, "
            f"and {_METADATA}worker-network-endpoints gave nothing; expected one of them, or "
            'TPUClusterResolver(["host0", "host1"], worker_id) with the hosts as arguments'
        )
    return _of_metadata(endpoints, read("agent-worker-number"))


def _of_environment(environ: Environ) -> tuple[list[str], int, str]:
    text = environ["TPU_WORKER_HOSTNAMES"]
    source = f"TPU_WORKER_HOSTNAMES={text!r}"
    hosts = [host.strip() for host in text.split(",")]
    variable = next((name for name in _WORKER_ID if name in environ), _WORKER_ID[0])
    if len(hosts) == 1 and variable not in environ:
        return hosts, 0, source
    return hosts, index(environ, variable, len(hosts), source), source


def _of_notebook(name: str, value: str) -> tuple[list[str], int, str]:
    if "://" in value:
        raise ClusterConfigError(
            f"{name}={value!r} is the address of a TPU node, which torch_xla 2 does not reach; "
            "expected a TPU VM, where the program runs on the machine that has the cores (in "
            'Colab: Runtime, Change runtime type, "v2-8 TPU" or later)'
        )
    return ["localhost"], 0, f"{name}={value!r}"


def _of_metadata(endpoints: str, number: str | None) -> tuple[list[str], int, str]:
    source = f"the TPU VM's metadata worker-network-endpoints={endpoints!r}"
    fields = [endpoint.split(":") for endpoint in endpoints.strip().split(",")]
    if any(len(field) < 3 or not field[2] for field in fields):
        raise ClusterConfigError(f"{source}; expected 'name:id:address' for each host")
    hosts = [field[2] for field in fields]
    if len(hosts) == 1:
        return hosts, 0, source
    metadata = {"agent-worker-number": number or ""}
    return hosts, index(metadata, "agent-worker-number", len(hosts), source), source


def _read_metadata(name: str) -> str | None:
    request = Request(_METADATA + name, headers={"Metadata-Flavor": "Google"})
    try:
        with urlopen(request, timeout=_METADATA_TIMEOUT_S) as answer:
            text: str = answer.read().decode()
    except OSError:
        return None
    return text
