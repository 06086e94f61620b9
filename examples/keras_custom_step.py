"""A Keras model with a train_step of its own, under any strategy: an autoencoder of digits.

    python examples/keras_custom_step.py --devices cpu:0 cpu:1

The step calls `self(x)`, `backward()` and the optimizer, as on one device. When `backward()` has
returned, the gradients are those of the global batch.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import fastdist as fd
import keras
import torch
from digits import load, make_strategy, parser
from keras import layers, ops


class Autoencoder(keras.Model):
    """Learns to remove noise from images."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = layers.Dense(16, activation="relu")
        self.decoder = layers.Dense(64, activation="sigmoid")
        self.error = keras.metrics.Mean(name="error")

    def call(self, images: Any) -> Any:
        """Return images without their noise."""
        return self.decoder(self.encoder(images))

    def train_step(self, data: Any) -> dict[str, Any]:
        """Train on one batch."""
        images = data[0] if isinstance(data, (list, tuple)) else data
        self.zero_grad()
        restored = self(images + 0.2 * torch.randn_like(images))
        loss = ops.mean((restored - images) ** 2)
        loss.backward()
        weights = self.trainable_weights
        with torch.no_grad():
            self.optimizer.apply([w.value.grad for w in weights], weights)
        self.error.update_state(loss, sample_weight=len(images))
        return {"error": self.error.result()}


def main() -> None:
    """Train, and print the error on images that were held out."""
    arguments = parser(__doc__ or "", "mirrored")
    arguments.add_argument("--resume", type=Path, help="folder of the state; made when missing")
    options = arguments.parse_args()
    strategy = make_strategy(options)
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = Autoencoder()
        model.compile(keras.optimizers.Adam(3e-3))
    (train, _), (held, _) = load()
    callbacks = []
    if options.resume:
        callbacks.append(fd.keras.BackupAndRestore(options.resume, delete_checkpoint=False))
    model.fit(
        train.numpy(),
        batch_size=options.global_batch_size,
        epochs=options.epochs,
        callbacks=callbacks,
        verbose=2,
    )
    error = float(((model.predict(held.numpy(), verbose=0) - held.numpy()) ** 2).mean())
    if strategy.is_chief:
        print(f"mean squared error on held-out digits: {error:.4f}")


if __name__ == "__main__":
    main()
