"""The doctor's report; imports none of the libraries that it tells of."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np

import fastdist._core as _core
from fastdist._version import __version__
from fastdist.cluster import detect_launch
from fastdist.collectives.communicator import Communicator
from fastdist.collectives.engines.nccl_library import load, why_unusable
from fastdist.collectives.init import local_group
from fastdist.errors import ClusterConfigError, UnsupportedError
from fastdist.processes.cgroups import cpu_limit, memory_limit_bytes, read_text
from fastdist.processes.proc import processor
from fastdist.processes.terminal import broken, show, width_of

# The purpose of each library; none where no single command installs it.
_PURPOSES = {
    "numpy": "required",
    "torch": "torch tensors; jobs on several machines",
    "ml_dtypes": "bfloat16 and float8 arrays in numpy",
    "cupy": "",
    "mpi4py": "fastdist.init(bootstrap=MPI.COMM_WORLD)",
    "torch_xla": "",  # needs the torch of its version, in a separate environment
    "cryptography": "parameter servers over TCP",
    "safetensors": "checkpoints of parameter servers",
    "cloudpickle": "functions that a coordinator schedules",
    "rich": "a progress bar in fastdist bench",
    "matplotlib": "fastdist bench --plot",
    "jinja2": "the page of fastdist bench report",
}
_DISTRIBUTIONS = {"cupy": ("cupy", "cupy-cuda12x", "cupy-cuda13x")}
_SHMEM_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
# Of the trial call:
_RANKS = 2
_TIMEOUT_S = 10.0
_EXPECTED = [3.0, 30.0]


@dataclass(frozen=True, slots=True)
class Fact:
    """One line of the report.

    Attributes:
        value: value in JSON; sizes in bytes, times in the unit of the key.
        text: value in the text report.
        is_bad: True for what keeps collectives from working.
        label: name in the text report; the key with spaces for underscores if None.
    """

    key: str
    value: str | int | float | bool | None
    text: str
    is_bad: bool = False
    label: str | None = None


def format_bytes(size_bytes: int) -> str:
    """Format a size in the largest unit in which it is at least 1: "7.5 GiB"."""
    size, unit = float(size_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size:.4g} {unit}"


def build_section() -> list[Fact]:
    """Return the version, the Python interpreter and the engines of this build."""
    python = f"{platform.python_version()} ({platform.python_implementation()})"
    loops = _core.instruction_set()
    return [
        Fact("version", __version__, __version__),
        Fact("python", platform.python_version(), python),
        Fact("host_engine", True, "built in"),
        Fact("instruction_set", loops, loops),
        _cuda(),
        *_nccl(),
    ]


def _cuda() -> Fact:
    """Report CUDA in this build, and the reason why no GPU is used."""
    why = _core.why_no_cuda()
    if not _core.cuda_is_built():
        return Fact("cuda", False, why)
    version = _core.cuda_runtime_version()
    text = f"built with CUDA {version // 1000}.{version % 1000 // 10}"
    if why:
        return Fact("cuda", True, f"{text}; no GPU is used: {why}")
    return Fact("cuda", True, text)


def _nccl() -> list[Fact]:
    """Return the libnccl to use; nothing if this build has no CUDA."""
    if not _core.cuda_is_built():
        return []
    try:
        library = load()
    except UnsupportedError as error:
        return [Fact("nccl", None, str(error).splitlines()[0])]
    text = f"{library.version_text} ({library.path})"
    return [Fact("nccl", library.version_text, text)]


def machine_section() -> list[Fact]:
    """Return the processor, and this process's share of it."""
    quota = cpu_limit()
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    quota_text = "none" if quota is None else f"{quota:g} cores' worth of time"
    return [
        Fact("processor", processor(), processor()),
        Fact("cores", usable, f"{usable} usable of {present}"),
        Fact("cpu_quota", quota, quota_text),
        Fact("kernel", platform.release(), platform.release()),
    ]


def memory_section() -> list[Fact]:
    """Report memory, and limits for shared memory."""
    limit = memory_limit_bytes()
    total, available = _memory_bytes("MemTotal"), _memory_bytes("MemAvailable")
    memory = f"{format_bytes(total)}, {format_bytes(available)} available"
    # The kernel's policy for huge pages of shared memory is in brackets.
    policies = read_text(_SHMEM_HUGE_PAGES).split()
    huge_pages = next((each.strip("[]") for each in policies if each.startswith("[")), None)
    return [
        Fact("memory", total, memory),
        Fact("cgroup_limit", limit, "none" if limit is None else format_bytes(limit)),
        _address_space(total),
        _open_files(),
        Fact("shared_huge_pages", huge_pages, huge_pages or "not in this kernel"),
    ]


def _memory_bytes(name: str) -> int:
    for line in read_text(Path("/proc/meminfo")).splitlines():
        if line.startswith(f"{name}:"):
            return 1024 * int(line.split()[1])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _address_space(memory_bytes: int) -> Fact:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return Fact("address_space_limit", None, "none")
    # Each rank maps a window of the size of the memory for every rank; most pages stay untouched.
    needed = 2 * (1 << (memory_bytes - 1).bit_length())
    if limit >= needed:
        return Fact("address_space_limit", limit, format_bytes(limit))
    text = f"{format_bytes(limit)}; 2 ranks need {format_bytes(needed)}: ulimit -v unlimited"
    return Fact("address_space_limit", limit, text, is_bad=True)


def _open_files() -> Fact:
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return Fact("open_files_limit", None, "none")
    return Fact("open_files_limit", limit, f"{limit} (one per rank is needed)")


