"""Clients of parameter servers: requests, shards, commits, checkpoints."""

import fastdist.ps.link.keys  # noqa: F401  raises an ImportError with a hint without pyzmq
