"""Keeps what modules write into their buffers, BatchNorm's running statistics, alike on replicas.

A buffer that forward has written becomes the mean over replicas, at the end of the next backward.
Running statistics are averages that are linear in what each replica has seen, so that averaging
them in each step gives what averaging them once in the end would (tf.distribute: ON_READ, MEAN),
and no reader has to communicate.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fastdist.collectives.communicator import Communicator, Work
from fastdist.replicas.variables import Variable
from fastdist.training.modules import is_materialized


class BufferSync:
    """The buffers of one replica's modules.

    Args:
        communicator: of all replicas.
        roots: the modules, alike on all replicas.
    """

    def __init__(self, communicator: Communicator, roots: Sequence[nn.Module]) -> None:
        self._communicator = communicator
        modules = {id(m): m for root in roots for m in root.modules() if _has_buffers(m)}
        self._modules = list(modules.values())
        self._seen: list[list[tuple[torch.Tensor, int]]] = [_stamps(m) for m in self._modules]
        self._written: set[int] = set()
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(self) -> None:
        """Until `restore`, what is written does not count: this replica has no examples."""
        self._kept = [(buffer, buffer.clone()) for buffer in self.floating()]

    def restore(self) -> None:
        """Put back what `keep` found, if it was called."""
        if not self._kept:
            return
        self._note_written()
        with torch.no_grad():
            for buffer, kept in self._kept:
                buffer.copy_(kept)
        self._seen = [_stamps(module) for module in self._modules]
        self._kept = []

    def send(self) -> Work | None:
        """Start to average what was written since the last time. Every replica must call."""
        written = self.take_written()
        if not written:
            return None
        work: Work = self._communicator.all_reduce(written, "mean", async_op=True)
        return work

    def take_written(self) -> list[torch.Tensor]:
        """What was written since the last time; it is up to the caller to make it alike."""
        self._note_written()
        self.restore()
        written = [buffer for i in sorted(self._written) for buffer in _floating(self._modules[i])]
        self._written.clear()
        return written

    def floating(self) -> list[torch.Tensor]:
        """All buffers that may be averaged."""
        return [buffer for module in self._modules for buffer in _floating(module)]

    def _note_written(self) -> None:
        # Torch's batch_norm writes its statistics without a trace; the count beside them has one.
        for i, (module, seen) in enumerate(zip(self._modules, self._seen, strict=True)):
            now = _stamps(module)
            if len(now) != len(seen) or any(
                a is not b or v != w for (a, v), (b, w) in zip(now, seen, strict=True)
            ):
                self._written.add(i)
                self._seen[i] = now


def _has_buffers(module: nn.Module) -> bool:
    return bool(module._buffers) and not isinstance(module, Variable)


def _stamps(module: nn.Module) -> list[tuple[torch.Tensor, int]]:
    return [
        (buffer, buffer._version)
        for buffer in module._buffers.values()
        if buffer is not None and is_materialized(buffer)
    ]


def _floating(module: nn.Module) -> list[torch.Tensor]:
    return [buffer for buffer, _ in _stamps(module) if buffer.is_floating_point()]
