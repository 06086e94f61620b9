"""Tests that run in every replica of a strategy."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def on_replicas(test: Callable[..., None]) -> Callable[..., None]:
    """Let the fixture `strategies` call `test(self, strategy, …)` in every replica.

    `self` is None there, since the class of the test is not what the replicas share.
    """

    def run(self: Any, strategies: Any, **given: Any) -> None:
        strategies.run(functools.partial(test, None, **given))

    signature = inspect.signature(test)
    self, strategy, *others = signature.parameters.values()
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[self, strategy.replace(name="strategies"), *others]
    )
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(run, name, getattr(test, name))
    return run
