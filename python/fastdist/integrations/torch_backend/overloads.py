"""Overloads of a process group's methods: without lists, and with options as arguments.

`group.broadcast(tensor, root)` means `group.broadcast([tensor], options)`, and so on, as for
torch's own process groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

_FIELDS = {"op": "reduceOp", "root": "rootRank", "timeout": "timeout"}


@dataclass(frozen=True, slots=True)
class Form:
    """The signatures of a method."""

    depths: tuple[int, ...]  # of lists of each argument of tensors
    plain: tuple[str, ...] = ()  # names of the arguments between tensors and options
    options: Any = None  # the class of the options; None: the method takes none
    fields: tuple[str, ...] = ()  # the options that may be arguments, in order
    # Types of the last argument that mark an overload whose first argument is a list.
    others: frozenset[type] = frozenset()


_SPLITS = ("output_split_sizes", "input_split_sizes")
_TIMES: frozenset[type] = frozenset({timedelta, type(None)})
_OPS = _TIMES | {c10d.ReduceOp, c10d.ReduceOp.RedOpType}
_TENSORS = _TIMES | {torch.Tensor, torch.nn.Parameter}
FORMS = {
    "allreduce": Form((1,), (), c10d.AllreduceOptions, ("op", "timeout"), _OPS),
    "allreduce_coalesced": Form((1,), (), c10d.AllreduceCoalescedOptions),
    "reduce": Form((1,), (), c10d.ReduceOptions, ("root", "op", "timeout"), _OPS | {int}),
    "broadcast": Form((1,), (), c10d.BroadcastOptions, ("root", "timeout"), _TIMES | {int}),
    "allgather": Form((2, 1), (), c10d.AllgatherOptions, ("timeout",), _TENSORS),
    "allgather_coalesced": Form((2, 1), (), c10d.AllgatherOptions),
    "all_gather_single": Form((0, 0), (), c10d.AllgatherOptions),
    "all_gather_single_coalesced": Form((1, 1), (), c10d.AllgatherOptions),
    "gather": Form((2, 1), (), c10d.GatherOptions, ("root", "timeout"), _TIMES | {int}),
    "scatter": Form((1, 2), (), c10d.ScatterOptions, ("root", "timeout"), _TIMES | {int}),
    "reduce_scatter": Form((1, 2), (), c10d.ReduceScatterOptions, ("op", "timeout"), _OPS),
    "reduce_scatter_single": Form((0, 0), (), c10d.ReduceScatterOptions),
    "reduce_scatter_single_coalesced": Form((1, 1), (), c10d.ReduceScatterOptions),
    "all_to_all_single": Form((0, 0), _SPLITS, c10d.AllToAllOptions, ("timeout",), _TIMES),
    "alltoall": Form((1, 1), (), c10d.AllToAllOptions),
    "barrier": Form((), (), c10d.BarrierOptions, ("timeout",)),
    "send": Form((1,), ("dstRank", "tag")),
    "recv": Form((1,), ("srcRank", "tag")),
    "recv_anysource": Form((1,), ("tag",)),
}


_timed = {
    form.options: type(form.options.__name__, (form.options,), {})
    for form in FORMS.values()
    if "timeout" in form.fields
}
# Options whose timeout was given for the call; in torch's own options it means nothing.
TIMED = frozenset(_timed.values())


def normalize_arguments(name: str, given: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """Return the arguments of a call as lists of tensors, plain arguments and options."""
    form = FORMS[name]
    named = dict(named)
    places = [*range(len(form.depths)), *form.plain]
    found: dict[Any, Any] = dict(zip(places, given, strict=False))
    spelled = list(given[len(places) :])
    for key in list(named):
        place: Any = key
        if key not in (*form.plain, *form.fields, "opts"):
            # outputs and inputs, or tensors; torch's names differ between the ways to call.
            place = 1 if key.startswith("input") else 0
            if not key.startswith(("tensor", "output", "input")) or place in found:
                raise TypeError(f"{name} got an unexpected argument {key!r}")
        if place in places:
            found[place] = named.pop(key)
    arguments = [
        _in_lists(found[place], form.depths[place]) if type(place) is int else found[place]
        for place in places
        if place in found
    ]
    if len(found) < len(form.depths):
        raise TypeError(f"{name} needs {len(form.depths)} arguments of tensors, got {len(found)}")
    if spelled and type(spelled[0]) is form.options:
        named["opts"] = spelled.pop(0)
    if len(spelled) > len(form.fields):
        raise TypeError(f"{name} got too many arguments")
    named |= dict(zip(form.fields, spelled, strict=False))
    options = named.pop("opts", None)
    if named:
        kind = form.options if named.get("timeout") is None else _timed[form.options]
        options = kind()
        for key, value in named.items():
            if value is not None:
                setattr(options, _FIELDS[key], value)
    return arguments if options is None else [*arguments, options]


def _in_lists(value: Any, depth: int) -> Any:
    if depth == 0:
        return value
    inner = value if isinstance(value, (list, tuple)) else [value]
    if depth == 2 and inner and isinstance(inner[0], torch.Tensor):
        return [list(inner)]
    return [_in_lists(item, depth - 1) for item in inner]
