"""Measures the memory that training by a strategy adds to a process, next to plain torch.

    python benchmarks/gradient_memory.py

Two ranks train the MLP of 19 million parameters, once independently and once together, each time in
new processes. Prints one JSON object, in MiB; the peak is the larger of the ranks' peaks.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys

import fastdist as fd
from strategy_step import batch_of, mlp, plain_step, strategy_step

MIB = 1 << 20


def train(together: bool) -> None:
    """Prints this rank's peak."""
    strategy = fd.MirroredStrategy()
    batch = batch_of("mlp", 0)
    step = strategy_step(strategy, mlp, [batch]) if together else plain_step(mlp, batch)
    for _ in range(10):
        step()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def peak_mib(*options: str) -> float:
    command = [sys.executable, "-m", "fastdist", "run", "-n", "2", "--no-prefix", __file__]
    done = subprocess.run([*command, *options], check=True, capture_output=True, text=True)
    return max(map(float, done.stdout.split()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", choices=["plain", "together"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        train(options.rank == "together")
        return
    plain, together = peak_mib("--rank", "plain"), peak_mib("--rank", "together")
    parameters = sum(p.numel() * p.element_size() for p in mlp().parameters()) / MIB
    bucket = fd.CommunicationOptions().bucket_bytes / MIB
    print(
        json.dumps(
            {
                "parameters_mib": round(parameters, 1),
                "bucket_mib": bucket,
                "plain_peak_mib": round(plain, 1),
                "strategy_peak_mib": round(together, 1),
                "added_mib": round(together - plain, 1),
                "passes": together - plain <= bucket,
            }
        )
    )


if __name__ == "__main__":
    main()
