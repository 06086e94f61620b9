"""Checks the options before the run, and makes cases, effort and engines of them."""

from __future__ import annotations

import argparse
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

import fastdist._core as _core
from fastdist.cli.bench.cases import DEVICE_ARRAYS, Case, array_cases, list_case, parse_sizes
from fastdist.cli.bench.machine import usable_cores
from fastdist.cli.bench.peers import (
    Engine,
    MissingPeer,
    fastdist_engine,
    find_peer,
    parse_peers,
)
from fastdist.cli.bench.placement import Placement, place_ranks
from fastdist.cli.bench.plot import check_plot
from fastdist.cli.bench.session import ROUNDS, Effort

_MOST_ITERATIONS = 1_000_000


@dataclass(frozen=True, slots=True)
class Plan:
    """A checked run of fastdist and the installed peers, on GPUs if there is a `placement`."""

    ranks: int
    cases: tuple[Case, ...]
    effort: Effort
    engines: tuple[Engine, ...]
    missing: tuple[MissingPeer, ...]
    placement: Placement | None = None


def make_plan(options: argparse.Namespace) -> Plan:
    """Make a plan of the options.

    Raises:
        ValueError: Options are invalid.
        ImportError: A library is missing.
    """
    cases, effort = _cases(options), _effort(options)
    engines, missing = _engines(options)
    placement = _placement(options)
    _check_files(options)
    return Plan(_ranks(options), cases, effort, engines, missing, placement)


def _ranks(options: argparse.Namespace) -> int:
    ranks: int | None = options.ranks
    if ranks is None:
        return max(2, usable_cores() if options.device == "cpu" else len(_core.cuda_devices()))
    if ranks < 1:
        raise ValueError(f"expected --ranks of at least 1, got {ranks}")
    if ranks == 1 and options.collective == "send_recv":
        raise ValueError("send_recv needs --ranks of at least 2, got 1")
    return ranks


def _array(options: argparse.Namespace) -> str:
    """Return the kind of arrays for fastdist's calls."""
    possible = DEVICE_ARRAYS[options.device]
    usual = possible[0]
    if options.through == "torch":
        if options.device != "cpu" or options.array not in (None, "torch"):
            raise ValueError("--through torch is for torch tensors on --device cpu")
        _require_torch("--through torch needs torch")
        usual = "torch"
    array: str = usual if options.array is None else options.array
    if array not in possible:
        raise ValueError(
            f"expected --array for --device {options.device} out of {', '.join(possible)}, "
            f"got {array!r}"
        )
    return array


def _placement(options: argparse.Namespace) -> Placement | None:
    """Return the ranks' GPUs; None on CPUs."""
    if options.device == "cpu":
        return None
    if options.collective == "barrier":
        raise ValueError("barrier is for --device cpu: on GPUs, the host waits")
    if options.array == "empty" and options.collective in ("gather", "scatter"):
        raise ValueError(
            "--array empty: every rank must call comm.empty for GPUs, and only the root of a "
            f"{options.collective} has a buffer of all blocks"
        )
    placement = place_ranks(_ranks(options))
    _require_torch()
    return placement


def _require_torch(why: str = "--device cuda needs torch to make arrays there") -> None:
    if importlib.util.find_spec("torch") is None:
        raise ImportError(f"{why}: pip install torch")


def _cases(options: argparse.Namespace) -> tuple[Case, ...]:
    array = _array(options)
    made_by = "numpy" if array == "empty" and options.device == "cpu" else array
    if options.dtype == "bfloat16" and made_by == "numpy":
        raise ValueError("numpy has no bfloat16: use --array torch")
    if options.redop == "mean" and "int" in options.dtype:
        raise ValueError(f"--op mean needs a floating point dtype, got {options.dtype}")
    if options.model:
        if options.collective != "all_reduce":
            raise ValueError(f"--list is for all_reduce, got {options.collective}")
        return (list_case(options.model, options.dtype, options.redop, array),)
    sizes = parse_sizes(options.sizes)
    return array_cases(
        options.collective, sizes, _ranks(options), options.dtype, options.redop, array
    )


def _effort(options: argparse.Namespace) -> Effort:
    for name, least in (("iters", 1), ("warmup", 0), ("time_s", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(
                f"expected --{name.replace('_', '-')} of at least {least}, got {value}"
            )
    if options.iters is not None and options.iters > _MOST_ITERATIONS:
        raise ValueError(f"expected --iters of at most {_MOST_ITERATIONS}, got {options.iters}")
    return Effort(
        time_s=options.time_s,
        iterations=options.iters,
        warmup=options.warmup,
        rounds=min(ROUNDS, options.iters or ROUNDS),
        check=options.check,
        bind=options.device == "cpu",
        graph=options.device == "cuda",
    )


def _engines(options: argparse.Namespace) -> tuple[tuple[Engine, ...], tuple[MissingPeer, ...]]:
    ranks = _ranks(options)
    device = options.device
    names = parse_peers(options.vs, device) if options.vs else ()
    found = [find_peer(name, ranks, options.peers_dir) for name in names]
    missing = tuple(peer for peer in found if isinstance(peer, MissingPeer))
    ours = fastdist_engine(ranks, device, options.through == "torch")
    return (ours, *(peer for peer in found if isinstance(peer, Engine))), missing


def _check_files(options: argparse.Namespace) -> None:
    """Raise before the run if matplotlib is missing, or its files cannot be written."""
    if options.plot:
        check_plot(Path(options.plot))
    for name in (options.json, options.plot):
        if name in (None, "-"):
            continue
        folder = Path(name).absolute().parent
        if not os.access(folder, os.W_OK):
            raise ValueError(f"cannot write {name}: {folder} is not a writable folder")
