"""Makes all checks and measurements of fastdist that one GPU allows.

    python benchmarks/gpu/one_gpu.py --out results.json             # at most 8 minutes
    python benchmarks/gpu/one_gpu.py --out results.json PART...     # these parts alone
    python benchmarks/gpu/one_gpu.py --list

Runs parts, the most valuable first: suites that guard correctness, at the same time, then programs
that measure, one at a time. Each part has a time limit; a part that fails or hangs does not stop
the others. `--out` is written after each part. Parts that passed in it are not run again unless the
code has changed, so an interrupted run continues where it stopped. Ends with 1 if a part failed or
a bar was missed; results.py makes the tables of the documentation.

Needs a clone of this repository, the package built with CUDA, torch, pytest and cupy. Without a
GPU, `--dry` runs all parts that can run on virtual GPUs or on the CPU, small.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fastdist._core as _core
from fastdist.cli.machine_facts import gpu_facts, machine_facts

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
SUPPORT = TESTS / "collectives" / "support"
HERE = Path(__file__).parent
sys.path[:0] = [str(SUPPORT), str(TESTS / "virtual_gpu")]
# Of the programs: the package that runs here, and the modules of the tests.
MODULES = (Path(_core.__file__).parents[1], SUPPORT, TESTS / "support", TESTS / "virtual_gpu")
DRY = {"OMP_NUM_THREADS": "1"}

IS_VIRTUAL = Path(_core.__file__).with_name("libvirtual_cudart.so").exists()
RUN = ("-m", "fastdist", "run", "--no-prefix", "-n")
COLLECTIVES = ("moves", "uneven", "pairs", "lists", "grouped", "compression")
SHOWN_LINES = 40  # of a part that failed

Command = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the run.

    Attributes:
        name: its name in the results.
        what: what it shows, for the tables.
        command: arguments of Python; "JSON" stands for a file that the command writes.
        limit_s: seconds until it is killed.
        folder: the directory to run in.
        is_suite: True if it measures nothing, so that other suites may run meanwhile.
        dry: the arguments without a GPU; None: it needs one.
        needs: modules without which the part is skipped.
    """

    name: str
    what: str
    command: Command
    limit_s: int
    folder: Path = ROOT
    is_suite: bool = False
    dry: Command | None = None
    needs: tuple[str, ...] = field(default=())


def ranks(count: int, program: str, *arguments: str) -> Command:
    return (*RUN, str(count), program, *arguments)


def suites() -> Iterator[Part]:
    """Yield the parts that guard correctness."""
    from gpu_lifetimes import PARTS as LIFETIMES
    from gpu_parts import ALONE, LOSING, TOGETHER

    lifetimes = tuple(part.__name__ for part in LIFETIMES)
    everything = (*COLLECTIVES, "reductions", *lifetimes)
    few = ("moves", "lists")
    what = "the engine by its compiled interface"
    for count, name, parts in (
        (1, "", everything),
        (2, ", collectives", (*COLLECTIVES, "reductions")),
        (2, ", lifetimes", lifetimes),
        (4, "", (*COLLECTIVES, *lifetimes)),
    ):
        yield Part(
            f"engine, {count} ranks{name}",
            f"{what}: {', '.join(parts)}",
            ranks(count, "gpu_rank.py", *parts),
            110,
            SUPPORT,
            is_suite=True,
            dry=ranks(count, "gpu_rank.py", *few) if IS_VIRTUAL else None,
        )
    for count in (1, 2, 4):
        parts = (*ALONE, *(TOGETHER if count > 1 else ()))
        yield Part(
            f"Communicator, {count} ranks",
            f"`Communicator` on torch's and cupy's arrays: {', '.join(parts)}",
            ranks(count, "gpu_communicator.py", *parts),
            110,
            SUPPORT,
            is_suite=True,
            dry=ranks(count, "gpu_communicator.py", *parts[:2]) if IS_VIRTUAL else None,
            needs=("cupy",),
        )
        yield Part(
            f"strategies, {count} replicas",
            "training as on a CPU, captured steps, generators, BatchNorm, recomputation, batches",
            ranks(count, "strategies_on_gpus.py", *STRATEGY_PARTS),
            110,
            TESTS / "strategies" / "support",
            is_suite=True,
        )
    tests = "tests/collectives/test_communicator_gpu.py"
    yield Part(
        "lost ranks",
        f"ranks that are late, silent, killed, or raise: {', '.join(LOSING)}; children of fork",
        pytest(tests, "-n", "4", "-k", "lost or children"),
        150,
        is_suite=True,
        dry=pytest(tests, "-n", "1", "-k", "lost and killed and 2") if IS_VIRTUAL else None,
        needs=("pytest",),
    )
    for count in (2, 1):
        program = str(HERE / "training_features.py")
        yield Part(
            f"training features, {count}",
            f"by {count} replicas: checkpoints saved while training goes on, and continued to the "
            "bit; mixed precision with GradScaler; torch.compile; groups of collectives",
            ranks(count, program),
            100,
            is_suite=True,
            dry=ranks(count, program),
        )
    yield Part(
        "torch backend",
        'the backend "fastdist" by 2 ranks: asynchronous lists and strided tensors, means of '
        "integers, futures, DDP, compiled DDP, FSDP2, groups, functional collectives",
        ranks(2, str(HERE / "torch_backend.py"), *BACKEND_PARTS),
        100,
        is_suite=True,
        dry=ranks(2, str(HERE / "torch_backend.py"), *BACKEND_PARTS),
    )
    for example in ("mirrored", "custom_loop", "central_storage"):
        yield Part(
            f"example {example}",
            f"`examples/{example}.py` by 2 ranks",
            ranks(2, f"examples/{example}.py"),
            90,
            is_suite=True,
        )


