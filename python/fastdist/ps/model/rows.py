"""Embeddings whose rows are in tables on servers."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fastdist.errors import UnsupportedError
from fastdist.training.modules import SparseWeight


class Rows(Protocol):
    """A table, as an embedding sees it.

    Attributes:
        name: of the embedding's weight.
    """

    name: str

    def pull(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows [ids, dim] on the device of the ids, which are unique."""

    def indices(self, ids: torch.Tensor) -> torch.Tensor:
        """Where in the gradient of the weight the rows of these ids are."""

    def summed(self, gradient: torch.Tensor) -> torch.Tensor:
        """The weight's gradient, with each row once."""

    def value(self) -> torch.Tensor | None:
        """All rows; None where their ids have no limit."""

    def assign(self, values: torch.Tensor) -> None:
        """Set all rows."""


class _PullRows(torch.autograd.Function):
    """The rows of some ids; the gradient of the weight is sparse, as of nn.Embedding(sparse=True).

    The weight stands for the table, and holds nothing.
    """

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, ids: torch.Tensor, rows: Rows) -> torch.Tensor:
        ctx.ids, ctx.rows, ctx.shape = ids, rows, weight.shape
        return rows.pull(ids).to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        (gradient,) = gradients
        indices = ctx.rows.indices(ctx.ids).reshape(1, -1)
        sparse = torch.sparse_coo_tensor(
            indices, gradient, ctx.shape, check_invariants=False, is_coalesced=True
        )
        return sparse, None, None


class Lookup(SparseWeight):
    """Base of embeddings whose weight may be a table on parameter servers."""

    _rows: Rows | None

    @property
    def is_served(self) -> bool:
        """Whether it is."""
        return self.__dict__.get("_rows") is not None

    def look_up(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Each id once, their rows, and where the rows of `ids` are among those."""
        rows: Rows | None = self.__dict__.get("_rows")
        if rows is None:
            raise UnsupportedError(
                f"{self} is a copy of an embedding whose rows are on parameter servers, and does "
                "not know where; functions may refer to the one that was made in the scope"
            )
        unique, places = torch.unique(ids, return_inverse=True)
        values = _PullRows.apply(self.weight, unique, rows)  # type: ignore[no-untyped-call]
        return unique, values, places

    def _save_to_state_dict(self, values: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(values, prefix, keep_vars)  # type: ignore[misc]
        table = self.__dict__.get("_rows")
        if table is not None:
            rows = table.value()
            del values[f"{prefix}weight"]
            if rows is not None:
                values[f"{prefix}weight"] = rows

    def _load_from_state_dict(self, values: dict[str, Any], prefix: str, *others: Any) -> None:
        key = f"{prefix}weight"
        if not self.is_served:
            super()._load_from_state_dict(values, prefix, *others)  # type: ignore[misc]
        elif key in values:
            if values[key].shape != self.weight.shape:
                raise ValueError(
                    f"{key} has shape {tuple(values[key].shape)}, expected "
                    f"{tuple(self.weight.shape)}"
                )
            self.__dict__["_rows"].assign(values[key])


class ServedEmbedding(Lookup, nn.Embedding):
    """An nn.Embedding whose weight is a table on servers."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As nn.Embedding."""
        unique, rows, places = self.look_up(input)
        padding = place_of(self.padding_idx, unique)
        return F.embedding(places, rows, padding, scale_grad_by_freq=self.scale_grad_by_freq)


class ServedEmbeddingBag(Lookup, nn.EmbeddingBag):
    """An nn.EmbeddingBag whose weight is a table on servers."""

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As nn.EmbeddingBag."""
        unique, rows, places = self.look_up(input)
        return F.embedding_bag(
            places,
            rows,
            offsets,
            scale_grad_by_freq=self.scale_grad_by_freq,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=place_of(self.padding_idx, unique),
        )


def gradient_of(weight: torch.Tensor) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The indices and values of a weight's sparse gradient; of equal indices there may be many."""
    gradient = weight.grad
    assert gradient is not None
    if not gradient.is_sparse:  # somebody has put it there
        gradient = gradient.to_sparse(1)
    indices = gradient._indices()[0].cpu().numpy()
    return indices, gradient._values().detach().float().cpu().numpy()


def place_of(id_: int | None, unique: torch.Tensor) -> int | None:
    """Where an id is among sorted ones; None where it is not."""
    if id_ is None:
        return None
    place = int(torch.searchsorted(unique, id_))
    return place if place < unique.numel() and int(unique[place]) == id_ else None
