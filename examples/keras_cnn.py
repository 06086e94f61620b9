"""Keras' fit under any strategy: a CNN on handwritten digits, resumed from its last checkpoint.

python examples/keras_cnn.py --devices cpu:0 cpu:1
fastdist run -n 2 examples/keras_cnn.py
python examples/keras_cnn.py --strategy one_device
"""

from __future__ import annotations

import os
from pathlib import Path

os.environ["KERAS_BACKEND"] = "torch"

import fastdist as fd
import keras
from digits import load, make_strategy, parser
from keras import layers


def make_model() -> keras.Model:
    """Make and compile the network."""
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss, metrics=["accuracy"])
    return model


def main() -> None:
    """Train, and evaluate on digits that were held out."""
    arguments = parser(__doc__ or "", "mirrored")
    arguments.set_defaults(epochs=12)
    arguments.add_argument("--resume", type=Path, help="folder of the state; made when missing")
    options = arguments.parse_args()
    strategy = make_strategy(options)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = make_model()
    train, held = [(x.reshape(-1, 8, 8, 1).numpy(), y.numpy()) for x, y in load()]
    callbacks = [keras.callbacks.EarlyStopping(patience=3, restore_best_weights=True)]
    if options.resume:
        callbacks.append(fd.keras.BackupAndRestore(options.resume, delete_checkpoint=False))
    model.fit(
        *train,
        batch_size=options.global_batch_size,  # of all replicas together
        epochs=options.epochs,
        validation_data=held,
        callbacks=callbacks,
        verbose=2,
    )
    accuracy = model.evaluate(*held, verbose=0, return_dict=True)["accuracy"]
    if strategy.is_chief:
        print(f"{accuracy:.1%} of the held-out digits are right")


if __name__ == "__main__":
    main()
