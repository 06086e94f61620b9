"""The hosts of a TPU slice, from arguments, environment variables or a TPU VM's metadata."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import final

from fastdist.cluster.address import join_address
from fastdist.cluster.environ import Environ, index
from fastdist.cluster.resolver import SimpleClusterResolver
from fastdist.cluster.spec import ClusterSpec
from fastdist.errors import ClusterConfigError

_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/"
_METADATA_TIMEOUT_S = 2.0
# Set in notebooks of Colab and Kaggle, where this machine is the only host.
_NOTEBOOKS = ("COLAB_TPU_ADDR", "TPU_NAME")
_WORKER_ID = ("TPU_WORKER_ID", "CLOUD_TPU_TASK_ID")


class TPUClusterResolver(SimpleClusterResolver):
    """The hosts of a TPU slice; each host is a worker with all of its cores.

    Sources of the hosts, in this order:

    - `worker_hostnames`, as given;
    - TPU_WORKER_HOSTNAMES and TPU_WORKER_ID, set by GKE in its pods, and by users elsewhere;
    - COLAB_TPU_ADDR or TPU_NAME of a notebook (Colab, Kaggle): this machine alone. An address, of
      an old TPU node on another machine, is refused;
    - the metadata of a Cloud TPU VM: `worker-network-endpoints` and `agent-worker-number`.

    Follows tf.distribute.cluster_resolver.TPUClusterResolver, whose `tpu` argument names a server
    to connect to. A program on a TPU VM instead runs on the machine of the cores, once per host.

    Attributes:
        source: the source of the hosts, for messages.

    Examples:
        >>> import fastdist as fd
        >>> resolver = fd.cluster.TPUClusterResolver(worker_hostnames=["a", "b"], worker_id=1)
        >>> resolver.num_hosts, resolver.rank
        (2, 1)
    """

    __slots__ = ("source",)

    def __init__(
        self,
        worker_hostnames: Sequence[str] | None = None,
        worker_id: int | None = None,
        *,
        port: int = 29500,
        environ: Environ = os.environ,
    ) -> None:
        """Find the hosts of the slice.

        Args:
            worker_hostnames: names or IP addresses of all hosts, in the order of their ids.
            worker_id: index of this host; optional for a single host.
            port: port for the rendezvous at the first host; TPUs use 8470 to 8480 themselves.

        Raises:
            ClusterConfigError: no source names the hosts, or the source is malformed.
        """
        hosts, task, self.source = _find(worker_hostnames, worker_id, environ)
        try:
            spec = ClusterSpec({"worker": [join_address(host, port) for host in hosts]})
        except ValueError as error:
            raise ClusterConfigError(f"{self.source}: {error}") from None
        super().__init__(spec, "worker", task)

    @staticmethod
    def is_available(environ: Environ = os.environ) -> bool:
        """Return True if the environment names TPU hosts; do not read a TPU VM's metadata."""
        return any(environ.get(name) for name in ("TPU_WORKER_HOSTNAMES", *_NOTEBOOKS))

    @property
    @final
    def num_hosts(self) -> int:
        """The number of machines of the slice; each runs the program once."""
        return self.world_size


def _find(
    given: Sequence[str] | None, worker_id: int | None, environ: Environ
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
    endpoints = _read_metadata("worker-network-endpoints")
    if endpoints is None:
        raise ClusterConfigError(
            "no TPU hosts found: TPU_WORKER_HOSTNAMES, COLAB_TPU_ADDR and TPU_NAME are not set, "
            f"and {_METADATA}worker-network-endpoints gave nothing; expected one of them, or "
            'TPUClusterResolver(["host0", "host1"], worker_id) with the hosts as arguments'
        )
    return _of_metadata(endpoints, _read_metadata("agent-worker-number"))


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
    """Ask Google's metadata server for an attribute of this machine; None if it has none."""
    from urllib.error import HTTPError  # takes as long to load as the rest of this folder
    from urllib.request import Request, urlopen

    request = Request(_METADATA + name, headers={"Metadata-Flavor": "Google"})
    try:
        with urlopen(request, timeout=_METADATA_TIMEOUT_S) as answer:
            text: str = answer.read().decode()
    except HTTPError as error:
        error.close()
        return None
    except OSError:
        return None
    return text
