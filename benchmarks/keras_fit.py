"""Times Keras' fit on two replicas, next to Keras alone and to DistributedDataParallel on Gloo.

    OMP_NUM_THREADS=1 fastdist run -n 2 benchmarks/keras_fit.py

The model is the CNN of TensorFlow's tutorials on images of 28 × 28, with accuracy. All ways train
on the same number of examples with the same global batch, and take turns in one run. DDP's loop is
written like Keras 3.16: a blocking all_reduce of every metric variable in each step. The same loop
without any exchange shows the lower bound for all engines. Prints one JSON object: milliseconds per
step (median over rounds of the slowest rank's time) and the ratios with bars.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import fastdist as fd
import keras
import numpy as np
import torch
import torch.distributed as dist
from keras import layers
from torch.nn.parallel import DistributedDataParallel

GLOBAL_BATCH = 128


def make_model() -> Any:
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            *(layers.Conv2D(32, 3, activation="relu"), layers.MaxPooling2D()),
            *(layers.Flatten(), layers.Dense(64, activation="relu"), layers.Dense(10)),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(), loss, metrics=["accuracy"])
    return model


def fit(model: Any, x: Any, y: Any, verbose: int = 0) -> Callable[[], Any]:
    return lambda: model.fit(x, y, GLOBAL_BATCH, verbose=verbose).history["loss"]


def loop(comm: fd.Communicator, x: Any, y: Any, exchanges: bool) -> Callable[[], Any]:
    """A loop over this rank's half of each batch, by DDP if ranks exchange anything."""
    model = make_model()
    model.fit(x[:2], y[:2], verbose=0)  # builds the loss, the metrics and the optimizer
    replica = DistributedDataParallel(model) if exchanges else model
    metrics = model.metrics if exchanges else []
    variables = [v.value for metric in metrics for v in metric.variables]

    def epoch() -> list[float]:
        model.reset_metrics()
        order = np.random.default_rng(0).permutation(len(x))
        for begin in range(0, len(x), GLOBAL_BATCH):
            rows = order[begin : begin + GLOBAL_BATCH][comm.rank :: comm.world_size]
            images, labels = torch.from_numpy(x[rows]), torch.from_numpy(y[rows])
            model.zero_grad()
            predicted = replica(images, training=True)
            loss = model.compute_loss(images, labels, predicted)
            loss.backward()
            with torch.no_grad():
                weights = model.trainable_weights
                model.optimizer.apply([w.value.grad for w in weights], weights)
            model._loss_tracker.update_state(loss, sample_weight=len(rows))
            model.compute_metrics(images, labels, predicted)
            for variable in variables:
                total = variable.detach().clone()
                dist.all_reduce(total)
        return [float(loss.detach())]

    return epoch


def only_first(comm: fd.Communicator, way: Callable[[], Any]) -> Callable[[], Any]:
    return way if comm.rank == 0 else lambda: None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    comm = fd.init()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = comm.broadcast_object(free.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=comm.rank, world_size=comm.world_size)
    random = np.random.default_rng(0)
    x = random.normal(size=(GLOBAL_BATCH * options.steps, 28, 28, 1)).astype(np.float32)
    y = random.integers(0, 10, len(x))
    strategy = fd.MirroredStrategy()
    with strategy.scope():
        replicated = make_model()
    one = fd.OneDeviceStrategy("cpu")
    with one.scope():
        on_one = make_model()
    ways = {
        "two replicas": fit(replicated, x, y),
        "two replicas, progress bar": fit(replicated, x, y, verbose=2),
        "keras alone": only_first(comm, fit(make_model(), x, y)),
        "one replica": only_first(comm, fit(on_one, x, y)),
        "ddp on gloo": loop(comm, x, y, exchanges=True),
        "no exchange": loop(comm, x, y, exchanges=False),
    }
    ms: dict[str, list[float]] = {way: [] for way in ways}
    for i in range(options.rounds + 1):  # the first warms up
        for way, run in ways.items():
            comm.barrier()
            begin = time.perf_counter()
            run()
            took = np.array([time.perf_counter() - begin])
            comm.all_reduce(took, "max")
            if i:
                ms[way].append(1e3 * float(took[0]) / options.steps)
    strategy.check_in_sync()
    p50 = {way: round(statistics.median(values), 2) for way, values in ms.items()}
    if comm.rank == 0:
        ratios = {
            "one replica of keras alone": p50["one replica"] / p50["keras alone"],
            "throughput of two over one": p50["one replica"] / p50["two replicas"],
            "of ddp": p50["two replicas"] / p50["ddp on gloo"],
            "no exchange of ddp": p50["no exchange"] / p50["ddp on gloo"],
        }
        print(json.dumps({"ms": p50, **{k: round(v, 3) for k, v in ratios.items()}}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