STRATEGY_PARTS = (
    "trains_as_one_device",
    "trains_graphed",
    "unused_parameters_keep_no_gradient",
    "replicas_draw_apart",
    "averages_batch_norm",
    "recomputes_in_its_replica",
    "brings_batches_to_the_gpu",
)
BACKEND_PARTS = (
    "lists_async",
    "memory_of_the_copy",
    "strided_async",
    "mean_of_integers",
    "futures",
    "ddp",
    "fsdp",
    "compiled_ddp",
    "compiled_functional_collective",
    "groups",
)


def pytest(*arguments: str) -> Command:
    options = "addopts=--strict-markers --dist load"
    plugins = ("-p", "no:cacheprovider", "-p", "no:benchmark")
    return (
        "-m",
        "pytest",
        "-v",
        *plugins,
        "-o",
        options,
        "-W",
        "default",
        "--tb=short",
        *arguments,
    )


def measurements() -> Iterator[Part]:
    """Yield the parts that measure; each has the machine for itself."""
    step = str(HERE / "training_step.py")
    yield Part(
        "training step",
        "a training step of one replica: plain torch, DDP on NCCL and on fastdist, "
        "MirroredStrategy, captured",
        (step,),
        100,
        dry=(step, "--rounds", "2"),
        needs=("torchvision",),
    )
    host, memory = str(HERE / "host_time.py"), str(HERE / "device_memory.py")
    yield Part(
        "host time, 1 rank",
        "the host's time of a call of one rank",
        ranks(1, host),
        50,
        dry=ranks(1, host) if IS_VIRTUAL else None,
    )
    yield Part(
        "packing",
        "packing of ResNet-50's 161 gradients as a share of a copy's speed",
        (str(HERE / "packing.py"),),
        50,
    )
    for count in (2, 1):
        yield Part(
            f"device memory, {count} ranks",
            f"device memory after lists and many calls of {count} ranks",
            ranks(count, memory),
            60,
            dry=ranks(count, memory) if IS_VIRTUAL else None,
        )
    yield Part(
        "messages before peers are connected",
        "futures of `irecv` between ranks that have exchanged no message, beside other kernels",
        ranks(2, str(HERE / "torch_backend.py"), "messages_before_peers_are_connected"),
        40,
        dry=ranks(2, str(HERE / "torch_backend.py"), "messages_before_peers_are_connected"),
    )
    yield Part(
        "NVTX ranges",
        "calls as NVTX ranges in NVIDIA's profiler",
        (str(HERE / "nvtx_ranges.py"),),
        60,
    )
    yield bench("161 gradients, 1 rank", 1, "--list", "resnet50", "--iters", "30")
    yield bench("sizes, 2 ranks", 2, "--sizes", "8,64K,1M,16M,64M", "--iters", "10")
    yield Part(
        "host time, 2 ranks",
        "the host's time of a call of two ranks",
        ranks(2, host),
        60,
        dry=ranks(2, host) if IS_VIRTUAL else None,
    )
    yield bench("161 gradients, 2 ranks", 2, "--list", "resnet50", "--iters", "6", limit_s=150)


