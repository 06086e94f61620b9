"""Keeps the buffers of modules, such as BatchNorm's running statistics, equal on all replicas.

At the end of backward, each buffer that forward has written is replaced by its mean over replicas,
weighted by examples. Running statistics are linear in the statistics of each batch, so averaging
them in every step gives the same result as averaging them once at the end (tf.distribute: ON_READ,
MEAN), and reading them needs no communication. A replica that has not written a module's buffers,
or had no examples, contributes nothing to them.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from fastdist.collectives.communicator import Communicator, Work
from fastdist.replicas.variables import Variable
from fastdist.training.modules import is_materialized


@dataclass(slots=True)
class _Buffered:
    """A module with buffers, and the versions of its buffers at the last check."""

    place: int
    module: weakref.ref[nn.Module]
    seen: list[tuple[weakref.ref[torch.Tensor], int]] = field(default_factory=list)
    is_written: bool = False


class BufferSync:
    """The buffers of one replica's modules.

    Args:
        modules: modules with buffers, each with its place among all modules with buffers that the
            strategy has had. The place is the same on all replicas; replicas may still hold
            different modules.
        places: the number of places.
    """

    def __init__(self, modules: Sequence[tuple[int, nn.Module]], places: int) -> None:
        self.places = places
        self._modules = [
            _Buffered(place, weakref.ref(module), _stamps(module)) for place, module in modules
        ]
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    def keep(self) -> None:
        """Save the buffers; writes until `restore` are undone, since there are no examples."""
        self._kept = [(buffer, buffer.clone()) for buffer in self.floating()]

    def restore(self) -> None:
        """Write back the values that `keep` saved, if it was called."""
        if self._kept is None:
            return
        with torch.no_grad():
            for buffer, kept in self._kept:
                buffer.copy_(kept)
        self._kept = None
        for buffered in self._modules:
            module = buffered.module()
            if module is not None:
                buffered.seen = _stamps(module)

    def weights(self, weight: float) -> torch.Tensor:
        """Return this replica's weights in the mean of each module's buffers: 0 or `weight`.

        Args:
            weight: this replica's examples, or 1.

        Returns:
            A tensor of shape [2, places]: the weights, and 1 for each module that was written. The
            caller sums it over replicas and passes the sum to `send`.
        """
        result = torch.zeros(2, self.places)
        self._note_written()
        self.restore()
        for buffered in self._modules:
            if buffered.is_written:
                result[0, buffered.place] = weight
                result[1, buffered.place] = 1.0
        return result

    def send(self, communicator: Communicator, weight: float, totals: torch.Tensor) -> Work | None:
        """Start to average the buffers that any replica has written. Every replica must call.

        Args:
            communicator: connects all replicas.
            weight: as for `weights`.
            totals: the sum over replicas of the results of `weights`.
        """
        total_of, writers_of = totals.tolist()
        parts: dict[int, torch.Tensor] = {}  # by id: modules may share a buffer
        with torch.no_grad():
            for buffered in self._modules:
                module, total = buffered.module(), total_of[buffered.place]
                own = weight if buffered.is_written else 0.0
                buffered.is_written = False
                if module is None or not total > 0.0:
                    continue
                if writers_of[buffered.place] < communicator.world_size:
                    _share_counts(communicator, module, own / total)
                for buffer in _floating(module):
                    if id(buffer) in parts:
                        continue
                    if own:
                        buffer.mul_(own / total)
                    else:
                        buffer.zero_()
                    parts[id(buffer)] = buffer
                buffered.seen = _stamps(module)
        if not parts:
            return None
        work: Work = communicator.all_reduce(list(parts.values()), "sum", async_op=True)
        return work

    def take_written(self) -> list[torch.Tensor]:
        """Return the buffers written since the last call; the caller must synchronize them."""
        self._note_written()
        self.restore()
        written = []
        for buffered in self._modules:
            module = buffered.module()
            if buffered.is_written and module is not None:
                written += _floating(module)
            buffered.is_written = False
        return written

    def floating(self) -> list[torch.Tensor]:
        """All buffers that may be averaged."""
        modules = (buffered.module() for buffered in self._modules)
        alive = [module for module in modules if module is not None]
        return list({id(b): b for module in alive for b in _floating(module)}.values())

    def _note_written(self) -> None:
        # torch's batch_norm bumps only the version of num_batches_tracked, not of its statistics.
        for buffered in self._modules:
            module = buffered.module()
            if module is None:
                continue
            now = _stamps(module)
            if len(now) != len(buffered.seen) or any(
                a() is not b() or v != w for (a, v), (b, w) in zip(now, buffered.seen, strict=True)
            ):
                buffered.is_written |= self._kept is None
                buffered.seen = now


def buffered_modules(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules that register buffers themselves, each once; no `Variable`."""
    modules = {id(m): m for root in roots for m in root.modules() if m._buffers}
    return [module for module in modules.values() if not isinstance(module, Variable)]


def _share_counts(communicator: Communicator, module: nn.Module, share: float) -> None:
    """Replace integer buffers by their weighted mean over replicas, rounded.

    So a replica that has not written the module gets the counts of the replicas that have. Every
    replica must call, each with its share in the mean.
    """
    for buffer in _materialized(module):
        if not buffer.is_floating_point() and not buffer.is_complex():
            mean = (
                buffer.double() * share if share else torch.zeros_like(buffer, dtype=torch.double)
            )
            communicator.all_reduce(mean)
            buffer.copy_(mean.round())


def _stamps(module: nn.Module) -> list[tuple[weakref.ref[torch.Tensor], int]]:
    return [(weakref.ref(buffer), buffer._version) for buffer in _materialized(module)]


def _materialized(module: nn.Module) -> list[torch.Tensor]:
    buffers = module._buffers.values()
    return [buffer for buffer in buffers if buffer is not None and is_materialized(buffer)]


def _floating(module: nn.Module) -> list[torch.Tensor]:
    return [buffer for buffer in _materialized(module) if buffer.is_floating_point()]
