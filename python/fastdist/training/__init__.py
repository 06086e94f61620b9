"""Keeps modules, gradients, buffers, metrics and optimizer steps equal on all replicas."""
