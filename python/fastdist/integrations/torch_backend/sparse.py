"""all_reduce of sparse tensors: gathers all ranks' indices and values, and adds them up."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import ReduceOp

from fastdist.collectives.communicator import Communicator


def all_reduce_sparse(comm: Communicator, tensor: torch.Tensor, op: Any, timeout_s: float) -> None:
    """Add up a sparse COO tensor over all ranks, in place."""
    if tensor.layout is not torch.sparse_coo or op != ReduceOp.SUM:
        raise ValueError(
            f"sparse tensors can only be summed, in the COO layout; got {tensor.layout} and {op}"
        )
    own = tensor.detach().coalesce()
    count = torch.tensor([own._nnz()])
    counts = comm.all_gather(count, timeout=timeout_s).tolist()
    splits = [int(n) for n in counts]
    # One row per element: indices and values are gathered along axis 0.
    indices = comm.all_gather(own.indices().T.contiguous(), splits=splits, timeout=timeout_s)
    values = comm.all_gather(own.values().contiguous(), splits=splits, timeout=timeout_s)
    total = torch.sparse_coo_tensor(indices.T, values, tensor.shape, check_invariants=False)
    with torch.no_grad():
        tensor.copy_(total.coalesce())
