"""Runs the requests of parameter_server.py through TensorFlow's ParameterServerStrategy.

parameter_server.py starts this script in a Python environment with TensorFlow; neither torch nor
fastdist is needed there. A line of JSON on the standard input asks for a number of requests; the
answer is a line with their seconds. One worker and one server, each a process of its own, over
gRPC.

The requests follow each other inside one scheduled function, the fastest way in TensorFlow: their
times exclude the scheduling and the transfer of ids and gradients to the worker.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Callable
from typing import Any

os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}

import numpy as np
import tensorflow as tf

BATCH, DIM = 4096, 64
AT_ONCE = 4
WORKER = "/job:worker/replica:0/task:0/device:CPU:0"


def serve(cluster: dict[str, list[str]], job: str, namespace: str) -> None:
    if namespace:
        with open(f"/run/netns/{namespace}") as file:
            assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
    spec = tf.train.ClusterSpec(cluster)
    tf.distribute.Server(spec, job_name=job, task_index=0, protocol="grpc").join()


def start_cluster(
    here: str, there: str, namespace: str
) -> tf.distribute.cluster_resolver.SimpleClusterResolver:
    """Starts the servers by spawn; forked from a process with TensorFlow, they would hang."""
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports.append(free.getsockname()[1])
    cluster = {"worker": [f"{here}:{ports[0]}"], "ps": [f"{there}:{ports[1]}"]}
    spawn = multiprocessing.get_context("spawn")
    for job, its_namespace in (("worker", ""), ("ps", namespace)):
        spawn.Process(target=serve, args=(cluster, job, its_namespace), daemon=True).start()
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), rpc_layer="grpc"
    )


class Peer:
    """A table of rows and a dense variable on the server; functions run on the worker."""

    def __init__(self, rows: int, dense: int, *place: str) -> None:
        strategy = tf.distribute.ParameterServerStrategy(start_cluster(*place))
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self.rows = rows
        with strategy.scope():
            table = tf.Variable(tf.zeros((rows, DIM)))
            variable = tf.Variable(tf.zeros((dense,)))

        def lookup(i: tf.Tensor, ids: tf.Tensor, _: tf.Tensor) -> list[tf.Tensor]:
            return [table.sparse_read(ids[i])]

        def lookups_at_once(i: tf.Tensor, ids: tf.Tensor, _: tf.Tensor) -> list[tf.Tensor]:
            return [table.sparse_read(part) for part in tf.split(ids[i], AT_ONCE)]

        def update(i: tf.Tensor, ids: tf.Tensor, gradients: tf.Tensor) -> list[tf.Tensor]:
            rows = table.sparse_read(ids[i])
            with tf.control_dependencies([rows]):
                done = tf.raw_ops.ResourceScatterSub(
                    resource=table.handle, indices=ids[i], updates=gradients[i]
                )
            with tf.control_dependencies([done]):
                return [rows, tf.identity(ids)]

        def pull(i: tf.Tensor, ids: tf.Tensor, _: tf.Tensor) -> list[tf.Tensor]:
            return [variable.read_value()]

        def push(i: tf.Tensor, ids: tf.Tensor, gradients: tf.Tensor) -> list[tf.Tensor]:
            done = tf.raw_ops.AssignSubVariableOp(resource=variable.handle, value=gradients)
            with tf.control_dependencies([done]):
                return [tf.identity(ids)]

        self._functions = {
            "lookups": timed(lookup),
            "lookups, 4 at once": timed(lookups_at_once),
            "lookups and updates": timed(update),
            "dense pull": timed(pull),
            "dense push": timed(push),
        }
        self._rng = np.random.default_rng(0)
        self._dense = dense
        self.check()

    def check(self) -> None:
        """Checks that lookups return updated rows."""
        ids = np.stack([np.arange(BATCH)] * 2)
        self.run("lookups and updates", ids, np.full((2, BATCH, DIM), 2.0, np.float32))
        assert self.run("lookups", ids, np.zeros(0, np.float32))[1] == -4
        self.run("dense push", ids, np.full(self._dense, 2, np.float32))
        assert self.run("dense pull", ids, np.zeros(0, np.float32))[1] == -4

    def run(self, what: str, ids: Any, gradients: Any) -> tuple[list[float], float]:
        """Returns the seconds of each request, and the last element of the last result."""
        arguments = (tf.constant(ids), tf.constant(gradients))
        times, last = self.coordinator.schedule(self._functions[what], args=arguments).fetch()
        return [float(time) for time in times], float(last)

    def measure(self, what: str, requests: int) -> list[float]:
        """Returns the seconds of each request."""
        batch = AT_ONCE * BATCH if what == "lookups, 4 at once" else BATCH
        ids = self._rng.integers(0, self.rows, (requests, batch))
        gradients = np.zeros(0, np.float32)
        if what == "lookups and updates":
            gradients = self._rng.standard_normal((requests, BATCH, DIM), np.float32)
        elif what == "dense push":
            gradients = self._rng.standard_normal(self._dense, np.float32)
        return self.run(what, ids, gradients)[0]


def timed(request: Callable[..., list[tf.Tensor]]) -> Callable[..., tuple[tf.Tensor, tf.Tensor]]:
    """Returns a function that makes a request for each row of `ids`, one after another.

    A request ends when one element of each of its results has been read on the worker: a control
    dependency alone does not wait for values that come from a server.
    """

    @tf.function
    def function(ids: tf.Tensor, gradients: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        times = tf.TensorArray(tf.float64, tf.shape(ids)[0])
        last = tf.zeros(())
        for i in tf.range(tf.shape(ids)[0]):
            with tf.control_dependencies([last]):
                begin = tf.timestamp()
            with tf.control_dependencies([begin]):
                got = request(i, ids, gradients)
            with tf.device(WORKER):
                ends = [tf.cast(tf.reshape(one, [-1])[-1], tf.float32) for one in got]
                last = tf.add_n(ends) / len(ends)
            with tf.control_dependencies([last]):
                end = tf.timestamp()
            times = times.write(i, end - begin)
        return times.stack(), last

    return function


def main() -> None:
    rows, dense, *place = sys.argv[1:]  # the fields of parameter_server.py's Place
    peer = Peer(int(rows), int(dense), *place)
    print(json.dumps(tf.__version__), flush=True)
    for line in sys.stdin:
        print(json.dumps(peer.measure(*json.loads(line))), flush=True)
    for process in multiprocessing.active_children():
        process.kill()
    os._exit(0)  # TensorFlow's cleanup would contact the servers


if __name__ == "__main__":
    main()
