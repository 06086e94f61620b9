"""Calls that are launched as one: `Communicator.group`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import fastdist._core as _core
from fastdist.collectives.arguments import to_rank
from fastdist.collectives.engines.nccl import NcclEngine
from fastdist.collectives.hints import is_immutable

if TYPE_CHECKING:
    from fastdist.collectives.communicator import Communicator

Call = tuple[str, tuple[Any, ...], float]
"""The name of a collective, its arguments but for the last two, and its timeout in seconds."""

# Where the arguments of each collective have the result.
_RESULT = {
    "all_reduce": 2,
    "reduce": 3,
    "broadcast": 2,
    "all_gather": 1,
    "gather": 2,
    "scatter": 2,
    "reduce_scatter": 2,
    "all_to_all": 1,
    "send": 0,
    "recv": 0,
}


def record(comm: Communicator, calls: list[Call], op: str, *arguments: Any) -> Any:
    """Note a call, and return the arrays that will hold its result.

    Raises:
        TypeError: arguments are not arrays, or arrays that never change.
        ValueError: the call cannot be in a group, or no rank has the number.
    """
    if op == "barrier":
        raise ValueError("barrier cannot be in a group: leave the group first")
    if arguments[-1]:
        raise ValueError(f"{op}(async_op=True) cannot be in a group, which ends all its calls")
    given = tuple(list(each) if isinstance(each, list) else each for each in arguments[:-2])
    in_place = op in ("all_reduce", "reduce", "broadcast") and arguments[_RESULT[op]] is None
    if in_place and is_immutable(arguments[0]):
        raise TypeError("arrays that never change need another one for the result")
    for each in (given[0], given[_RESULT[op]]):
        if each is not None:
            _core.check_arrays(each)
    if op in ("send", "recv"):
        to_rank(given[1], "dst" if op == "send" else "src", comm.world_size, comm.rank)
    calls.append((op, given, arguments[-2]))
    return arguments[0 if in_place else _RESULT[op]]


def run(
    calls: list[Call], on_hosts: Mapping[str, Callable[..., Any]], on_gpus: NcclEngine | None
) -> None:
    """Make recorded calls: those on GPUs as at most two launches, those on hosts at the same time.

    Sends and receives come first, as collectives may have several steps that wait for all ranks.
    """
    there = [on_gpus is not None and on_gpus.is_on_gpu(given) for _, given, _ in calls]
    if on_gpus is not None:
        for is_between_two in (True, False):
            part = [
                call
                for call, is_there in zip(calls, there, strict=True)
                if is_there and (call[0] in ("send", "recv")) == is_between_two
            ]
            if part:
                longest = max(timeout_s for _, _, timeout_s in part)
                on_gpus.run_group([(op, given) for op, given, _ in part], longest)
    works = []
    failure: Exception | None = None
    for (op, given, timeout_s), is_there in zip(calls, there, strict=True):
        if is_there or failure is not None:
            continue
        try:
            works.append(on_hosts[op](*given, timeout_s, True))
        except Exception as error:  # raised when the calls before have ended
            failure = error
    for work in works:
        try:
            work.wait()
        except Exception as error:
            failure = failure or error
    if failure is not None:
        raise failure
