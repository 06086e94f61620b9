"""The build, the libraries that fastdist uses, and the launcher; imports no library."""

from __future__ import annotations

import importlib.metadata
import platform

import fastdist._core as _core
from fastdist._version import __version__
from fastdist.cli.doctor.facts import Fact, State, format_bytes
from fastdist.cluster import detect_launch
from fastdist.collectives.engines.nccl_library import load
from fastdist.errors import ClusterConfigError, UnsupportedError

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


def build_section() -> list[Fact]:
    """Return the version, the Python interpreter and the engines of this build."""
    python = f"{platform.python_version()} ({platform.python_implementation()})"
    loops = _core.instruction_set()
    return [
        Fact("version", __version__, __version__),
        Fact("python", platform.python_version(), python),
        Fact("host_engine", True, "built in", State.GOOD),
        Fact("instruction_set", loops, loops),
        _cuda(),
        *_nccl(),
    ]


def libraries_section() -> list[Fact]:
    """Return the versions of installed libraries."""
    facts = []
    for name in _PURPOSES:
        version = version_of(name)
        state = State.ABSENT if version is None else State.PLAIN
        facts.append(Fact(name, version, version or "not installed", state, label=name))
    return facts


def launcher_section() -> list[Fact]:
    """Return the launcher and the rank of this process."""
    try:
        launch = detect_launch()
    except ClusterConfigError as error:
        return [Fact("error", str(error), str(error), State.BAD)]
    if launch is None:
        return [Fact("launcher", None, "none: a world of one")]
    return [
        Fact("launcher", launch.launcher, launch.launcher),
        Fact("rank", launch.rank, f"{launch.rank} of {launch.world_size}"),
        Fact(
            "local_rank",
            launch.local_rank,
            f"{launch.local_rank} of {launch.local_world_size} on this machine",
        ),
        *_shared_gpus(launch.local_world_size),
    ]


def _shared_gpus(ranks: int) -> list[Fact]:
    gpus = len(_core.cuda_devices())
    if gpus == 0 or gpus >= ranks:
        return []
    text = f"by {ranks} ranks: speeds are not those of GPUs of their own"
    return [Fact("gpus_shared", ranks, text, label="GPUs shared")]


def install_section() -> list[Fact]:
    """Return the commands that install missing libraries, with their purposes."""
    return [
        Fact(command, purpose, purpose, label=command)
        for name, purpose in _PURPOSES.items()
        if purpose and version_of(name) is None
        for command in [f"pip install {name}"]
    ]


def _cuda() -> Fact:
    """Report CUDA in this build, and the reason why no GPU is used."""
    why = _core.why_no_cuda()
    if not _core.cuda_is_built():
        return Fact("cuda", False, why, State.ABSENT)
    version = _core.cuda_runtime_version()
    text = f"built with CUDA {version // 1000}.{version % 1000 // 10}"
    if why:
        return Fact("cuda", True, f"{text}; no GPU is used: {why}", State.ABSENT)
    return Fact("cuda", True, text, State.GOOD)


def gpus_section() -> list[Fact]:
    """Return the GPUs that this process sees."""
    facts = []
    for number, gpu in enumerate(_core.cuda_devices()):
        chip = f"compute capability {gpu.major}.{gpu.minor}, {gpu.multiprocessors} multiprocessors"
        text = f"{gpu.name}, {format_bytes(gpu.bytes)}, {chip}"
        facts.append(Fact(f"cuda:{number}", gpu.name, text, State.GOOD))
    return facts


def _nccl() -> list[Fact]:
    """Return the libnccl to use, and its optional functions; nothing if this build has no CUDA."""
    if not _core.cuda_is_built():
        return []
    try:
        library = load()
    except UnsupportedError as error:
        return [Fact("nccl", None, str(error).splitlines()[0], State.ABSENT)]
    text = f"{library.version_text} ({library.path})"
    facts = [Fact("nccl", library.version_text, text, State.GOOD)]
    has = ", ".join(library.has) or "nothing beyond 2.27"
    facts.append(Fact("nccl_functions", has, has))
    if library.others:
        others = ", ".join(library.others)
        facts.append(Fact("nccl_others", others, f"loaded too, and not used: {others}"))
    return facts


def version_of(name: str) -> str | None:
    """Return the installed version of a library of the report; None if not installed."""
    for distribution in _DISTRIBUTIONS.get(name, (name,)):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None
