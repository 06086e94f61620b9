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

        signature = inspect.signature(method)
        call.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=list(signature.parameters.values())[1:]
        )
        return call


_default = cast(Communicator, _DefaultCommunicator())

all_gather = _default.all_gather
all_gather_object = _default.all_gather_object
all_reduce = _default.all_reduce
all_to_all = _default.all_to_all
barrier = _default.barrier
broadcast = _default.broadcast
broadcast_object = _default.broadcast_object
gather = _default.gather
gather_object = _default.gather_object
recv = _default.recv
recv_any = _default.recv_any
recv_any_object = _default.recv_any_object
recv_object = _default.recv_object
reduce = _default.reduce
reduce_scatter = _default.reduce_scatter
scan = _default.scan
scatter = _default.scatter
scatter_object = _default.scatter_object
send = _default.send
send_object = _default.send_object
