"""Collectives on arrays: communicators, rendezvous of ranks, and engines that move bytes."""
