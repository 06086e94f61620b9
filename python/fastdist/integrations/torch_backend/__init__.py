"""The backend "fastdist" of torch.distributed, for DDP, FSDP and every other user of c10d.

    import fastdist
    import torch.distributed as dist

    dist.init_process_group("fastdist")

`import fastdist` registers it, before or after torch is imported, and does not import torch itself.
From torch 2.14 on, torch finds it by its entry point, without an import.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from fastdist._config import replaced_backend
from fastdist.integrations.torch_backend.name import NAME

_C10D = "torch.distributed.distributed_c10d"
_OLDEST = (2, 9)
_TRACE_RULES = "torch._dynamo.trace_rules"


def register(*_: Any) -> None:
    """Register the backend with torch; the entry point that torch 2.14 calls."""
    c10d = sys.modules[_C10D]
    if not hasattr(c10d.Backend, NAME.upper()):
        c10d.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
        # From torch 2.15 on: its recorder can only be attached to groups in C++.
        recording: set[str] = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set())
        recording.add(NAME)
        if replaced_backend() is not None:
            _MakesFastdist.plain = getattr(c10d, "ProcessGroupGloo", _ProcessGroupGloo)
            c10d.ProcessGroupGloo = _ProcessGroupGloo  # type: ignore[attr-defined]


def register_with_torch() -> None:
    """Register the backend, now or when torch.distributed is imported later."""
    for name, act in ((_C10D, register), (_TRACE_RULES, _stay_uncompiled)):
        if name in sys.modules:
            act()
        else:
            sys.meta_path.insert(0, _WhenImported(name, act))


class _MakesFastdist(type):
    """Makes a process group of fastdist for torch's own functions, which check its class."""

    plain: type  # torch's class, of which other libraries may have objects

    def __call__(cls, store: Any, rank: int, size: int, timeout: Any, **_: Any) -> Any:
        from fastdist.integrations.torch_backend.group import ProcessGroupFastdist

        return ProcessGroupFastdist.of_store(store, rank, size, timeout.total_seconds(), "")

    def __instancecheck__(cls, instance: Any) -> bool:
        made = sys.modules.get("fastdist.integrations.torch_backend.group")
        if made is not None and isinstance(instance, made.ProcessGroupFastdist):
            return True
        return cls.plain is not cls and isinstance(instance, cls.plain)


class _ProcessGroupGloo(metaclass=_MakesFastdist):
    """Takes the place of torch's class of this name under `FASTDIST_REPLACE=gloo`."""


def _stay_uncompiled() -> None:
    """Have torch.compile run fastdist's functions as they are, where a compiled one calls them."""
    sys.modules[_TRACE_RULES].add("fastdist")


def _create(options: Any, backend_options: Any) -> Any:
    if (why := unusable_torch()) is not None:
        raise ImportError(f'the backend "{NAME}" needs torch{why}')
    from fastdist.integrations.torch_backend.group import ProcessGroupFastdist

    if backend_options is not None:
        raise TypeError(f'the backend "{NAME}" takes no pg_options, got {backend_options!r}')
    place, seconds = (options.group_rank, options.group_size), options.timeout.total_seconds()
    # With this option of torch 2.14, the rendezvous is in `reconfigure`.
    is_apart = getattr(options, "enable_reconfigure", False)
    make = ProcessGroupFastdist if is_apart else ProcessGroupFastdist.of_store
    return make(options.store, *place, seconds, options.group_id)


def unusable_torch(error: BaseException | None = None) -> str | None:
    """Return why torch cannot be used, the end of a sentence "... needs torch"; None if it can.

    Args:
        error: what an import of a module that uses torch has raised.
    """
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        return ": pip install torch"
    torch = sys.modules.get("torch")
    version = getattr(torch, "__version__", None)
    if version is not None and tuple(map(int, version.split(".")[:2])) < _OLDEST:
        return f" {_OLDEST[0]}.{_OLDEST[1]} or newer, got {version}: pip install -U torch"
    is_of_library = isinstance(error, OSError) or ".so" in str(error)  # that torch loads
    if version is None and is_of_library:
        return f", which is installed but does not load: {error}"
    return None


class _WhenImported:
    """An import hook that calls a function once a module has been imported."""

    def __init__(self, name: str, act: Callable[[], None]) -> None:
        self._name = name
        self._act = act

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_act(module: ModuleType) -> None:
            run(module)
            self._act()

        spec.loader.exec_module = run_and_act  # type: ignore[method-assign]
        return spec
