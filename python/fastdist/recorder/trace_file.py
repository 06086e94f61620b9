"""Timelines of ranks as a trace that Perfetto and chrome://tracing show."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastdist.recorder.signatures import Signature
from fastdist.recorder.timeline import RankTimeline, Span, TracedCall

_PHASES = 0  # the row of phases; each communicator and lane has another row


class TraceError(ValueError):
    """A file is not a trace of fastdist."""


def write_trace(path: Path, ranks: Sequence[RankTimeline]) -> None:
    """Write a trace; a rank is a process in it, and its communicators are threads."""
    begins = [span.begin_s for rank in ranks for span in rank.spans]
    begins += [call.entered_s for rank in ranks for call in rank.calls]
    begin_s = min(begins, default=0.0)
    events = [event for rank in ranks for event in _events(rank, begin_s)]
    trace = {"traceEvents": events, "otherData": {"program": "fastdist", "begin_s": begin_s}}
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(trace, separators=(",", ":")))
    part.replace(path)


def read_trace(path: Path) -> list[RankTimeline]:
    """Read a trace that `write_trace` wrote."""
    text = path.read_bytes()
    try:
        trace = json.loads(text)
        if trace["otherData"]["program"] != "fastdist":
            raise KeyError("program")
        begin_s = float(trace["otherData"]["begin_s"])
        ranks: dict[int, RankTimeline] = {}
        for event in trace["traceEvents"]:
            rank = ranks.setdefault(event["pid"], RankTimeline(event["pid"], ""))
            _take(rank, event, begin_s)
    except Exception as error:
        raise TraceError(f"{path} is no trace of fastdist run --trace: {error!r}") from None
    return sorted(ranks.values(), key=lambda each: each.rank)


def _events(rank: RankTimeline, begin_s: float) -> Iterator[dict[str, Any]]:
    about = {"name": rank.label, "lost_calls": rank.lost_calls}
    yield {"ph": "M", "name": "process_name", "pid": rank.rank, "tid": 0, "args": about}
    yield _name_of_row(rank, _PHASES, "phases")
    for span in rank.spans:
        yield _slice(rank, _PHASES, span.phase, span.begin_s - begin_s, span.end_s - begin_s, {})
    rows: dict[tuple[str, str], int] = {}
    for call in rank.calls:
        key = (call.communicator, "" if call.is_collective else call.signature.op)
        if key not in rows:
            rows[key] = 1 + len(rows)
            yield _name_of_row(rank, rows[key], f"communicator {len(rows)} {key[1]}".rstrip())
        yield from _call(rank, rows[key], call, begin_s)


def _call(
    rank: RankTimeline, row: int, call: TracedCall, begin_s: float
) -> Iterator[dict[str, Any]]:
    about = {
        "call": str(call.signature),
        "signature": call.signature.packed,
        "elements": call.signature.count,
        "on_gpu": call.signature.on_gpu,
        "number": call.sequence,
        "line": call.site,
        "communicator": call.communicator,
        "rank": call.rank,
        "ranks": call.size,
        "failed": call.is_failed,
    }
    entered, there = call.entered_s - begin_s, call.there_s - begin_s
    yield _slice(rank, row, call.signature.op, entered, call.done_s - begin_s, about)
    if call.there_s > call.entered_s:
        yield _slice(rank, row, "waits for other ranks", entered, there, {})


def _slice(
    rank: RankTimeline, row: int, name: str, begin_s: float, end_s: float, about: dict[str, Any]
) -> dict[str, Any]:
    begin_us, end_us = round(begin_s * 1e6, 3), round(end_s * 1e6, 3)
    event = {"ph": "X", "name": name, "pid": rank.rank, "tid": row}
    return event | {"ts": begin_us, "dur": round(end_us - begin_us, 3), "args": about}


def _name_of_row(rank: RankTimeline, row: int, name: str) -> dict[str, Any]:
    event = {"ph": "M", "name": "thread_name", "pid": rank.rank, "tid": row}
    return event | {"args": {"name": name}}


def _take(rank: RankTimeline, event: dict[str, Any], begin_s: float) -> None:
    about = event["args"]
    if event["name"] == "process_name":
        rank.label = str(about["name"])
        rank.lost_calls = int(about["lost_calls"])
    if event["ph"] != "X":
        return
    first, last = (begin_s + each / 1e6 for each in (event["ts"], event["ts"] + event["dur"]))
    if event["tid"] == _PHASES:
        rank.spans.append(Span(event["name"], first, last))
    elif "call" in about:
        rank.calls.append(
            TracedCall(
                communicator=about["communicator"],
                rank=about["rank"],
                size=about["ranks"],
                sequence=about["number"],
                signature=Signature(about["signature"], about["elements"]),
                site=about["line"],
                entered_s=first,
                there_s=first,
                done_s=last,
                is_failed=about["failed"],
            )
        )
    else:  # the wait of the call before
        rank.calls[-1] = replace(rank.calls[-1], there_s=last)
