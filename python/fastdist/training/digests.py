"""Digests of training for every k-th step: replicas compare theirs, and the chief writes them.

After the step each replica hashes its own gradients, before they were reduced, and the parameters
and optimizer states, which must be equal on all replicas. A replica whose memory or processor has
flipped a bit is found in the next recorded step. `fastdist compare-runs` compares two files.
"""

from __future__ import annotations

import json
import socket
import warnings
import weakref
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fastdist._config import Recording
from fastdist.collectives.communicator import Communicator
from fastdist.errors import FastdistError
from fastdist.training.contributions import ReducedParameter
from fastdist.training.graphed import is_capturing
from fastdist.training.modules import bytes_of


@dataclass(frozen=True, slots=True)
class _Digests:
    host: str
    threads: int  # of an operation of torch, on which bits depend
    own: int  # of its gradients before they were reduced
    shared: dict[str, int]  # of parameters, and of gradients that a sharded optimizer stepped by
    states: dict[str, int]  # of a sharded optimizer those that the replica owns


class StepDigests:
    """Takes the digests of one replica."""

    steps = 0  # of this process: runs in which an optimizer has stepped

    def __init__(self, recording: Recording, is_sharded: bool) -> None:
        self._recording = recording
        self._is_sharded = is_sharded
        self._is_exact = True  # False if replicas may round differently
        self._has_stepped = False
        self._can_write = True
        self._own = 0
        self._gradients: dict[str, int] = {}
        self._parameters: dict[str, weakref.ref[torch.nn.Parameter]] = {}

    def watch(
        self, parameters: Sequence[ReducedParameter], workers: Communicator, is_exact: bool
    ) -> None:
        """Set the parameters, and go on from the chief's step. Every replica must call."""
        has_several_models = len({reduced.model for reduced in parameters}) > 1
        self._parameters = {
            f"{reduced.model}/{reduced.name}" if has_several_models else reduced.name: reduced.ref
            for reduced in parameters
        }
        self._is_exact = is_exact
        StepDigests.steps = int(workers.broadcast(np.array([self.steps]))[0])

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, ref in self._parameters.items():
            if (parameter := ref()) is not None:
                yield name, parameter

    @property
    def _is_due(self) -> bool:
        return (self.steps + 1) % self._recording.every == 0 and not is_capturing()

    def note_own(self, gradients: Iterable[torch.Tensor]) -> None:
        """Hash gradients of this replica that are about to be reduced."""
        if self._is_due:
            for gradient in gradients:
                self._own = zlib.crc32(bytes_of(gradient), self._own)

    def note_step(self) -> None:
        """Hash the gradients with which an optimizer is about to step."""
        self._has_stepped = True
        if self._is_due:
            for name, parameter in self._named():
                if parameter.grad is not None and name not in self._gradients:
                    self._gradients[name] = zlib.crc32(bytes_of(parameter.grad))

    def end_run(
        self, workers: Communicator | None, optimizers: Sequence[torch.optim.Optimizer | None]
    ) -> None:
        """Compare and write the digests if this step is recorded. Every replica must call.

        The step of a single replica (`workers` is None) is counted, and not recorded. `optimizers`
        are those whose states replicas have.
        """
        if not self._has_stepped:
            return
        is_due = self._is_due
        StepDigests.steps += 1
        own, gradients = self._own, self._gradients
        self._has_stepped, self._own, self._gradients = False, 0, {}
        if not is_due or workers is None:
            return
        parameters = {name: zlib.crc32(bytes_of(p)) for name, p in self._named()}
        states = dict(self._states(optimizers))
        shared = dict(parameters)
        if self._is_sharded:  # replicas step by gradients that the others do not see
            shared = {f"the gradient of {name}": d for name, d in gradients.items()} | shared
        digests = _Digests(socket.gethostname(), torch.get_num_threads(), own, shared, states)
        everyone = workers.all_gather_object(digests)
        if workers.rank == 0:
            record: dict[str, Any] = {"step": self.steps}
            record["replicas"] = [f"{each.own:08x}" for each in everyone]
            record["threads"] = [each.threads for each in everyone]
            states = {k: v for each in reversed(everyone) for k, v in each.states.items()}
            kinds = {"gradients": gradients, "parameters": parameters, "states": states}
            for kind, values in kinds.items():
                record[kind] = {name: f"{digest:08x}" for name, digest in values.items()}
            self._write(record)
        self._compare(everyone)

    def _states(
        self, optimizers: Sequence[torch.optim.Optimizer | None]
    ) -> Iterator[tuple[str, int]]:
        for number, optimizer in enumerate(optimizers):
            of = f"optimizer {number}'s " if len(optimizers) > 1 else ""
            for name, parameter in self._named():
                state = {} if optimizer is None else optimizer.state.get(parameter, {})
                for key, value in state.items():
                    if isinstance(value, torch.Tensor):
                        yield f"{of}{key} of {name}", zlib.crc32(bytes_of(value))

    def _compare(self, everyone: Sequence[_Digests]) -> None:
        """Raise FastdistError if replicas differ; what only some of them have is left out."""
        found = [each.shared | each.states for each in everyone]
        common = [name for name in found[0] if all(name in each for each in found)]
        differing = [name for name in common if len({each[name] for each in found}) > 1]
        if not differing:
            return
        values = [each[differing[0]] for each in found]
        ((most, count),) = Counter(values).most_common(1)
        others = [replica for replica, value in enumerate(values) if value != most]
        if 2 * count <= len(values):  # no majority
            others = list(range(len(values)))
        whose = " and ".join(f"{replica} (on {everyone[replica].host})" for replica in others)
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        said = (
            f"after step {self.steps}, {differing[0]}{more} is not the same on all replicas: "
            f"replica{'s' * (len(others) > 1)} {whose} differ{'s' * (len(others) == 1)}"
            f"{'' if len(others) == len(values) else f' from the {count} others'}"
        )
        if self._is_exact:
            raise FastdistError(
                f"{said}. Either the program has changed it on one replica alone, or memory or a "
                "processor has failed there",
                tuple(others),
            )
        warnings.warn(f"{said}, perhaps by rounding: their devices may differ", stacklevel=2)

    def _write(self, record: dict[str, object]) -> None:
        if not self._can_write:
            return
        path = self._recording.path
        first_line = json.dumps({"run": self._recording.run}) + "\n"
        try:
            with open(path, "a+", encoding="utf-8") as file:
                file.seek(0)
                if file.readline() != first_line:
                    file.truncate(0)
                    file.write(first_line)
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            self._can_write = False
            warnings.warn(f"no more steps are recorded: {path}: {error.strerror}", stacklevel=2)
