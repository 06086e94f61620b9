"""Keras' own data parallelism on handwritten digits, from Keras 3.16 on (nightly builds).

fastdist run -n 2 examples/torch_backend/keras_ddp.py

Keras wraps the model in DistributedDataParallel, and deals out the batches to the processes.
"""

import argparse
import os

os.environ["KERAS_BACKEND"] = "torch"

import fastdist  # registers the backend; torch 2.14 finds it without this line
import keras
import torch.distributed as dist
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser()
parser.add_argument("--backend", default="fastdist")
parser.add_argument("--epochs", type=int, default=5)
options = parser.parse_args()


class Digits(keras.utils.PyDataset):
    """Batches of 32 digits, in the same order in every process; Keras deals them out."""

    def __init__(self):
        super().__init__()
        self.images, self.labels = load_digits(return_X_y=True)

    def __len__(self):
        return len(self.labels) // 64 * 2  # as many for each of two processes

    def __getitem__(self, index):
        rows = slice(32 * index, 32 * index + 32)
        return self.images[rows] / 16, self.labels[rows]


dist.init_process_group(options.backend)  # else Keras would take Gloo or NCCL
keras.distribution.set_distribution(keras.distribution.DataParallel())
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10)])
model.compile(
    keras.optimizers.Adam(3e-3),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
history = model.fit(Digits(), epochs=options.epochs, verbose=0)
for epoch, loss in enumerate(history.history["loss"]):
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: loss {loss:.4f}")
dist.destroy_process_group()
