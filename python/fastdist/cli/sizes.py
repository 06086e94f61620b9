"""Sizes in bytes as people write them: `64K`, and ranges of sizes."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_FACTOR = 4  # from a size of a range to the next
_SIZE = re.compile(r"(\d+)\s*([KMG]?)(?:i?B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Parse a size in bytes: `8`, `64K`, `1M`, `2GiB` (powers of 1024)."""
    match = _SIZE.fullmatch(text.strip())
    size = int(match[1]) * _UNITS[match[2].upper()] if match else 0
    if size < 1:
        raise ValueError(f"expected a size in bytes like 8, 64K or 1M, got {text!r}")
    return size


def parse_sizes(text: str) -> tuple[int, ...]:
    """Parse a range `8:256M` or a list `8,1K,64K` of sizes.

    In a range each size is 4 times the previous size; the end is always included.
    """
    if ":" not in text:
        return tuple(parse_size(part) for part in text.split(","))
    first, _, last = text.partition(":")
    size, end = parse_size(first), parse_size(last)
    if end < size:
        raise ValueError(f"expected a range from small to large, got {text!r}")
    sizes = []
    while size < end:
        sizes.append(size)
        size *= _FACTOR
    return (*sizes, end)


def format_size(size_bytes: int) -> str:
    """Return the shortest text that `parse_size` parses as this size."""
    for unit in ("G", "M", "K"):
        if size_bytes and size_bytes % _UNITS[unit] == 0:
            return f"{size_bytes // _UNITS[unit]}{unit}"
    return str(size_bytes)
