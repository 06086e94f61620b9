"""The version, for this package and for `pyproject.toml`."""

__version__ = "0.1.0"
