"""Ranks of one machine use no network interface, so that none can be the wrong one.

Start it by `fastdist run -n 2 examples/asked/07_no_network_on_one_machine.py`. With `gloo` at its
end, each rank connects by TCP at the address that the machine's name stands for.
"""

import contextlib
import os
import sys
from pathlib import Path

import fastdist as fd
import numpy as np

os.environ["GLOO_SOCKET_IFNAME"] = "eth7"  # which this machine does not have


def tcp_sockets():
    """The TCP sockets of this process."""
    tables = [Path(f"/proc/self/net/{name}").read_text() for name in ("tcp", "tcp6")]
    inodes = {line.split()[9] for table in tables for line in table.splitlines()[1:]}
    links = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing itself
            links.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [link for link in links if link.removeprefix("socket:[").rstrip("]") in inodes]


if sys.argv[1:] == ["gloo"]:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(4))
else:
    comm = fd.init()
    assert comm.all_reduce(np.ones(4)).tolist() == [2.0] * 4
print(f"TCP sockets: {tcp_sockets()}")
assert tcp_sockets() == []
