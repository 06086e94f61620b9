"""Checks the file of an option `--plot`."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def check_plot(path: Path) -> None:
    """Check that matplotlib can write such a file."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError("--plot needs matplotlib: pip install matplotlib")
    from matplotlib.backend_bases import FigureCanvasBase

    types = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lstrip(".").lower() not in types:
        raise ValueError(f"--plot {path}: expected a file type out of {', '.join(types)}")
