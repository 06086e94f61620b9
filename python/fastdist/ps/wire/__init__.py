"""The protocol between parameter servers and their clients."""
