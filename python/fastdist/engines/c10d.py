"""The part of torch that connects machines; imported where it is first needed."""

from __future__ import annotations

from typing import Any


def c10d() -> Any:
    """The module torch.distributed.distributed_c10d.

    Raises:
        ImportError: torch is not installed, or without Gloo.
    """
    try:
        from torch.distributed import distributed_c10d
    except ImportError:
        raise ImportError(
            "ranks on several machines need torch: pip install 'fastdist[torch]'"
        ) from None
    if not distributed_c10d.is_gloo_available():
        raise ImportError("ranks on several machines need Gloo, and this torch is without it")
    return distributed_c10d
