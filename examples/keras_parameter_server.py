"""Keras' fit on parameter servers: a classifier of handwritten digits.

    fastdist run --workers 2 --ps 2 examples/keras_parameter_server.py

Workers make their own batches, and take steps without waiting for each other. Under the other
strategies the same program trains on arrays.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import fastdist as fd
import keras
import numpy as np
from digits import STRATEGIES, load, make_strategy, parser
from keras import layers

BATCH_SIZE = 32


def make_batches(context: fd.InputContext) -> Iterator[Any]:
    """Yield batches of a worker's part of the digits, once; fit calls this again at their end."""
    (x, y), _ = load()
    own = np.arange(context.input_pipeline_id, len(x), context.num_input_pipelines)
    np.random.default_rng().shuffle(own)
    for begin in range(0, len(own), BATCH_SIZE):
        rows = own[begin : begin + BATCH_SIZE]
        yield x[rows], y[rows]


def make_model() -> keras.Model:
    """Make and compile the network."""
    model = keras.Sequential(
        [
            keras.Input((64,)),
            layers.Dense(64, activation="relu"),
            layers.Dropout(0.2),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adagrad(0.05), loss, metrics=["accuracy"])
    return model


def main() -> None:
    """Train, and evaluate on digits that were held out."""
    STRATEGIES["parameter_server"] = lambda devices: fd.ParameterServerStrategy()
    arguments = parser(__doc__ or "", "parameter_server")
    arguments.set_defaults(epochs=10, global_batch_size=BATCH_SIZE)
    arguments.add_argument("--resume", type=Path, help="folder of the state; made when missing")
    options = arguments.parse_args()
    strategy = make_strategy(options)  # in workers and servers this call does not return
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = make_model()
    train, held = [(x.numpy(), y.numpy()) for x, y in load()]
    callbacks = []
    if options.resume:
        callbacks.append(fd.keras.BackupAndRestore(options.resume, delete_checkpoint=False))
    given: dict[str, Any] = {"epochs": options.epochs, "validation_data": held, "verbose": 2}
    if strategy.has_servers:
        steps = len(train[0]) // BATCH_SIZE
        model.fit(make_batches, steps_per_epoch=steps, callbacks=callbacks, **given)
    else:
        model.fit(*train, batch_size=options.global_batch_size, callbacks=callbacks, **given)
    accuracy = model.evaluate(*held, verbose=0, return_dict=True)["accuracy"]
    if strategy.is_chief:
        print(f"{accuracy:.1%} of the held-out digits are right")


if __name__ == "__main__":
    main()
