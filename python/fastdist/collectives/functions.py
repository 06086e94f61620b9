"""The collectives as functions, on the communicator that `fastdist.init` made."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from fastdist.collectives.communicator import Communicator
from fastdist.collectives.init import default_communicator

P = ParamSpec("P")
R = TypeVar("R")


def _function(method: Callable[Concatenate[Communicator, P], R]) -> Callable[P, R]:
    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        bound: Callable[P, R] = getattr(default_communicator(), method.__name__)
        return bound(*args, **kwargs)

    signature = inspect.signature(method)
    call.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=list(signature.parameters.values())[1:]
    )
    functions: Callable[P, R] = call
    return functions


all_gather = _function(Communicator.all_gather)
all_gather_object: Callable[..., Any] = _function(Communicator.all_gather_object)
all_reduce = _function(Communicator.all_reduce)
all_to_all = _function(Communicator.all_to_all)
barrier = _function(Communicator.barrier)
broadcast = _function(Communicator.broadcast)
broadcast_object: Callable[..., Any] = _function(Communicator.broadcast_object)
gather = _function(Communicator.gather)
recv = _function(Communicator.recv)
reduce = _function(Communicator.reduce)
reduce_scatter = _function(Communicator.reduce_scatter)
scatter = _function(Communicator.scatter)
send = _function(Communicator.send)
