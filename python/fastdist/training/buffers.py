"""Keeps the buffers of modules, such as BatchNorm's running statistics, equal on all replicas.

At the end of backward, where replicas communicate outside runs, and before a run whose batch gives
replicas other shares than the run before it, each buffer that forward has written is replaced by
its mean over replicas, weighted by examples. Running statistics are linear in the statistics of
each batch, so averaging them in every step gives the same result as averaging them when they are
read (tf.distribute: ON_READ, MEAN). Integer buffers stay each replica's own.

Other buffers, such as a codebook's sums, a queue or a counter of examples, are no means of batches:
the first exchanges compare those of modules that are not known to keep means, and warn.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fastdist.collectives.communicator import Communicator
from fastdist.collectives.types import Work
from fastdist.replicas.variables import Variable
from fastdist.training.frameworks import inner_modules, moving_averages, state_of
from fastdist.training.graphed import is_capturing
from fastdist.training.modules import is_materialized

_LOOKS = 3  # exchanges that compare buffers
_CLOSE = 1e-3  # relative: equal buffers' mean is rounded
_MOST = 1 << 16  # elements of an integer buffer that are compared
_OF_MEANS = ("running", "moving", "mean")  # in names of buffers that are means, by what they say


@dataclass(slots=True)
class BufferedModule:
    """A module with buffers."""

    place: int  # its number among all that the strategy has had; the same on all replicas
    keeps_means: bool  # all buffers are known to be running means
    ref: weakref.ref[nn.Module]
    # Of each buffer: replicas that have released the module contribute zeros of these shapes.
    specs: dict[str, tuple[torch.Size, torch.dtype]]
    # The buffers' versions at the last check; None until a `BufferSync` watches the module.
    seen: list[tuple[weakref.ref[torch.Tensor], int]] | None = None
    is_written: bool = False  # by forward, since the buffers were averaged

    @classmethod
    def of(cls, place: int, module: nn.Module) -> BufferedModule:
        """Describe a module as it is now."""
        specs = {name: (b.shape, b.dtype) for name, b in _materialized(module).items()}
        return cls(place, _keeps_means(module), weakref.ref(module), specs)

    def look(self) -> None:
        """Record the present versions of the buffers as seen."""
        module = self.ref()
        self.seen = [] if module is None else _stamps(module)

    def buffers(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the buffers by name; zeros in their place if the module was released."""
        module = self.ref()
        if module is not None:
            return _materialized(module)
        return {n: torch.zeros(s, dtype=d, device=device) for n, (s, d) in self.specs.items()}