def bench(name: str, count: int, *options: str, limit_s: int = 70) -> Part:
    given = ("all_reduce", "--device", "cuda", "-n", str(count), "--vs", "torch", *options)
    return Part(
        f"all_reduce, {name}",
        f"`fastdist bench {' '.join(given)}`",
        ("-m", "fastdist", "bench", *given, "--json", "JSON"),
        limit_s,
    )


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure that one rank must reach.

    Attributes:
        name: what is compared.
        value: the figure.
        most: its limit.
    """

    name: str
    value: float
    most: float

    @property
    def is_reached(self) -> bool:
        return self.value <= self.most


def bars(parts: dict[str, Any]) -> Iterator[Bar]:
    """Yield the bars whose parts have run."""
    for row in figures(parts, "training step"):
        ms = row["ms_per_step"]
        if "DDP, NCCL" not in ms:
            continue
        name, plain = row["model"], ms["plain torch"]
        yield Bar(f"{name}: MirroredStrategy / plain torch", ms["MirroredStrategy"] / plain, 1.0)
        captured = ms["MirroredStrategy, captured"] / plain
        yield Bar(f"{name}: captured / plain torch", captured, 0.6)
        ddp = ms["DDP, fastdist"] / ms["DDP, NCCL"]
        yield Bar(f"{name}: DDP on fastdist / on NCCL", ddp, 1.0)
    host = {
        (row["engine"], row["call"]): row["host_us"]
        for row in figures(parts, "host time, 1 rank")
        if "host_us" in row
    }
    if ("torch's NCCL", "asynchronous, and wait") in host:
        yield Bar("host time of a call, us", host["fastdist", "all_reduce of 1 KiB"], 5.0)
        ours, theirs = (host[e, "asynchronous, and wait"] for e in ("fastdist", "torch's NCCL"))
        yield Bar("asynchronous call and wait / torch's", ours / theirs, 1.0)
    for row in figures(parts, "packing"):
        if "share_of_a_copy" in row:
            yield Bar("a copy / packing", 1 / row["share_of_a_copy"], 1 / 0.85)
    for row in figures(parts, "all_reduce, sizes, 2 ranks"):
        for case in row.get("results", ()):
            for peer in case.get("peers", {}).values():
                if peer.get("times_as_fast"):
                    name = f"{case['bytes']} bytes, 2 ranks: fastdist / torch's NCCL"
                    yield Bar(name, 1 / peer["times_as_fast"], 1 / 0.98)
    for count in (1, 2):
        for row in figures(parts, f"device memory, {count} ranks"):
            for key in ("again_bytes", "growth_bytes"):
                yield Bar(f"device memory, {count} ranks, {key}", row[key], 0)


def figures(parts: dict[str, Any], name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = parts.get(name, {}).get("figures", [])
    return found


class OneGpu:
    """Runs parts within the time limit, and writes their results."""

    def __init__(self, out: Path, limit_s: float, is_dry: bool) -> None:
        self._out, self._is_dry = out, is_dry
        self._until = time.monotonic() + limit_s
        self._digest = digest()
        self.results: dict[str, Any] = {"parts": {}}
        if out.exists():
            old = json.loads(out.read_text())
            if old.get("code") == self._digest:
                self.results = old
        facts = machine_facts() | ({} if is_dry else gpu_facts())
        self.results |= {"code": self._digest, "machine": facts, "dry": is_dry}

    def run(self, parts: Sequence[Part]) -> None:
        """Run suites beside each other, then the others one after another."""
        open_parts = [part for part in parts if not self._parts.get(part.name, {}).get("passed")]
        together = [part for part in open_parts if part.is_suite]
        at_once = max(1, (os.cpu_count() or 1) // 3)
        with ThreadPoolExecutor(at_once) as pool:
            for part, result in pool.map(lambda part: (part, self._run(part)), together):
                self._note(part, result)
        for part in open_parts:
            if not part.is_suite:
                self._note(part, self._run(part))

    @property
    def _parts(self) -> dict[str, Any]:
        parts: dict[str, Any] = self.results["parts"]
        return parts

    def _run(self, part: Part) -> dict[str, Any]:
        command = part.dry if self._is_dry else part.command
        if command is None:
            return {"skipped": "needs a GPU"}
        missing = [name for name in part.needs if importlib.util.find_spec(name) is None]
        if missing and not self._is_dry:
            return {"skipped": f"needs {', '.join(missing)}"}
        left_s = min(part.limit_s, self._until - time.monotonic())
        if left_s < 5:
            return {"skipped": "no time was left"}
        return ended(command, part.folder, left_s, DRY if self._is_dry else {})

    def _note(self, part: Part, result: dict[str, Any]) -> None:
        self._parts[part.name] = {"what": part.what, **result}
        self.results["bars"] = [
            {"name": bar.name, "value": round(bar.value, 3), "most": round(bar.most, 3)}
            | {"reached": bar.is_reached}
            for bar in bars(self._parts)
        ]
        self._out.write_text(json.dumps(self.results, indent=1) + "\n")
        verdict = result.get("skipped") or ("passed" if result["passed"] else "FAILED")
        print(f"{verdict:<10} {result.get('s', 0):6.1f} s  {part.name}", flush=True)
        for row in result.get("figures", ()):
            if "part" not in row and "results" not in row:
                print(f"{'':20}{json.dumps(row)}"[:200], flush=True)
        if result.get("passed") is False:
            print("\n".join("    " + line[:200] for line in result["output"]), flush=True)


def ended(
    command: Command, folder: Path, limit_s: float, settings: dict[str, str]
) -> dict[str, Any]:
    """Run a command to its end or its limit; return its result."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        written = Path(scratch) / "written.json"
        words = [str(written) if word == "JSON" else word for word in command]
        with (Path(scratch) / "output").open("w+") as output:
            process = subprocess.Popen(
                [sys.executable, *words],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, MODULES))} | settings,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                output.write(f"\nkilled after {limit_s:.0f} s\n")
            output.seek(0)
            lines = output.read().splitlines()
        result = {
            "command": "python " + " ".join(command),
            "passed": process.returncode == 0,
            "s": round(time.monotonic() - start, 1),
            "figures": list(rows(lines)),
        }
        if written.exists():
            result["figures"] += [json.loads(written.read_text())]
    if process.returncode:
        result["output"] = [f"exit code {process.returncode}", *lines[-SHOWN_LINES:]]
    return result


