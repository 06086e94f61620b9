"""Checks that replicas hold bitwise equal tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fastdist.collectives.communicator import Communicator
from fastdist.errors import FastdistError
from fastdist.training.modules import tensor_digest


def require_in_sync(
    workers: Communicator | None, replicas: Sequence[Sequence[tuple[str, torch.Tensor]]]
) -> None:
    """Compare hashes of named tensors over all replicas. Every worker must call.

    Args:
        workers: connects all processes; None if this is the only process.
        replicas: for each local replica, its tensors with their names.

    Raises:
        FastdistError: the tensors differ; the message names the first tensor that differs, and
            the replicas that differ from replica 0.
    """
    digests = [{name: tensor_digest(tensor) for name, tensor in named} for named in replicas]
    if workers is not None:
        digests = [rows for worker in workers.all_gather_object(digests) for rows in worker]
    for name, digest in digests[0].items():
        differing = tuple(r for r, rows in enumerate(digests) if rows.get(name, digest) != digest)
        if differing:
            raise FastdistError(
                f"replicas are out of sync: {name} differs on replicas {list(differing)} from "
                f"replica 0. Was it changed on one replica only?",
                differing,
            )
