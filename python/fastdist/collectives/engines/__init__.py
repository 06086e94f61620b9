"""Engines that move the bytes of a communicator: one file per engine, and their shared parts."""
