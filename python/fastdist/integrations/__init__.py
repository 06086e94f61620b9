"""Fastdist in other frameworks: one module per framework, each imported by its users only."""
