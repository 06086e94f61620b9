"""Keras on torch: models that are made in a strategy's scope train on all its replicas.

`fit`, `evaluate`, `predict` and their relatives for single batches are those of all replicas; see
docs/keras.md. Keras itself is loaded by its users only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdist.keras.callbacks import chief_only
from fastdist.keras.extension import KerasExtension
from fastdist.strategies.scope import extensions

if TYPE_CHECKING:
    from fastdist.keras.backup import BackupAndRestore
    from fastdist.keras.sidecar import SidecarEvaluator

__all__ = ["BackupAndRestore", "SidecarEvaluator", "chief_only"]

_LAZY = {"BackupAndRestore": "backup", "SidecarEvaluator": "sidecar"}  # these load Keras

extensions.append(KerasExtension())


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(
            f"module 'fastdist.keras' has no attribute {name!r}; Keras' own names are in keras"
        )
    import importlib

    try:
        return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "keras":
            raise
        hint = f"fastdist.keras.{name} needs Keras: pip install 'keras>=3.15'"
        raise ImportError(hint, name="keras") from error


def __dir__() -> list[str]:
    return __all__
