"""Timelines of ranks as files: traces for Perfetto."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastdist.recorder.ring import Call, Member
from fastdist.recorder.signatures import Signature
from fastdist.recorder.timeline import RankTimeline, Span

_PHASES = 0  # the row of phases; each communicator and lane has another row


def write_trace(path: Path, ranks: Sequence[RankTimeline]) -> None:
    """Write a trace for Perfetto and chrome://tracing; a rank is a process, a row a thread."""
    begins = [span.begin_s for rank in ranks for span in rank.spans]
    begins += [call.entered_s for rank in ranks for call in rank.calls]
    begin_s = min(begins, default=0.0)
    events = [event for rank in ranks for event in _events(rank, begin_s)]
    trace = {"traceEvents": events, "otherData": {"program": "fastdist", "begin_s": begin_s}}
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(trace, separators=(",", ":")))
    part.replace(path)


def read_trace(path: Path) -> list[RankTimeline]:
    """Read a trace that `write_trace` wrote; raise ValueError if the file is none."""
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
        raise ValueError(f"{path} is no trace of fastdist run --trace: {error!r}") from None
    return sorted(ranks.values(), key=lambda each: each.rank)


def _events(rank: RankTimeline, begin_s: float) -> Iterator[dict[str, Any]]:
    def name(what: str, row: int, about: dict[str, Any]) -> dict[str, Any]:
        return {"ph": "M", "name": what, "pid": rank.rank, "tid": row, "args": about}

    def slice_(row: int, name: str, first_s: float, last_s: float, **about: Any) -> dict[str, Any]:
        first_us, last_us = (round((each - begin_s) * 1e6, 3) for each in (first_s, last_s))
        event = {"ph": "X", "name": name, "pid": rank.rank, "tid": row}
        return event | {"ts": first_us, "dur": round(last_us - first_us, 3), "args": about}

    yield name("process_name", 0, {"name": rank.label, "lost_calls": rank.lost_calls})
    yield name("thread_name", _PHASES, {"name": "phases"})
    for span in rank.spans:
        yield slice_(_PHASES, span.phase, span.begin_s, span.end_s)
    rows: dict[tuple[int, str], int] = {}
    for call in rank.calls:
        signature, member = call.signature, call.member
        key = (member.key, "" if call.is_collective else signature.op)
        if key not in rows:
            rows[key] = 1 + len(rows)
            row_name = f"communicator {len(rows)} {key[1]}".rstrip()
            yield name("thread_name", rows[key], {"name": row_name})
        yield slice_(
            rows[key],
            signature.op,
            call.entered_s,
            call.end_s,
            call=str(signature),
            signature=signature.packed,
            elements=signature.count,
            on_gpu=signature.on_gpu,
            number=call.sequence,
            line=call.site,
            communicator=f"{member.key:016x}",
            rank=member.rank,
            ranks=member.size,
            failed=call.is_failed,
        )
        if call.there_s > call.entered_s:
            yield slice_(rows[key], "waits for other ranks", call.entered_s, call.there_s)


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
        key = int(about["communicator"], 16)
        rank.calls.append(
            Call(
                number=len(rank.calls),
                sequence=about["number"],
                member=Member(key, about["rank"], about["ranks"], engine=""),
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
