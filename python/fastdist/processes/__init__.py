"""Starts processes, forwards their output, notes how they end, and ends them with this process."""
