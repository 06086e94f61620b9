"""Keras on torch: models that are made in a strategy's scope train on all its replicas.

`fit`, `evaluate`, `predict` and their relatives for single batches are those of all replicas; see
docs/keras.md. Keras itself is loaded by its users only.
"""

from fastdist.integrations.keras.callbacks import chief_only
from fastdist.integrations.keras.extension import KerasExtension
from fastdist.strategies.scope import extensions

__all__ = ["chief_only"]

extensions.append(KerasExtension())
