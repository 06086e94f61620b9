"""Collectives on arrays: communicators, how ranks meet, and what moves the bytes."""