def gpus_section() -> list[Fact]:
    """Return the GPUs that this process sees."""
    facts = []
    for number, gpu in enumerate(_core.cuda_devices()):
        chip = f"compute capability {gpu.major}.{gpu.minor}, {gpu.multiprocessors} multiprocessors"
        text = f"{gpu.name}, {format_bytes(gpu.bytes)}, {chip}"
        facts.append(Fact(f"cuda:{number}", gpu.name, text))
    return facts


def libraries_section() -> list[Fact]:
    """Return the versions of libraries, and the commands that install missing ones."""
    facts = []
    for name, purpose in _PURPOSES.items():
        version = _version_of(name)
        missing = f"not installed; {purpose}: pip install {name}" if purpose else "not installed"
        facts.append(Fact(name, version, version or missing, label=name))
    return facts


def _version_of(name: str) -> str | None:
    for distribution in _DISTRIBUTIONS.get(name, (name,)):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def launcher_section() -> list[Fact]:
    """Return the launcher and the rank of this process."""
    try:
        launch = detect_launch()
    except ClusterConfigError as error:
        return [Fact("error", str(error), str(error), is_bad=True)]
    if launch is None:
        return [Fact("launcher", None, "none: a world of one")]
    ranks, gpus = launch.local_world_size, len(_core.cuda_devices())
    facts = [
        Fact("launcher", launch.launcher, launch.launcher),
        Fact("rank", launch.rank, f"{launch.rank} of {launch.world_size}"),
        Fact("local_rank", launch.local_rank, f"{launch.local_rank} of {ranks} on this machine"),
    ]
    if 0 < gpus < ranks:
        text = f"by {ranks} ranks: speeds are not those of GPUs of their own"
        facts.append(Fact("gpus_shared", ranks, text, label="GPUs shared"))
    return facts


def engines_section() -> list[Fact]:
    """Return all engines, available or not, and the arrays that they serve."""
    xla = "torch_xla is not installed" if _version_of("torch_xla") is None else ""
    return [
        _engine("local", "any array, world of one"),
        _engine("host", "numpy, torch, DLPack and buffers on the CPU; ranks of one machine"),
        _engine("nccl", "torch, cupy, DLPack and others on GPUs", why_unusable()),
        _engine("net", "as host, across machines by TCP"),
        _engine("xla", "XLA tensors in TPUStrategy", xla),
    ]


def _engine(engine: str, serves: str, why: str = "") -> Fact:
    """Return what an engine serves; `why` tells why it is not available."""
    if why:
        return Fact(engine, "not available", f"not available  {serves}: {why}")
    return Fact(engine, "available", f"available   {serves}")


def check_section() -> list[Fact]:
    """Check the result of an all_reduce between two threads of this process."""
    try:
        communicators = local_group(_RANKS, timeout=_TIMEOUT_S)
        try:
            with ThreadPoolExecutor(_RANKS) as threads:
                results = list(threads.map(_all_reduce, communicators))
        finally:
            for communicator in communicators:
                communicator.close()
    except Exception as error:  # any failure belongs into the report
        text = f"failed: {type(error).__name__}: {error}"
        return [Fact("all_reduce", False, text, is_bad=True)]
    if results != [_EXPECTED] * _RANKS:
        text = f"wrong: expected {_EXPECTED} on each rank, got {results}"
        return [Fact("all_reduce", False, text, is_bad=True)]
    return [Fact("all_reduce", True, f"right on {_RANKS} ranks (threads)")]


def _all_reduce(communicator: Communicator) -> list[float]:
    array = np.array([1, 10], np.float32) * (communicator.rank + 1)
    result: list[float] = communicator.all_reduce(array).tolist()
    return result


SECTIONS = {
    "fastdist": build_section,
    "machine": machine_section,
    "memory": memory_section,
    "GPUs": gpus_section,
    "libraries": libraries_section,
    "launcher": launcher_section,
    "engines": engines_section,
    "check": check_section,
}
"""The report's sections in order, by title."""


def run(options: argparse.Namespace) -> int:
    """Print the report; return 1 if a fact is bad."""
    sections = examine()
    show(to_json(sections) if options.json else to_text(sections, width_of(sys.stdout)))
    return 0 if is_well(sections) else 1


def examine() -> dict[str, list[Fact]]:
    """Collect all sections, in less than a second; leave no files or processes behind."""
    return {title: section() for title, section in SECTIONS.items()}


def is_well(sections: dict[str, list[Fact]]) -> bool:
    """Return False if a fact is bad."""
    return not any(fact.is_bad for facts in sections.values() for fact in facts)


def to_json(sections: dict[str, list[Fact]]) -> str:
    """Format one object per section, and `well`, which is false if a fact is bad."""
    report: dict[str, object] = {
        title.replace(" ", "_"): {fact.key: fact.value for fact in facts}
        for title, facts in sections.items()
    }
    report["well"] = is_well(sections)
    return json.dumps(report, indent=2) + "\n"


def to_text(sections: dict[str, list[Fact]], width: int | None = None) -> str:
    """Format aligned lines of at most `width` columns; omit sections without facts."""
    labels = max(len(_label(fact)) for facts in sections.values() for fact in facts)
    room = None if width is None else width - labels - 4
    lines = []
    for title, facts in sections.items():
        if facts:
            lines.append(title)
        for fact in facts:
            parts = broken(fact.text, room, indent="")
            for label, part in zip_longest([_label(fact)], parts, fillvalue=""):
                lines.append(f"  {label:<{labels}}  {part}")
    return "\n".join(lines) + "\n"


def _label(fact: Fact) -> str:
    return fact.key.replace("_", " ") if fact.label is None else fact.label
