"""Refuses what Keras models cannot do on several replicas or parameter servers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastdist.errors import UnsupportedError

CALLS = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")


def refusal(message: str) -> Callable[..., Any]:
    """Return a method that raises UnsupportedError."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise UnsupportedError(message)

    return refuse


def require_parts(model: Any) -> None:
    """Check that replicas or workers can train a model, each on a part of the examples."""
    if model.jit_compile:
        raise UnsupportedError(
            f"{model.name} was compiled with jit_compile=True; torch.compile of Keras' steps is "
            "not supported on several replicas or parameter servers; leave jit_compile out"
        )
    for layer in model._flatten_layers():
        if getattr(layer, "stateful", False):
            raise UnsupportedError(
                f"{type(layer).__name__} {layer.name} has stateful=True: it keeps a state for each "
                "example of a batch, whose parts go to several replicas or workers; leave stateful "
                "out, or use OneDeviceStrategy"
            )
