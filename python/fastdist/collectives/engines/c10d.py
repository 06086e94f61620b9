"""torch's stores and process groups, imported on first use."""

from __future__ import annotations

import threading
import time
from typing import Any

import fastdist._core as _core


def c10d() -> Any:
    """Import the module of torch's stores and process groups.

    Raises:
        ImportError: torch is not installed, or has no Gloo.
    """
    try:
        import torch.distributed
    except ImportError:
        raise ImportError("ranks on several machines need torch: pip install torch") from None
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        raise ImportError("ranks on several machines need Gloo, which this build of torch lacks")
    return torch._C._distributed_c10d  # torch.distributed exports only a part of it


def stay_out_at_exit() -> None:
    """Keep other threads than the main one out of torch once the interpreter ends.

    Their stacks would be unwound when torch takes the GIL again, which ends the process by SIGABRT.
    """
    while _core.is_exiting() and threading.current_thread() is not threading.main_thread():
        time.sleep(60)
