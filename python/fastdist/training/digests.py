"""Digests of training for every k-th step: replicas compare theirs, and the chief writes them.

After the step each replica hashes its own gradients, before they were reduced, and the parameters
and optimizer states, which must be equal on all replicas. A replica whose memory or processor has
flipped a bit is found in the next recorded step. `fastdist compare-runs` compares two files.
"""

from __future__ import annotations

import json
import socket
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from fastdist._config import Recording
from fastdist.collectives.communicator import Communicator
from fastdist.errors import FastdistError
from fastdist.training.contributions import ReducedParameter
from fastdist.training.graphed import is_capturing


class StepDigests:
    """The digests of one replica.

    Args:
        recording: the file, and how many steps lie between two records.
        has_all_states: True if each replica has all states of the optimizers.
    """

    def __init__(self, recording: Recording, has_all_states: bool) -> None:
        self._path, self._every = recording.path, recording.every
        self._has_all_states = has_all_states
        self._steps = 0  # runs so far in which an optimizer has stepped
        self._is_due = False
        self._has_stepped = False
        self._own = 0
        self._gradients: dict[str, int] = {}
        self._names: dict[torch.Tensor, str] = {}

    def watch(self, parameters: Sequence[ReducedParameter], workers: Communicator) -> None:
        """Set the parameters, and go on from the chief's step. Every replica must call."""
        several = len({reduced.model for reduced in parameters}) > 1
        self._names = {
            parameter: f"{reduced.model}/{reduced.name}" if several else reduced.name
            for reduced in parameters
            if (parameter := reduced.ref()) is not None
        }
        self._steps = int(workers.broadcast(np.array([self._steps]))[0])

    def begin_run(self) -> None:
        """Start with a run."""
        self._is_due = (self._steps + 1) % self._every == 0 and not is_capturing()
        self._has_stepped = False
        self._own, self._gradients = 0, {}

    def note_own(self, gradients: Iterable[torch.Tensor]) -> None:
        """Hash gradients of this replica that are about to be reduced."""
        if self._is_due:
            for gradient in gradients:
                self._own = _digest(gradient, self._own)

    def note_step(self) -> None:
        """Hash the gradients with which an optimizer is about to step."""
        self._has_stepped = True
        if self._is_due:
            for parameter, name in self._names.items():
                if parameter.grad is not None and name not in self._gradients:
                    self._gradients[name] = _digest(parameter.grad)

    def end_run(self, workers: Communicator, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Compare and write the digests if this step is recorded. Every replica must call.

        Raises:
            FastdistError: replicas have different parameters or states; the message names them.
        """
        if not self._has_stepped:
            return
        self._steps += 1
        if not self._is_due:
            return
        parameters = {name: _digest(p) for p, name in self._names.items()}
        states = {
            f"{key} of {self._names[parameter]}": _digest(value)
            for optimizer in optimizers
            for parameter, state in optimizer.state.items()
            if self._has_all_states and parameter in self._names
            for key, value in state.items()
            if isinstance(value, torch.Tensor)
        }
        equal = parameters | states
        row = np.array([[self._own, *equal.values()]], np.uint32)
        table = workers.all_gather(row)
        self._compare(table[:, 1:], list(equal), workers)
        if workers.rank == 0:
            self._write(table[:, 0].tolist(), parameters, states)

    def _compare(self, table: np.ndarray, names: list[str], workers: Communicator) -> None:
        """Raise FastdistError if the rows of the replicas differ."""
        columns = (table != table[0]).any(0).nonzero()[0]
        if not len(columns):
            return
        column = table[:, columns[0]].tolist()
        ((most, count),) = Counter(column).most_common(1)
        others = [rank for rank, digest in enumerate(column) if digest != most]
        if 2 * count <= len(column):  # no majority
            others = list(range(len(column)))
        hosts = workers.all_gather_object(socket.gethostname())
        whose = " and ".join(f"{rank} (on {hosts[rank]})" for rank in others)
        what, more = names[columns[0]], len(columns) - 1
        others_too = f" and {more} more" if more else ""
        raise FastdistError(
            f"after step {self._steps}, {what}{others_too} is not the same on all replicas: "
            f"replica{'s' * (len(others) > 1)} {whose} differ{'s' * (len(others) == 1)}"
            f"{'' if len(others) == len(column) else f' from the {count} others'}. Either the "
            "program has changed it on one replica alone, or memory or a processor has failed "
            "there",
            tuple(others),
        )

    def _write(self, own: list[int], parameters: dict[str, int], states: dict[str, int]) -> None:
        record = {
            "step": self._steps,
            "replicas": [f"{digest:08x}" for digest in own],
            "gradients": _hexadecimal(self._gradients),
            "parameters": _hexadecimal(parameters),
            "states": _hexadecimal(states),
        }
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _digest(tensor: torch.Tensor, begin: int = 0) -> int:
    """Return the CRC-32 of a tensor's bytes, after those with the CRC-32 `begin`."""
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().data, begin)


def _hexadecimal(digests: dict[str, int]) -> dict[str, str]:
    return {name: f"{digest:08x}" for name, digest in digests.items()}
