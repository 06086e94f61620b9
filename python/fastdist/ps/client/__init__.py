"""Clients of parameter servers: requests, shards, commits, checkpoints."""

import fastdist.ps.wire.keys  # noqa: F401  raises an ImportError with a hint without pyzmq
