"""Clients of parameter servers: requests, shards, commits, checkpoints."""