class BufferSync:
    """The buffers of one replica's modules, which are the same list on all replicas.

    `examples` are those of each replica in the runs since buffers were averaged; None if all
    replicas weigh the same.
    """

    def __init__(
        self,
        modules: Sequence[BufferedModule],
        places: int,
        examples: tuple[int, ...] | None = None,
    ) -> None:
        self.places = places
        self.examples = examples
        self._modules = modules
        for buffered in modules:
            if buffered.seen is None:
                buffered.look()
        self._kept: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self._looks = _LOOKS  # the same on all replicas
        # The module's and the buffer's name, the mean to be, and what this replica wrote.
        self._compared: list[tuple[str, str, torch.Tensor, torch.Tensor]] = []
        self._different: dict[str, list[str]] = {}  # names of buffers, by that of their module
        self._has_warned = False

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
            buffered.look()

    def _weight(self, replica: int) -> float:
        return 1.0 if self.examples is None else float(self.examples[replica])

    def weights(self, replica: int) -> torch.Tensor:
        """Return a tensor of shape [2, places], whose sum over replicas is an argument of `send`.

        It has the weight of a replica in the mean of each module's buffers, its examples or 1, and
        1 for each module that was written; 0 where the replica has written nothing.
        """
        result = torch.zeros(2, self.places)
        self._note_written()
        self.restore()
        for buffered in self._modules:
            if buffered.is_written:
                result[0, buffered.place] = self._weight(replica)
                result[1, buffered.place] = 1.0
        return result

    def send(self, communicator: Communicator, totals: torch.Tensor) -> Work | None:
        """Start to average the buffers that any replica has written. Every replica must call."""
        total_of, writers_of = totals.tolist()
        seen: dict[int, torch.Tensor] = {}  # by id: modules may share a buffer
        parts: list[torch.Tensor] = []
        alive = self.floating()
        device = alive[0].device if alive else torch.device("cpu")
        with torch.no_grad():
            for buffered in self._modules:
                total = total_of[buffered.place]
                own = self._weight(communicator.rank) if buffered.is_written else 0.0
                buffered.is_written = False
                if not total > 0.0:
                    continue
                buffers = buffered.buffers(device)
                looks = self._looks > 0 and not buffered.keeps_means and not is_capturing()
                if writers_of[buffered.place] < communicator.world_size:
                    _share_counts(communicator, list(buffers.values()), own / total)
                for name, buffer in buffers.items():
                    is_float = buffer.is_floating_point()
                    if id(buffer) in seen or not (is_float or looks) or buffer.is_complex():
                        continue
                    seen[id(buffer)] = buffer
                    mean = buffer if is_float else _sample(buffer).double()
                    if looks and own and not any(word in name for word in _OF_MEANS):
                        owner = type(buffered.ref()).__name__
                        self._compared.append((owner, name, mean, mean.clone()))
                    if own:
                        mean.mul_(own / total)
                    else:
                        mean.zero_()
                    parts.append(mean)
                buffered.look()
        self._looks -= bool(parts) and self._looks > 0
        if not parts:
            return None
        work: Work = communicator.all_reduce(parts, "sum", async_op=True)
        return work

    def compare(self) -> None:
        """Compare the means with what this replica wrote, after the work of `send` has ended."""
        for owner, name, mean, own in self._compared:
            if not torch.allclose(mean, own, _CLOSE, equal_nan=True):
                self._different.setdefault(owner, []).append(name)
        self._compared = []

    def report(self, is_chief: bool) -> None:
        """Warn, once and on one replica, of buffers that replicas wrote differently."""
        different, self._different = self._different, {}
        if not different or not is_chief or self._has_warned:
            return
        self._has_warned = True
        for name, buffers in different.items():
            warnings.warn(
                f"{name} has buffers that each replica wrote differently: "
                f"{', '.join(dict.fromkeys(buffers))}. They became their mean over replicas, as is "
                "right for running means of batches, or stayed each replica's own if they are "
                "integers. For sums, counts, codebooks or queues compute on the examples of all "
                "replicas, x = fastdist.get_replica_context().all_gather(x), before forward writes "
                "them",
                stacklevel=6,  # the line that calls run
            )

    def take_written(self) -> list[torch.Tensor]:
        """Return the buffers written since the last call; the caller must synchronize them."""
        self._note_written()
        self.restore()
        written = []
        for buffered in self._modules:
            module = buffered.ref()
            if buffered.is_written and module is not None:
                written += _floating(module)
            buffered.is_written = False
        return written

    def floating(self) -> list[torch.Tensor]:
        """Return all buffers that may be averaged."""
        alive = [module for b in self._modules if (module := b.ref()) is not None]
        return list({id(b): b for module in alive for b in _floating(module)}.values())

    def _note_written(self) -> None:
        # torch's batch_norm bumps only the version of num_batches_tracked, not of its statistics.
        for buffered in self._modules:
            module = buffered.ref()
            if module is None:
                continue
            now, seen = _stamps(module), buffered.seen or []
            if len(now) != len(seen) or any(
                a() is not b() or v != w for (a, v), (b, w) in zip(now, seen, strict=True)
            ):
                buffered.is_written |= self._kept is None
                buffered.seen = now


def buffered_modules(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules with buffers of their own, each once, without `Variable`s."""
    modules = {id(m): m for root in roots for m in inner_modules(root) if state_of(m)}
    return [module for module in modules.values() if not isinstance(module, Variable)]


def _keeps_means(module: nn.Module) -> bool:
    """Return True for a normalization, and for a module whose state is known to be means."""
    is_norm = any("Norm" in kind.__name__ for kind in type(module).__mro__)
    return is_norm or bool(moving_averages(module))


def _sample(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.flatten()[:: -(-buffer.numel() // _MOST) or 1]


def _share_counts(
    communicator: Communicator, buffers: Sequence[torch.Tensor], share: float
) -> None:
    """Replace integer buffers by their mean over replicas, rounded, by each replica's share.

    A replica that has not written the module gets the counts of the replicas that have.
    """
    for buffer in buffers:
        if not buffer.is_floating_point() and not buffer.is_complex():
            mean = (
                buffer.double() * share if share else torch.zeros_like(buffer, dtype=torch.double)
            )
            communicator.all_reduce(mean)
            buffer.copy_(mean.round())


def _stamps(module: nn.Module) -> list[tuple[weakref.ref[torch.Tensor], int]]:
    return [(weakref.ref(buffer), buffer._version) for buffer in _materialized(module).values()]


def _materialized(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t for name, t in state_of(module).items() if is_materialized(t)}


def _floating(module: nn.Module) -> list[torch.Tensor]:
    return [buffer for buffer in _materialized(module).values() if buffer.is_floating_point()]
