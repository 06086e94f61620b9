"""Embeddings that are made for tables of rows, and which others become such."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import fastdist._core as _core
from fastdist.errors import UnsupportedError
from fastdist.ps.model.rows import (
    Lookup,
    Rows,
    ServedEmbedding,
    ServedEmbeddingBag,
    place_of,
)
from fastdist.ps.model.table_weight import table_weight
from fastdist.replicas.context import state
from fastdist.training.module_structure import modules_of

# As many rows as a weight can stand for; ids of such tables are not its indices.
UNLIMITED = 1 << 40
_SERVED: dict[type, type] = {
    nn.Embedding: ServedEmbedding,
    nn.EmbeddingBag: ServedEmbeddingBag,
}


class Table(Lookup, nn.Module):
    """What embeddings that are made for tables have in common."""

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        *,
        initializer: tuple[str, float, float] = ("normal", 0.0, 1.0),
        seed: int = 0,
        storage: str = "float32",
        max_rows: int | None = None,
        max_age: int | None = None,
        padding_idx: int | None = None,
        cached_rows: int = 0,
        cache_age: int = 16,
    ) -> None:
        super().__init__()
        if cached_rows < 0 or cache_age < 0:
            raise ValueError(
                f"cached_rows and cache_age must be at least 0, got {cached_rows} and {cache_age}"
            )
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.initializer = initializer
        self.seed = seed
        self.storage = storage
        self.max_rows = max_rows
        self.max_age = max_age
        self.padding_idx = _padding(padding_idx, num_embeddings)
        self.cached_rows = cached_rows
        self.cache_age = cache_age
        rows = UNLIMITED if num_embeddings is None else num_embeddings
        # Also where there are no servers, this says what is wrong with the arguments.
        table = _core.RowTable(
            embedding_dim,
            _core.UpdateRule("SGD"),
            rows=num_embeddings,
            initializer=initializer,
            seed=seed,
            storage=storage,
            max_rows=max_rows,
            max_age=max_age,
        )
        self.sparse = bool(state.scopes) and state.scopes[-1].has_servers
        if self.sparse:
            self.weight: nn.Parameter = table_weight(rows, embedding_dim)
        elif num_embeddings is None:
            raise UnsupportedError(
                "an embedding without a limit of rows needs parameter servers: make it in the "
                "scope of a ParameterServerStrategy, or give num_embeddings"
            )
        else:
            weight = torch.empty((rows, embedding_dim))
            table.pull(np.arange(rows), weight.numpy())
            if self.padding_idx is not None:
                weight[self.padding_idx] = 0
            self.weight = nn.Parameter(weight)

    def extra_repr(self) -> str:
        """For `repr`."""
        return f"{self.num_embeddings}, {self.embedding_dim}"


class Embedding(Table):
    """Rows by their ids, kept by parameter servers where the strategy has such.

    There, memory is used for rows that have been trained, and for none that have not; without a
    limit ids are any 64-bit integers, such as hashes. Elsewhere it is an nn.Embedding.

    Args:
        num_embeddings: ids are below it; None: any.
        embedding_dim: elements of a row.
        initializer: ("constant", value, 0), ("uniform", low, high) or ("normal", mean, deviation).
        seed: of the initial values; they depend on it and the id alone.
        storage: "float32", "bfloat16" or "int8", on servers.
        max_rows: servers drop rows that were touched the longest ago over this number.
        max_age: servers drop rows that so many pushes have not touched.
        padding_idx: an id whose row is zero, and does not learn.
        cached_rows: so many rows a worker keeps, and need not pull again; its own pushes are seen
            at once, those of others when a row is too old. For asynchronous workers alone.
        cache_age: lookups after which a row is too old.

    Raises:
        UnsupportedError: no limit, and no parameter servers.
        ValueError: an option that makes no sense.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Rows of ids: shape (…, embedding_dim)."""
        if not self.is_served:
            return F.embedding(input, self.weight, self.padding_idx)
        unique, rows, places = self.look_up(input)
        return F.embedding(places, rows, place_of(self.padding_idx, unique))


class EmbeddingBag(Table):
    """Sums, means or maxima of rows, kept as those of `Embedding`.

    Args:
        num_embeddings: as for `Embedding`, and so is everything that is not named here.
        embedding_dim: elements of a row.
        mode: "sum", "mean" or "max".
        include_last_offset: as for nn.EmbeddingBag.
    """

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        *,
        mode: str = "mean",
        include_last_offset: bool = False,
        **options: Any,
    ) -> None:
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f'mode must be "sum", "mean" or "max", got {mode!r}')
        super().__init__(num_embeddings, embedding_dim, **options)
        self.mode = mode
        self.include_last_offset = include_last_offset

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One row for each bag: as nn.EmbeddingBag."""
        ids, padding = input, self.padding_idx
        weight: torch.Tensor = self.weight
        if self.is_served:
            unique, weight, ids = self.look_up(input)
            padding = place_of(self.padding_idx, unique)
        return F.embedding_bag(
            ids,
            weight,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )


def tables_in(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """The embeddings that become tables: those that learn, and whose weight nobody else uses.

    Subclasses may use their weight in any way, so that it stays a dense variable.

    Raises:
        ValueError: one has a max_norm.
    """
    modules = list(modules_of(roots))
    users: dict[int, int] = {}
    for module in modules:
        for parameter in module.parameters(recurse=False):
            users[id(parameter)] = users.get(id(parameter), 0) + 1
    found: list[nn.Module] = []
    for module in modules:
        if not isinstance(module, Table):
            is_exact = type(module) in (*_SERVED, *_SERVED.values())
            if not is_exact or users[id(module.weight)] > 1:
                continue
            if module.max_norm is not None:
                raise ValueError(
                    f"{module} has max_norm, which changes rows in forward; rows on parameter "
                    "servers are changed by optimizers alone"
                )
        if isinstance(module.weight, nn.Parameter) and module.weight.requires_grad:
            found.append(module)
    return found


def _padding(index: int | None, rows: int | None) -> int | None:
    """As nn.Embedding understands it: negative ones count from the end, if there is one."""
    if index is None or rows is None:
        return index
    if not -rows <= index < rows:
        raise ValueError(f"padding_idx must be within {rows} embeddings, got {index}")
    return index % rows


def serve(module: nn.Module, rows: Rows) -> None:
    """From now on the module's rows are those of a table, and its gradients are sparse."""
    module.__dict__["_rows"] = rows
    module.__dict__["sparse"] = True
    module.weight.__dict__["rows"] = rows
    if module.__class__ in _SERVED:
        module.__class__ = _SERVED[module.__class__]
