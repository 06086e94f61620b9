"""A parameter server: keeps variables and tables, and applies updates."""

import fastdist.ps.link.keys  # noqa: F401  raises an ImportError with a hint without pyzmq
