"""Timelines of ranks in the format of torch's flight recorder, which torchfrtrace reads."""

from __future__ import annotations

import pickle
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastdist.recorder.timeline import RankTimeline, TracedCall

PREFIX = "fastdist_rank_"
"""The beginning of the names of the files; the rank follows."""

_VERSION = "2.10"  # of the format
_NAMES = {  # torch's, where they differ
    "all_gather": "all_gather_single",
    "reduce_scatter": "reduce_scatter_single",
    "all_to_all": "all_to_all_single",
}
_STEPS = {  # of calls that torch does not know
    "scan": "all_reduce",
    "split": "all_gather",
    "all_gather_object": "all_gather",
    "gather_object": "all_gather",
    "broadcast_object": "broadcast",
    "scatter_object": "broadcast",
}
_NO_NAME = "undefined"
_SITE = re.compile(r"(.*):(\d+) in (.*)")

Groups = Mapping[str, Mapping[int, int]]  # by communicator, the job's ranks by those in it


def write_flight_records(folder: Path, ranks: Sequence[RankTimeline]) -> None:
    """Write a file for each rank into a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    groups: dict[str, dict[int, int]] = defaultdict(dict)
    for timeline in ranks:
        for call in timeline.calls:
            groups[call.communicator][call.rank] = timeline.rank
    for timeline in ranks:
        entries = [_entry(i, call, groups) for i, call in enumerate(timeline.calls)]
        record = {
            "version": _VERSION,
            "pg_config": {
                name: {"name": name, "desc": _NO_NAME, "ranks": str(sorted(groups[name].values()))}
                for name in dict.fromkeys(call.communicator for call in timeline.calls)
            },
            "pg_status": {},
            "entries": entries,
        }
        (folder / f"{PREFIX}{timeline.rank}").write_bytes(pickle.dumps(record))


def _entry(number: int, call: TracedCall, groups: Groups) -> dict[str, Any]:
    given, result = _sizes(call)
    frames = []
    if found := _SITE.fullmatch(call.site):
        frames = [{"filename": found[1], "line": int(found[2]), "name": found[3]}]
    begin_ns, end_ns = (int(1e9 * time_s) for time_s in (call.entered_s, call.done_s))
    return {
        "frames": frames,
        "record_id": number,
        "pg_id": 0,
        "process_group": (call.communicator, _NO_NAME),
        "collective_seq_id": call.sequence if call.is_collective else 0,
        "p2p_seq_id": 0 if call.is_collective else call.sequence,
        "op_id": number,
        "profiling_name": f"{'nccl' if call.signature.on_gpu else 'gloo'}:{_name(call)}",
        "time_created_ns": begin_ns,
        "time_discovered_started_ns": int(1e9 * call.there_s),
        "time_discovered_completed_ns": None if call.is_failed else end_ns,
        "duration_ms": (end_ns - begin_ns) / 1e6,
        "input_sizes": [given],
        "input_dtypes": [call.signature.dtype],
        "output_sizes": [result],
        "output_dtypes": [call.signature.dtype],
        "state": "started" if call.is_failed else "completed",
        "timeout_ms": 0,
        "is_p2p": not call.is_collective,
        "retired": not call.is_failed,
    }


def _op(call: TracedCall) -> str:
    return _STEPS.get(call.signature.op, call.signature.op)


def _name(call: TracedCall) -> str:
    op, root = _op(call), call.signature.root
    if op == "send":
        return f"send {call.rank}->{root}"
    if op == "recv":
        return f"recv {call.rank}<-{root}"
    return _NAMES.get(op, op)


def _sizes(call: TracedCall) -> tuple[list[int], list[int]]:
    """Return the shapes of the argument and the result, as one axis."""
    n, count, op = call.size, call.signature.count, _op(call)
    is_root = call.rank == call.signature.root
    if op == "all_gather":
        return [count], [count * n]
    if op == "gather":
        return [count], [count * n] if is_root else []
    if op == "scatter":  # the count is that of a part
        return [count * n] if is_root else [], [count]
    if op == "reduce_scatter":
        return [count], [count // n]
    return [count], [count]
