"""Compares all_reduce of numpy arrays with that of oneCCL's build for CPUs, called through ctypes.

    pip install --no-deps oneccl && pip install --no-deps oneccl-cpu oneccl-devel impi-rt
    I_MPI_ROOT=$VIRTUAL_ENV I_MPI_FABRICS=shm LD_LIBRARY_PATH=$VIRTUAL_ENV/lib \\
        mpiexec -n 2 python benchmarks/oneccl.py [--offload 1]
    fastdist run -n 2 benchmarks/oneccl.py          by libfabric's TCP in place of Intel MPI

Needs a virtual environment, a C++ compiler and, for the second run, libfabric (Debian: libfabric1).
The wheel oneccl is for GPUs, and contains one library that both wheels need; oneccl-cpu replaces
its other library. Both engines take turns, on data that each rank has just written. Prints JSON
lines: microseconds by size, medians of the slower rank.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import fastdist as fd
import numpy as np

CALLS = {8: 500, 1 << 16: 300, 1 << 20: 100, 1 << 26: 8}  # by bytes, in each round
ADDRESS_BYTES = 512
SHIM = r"""
#include <cstring>
#include <memory>
#include <oneapi/ccl.hpp>
namespace {
std::shared_ptr<ccl::kvs> store;
std::unique_ptr<ccl::communicator> ranks;
}  // namespace
extern "C" void begin(char* address) {
  ccl::init();
  store = ccl::create_main_kvs();
  const auto made = store->get_address();
  std::memcpy(address, made.data(), made.size());
}
extern "C" void join(int rank, int size, const char* address) {
  ccl::init();
  if (!store) {
    ccl::kvs::address_type given;
    std::memcpy(given.data(), address, given.size());
    store = ccl::create_kvs(given);
  }
  ranks = std::make_unique<ccl::communicator>(ccl::create_communicator(size, rank, store));
}
extern "C" void all_reduce(const void* in, void* out, std::size_t count) {
  ccl::allreduce(in, out, count, ccl::datatype::float32, ccl::reduction::sum, *ranks).wait();
}
extern "C" void end() { ranks.reset(); store.reset(); }
"""

AllReduce = Callable[[np.ndarray, np.ndarray], object]


def compiled(folder: str) -> ctypes.CDLL:
    source, library = Path(folder, "shim.cpp"), Path(folder, "shim.so")
    source.write_text(SHIM)
    prefix = Path(sys.prefix)
    libraries = prefix / "lib"
    subprocess.run(
        [
            *("c++", "-O2", "-std=c++17", "-shared", "-fPIC", source, "-o", library),
            *(f"-I{prefix / 'include'}", f"-L{libraries}", "-l:libccl.so.1"),
            *(f"-Wl,-rpath,{libraries}", f"-Wl,-rpath-link,{libraries}"),
        ],
        check=True,
    )
    return ctypes.CDLL(str(library))


def connect(comm: fd.Communicator, shim: ctypes.CDLL) -> AllReduce:
    address = ctypes.create_string_buffer(ADDRESS_BYTES)
    if comm.rank == 0:
        shim.begin(address)
    address.raw = comm.broadcast_object(address.raw)
    shim.join(comm.rank, comm.world_size, address)
    shim.all_reduce.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    return lambda x, out: shim.all_reduce(x.ctypes.data, out.ctypes.data, x.size)


def measure(
    comm: fd.Communicator, ways: dict[str, AllReduce], nbytes: int, rounds: int
) -> dict[str, float]:
    """Return the median over calls of the slower rank's time, in microseconds, for each way."""
    n = comm.world_size
    x = np.empty(nbytes // 4, np.float32)
    out = np.empty_like(x)
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, all_reduce in ways.items():
            took = np.empty(CALLS[nbytes])
            for call in range(len(took)):
                x[:] = comm.rank + call % 7
                comm.barrier()
                begin = time.perf_counter()
                all_reduce(x, out)
                took[call] = time.perf_counter() - begin
                assert (out == n * (call % 7) + n * (n - 1) / 2).all(), way
            times[way] += comm.all_reduce(took, "max").tolist()
    return {way: round(1e6 * statistics.median(each), 2) for way, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--offload", type=int, default=0, help="1: oneCCL uses a thread of its own")
    options = parser.parse_args()
    comm = fd.init()
    has_mpi = "PMI_RANK" in os.environ
    os.environ |= {
        "CCL_ATL_TRANSPORT": "mpi" if has_mpi else "ofi",
        "CCL_PROCESS_LAUNCHER": "hydra" if has_mpi else "none",
        "CCL_LOCAL_RANK": str(comm.rank),
        "CCL_LOCAL_SIZE": str(comm.world_size),
        "CCL_WORKER_OFFLOAD": str(options.offload),
        "CCL_LOG_LEVEL": "error",
        "FI_PROVIDER": "tcp",
    }
    with tempfile.TemporaryDirectory() as folder:
        shim = compiled(folder)
        ways: dict[str, AllReduce] = {
            "fastdist": lambda x, out: comm.all_reduce(x, out=out),
            "oneccl": connect(comm, shim),
        }
        for nbytes in CALLS:
            us = measure(comm, ways, nbytes, options.rounds)
            if comm.rank == 0:
                ratio = round(us["fastdist"] / us["oneccl"], 4)
                print(json.dumps({"bytes": nbytes, "us": us, "fastdist of oneccl": ratio}))
        comm.barrier()
        shim.end()


if __name__ == "__main__":
    main()