def rows(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield the lines that are JSON objects."""
    for line in lines:
        if line.startswith("{"):
            try:
                yield json.loads(line)
            except ValueError:
                continue


def digest() -> str:
    """Return a digest of the package and of these programs."""
    found = hashlib.sha256()
    package = Path(_core.__file__).parent
    for path in sorted([*package.rglob("*.py"), *package.glob("_core*"), *HERE.glob("*.py")]):
        found.update(path.read_bytes())
    return found.hexdigest()[:16]


def main() -> int:
    """Run the parts; 1 if one failed or a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--out", type=Path, default=Path("one_gpu.json"))
    parser.add_argument("--limit-s", type=float, default=480, help="seconds for all parts (480)")
    parser.add_argument("--dry", action="store_true", help="run small parts without a GPU")
    parser.add_argument("--list", action="store_true", help="list the parts")
    options = parser.parse_args()
    parts = [*suites(), *measurements()]
    if options.list:
        for part in parts:
            print(f"{part.limit_s:4} s  {part.name}: {part.what}")
        return 0
    known = {part.name: part for part in parts}
    if unknown := [name for name in options.parts if name not in known]:
        parser.error(f"unknown parts {unknown}; expected some of {list(known)}")
    if not options.dry and (why := _core.why_no_cuda()):
        parser.error(f"no GPU: {why}; --dry runs without one")
    run = OneGpu(options.out, options.limit_s, options.dry)
    run.run([known[name] for name in options.parts] or parts)
    missed = [bar for bar in run.results["bars"] if not bar["reached"]]
    for bar in run.results["bars"]:
        verdict = "reached" if bar["reached"] else "MISSED"
        print(f"{verdict:<8} {bar['value']:>10} (at most {bar['most']})  {bar['name']}")
    failed = [name for name, part in run.results["parts"].items() if part.get("passed") is False]
    print(f"# {len(failed)} parts failed: {', '.join(failed) or 'none'}; {len(missed)} bars missed")
    return 1 if failed or missed else 0


if __name__ == "__main__":
    sys.exit(main())
