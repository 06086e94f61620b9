"""Batches as structures: made from examples, emptied, counted, and joined over replicas.

Leaves are tensors, numpy arrays, and columns. A column is a list, tuple or deque with one item
per example: strings, which torch's default_collate leaves in a list, or images of different sizes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import default_collate

from fastdist.replicas.per_replica import Origin, PerReplica, leaves, map_structure

Collate = Callable[[list[Any]], Any]


def collate(examples: list[Any]) -> Any:
    """Apply torch's default_collate to each leaf: tuples stay tuples, and dataclasses work."""
    try:
        return map_structure(lambda *leaf: default_collate(list(leaf)), *examples)
    except ValueError as error:
        raise ValueError(
            "the examples of one batch differ in structure; give collate_fn to join them, or "
            f"make them alike ({error})"
        ) from error


def join(
    batches: Sequence[Any],
    sizes: Sequence[int],
    examples: tuple[int, ...],
    origin: Origin | None = None,
) -> Any:
    """Join one batch per local replica into one structure of per-replica values.

    The sizes are those of these batches, the examples those of each replica of the job.
    """

    def joined(*values: Any) -> PerReplica[Any]:
        return PerReplica(values, examples, None, origin)

    return _map_batches(joined, batches, sizes)


def emptied(batch: Any, size: int) -> Any:
    """Copy a batch without its `size` examples: arrays have length 0 in axis 0, columns are empty.

    Leaves without an axis 0 (numbers, strings, tensors without axes) are kept.
    """
    return _map_batches(_empty_leaf, [batch], [size])


def divided(batch: Any, count: int, start: int, sizes: Sequence[int]) -> tuple[Any, ...]:
    """Return consecutive parts of a batch of `count` examples, of these sizes, from `start` on.

    Leaves without an axis 0 (numbers, strings, tensors without axes) are in every part.
    """
    parts = []
    for size in sizes:
        rows = slice(start, start + size)
        parts.append(_map_batches(lambda leaf, rows=rows: _rows(leaf, rows), [batch], [count]))
        start += size
    return tuple(parts)


def count_examples(batch: Any) -> int:
    """Count the examples of a batch: axis 0 of its first array, else its first column's length."""
    for array in arrays_in(batch):
        if array.ndim:
            return len(array)
    inner = batch
    while isinstance(inner, dict) and inner:
        inner = next(iter(inner.values()))
    if isinstance(inner, (list, tuple)):
        return len(inner)
    raise TypeError(
        f"expected batches that contain an array or a list, got {type(batch).__name__}: its number "
        "of examples is unknown"
    )


def _map_batches(leaf: Callable[..., Any], batches: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Apply `map_structure` with columns as leaves, so that their lengths may differ."""

    def is_column(*nodes: Any) -> bool:
        kind = type(nodes[0])
        if kind is deque:
            return True
        is_list = issubclass(kind, (list, tuple)) and not hasattr(kind, "_fields")
        return is_list and all(type(n) is kind for n in nodes) and _are_columns(nodes, sizes)

    return map_structure(leaf, *batches, is_leaf=is_column)


def _are_columns(nodes: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Return True if the lists are columns, rather than structures whose items are batches.

    A batch [x, y] of 2 examples also has the length of a column. In a column the length is the
    number of examples, the items have one type, and they are seldom arrays or lists of that length.
    """
    if any(len(node) != size for node, size in zip(nodes, sizes, strict=True)):
        return False
    if len({*map(len, nodes)}) > 1:
        return True
    items = [(item, size) for n, size in zip(nodes, sizes, strict=True) for item in n]
    if items and all(isinstance(item, (list, tuple)) and len(item) == n for item, n in items):
        return False
    arrays = [(array, size) for n, size in zip(nodes, sizes, strict=True) for array in arrays_in(n)]
    batched = all(array.ndim and len(array) == size for array, size in arrays)
    kinds = {(type(i), getattr(i, "dtype", None), getattr(i, "ndim", None)) for i, _ in items}
    return not arrays or (len(kinds) == 1 and not batched)


def arrays_in(node: Any) -> list[Any]:
    """Return the tensors and numpy arrays of a structure."""
    return [leaf for leaf in leaves(node) if isinstance(leaf, (torch.Tensor, np.ndarray))]


def _rows(leaf: Any, rows: slice) -> Any:
    if type(leaf) is PackedSequence:
        raise ValueError(
            "a batch with a PackedSequence cannot be divided among replicas: give the examples "
            "and a collate_fn that packs them, or pad, and pack in the step"
        )
    if isinstance(leaf, (torch.Tensor, np.ndarray)):
        return leaf[rows] if leaf.ndim else leaf
    return type(leaf)(list(leaf)[rows]) if isinstance(leaf, (list, tuple, deque)) else leaf


def _empty_leaf(leaf: Any) -> Any:
    if type(leaf) is PackedSequence:
        raise ValueError(
            "a PackedSequence cannot be empty, and a replica has no example of this batch: use "
            "drop_remainder=True, or pad in collate_fn and pack in the step"
        )
    if isinstance(leaf, torch.Tensor):
        return leaf.new_empty((0, *leaf.shape[1:])) if leaf.ndim else leaf
    if isinstance(leaf, np.ndarray):
        return leaf[:0].copy() if leaf.ndim else leaf
    return type(leaf)() if isinstance(leaf, (list, tuple)) else leaf
