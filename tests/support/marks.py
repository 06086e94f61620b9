"""Marks of parameters."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any) -> list[Any]:
    """Parameters of one value each whose tests are slow."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
