"""Saves and restores models, optimizers and other objects of a training job."""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastdist.checkpoints import files
from fastdist.checkpoints.agreement import Ranks, broadcast_result, run_on_all
from fastdist.checkpoints.encoding import Encoder, decode
from fastdist.checkpoints.files import PartFiles
from fastdist.checkpoints.matching import require_match, require_same_tensors
from fastdist.collectives.communicator import Communicator
from fastdist.recorder.phases import Phase, phase
from fastdist.replicas.context import state
from fastdist.training.digests import StepDigests
from fastdist.training.metrics import note_updates, with_metric_states

_RANDOM = "random_generator"
_keepers: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()
# Returns a part's tensors on the CPU, in memory that does not change while they are written.
Stage = Callable[[str, Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]


class Checkpoint:
    """The objects and values of a training job that are saved and restored together.

    Make and use one on every replica. A checkpoint does not depend on the strategy or the number of
    replicas: any other can restore it. Torch alone can restore it too:
    `model.load_state_dict(safetensors.torch.load_file(path / "model.safetensors"))`. (If parameters
    share memory, each is saved once, and `safetensors.torch.load_model` loads them.) The exceptions
    are modules and optimizers of a `ParameterServerStrategy`: its servers write them, and any
    number of servers or `fd.ps.load` can read them.

    Args:
        parts: objects by name. Objects with `state_dict` and `load_state_dict` (modules,
            optimizers, schedulers, scalers, metrics, distributed datasets) are restored by these,
            and tensors in place. Other values, such as numbers, strings, lists and dictionaries,
            are attributes of the checkpoint (`checkpoint.step`); restoring replaces them.

    Raises:
        TypeError: no part was given, or a part has the name of a method.

    Examples:
        >>> import tempfile
        >>> import fastdist as fd, torch
        >>> model = torch.nn.Linear(2, 1)
        >>> checkpoint = fd.Checkpoint(model=model, step=7)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = checkpoint.save(f"{folder}/seven")
        ...     checkpoint.step = 8
        ...     checkpoint.restore(path)
        >>> checkpoint.step
        7
    """

    _parts: dict[str, Any]

    def __init__(self, **parts: Any) -> None:
        if not parts:
            raise TypeError("Checkpoint: expected at least one part, as in Checkpoint(model=model)")
        for name in parts:
            if hasattr(type(self), name) or name.startswith("_") or name == _RANDOM:
                raise TypeError(f"Checkpoint: {name!r} cannot be the name of a part")
        self.__dict__["_parts"] = dict(parts)

    def __getattr__(self, name: str) -> Any:
        parts = self.__dict__.get("_parts", {})
        if name not in parts:
            raise AttributeError(f"this checkpoint has {sorted(parts)}, got {name!r}")
        return parts[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._parts:
            raise AttributeError(f"this checkpoint has {sorted(self._parts)}, got {name!r}")
        self._parts[name] = value

    def __repr__(self) -> str:
        return f"<fastdist.Checkpoint of {', '.join(self._parts)}>"

    def save(self, path: str | Path) -> Path:
        """Write all parts into a new directory. Every replica must call, outside `run`.

        The directory gets its final name after everything is flushed. See `CheckpointManager` for a
        series of checkpoints.

        Returns:
            The directory's path.

        Raises:
            FileExistsError: the path exists.
            OSError: the disk is full, or the directory cannot be written.
            TypeError: a state holds an object of a type that cannot be saved.
        """
        path = Path(path).absolute()

        def write(parts: Mapping[str, PartFiles]) -> None:
            if path.exists():
                raise FileExistsError(f"{path} exists; remove it, or give another path")
            files.write(path, parts, files.start_checksums(parts), self.write_others)

        with self.ranks().communicator() as workers:
            self.collect(workers, copy_to_cpu, write)
        return path

    def restore(self, path: str | Path) -> None:
        """Restore all parts from a directory that was saved. Every replica must call.

        Parts that only the directory has are ignored. If anything does not fit, nothing is
        changed: names and shapes are compared first, and if a part refuses its new state, all parts
        get their old states back.

        Raises:
            FileNotFoundError: there is no checkpoint.
            DamagedCheckpointError: a ValueError: bytes are missing or have changed; the message
                names the file and the tensor.
            ValueError: the checkpoint is of another model (the message lists names and shapes), an
                object of another class, or other data; or a newer release wrote it.
            Exception: what an object's `load_state_dict` raises.
        """
        path = Path(path).absolute()
        with self.ranks().communicator() as workers:
            self.load(workers, path, lambda: self.read(path), with_random=False)

    # --- for CheckpointManager ------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """The names of the parts."""
        return list(self._parts)

    @property
    def keeper(self) -> Any:
        """The one keeper of the values of modules and optimizers, which writes its own files."""
        found = [keeper for part in self._parts.values() if (keeper := keeper_of(part)) is not None]
        if any(keeper is not found[0] for keeper in found):
            raise ValueError("a checkpoint has modules of several strategies with servers")
        return found[0] if found else None

    @property
    def write_others(self) -> Callable[[Path], Any] | None:
        """The function that writes the keeper's files, for `files.write`."""
        return None if self.keeper is None else self.keeper.write_files

    def read(self, path: Path) -> dict[str, PartFiles]:
        """Read the parts that a checkpoint has; check every byte. Raises what `restore` raises."""
        index = files.read_index(path)
        if self.keeper is not None:
            self.keeper.check_files(path)
        return {
            name: files.read_part(index, name)
            for name in [*self.names, _RANDOM]
            if name in index.parts
        }

    def ranks(self) -> Ranks:
        """Return the ranks that save and restore this checkpoint together."""
        return Ranks(part for part in self._parts.values() if isinstance(part, nn.Module))

    def collect(
        self,
        workers: Communicator | None,
        stage: Stage,
        write: Callable[[Mapping[str, PartFiles]], None],
    ) -> None:
        """Collect the states of all parts, and pass them to `write` on rank 0.

        Every rank must call; if one fails, all raise.
        """
        if state.replica is not None:
            raise RuntimeError(
                "a checkpoint was saved inside run; save it outside, on all replicas"
            )

        def work() -> None:
            # Every rank: states such as that of a variable with a value per replica communicate.
            states = {name: _state_of(part) for name, part in self._own_parts.items()}
            if workers is not None and workers.rank > 0:
                return
            states[_RANDOM] = _random_state()
            parts = {}
            for name, value in states.items():
                encoder = Encoder()
                encoded = encoder.encode(value, () if isinstance(value, Mapping) else (name,))
                class_name = type(self._parts.get(name, value)).__name__
                parts[name] = PartFiles(encoded, stage(name, encoder.tensors), class_name)
            write(parts)

        with phase(Phase.SAVING):
            run_on_all(workers, work)

    @property
    def _own_parts(self) -> dict[str, Any]:
        """The parts without a keeper."""
        return {name: part for name, part in self._parts.items() if keeper_of(part) is None}

    def load(
        self,
        workers: Communicator | None,
        path: Path,
        read_parts: Callable[[], dict[str, PartFiles]],
        *,
        with_random: bool,
    ) -> None:
        """Load the parts that `read_parts` returns on rank 0, on every rank.

        The keeper of parts reads the path. `with_random` restores torch's random generators too.
        """
        if state.replica is not None:
            raise RuntimeError(
                "a checkpoint was restored inside run; restore it outside, on all replicas"
            )
        saved = _share(workers, read_parts)
        random = saved.pop(_RANDOM, None)
        before: dict[str, Any] = {}  # old states of parts that may refuse the new ones
        own_parts, keeper = self._own_parts, self.keeper

        def match() -> None:
            missing = [name for name in own_parts if name not in saved]
            if missing:
                raise ValueError(
                    f"the checkpoint has {sorted(saved)}, and not {missing}; modules that were "
                    "saved on parameter servers are read by fastdist.ps.load(module, directory)"
                )
            for name, part in own_parts.items():
                given, class_name = saved[name]
                if isinstance(part, nn.Module):
                    own = _state_of(part)
                    require_same_tensors(name, own, given)
                    if may_refuse(part):
                        before[name] = copy.deepcopy(own)
                else:
                    require_match(name, part, given, class_name)
                    if has_state(part):
                        before[name] = copy.deepcopy(part.state_dict())

        def load_objects() -> None:
            for name in before:
                _load(self._parts[name], saved[name][0])
            if keeper is not None:
                keeper.read_files(path)

        def load_others() -> None:
            for name, part in own_parts.items():
                if name not in before:
                    self._parts[name] = _put(part, saved[name][0])
            if with_random and random is not None:
                _set_random_state(random[0])

        run_on_all(workers, match)
        try:
            run_on_all(workers, load_objects)
        except BaseException:
            for name, own in before.items():
                _take_back(self._parts[name], own)
            raise
        run_on_all(workers, load_others)


def _share(
    workers: Communicator | None, read_parts: Callable[[], dict[str, PartFiles]]
) -> dict[str, tuple[Any, str]]:
    """Return the states and class names of the parts that rank 0 reads, on every rank."""
    taken: dict[str, PartFiles] = {}

    def outline() -> dict[str, PartFiles]:
        taken.update(read_parts())
        return {
            name: replace(part, tensors={n: t.to("meta") for n, t in part.tensors.items()})
            for name, part in taken.items()
        }

    shared = {}
    for name, part in broadcast_result(workers, outline).items():
        if name in taken:
            tensors = dict(taken[name].tensors)
        else:
            tensors = {n: torch.empty(t.shape, dtype=t.dtype) for n, t in part.tensors.items()}
        if workers is not None and tensors:
            workers.broadcast([tensor.reshape(-1).view(torch.uint8) for tensor in tensors.values()])
        shared[name] = decode(part.encoded, tensors), part.class_name
    return shared


def keep(parts: Iterable[nn.Module | torch.optim.Optimizer], keeper: Any) -> None:
    """Record what keeps the values of modules and optimizers, such as parameter servers.

    Its methods `write_files`, `check_files` and `read_files` take a checkpoint's directory.
    """
    for part in parts:
        _keepers[part] = weakref.ref(keeper)


def keeper_of(part: Any) -> Any:
    """Return the keeper of a part's values; None if the part has them itself."""
    if not isinstance(part, nn.Module | torch.optim.Optimizer):
        return None
    known = _keepers.get(part)
    return None if known is None else known()


def copy_to_cpu(name: str, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    """Return the tensors on the CPU, without copying tensors that are there."""
    del name
    return {key: tensor.cpu() for key, tensor in tensors.items()}


def has_state(part: Any) -> bool:
    """Return True if an object saves and restores its state by a dict, as torch's do."""
    return hasattr(part, "state_dict") and hasattr(part, "load_state_dict")


def _state_of(part: Any) -> Any:
    if isinstance(part, nn.Module):
        with with_metric_states(part):
            return part.state_dict()
    return part.state_dict() if has_state(part) else part


def may_refuse(module: nn.Module) -> bool:
    """Return True if code other than torch's own takes part when the module loads its state."""
    return any(
        part._load_state_dict_pre_hooks
        or part._load_state_dict_post_hooks
        or any(
            not getattr(type(part), name).__module__.startswith("torch.")
            for name in ("load_state_dict", "_load_from_state_dict", "set_extra_state")
        )
        for part in module.modules()
    )


def _load(part: Any, state: Any) -> None:
    part.load_state_dict(state)
    if isinstance(part, nn.Module):
        note_updates(part)
    elif isinstance(part, torch.optim.Optimizer):
        _lay_out(part)


def _lay_out(optimizer: torch.optim.Optimizer) -> None:
    """Give states the memory layout of their parameters: fused optimizers read both in one order.

    A checkpoint holds contiguous tensors, a parameter may be channels_last.
    """
    for parameter, states in optimizer.state.items():
        for name, held in states.items():
            if not isinstance(held, torch.Tensor) or held.shape != parameter.shape:
                continue
            if held.stride() != parameter.stride():
                states[name] = torch.empty_like(parameter, dtype=held.dtype).copy_(held)


def _take_back(part: Any, own: Any) -> None:
    """Give a part its old state back; a module may refuse that too."""
    if not isinstance(part, nn.Module):
        part.load_state_dict(own)
        return
    with torch.no_grad():
        for name, tensor in part.state_dict(keep_vars=True).items():
            if isinstance(tensor, torch.Tensor):
                tensor.copy_(own[name])
    with contextlib.suppress(Exception):
        part.load_state_dict(own)
    note_updates(part)


def _put(part: Any, value: Any) -> Any:
    """Restore a module, tensor or value; return its replacement."""
    if isinstance(part, nn.Module):
        _load(part, value)
        return part
    if isinstance(part, torch.Tensor):
        with torch.no_grad():
            part.copy_(value)
        return part
    return value


def _random_state() -> dict[str, Any]:
    """Return torch's generators' states; the CPU's gives the streams of all replicas in `run`."""
    generators: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if StepDigests.steps > 0:
        generators["steps"] = StepDigests.steps
    if torch.cuda.is_available():
        generators["cuda"] = torch.cuda.get_rng_state()
    return generators


def _set_random_state(generators: Mapping[str, Any]) -> None:
    torch.set_rng_state(generators["cpu"])
    StepDigests.steps = generators.get("steps", StepDigests.steps)
    if "cuda" in generators and torch.cuda.is_available():
        torch.cuda.set_rng_state(generators["cuda"])
