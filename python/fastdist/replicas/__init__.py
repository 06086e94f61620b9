"""Replicas: their contexts, values, variables and processes."""
