"""The resolver for TPU slices: which hosts it finds, and what it says where it finds none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import ClassVar

import pytest
from fastdist.cluster import TPUClusterResolver, tpu
from fastdist.errors import ClusterConfigError

GKE = {"TPU_WORKER_HOSTNAMES": "t-0.tpu,t-1.tpu", "TPU_WORKER_ID": "1"}
ENDPOINTS = "w-0:u0:10.0.0.2,w-1:u1:10.0.0.3,w-2:u2:10.0.0.4"


@pytest.fixture
def has(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str]], None]:
    """Give this machine metadata."""

    def make(attributes: dict[str, str]) -> None:
        named = {name.replace("_", "-"): value for name, value in attributes.items()}
        monkeypatch.setattr(tpu, "_read_metadata", named.get)

    return make


@pytest.mark.parametrize(
    ("environ", "attributes", "addresses", "task", "source"),
    [
        (GKE, {}, ("t-0.tpu:29500", "t-1.tpu:29500"), 1, "TPU_WORKER_HOSTNAMES="),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, {}, ("localhost:29500",), 0, "TPU_WORKER"),
        (
            {"TPU_WORKER_HOSTNAMES": "a, b", "CLOUD_TPU_TASK_ID": "0"},
            {},
            ("a:29500", "b:29500"),
            0,
            "TPU_WORKER_HOSTNAMES=",
        ),
        ({"COLAB_TPU_ADDR": "10.1.2.3:29500"}, {}, ("localhost:29500",), 0, "COLAB_TPU_ADDR="),
        ({"TPU_NAME": "local"}, {}, ("localhost:29500",), 0, "TPU_NAME="),
        (
            {},
            {"worker_network_endpoints": ENDPOINTS, "agent_worker_number": "2"},
            ("10.0.0.2:29500", "10.0.0.3:29500", "10.0.0.4:29500"),
            2,
            "metadata worker-network-endpoints=",
        ),
        ({}, {"worker_network_endpoints": "w:u:10.0.0.9"}, ("10.0.0.9:29500",), 0, "metadata"),
    ],
)
def test_hosts_that_are_found(
    environ: dict[str, str],
    attributes: dict[str, str],
    addresses: tuple[str, ...],
    task: int,
    source: str,
    has: Callable[[dict[str, str]], None],
) -> None:
    has(attributes)
    resolver = TPUClusterResolver(environ=environ)
    assert resolver.cluster_spec().job_tasks("worker") == addresses
    assert (resolver.task_type, resolver.task_id, resolver.rank) == ("worker", task, task)
    assert resolver.num_hosts == resolver.world_size == len(addresses)
    assert resolver.coordinator_address == addresses[0]
    assert source in resolver.source
    assert TPUClusterResolver.is_available(environ) is bool(environ)


def test_hosts_as_given() -> None:
    resolver = TPUClusterResolver(["h0", "h1"], 1, port=99, environ=GKE)
    assert resolver.coordinator_address == "h0:99"
    assert (resolver.rank, resolver.is_chief) == (1, False)
    assert TPUClusterResolver(["h0"]).rank == 0


@pytest.mark.parametrize(
    ("arguments", "environ", "attributes", "messages"),
    [
        (
            (),
            {},
            {},
            [
                "no TPU hosts found: TPU_WORKER_HOSTNAMES, COLAB_TPU_ADDR and TPU_NAME are not set",
                "worker-network-endpoints gave nothing",
                'TPUClusterResolver(["host0", "host1"], worker_id)',
            ],
        ),
        (([],), {}, {}, ["worker_hostnames is empty"]),
        ((["a", "b"],), {}, {}, ["2 hosts; expected worker_id"]),
        ((["a", "b"], 2), {}, {}, ["no worker 2; expected an index from 0 to 1"]),
        ((["a:b:c"],), {}, {}, ["worker_hostnames: malformed address"]),
        ((), GKE | {"TPU_WORKER_ID": "2"}, {}, ["TPU_WORKER_ID='2'; expected an integer from 0"]),
        ((), {"TPU_WORKER_HOSTNAMES": "a,b"}, {}, ["TPU_WORKER_ID is not set"]),
        ((), {"TPU_NAME": "grpc://10.0.0.2:29500"}, {}, ["the address of a TPU node", "TPU VM"]),
        ((), {}, {"worker_network_endpoints": "w-0"}, ["expected 'name:id:address'"]),
        (
            (),
            {},
            {"worker_network_endpoints": ENDPOINTS, "agent_worker_number": "3"},
            ["agent-worker-number='3'; expected an integer from 0 to 2", "10.0.0.4"],
        ),
        ((), {}, {"worker_network_endpoints": ENDPOINTS}, ["agent-worker-number=''"]),
    ],
)
def test_hosts_that_make_no_sense(
    arguments: tuple[object, ...],
    environ: dict[str, str],
    attributes: dict[str, str],
    messages: list[str],
    has: Callable[[dict[str, str]], None],
) -> None:
    has(attributes)
    with pytest.raises(ClusterConfigError) as caught:
        TPUClusterResolver(*arguments, environ=environ)  # type: ignore[arg-type]
    for message in messages:
        assert message in str(caught.value)


class Metadata(BaseHTTPRequestHandler):
    """A TPU VM's, of two hosts; it answers those only who send the header that it wants."""

    attributes: ClassVar[dict[str, str]] = {
        "/worker-network-endpoints": ENDPOINTS,
        "/agent-worker-number": "1",
    }

    def do_GET(self) -> None:
        text = self.attributes.get(self.path)
        known = text is not None and self.headers["Metadata-Flavor"] == "Google"
        self.send_response(200 if known else 404)
        self.end_headers()
        self.wfile.write((text or "").encode())

    def log_message(self, *_: object) -> None:
        """Says nothing."""


def test_metadata_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    server = HTTPServer(("127.0.0.1", 0), Metadata)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        monkeypatch.setattr(tpu, "_METADATA", f"http://127.0.0.1:{server.server_port}/")
        assert TPUClusterResolver(environ={}).coordinator_address == "10.0.0.2:29500"
        assert TPUClusterResolver(environ={}).rank == 1
        monkeypatch.setattr(tpu, "_METADATA", f"http://127.0.0.1:{server.server_port}/no/")
        with pytest.raises(ClusterConfigError, match="no TPU hosts found"):
            TPUClusterResolver(environ={})
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
