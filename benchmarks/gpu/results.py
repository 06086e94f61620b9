"""Writes what one_gpu.py has measured into the documentation.

    python benchmarks/gpu/results.py            # the newest benchmarks/results/one-gpu-*.json
    python benchmarks/gpu/results.py --check    # ends with 1 if a page says something else

Replaces the lines from `<!-- one GPU: rows -->` in docs/verified.md, and from
`<!-- one GPU: steps -->` in README.md, to the next `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MODELS = {"resnet50": "ResNet-50, 16 images", "linear_layers": "20 linear layers"}
WAYS = {
    "plain torch": "torch",
    "MirroredStrategy": "Mirrored",
    "MirroredStrategy, captured": "captured",
    "DDP, NCCL": "DDP, NCCL",
    "DDP, fastdist": "DDP, fastdist",
}
MIB = 1 << 20


def newest() -> dict[str, Any]:
    """Return the newest results."""
    found: dict[str, Any] = json.loads(max(RESULTS.glob("one-gpu-*.json")).read_text())
    return found


def rows(results: dict[str, Any]) -> Iterator[str]:
    """Yield a row of docs/verified.md for each part that has run."""
    yield "| what | where | when | how |"
    yield "|---|---|---|---|"
    card, when = card_of(results), results["machine"]["date"]
    for name, part in results["parts"].items():
        if "skipped" in part:
            continue
        said = figures_of(name, part["figures"])
        what = part["what"][0].upper() + part["what"][1:] + (f": {said}" if said else "")
        if not part["passed"]:
            what = f"**failed** ({part['output'][-1].strip('= ')}): {what}"
        yield f'| {what} | {card} | {when} | `python benchmarks/gpu/one_gpu.py "{name}"` |'


def steps(results: dict[str, Any]) -> Iterator[str]:
    """Yield README.md's table of training steps."""
    card, when = card_of(results), results["machine"]["date"]
    yield (
        f"Milliseconds for a training step of one replica on one {card}, {when}: by plain torch, "
        "`MirroredStrategy`, the same captured in a CUDA graph, DDP:"
    )
    yield ""
    yield "| | " + " | ".join(WAYS.values()) + " |"
    yield "|---|" + "---|" * len(WAYS)
    for row in results["parts"]["training step"]["figures"]:
        ms = row["ms_per_step"]
        yield f"| {MODELS[row['model']]} | " + " | ".join(f"{ms[way]:.3g}" for way in WAYS) + " |"


def card_of(results: dict[str, Any]) -> str:
    """Return the name of the GPU, "H200"."""
    return str(results["machine"]["gpus"]).removeprefix("NVIDIA ").partition(" (")[0]


def figures_of(name: str, figures: list[dict[str, Any]]) -> str:
    """Return a part's figures in words; "" for suites."""
    for prefix, words in WORDS.items():
        if name.startswith(prefix):
            return words(figures)
    return ""


def step_words(figures: list[dict[str, Any]]) -> str:
    found = []
    for row in figures:
        ms = ", ".join(f"{way} {ms:.3g}" for way, ms in row["ms_per_step"].items())
        found.append(f"{MODELS[row['model']]}: {ms} ms")
    return "; ".join(found)


def host_words(figures: list[dict[str, Any]]) -> str:
    by_engine: dict[str, list[str]] = {}
    for row in figures:
        by_engine.setdefault(row["engine"], []).append(f"{row['call']} {row['host_us']:.3g}")
    return "; ".join(f"{engine}: {', '.join(calls)} µs" for engine, calls in by_engine.items())


def packing_words(figures: list[dict[str, Any]]) -> str:
    row = figures[-1]
    return (
        f"the kernels at {row['share_of_a_copy']:.0%} of the {row['copy_gb_per_s']:,.0f} GB/s of a "
        f"copy; a whole call {row['list_us']:.0f} µs, in bf16 {row['list in bf16_us']:.0f}"
    )


def memory_words(figures: list[dict[str, Any]]) -> str:
    row = figures[0]
    return (
        f"{row['buckets_bytes'] / MIB:.0f} MiB for buckets and NCCL, the same lists again "
        f"{row['again_bytes'] / MIB:.0f} MiB more, {row['calls']:,} calls "
        f"{row['growth_bytes'] / MIB:.0f} MiB more"
    )


def bench_words(figures: list[dict[str, Any]]) -> str:
    found = []
    for case in [case for table in figures for case in table["rows"]]:
        size = case["model"] or f"{case['bytes']:,} bytes"
        ours = f"{size} {case['p50_us']:,.0f} µs, the host {case['host_us']:.0f}"
        peers = [
            f"{peer} {row['p50_us']:,.0f}, the host {row['host_us']:.0f}"
            for peer, row in case["peers"].items()
            # The second is a list's name in older files.
            if row.get("host_us") is not None and peer in ("torch", "torch: 25 MB buckets")
        ]
        wrong = f"; {case['wrong']} wrong elements" if case["wrong"] else ""
        found.append(f"{ours} ({'; '.join(peers)}{wrong})")
    return "; ".join(found)


WORDS: dict[str, Callable[[list[dict[str, Any]]], str]] = {
    "training step": step_words,
    "host time": host_words,
    "packing": packing_words,
    "device memory": memory_words,
    "all_reduce": bench_words,
}


def replaced(page: str, mark: str, lines: Iterator[str]) -> str:
    """Return a page with other lines between a mark and the next end."""
    pattern = re.compile(rf"(<!-- one GPU: {mark} -->\n).*?(<!-- end -->)", re.DOTALL)
    new, count = pattern.subn(lambda m: "\n".join([m[1], *lines, "", m[2]]), page)
    if count != 1:
        raise SystemExit(f"expected one mark 'one GPU: {mark}', found {count}")
    return new


def main() -> int:
    """Write the pages, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing")
    is_check = parser.parse_args().check
    results = newest()
    differ = []
    for page, mark, make in (("docs/verified.md", "rows", rows), ("README.md", "steps", steps)):
        path = ROOT / page
        old = path.read_text()
        new = replaced(old, mark, make(results))
        if new != old:
            differ.append(page)
            if not is_check:
                path.write_text(new)
    if differ:
        print(f"{'other figures in' if is_check else 'written:'} {', '.join(differ)}")
    return 1 if is_check and differ else 0


if __name__ == "__main__":
    sys.exit(main())
