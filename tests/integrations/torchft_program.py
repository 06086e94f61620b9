"""One replica group of a training with torchft: python torchft_program.py REPLICA FILE LAST.

TORCHFT_LIGHTHOUSE is the lighthouse's address. For each step that is committed, FILE gets a line:
the step, the number of participants and a sum over the model's bytes. Once there is a file LAST, it
holds the number of the last step.
"""

import hashlib
import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from fastdist.integrations.torchft import ProcessGroupFastdist
from torchft import DistributedDataParallel, Manager, Optimizer


def digest(model: torch.nn.Module) -> str:
    total = hashlib.sha256()
    for value in model.state_dict().values():
        total.update(value.numpy().tobytes())
    return total.hexdigest()[:16]


def train(replica: int, file: Path, last: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupFastdist(timeout=timedelta(seconds=10)),
        min_replica_size=1,
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"replica_{replica}",
        timeout=timedelta(seconds=10),
        hostname="localhost",
    )
    parallel, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    while not last.exists() or manager.current_step() < int(last.read_text()):
        step = manager.current_step()
        draw = torch.Generator().manual_seed(1000 * step + replica)
        x = torch.randn(32, 20, generator=draw)
        optimizer.zero_grad()  # asks for a quorum
        torch.nn.functional.mse_loss(parallel(x), x.sum(1, keepdim=True)).backward()
        optimizer.step()  # if all replicas can
        if manager.current_step() == step + 1:
            with file.open("a") as out:
                print(step + 1, manager.num_participants(), digest(model), file=out)
        time.sleep(0.02)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    torch.manual_seed(int(sys.argv[1]))
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port)}
    train(int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]))
