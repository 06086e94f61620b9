"""torch_xla's mode of one process for each device, which needs TPUs to run.

What can be had without: the program that torch_xla makes of the engine's calls for two devices; and
three processes whose exchanges of data something stands in for: torch_xla's functions for it
(`xla_model`) are done by the host's communicator, on real XLA tensors.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tpu_pieces import N, on_devices

pytestmark = [*on_devices, pytest.mark.skipif(N != 1, reason="is the same for CPU_NUM_DEVICES=1")]

PROGRAM = """
import fastdist as fd, torch, torch_xla
from fastdist.tpu.engine import ProcessEngine

bindings = torch_xla._XLAC
bindings._xla_set_replication_devices(bindings._xla_get_devices())
comm = fd.Communicator(ProcessEngine(), 60)
assert (comm.rank, comm.world_size) == (0, 2)
own = [torch.ones(3), torch.ones(2, 2).double(), torch.ones(4), torch.ones(5).double()]
own = [tensor.to("xla") for tensor in own]
comm.all_reduce(own, "mean")
print(bindings._get_xla_tensors_hlo(own))
try:
    comm.broadcast_object("alone")
except fd.errors.UnsupportedError as error:
    print(error)
"""

RANK = """
import fastdist as fd, numpy as np, pytest, torch, torch_xla
from fastdist.tpu.engine import ProcessEngine
from fastdist.errors import CollectiveMismatchError

hosts = fd.init()
rank, n = hosts.rank, hosts.world_size

class Exchanges:
    @staticmethod
    def all_reduce(op, tensors, scale=1.0):
        for tensor in tensors:
            tensor.copy_(hosts.all_reduce(tensor.cpu(), op) * scale)

    @staticmethod
    def all_gather(tensor, dim):
        assert dim == 0
        return hosts.all_gather(tensor.cpu()).to("xla")

    @staticmethod
    def all_to_all(tensor, split_dimension, concat_dimension, split_count):
        assert (split_dimension, concat_dimension, split_count) == (0, 0, n)
        return hosts.all_to_all(tensor.cpu()).to("xla")

torch_xla.runtime.global_ordinal = lambda: rank
torch_xla.runtime.world_size = lambda: n
engine = ProcessEngine(hosts.engine)
engine._model = Exchanges
comm = fd.Communicator(engine, 60)

rows = torch.arange(n * 2.0 * n * 3).reshape(n, 2 * n, 3) % 7
own = rows[rank].to("xla")
cases = {
    "sum": (comm.all_reduce(own.clone()), rows.sum(0)),
    "mean": (comm.all_reduce(own.clone(), "mean"), rows.mean(0)),
    "min": (comm.all_reduce(own.clone(), "min"), rows.amin(0)),
    "reduce": (comm.reduce(own.clone(), "max", root=1), rows.amax(0)),
    "broadcast": (comm.broadcast(own.clone(), 1), rows[1]),
    "all_gather": (comm.all_gather(own), rows.flatten(0, 1)),
    "scatter": (comm.scatter(own, 1, out=own[:2] * 0), rows[1].tensor_split(n)[rank]),
    "reduce_scatter": (comm.reduce_scatter(own), rows.sum(0).tensor_split(n)[rank]),
    "all_to_all": (comm.all_to_all(own), torch.cat([r.tensor_split(n)[rank] for r in rows])),
}
for name, (got, wanted) in cases.items():
    torch.testing.assert_close(got.cpu(), wanted, msg=lambda text: f"{name}: {text}")
flags = torch.tensor([rank == 0, rank >= 0, False]).to("xla")
mixed = [flags, own.double(), own.to(torch.int32)]
comm.all_reduce(mixed)
assert mixed[0].tolist() == [True, True, False]
assert mixed[1].cpu().equal(rows.sum(0).double()) and mixed[2].cpu().equal(rows.sum(0).int())
assert comm.all_reduce(np.array([rank, 1.0])).tolist() == [n * (n - 1) / 2, n]
assert comm.all_gather_object({"rank": rank}) == [{"rank": i} for i in range(n)]
assert comm.broadcast_object(rank, 2) == 2
comm.barrier()
with pytest.raises(CollectiveMismatchError) as caught:
    if rank == 2:
        comm.all_gather(own)
    else:
        comm.all_reduce(own)
for i in range(n):
    call = "all_gather(float32" if i == 2 else "all_reduce(float32"
    assert f"rank {i}: {call}" in str(caught.value), caught.value
    assert "rank.py:" in str(caught.value)
assert comm.all_reduce(own[:1, :1] * 0 + 1.0).item() == n
print("rank", rank, "done")
"""


def ran(*command: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env=os.environ | environ,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_list_is_one_tuple_all_reduce_for_each_dtype() -> None:
    program = ran("-c", PROGRAM, CPU_NUM_DEVICES="2")
    assert program.count(" all-reduce(") == 2
    assert "(f32[3]{0}, f32[4]{0}, f32[]) all-reduce(" in program
    assert "(f64[2,2]{1,0}, f64[5]{0}, f64[]) all-reduce(" in program
    assert "arrays on the host go to other processes by ProcessEngine(peers)" in program


def test_three_processes(tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    said = ran("-m", "fastdist", "run", "-n", "3", str(script))
    assert all(f"rank {rank} done" in said for rank in range(3))
