"""Calls that are launched as one: `Communicator.group`."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import fastdist._core as _core
from fastdist.collectives.arguments import to_rank
from fastdist.collectives.engines.engine import OPS, Calls
from fastdist.collectives.engines.gpu_arrays import device_of
from fastdist.collectives.engines.nccl import NcclEngine
from fastdist.collectives.hints import is_immutable

if TYPE_CHECKING:
    from fastdist.collectives.communicator import Communicator

Call = tuple[str, dict[str, Any]]
"""The name of a collective, and its arguments by name."""


def recorder(comm: Communicator, timeout_s: float, calls: list[Call]) -> Calls:
    """Return collectives that note their calls instead of making them."""
    return Calls(**{op: partial(_record, comm, timeout_s, calls, op) for op in OPS})


def _record(
    comm: Communicator,
    timeout_s: float,
    calls: list[Call],
    name: str,
    array: Any = None,
    /,
    *,
    async_op: bool,
    timeout: float | None,
    stream: Any = None,
    bucket_bytes: int | Literal["auto"] = "auto",
    **given: Any,
) -> Any:
    """Note a call, and return the arrays that will hold its result.

    Raises:
        TypeError: arguments are not arrays, or arrays that never change.
        ValueError: the call cannot be in a group, or no rank has the number.
    """
    if name == "barrier":
        raise ValueError("barrier cannot be in a group: leave the group first")
    if stream is not None or bucket_bytes != "auto":
        raise ValueError(
            "a call with stream or bucket_bytes cannot be in a group: leave the group first"
        )
    if async_op:
        raise ValueError(f"{name}(async_op=True) cannot be in a group, which ends all its calls")
    out = given.get("out")
    if name in ("all_reduce", "reduce", "broadcast") and out is None and is_immutable(array):
        raise TypeError("arrays that never change need another one for the result")
    for each in (array, out):
        if each is not None:
            _core.check_arrays(each, device_of(each))
    for peer in given.keys() & {"dst", "src"}:
        to_rank(given[peer], peer, comm.world_size, comm.rank)
    given |= {"array": array, "timeout": timeout_s if timeout is None else timeout}
    calls.append((name, {k: list(v) if isinstance(v, list) else v for k, v in given.items()}))
    return array if out is None and name != "gather" else out


def run(calls: list[Call], on_hosts: Calls, on_gpus: NcclEngine | None) -> None:
    """Make recorded calls: those on GPUs as at most two launches, those on hosts at the same time.

    Sends and receives come first, as collectives may have several steps that wait for all ranks.
    """
    there = [on_gpus is not None and on_gpus.is_on_gpu(given) for _, given in calls]
    if on_gpus is not None:
        for is_between_two in (True, False):
            part = [
                call
                for call, is_there in zip(calls, there, strict=True)
                if is_there and (call[0] in ("send", "recv")) == is_between_two
            ]
            if part:
                on_gpus.run_group(part)
    works = []
    failure: Exception | None = None
    for (op, given), is_there in zip(calls, there, strict=True):
        if is_there or failure is not None:
            continue
        try:
            works.append(getattr(on_hosts, op)(**given, async_op=True))
        except Exception as error:  # raised when the calls before have ended
            failure = error
    for work in works:
        try:
            work.wait()
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
