"""Runs test files of torch's repository on the CPU, on Gloo or on fastdist in Gloo's place.

    python tests/integrations/torch_repository.py gloo|fastdist SOURCE [FILE ...] [--json FILE]

SOURCE is a checkout or an unpacked release of torch's sources, of about the installed torch's
version; FILE lies below `test/distributed` there. Ranks are forks of pytest's process, which saves
the import of torch in each.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

FILES = (
    "_composable/fsdp/test_fully_shard_autograd.py",
    "_composable/fsdp/test_fully_shard_clip_grad_norm_.py",
    "_composable/fsdp/test_fully_shard_comm.py",
    "_composable/fsdp/test_fully_shard_compile.py",
    "_composable/fsdp/test_fully_shard_dtensor.py",
    "_composable/fsdp/test_fully_shard_extensions.py",
    "_composable/fsdp/test_fully_shard_frozen.py",
    "_composable/fsdp/test_fully_shard_grad_scaler.py",
    "_composable/fsdp/test_fully_shard_ignore_params.py",
    "_composable/fsdp/test_fully_shard_init.py",
    "_composable/fsdp/test_fully_shard_memory.py",
    "_composable/fsdp/test_fully_shard_mixed_precision.py",
    "_composable/fsdp/test_fully_shard_overlap.py",
    "_composable/fsdp/test_fully_shard_state.py",
    "_composable/fsdp/test_fully_shard_state_dict.py",
    "_composable/fsdp/test_fully_shard_training.py",
    "tensor/test_api.py",
    "tensor/test_dtensor.py",
    "tensor/test_embedding_ops.py",
    "tensor/test_init.py",
    "tensor/test_math_ops.py",
    "tensor/test_matrix_ops.py",
    "tensor/test_optimizers.py",
    "tensor/test_random_ops.py",
    "tensor/test_tensor_ops.py",
    "tensor/parallel/test_parallelize_api.py",
    "tensor/parallel/test_tp_examples.py",
    "tensor/parallel/test_tp_style.py",
    "test_c10d_functional_native.py",
    "test_device_mesh.py",
    "test_functional_api.py",
    "checkpoint/test_checkpoint.py",
    "checkpoint/test_dtensor_checkpoint.py",
    "checkpoint/test_dtensor_resharding.py",
    "checkpoint/test_file_system_checkpoint.py",
    "checkpoint/test_fsdp_model_state.py",
    "checkpoint/test_hsdp_checkpoint.py",
    "checkpoint/test_pg_transport.py",
    "checkpoint/test_save_load_api.py",
    "checkpoint/test_state_dict.py",
    "checkpoint/test_state_dict_utils.py",
    "checkpoint/test_tp_checkpoint.py",
    "checkpoint/test_utils.py",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("backend", choices=["gloo", "fastdist"])
    parser.add_argument("source", type=Path)
    parser.add_argument("files", nargs="*", metavar="FILE")
    parser.add_argument("--json", help="write the outcome of each test to this file")
    options = parser.parse_args()
    outcomes: dict[str, dict[str, Any]] = {}
    for file in options.files or FILES:
        start = time.monotonic()
        ran = run_file(options.backend, options.source / "test" / "distributed" / file)
        outcomes |= {f"{file}::{name}": outcome for name, outcome in ran.items()}
        counted = count(ran)
        print(f"{file}: {counted} in {time.monotonic() - start:.0f} s", flush=True)
        if options.json:
            Path(options.json).write_text(json.dumps(outcomes, indent=1))
    print(count(outcomes))
    return int("failed" in count(outcomes))


def count(outcomes: dict[str, dict[str, Any]]) -> dict[str, int]:
    kinds = [outcome["kind"] for outcome in outcomes.values()]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def run_file(backend: str, file: Path) -> dict[str, dict[str, Any]]:
    """Run the tests of a file; return the kind of outcome, the seconds and the message of each."""
    with tempfile.TemporaryDirectory() as directory:
        report = Path(directory) / "report.xml"
        plugins = ["-p", "no:cacheprovider", "-p", "torch_repository", f"--rootdir={directory}"]
        pytest = ["-m", "pytest", "-q", "-c", os.devnull, *plugins, f"--junit-xml={report}"]
        paths = [str(Path(__file__).parent), str(file.parents[1]), os.environ.get("PYTHONPATH", "")]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
            "TEST_BACKEND": backend,
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
        }
        command = [sys.executable, *pytest, str(file)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if not report.exists():
            return {"": {"kind": "failed", "seconds": 0, "message": done.stdout + done.stderr}}
        outcomes = {}
        for case in ElementTree.parse(report).iter("testcase"):
            kind, message = "passed", ""
            for child in case:
                if child.tag in ("failure", "error"):
                    kind = "failed"
                elif child.tag == "skipped":
                    kind = "skipped"
                else:
                    continue
                message = f"{child.get('message')}\n{child.text}"
            name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
            seconds = round(float(case.get("time", 0)), 2)
            outcomes[name] = {"kind": kind, "seconds": seconds, "message": message}
        return outcomes


def pytest_configure() -> None:
    """In pytest's process, of which this file is a plugin."""
    import torch.multiprocessing
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    torch.multiprocessing.set_start_method("fork")
    fork = torch.multiprocessing.get_context("fork").Process
    MultiProcessTestCase._spawn_processes = lambda self: self._start_processes(fork)
    if os.environ["TEST_BACKEND"] == "fastdist":
        from torch_suite import take_place_of_gloo

        take_place_of_gloo()


if __name__ == "__main__":
    sys.exit(main())
