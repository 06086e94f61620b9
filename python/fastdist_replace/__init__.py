"""Loads fastdist where the environment variable FASTDIST_REPLACE is set.

Every `import torch` calls `load`, by the entry point "torch.backends": a package of its own, so
that programs without the variable do not import fastdist.
"""

import os


def load() -> None:
    """Import fastdist, which then takes the place of a backend of torch.distributed."""
    if os.environ.get("FASTDIST_REPLACE"):
        import fastdist  # noqa: F401
