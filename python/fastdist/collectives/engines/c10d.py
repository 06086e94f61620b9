"""The part of torch that connects machines; imported where it is first needed."""

from __future__ import annotations

from typing import Any


def c10d() -> Any:
    """The module that holds torch's stores and process groups.

    Raises:
        ImportError: torch is not installed, or without Gloo.
    """
    try:
        import torch.distributed
    except ImportError:
        raise ImportError("ranks on several machines need torch: pip install torch") from None
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        raise ImportError("ranks on several machines need Gloo, and this torch is without it")
    return torch._C._distributed_c10d  # torch.distributed shows only some of it
