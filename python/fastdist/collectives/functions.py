"""The collectives as functions, on the communicator that `fastdist.init` made."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, cast

from fastdist.collectives.communicator import Communicator
from fastdist.collectives.init import default_communicator


class _DefaultCommunicator:
    """Gives functions that have a method's signature and call it on the default communicator."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(Communicator, name)

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(default_communicator(), name)(*args, **kwargs)

        call.__signature__ = inspect.signature(method.__get__(self))  # type: ignore[attr-defined]
        return call


default = cast(Communicator, _DefaultCommunicator())
