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
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from fastdist.integrations.torch_backend.name import NAME

_C10D = "torch.distributed.distributed_c10d"


def register(*_: Any) -> None:
    """Register the backend with torch; the entry point that torch 2.14 calls."""
    backends = sys.modules[_C10D].Backend
    if not hasattr(backends, NAME.upper()):
        backends.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def register_with_torch() -> None:
    """Register the backend now, or when torch.distributed is imported later."""
    if _C10D in sys.modules:
        register()
    else:
        sys.meta_path.insert(0, _WhenImported())


def _create(options: Any, backend_options: Any) -> Any:
    from fastdist.integrations.torch_backend.group import ProcessGroupFastdist

    if backend_options is not None:
        raise TypeError(f'the backend "{NAME}" takes no pg_options, got {backend_options!r}')
    return ProcessGroupFastdist.of_options(options)


class _WhenImported:
    """An import hook that registers the backend once torch.distributed has been imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != _C10D:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        loader = spec.loader
        run = loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            register()

        loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec
