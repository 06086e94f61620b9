"""Embeddings whose rows may be tables on parameter servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from fastdist.errors import UnsupportedError
from fastdist.ps.model.table import ServedTable
from fastdist.ps.model.table_weight import table_weight
from fastdist.ps.wire.specs import RowsSpec, RuleSpec
from fastdist.replicas.context import state
from fastdist.replicas.random_streams import draw_seed
from fastdist.training.modules import SparseWeight, modules_of

# Rows of the weight of a table without a limit; its gradients' indices are not ids.
UNLIMITED = 1 << 40


class _RowsOfWeight(torch.autograd.Function):
    """Makes pulled rows depend on the weight, which stands for the table and holds no values.

    The weight's gradient is sparse, as with nn.Embedding(sparse=True).
    """

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor, table: ServedTable
    ) -> torch.Tensor:
        ctx.ids, ctx.table, ctx.shape = ids, table, weight.shape
        return rows.to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        (gradient,) = gradients
        indices = ctx.table.gradient_indices(ctx.ids).reshape(1, -1)
        sparse = torch.sparse_coo_tensor(
            indices, gradient, ctx.shape, check_invariants=False, is_coalesced=True
        )
        return sparse, None, None, None


class Found(NamedTuple):
    """The rows of a lookup."""

    rows: torch.Tensor
    positions: torch.Tensor  # for each given id, of its row
    padding: int | None  # position of the padding row, if it is among them


class TableLookup(SparseWeight):
    """Base of embeddings whose weight may be a table on parameter servers."""

    padding_idx: int | None
    _table: ServedTable | None = None

    def look_up(self, ids: torch.Tensor) -> Found:
        """Find the rows of ids."""
        return look_up_together([(self, ids)])[0]

    def served_table(self) -> ServedTable:
        """Return the table; raise UnsupportedError if this is a copy, which has none."""
        if self._table is None:
            raise UnsupportedError(
                f"{self} is a copy of an embedding whose rows are on parameter servers, and has no "
                "connection to them; functions must use the embedding that was made in the scope"
            )
        return self._table

    def _save_to_state_dict(self, values: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(values, prefix, keep_vars)  # type: ignore[misc]
        if self._table is not None:
            rows = self._table.all_rows()
            del values[f"{prefix}weight"]
            if rows is not None:
                values[f"{prefix}weight"] = rows

    def _load_from_state_dict(self, values: dict[str, Any], prefix: str, *others: Any) -> None:
        key = f"{prefix}weight"
        if self._table is None:
            super()._load_from_state_dict(values, prefix, *others)  # type: ignore[misc]
        elif key in values:
            if values[key].shape != self.weight.shape:
                raise ValueError(
                    f"{key} has shape {tuple(values[key].shape)}, expected "
                    f"{tuple(self.weight.shape)}"
                )
            self._table.assign(values[key])


def look_up_together(lookups: Sequence[tuple[TableLookup, torch.Tensor]]) -> list[Found]:
    """Find the rows of ids in several embeddings; each server is asked once."""
    tables = [layer.served_table() for layer, _ in lookups]
    wanted = [table.find(ids) for table, (_, ids) in zip(tables, lookups, strict=True)]
    found = []
    for (layer, _), table, ids, rows in zip(
        lookups, tables, wanted, ServedTable.pull(tables, wanted), strict=True
    ):
        unique, weight, padding = ids.unique, layer.weight, layer.padding_idx
        tied = _RowsOfWeight.apply(weight, unique, rows, table)  # type: ignore[no-untyped-call]
        if padding is not None:
            at = int(torch.searchsorted(unique, padding))
            padding = at if at < unique.numel() and int(unique[at]) == padding else None
        found.append(Found(tied, ids.positions, padding))
    return found


class ServedEmbedding(TableLookup, nn.Embedding):
    """An nn.Embedding whose weight is a table on servers."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return rows, as nn.Embedding."""
        rows, positions, padding = self.look_up(input)
        return F.embedding(positions, rows, padding, scale_grad_by_freq=self.scale_grad_by_freq)


class ServedEmbeddingBag(TableLookup, nn.EmbeddingBag):
    """An nn.EmbeddingBag whose weight is a table on servers."""

    def forward(
        self,
        input: torch.Tensor,
        offsets: torch.Tensor | None = None,
        per_sample_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return one row per bag, as nn.EmbeddingBag."""
        return _pool(self, self.look_up(input), offsets, per_sample_weights)


_SERVED: dict[type, type] = {
    nn.Embedding: ServedEmbedding,
    nn.EmbeddingBag: ServedEmbeddingBag,
}


class TableLayer(TableLookup, nn.Module):
    """Base of fastdist's own embeddings."""

    def __init__(
        self,
        num_embeddings: int | None,
        embedding_dim: int,
        *,
        initializer: tuple[str, float, float] = ("normal", 0.0, 1.0),
        seed: int | None = None,
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
        if num_embeddings is not None and num_embeddings < 0:
            raise ValueError(f"num_embeddings must be at least 0, or None, got {num_embeddings}")
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.spec = RowsSpec(  # the name and the rule are known when the scope ends
            "",
            embedding_dim,
            RuleSpec("SGD"),
            num_embeddings,
            initializer,
            draw_seed() if seed is None else seed,
            storage=storage,
            max_rows=max_rows,
            max_age=max_age,
        )
        self.padding_idx = _padding(padding_idx, num_embeddings)
        self.cached_rows = cached_rows
        self.cache_age = cache_age
        rows = UNLIMITED if num_embeddings is None else num_embeddings
        self.sparse = bool(state.scopes) and state.scopes[-1].has_servers
        # Checks the arguments, with and without servers; the rows of the servers are not made here.
        made = num_embeddings if num_embeddings is None or not self.sparse else min(rows, 1)
        table = replace(self.spec, rows=made).make()
        if self.sparse:
            self.weight: nn.Parameter = table_weight(rows, embedding_dim)
        elif num_embeddings is None:
            raise UnsupportedError(
                "an embedding without a limit of rows needs parameter servers: make it in the "
                "scope of a ParameterServerStrategy, or pass num_embeddings"
            )
        else:
            weight = torch.empty((rows, embedding_dim))
            table.pull(np.arange(rows), weight.numpy())
            if self.padding_idx is not None:
                weight[self.padding_idx] = 0
            self.weight = nn.Parameter(weight)

    def extra_repr(self) -> str:
        """Return the arguments, for `repr`."""
        return f"{self.num_embeddings}, {self.embedding_dim}"


class Embedding(TableLayer):
    """An embedding whose rows parameter servers keep, if the strategy has servers.

    Servers use memory only for rows that have been trained. Without a limit, ids are any 64-bit
    integers, such as hashes. Without parameter servers it is a plain nn.Embedding.

    Args:
        num_embeddings: ids are below this number; None accepts any id.
        embedding_dim: elements of a row.
        initializer: ("constant", value, 0), ("uniform", low, high) or ("normal", mean, deviation).
        seed: initial values depend on the seed and the id alone; None draws one from torch's
            default generator.
        storage: "float32", "bfloat16" or "int8", on servers.
        max_rows: the number of rows above which servers drop the least recently touched rows.
        max_age: servers drop rows that were not touched in this many pushes.
        padding_idx: an id whose row is zero, and does not learn.
        cached_rows: number of rows that a worker caches. It sees its own pushes at once, pushes of
            other workers when a row expires. For asynchronous workers only.
        cache_age: number of lookups after which a cached row expires.

    Raises:
        UnsupportedError: there is neither a limit nor a parameter server.
        ValueError: an option is out of range.

    Examples:
        >>> import fastdist as fd, torch
        >>> rows = fd.nn.Embedding(100, 8)
        >>> rows(torch.tensor([3, 7])).shape
        torch.Size([2, 8])
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return the rows of ids: shape (…, embedding_dim)."""
        if self._table is None:
            return F.embedding(input, self.weight, self.padding_idx)
        rows, positions, padding = self.look_up(input)
        return F.embedding(positions, rows, padding)


class EmbeddingBag(TableLayer):
    """Sums, means or maxima of rows; the rows are kept as for `Embedding`.

    Args:
        num_embeddings: the number of rows; see `Embedding`, also for options not listed here.
        embedding_dim: elements of a row.
        mode: "sum", "mean" or "max".
        include_last_offset: the `include_last_offset` of nn.EmbeddingBag.

    Examples:
        >>> import fastdist as fd, torch
        >>> bags = fd.nn.EmbeddingBag(100, 8, mode="sum")
        >>> bags(torch.tensor([[3, 7], [1, 2]])).shape
        torch.Size([2, 8])
    """

    scale_grad_by_freq = False

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
        """Return one row per bag, as nn.EmbeddingBag."""
        plain = Found(self.weight, input, self.padding_idx)
        found = plain if self._table is None else self.look_up(input)
        return _pool(self, found, offsets, per_sample_weights)


def _pool(
    bag: Any, found: Found, offsets: torch.Tensor | None, weights: torch.Tensor | None
) -> torch.Tensor:
    """Return one row per bag of rows that were found."""
    return F.embedding_bag(
        found.positions,
        found.rows,
        offsets,
        scale_grad_by_freq=bag.scale_grad_by_freq,
        mode=bag.mode,
        per_sample_weights=weights,
        include_last_offset=bag.include_last_offset,
        padding_idx=found.padding,
    )


class EmbeddingBagCollection(nn.Module):
    """Embedding bags of many features, whose rows each server is asked for once.

    Args:
        bags: the bag of each feature, of `fd.nn.EmbeddingBag` or nn.EmbeddingBag; features may
            share one.

    Raises:
        TypeError: a bag is another module.

    Examples:
        >>> import fastdist as fd, torch
        >>> bags = {"day": fd.nn.EmbeddingBag(7, 4), "shop": fd.nn.EmbeddingBag(100, 8)}
        >>> collection = fd.nn.EmbeddingBagCollection(bags)
        >>> shops = torch.tensor([5, 6, 7]), torch.tensor([0, 2])  # two shops, then one
        >>> pooled = collection({"day": torch.tensor([[1], [3]]), "shop": shops})
        >>> pooled["day"].shape, pooled["shop"].shape
        (torch.Size([2, 4]), torch.Size([2, 8]))
    """

    def __init__(self, bags: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for feature, bag in bags.items():
            if not isinstance(bag, EmbeddingBag | nn.EmbeddingBag):
                raise TypeError(f"the bag of {feature!r} must be an EmbeddingBag, got {bag!r}")
        self.bags = nn.ModuleDict(bags)

    def forward(self, features: Any) -> dict[str, torch.Tensor]:
        """Return for each feature one row per bag: shape (bags, embedding_dim).

        Args:
            features: the features' ids: for each feature, ids of shape (bags, ids), or (ids,
                offsets), or (ids, offsets, per_sample_weights), as for nn.EmbeddingBag; or
                torchrec's KeyedJaggedTensor.

        Raises:
            KeyError: a feature is missing.
        """
        given = {name: _jagged(features[name], bag) for name, bag in self.bags.items()}
        served = self._served_bags()
        lookups = [(bag, given[name][0]) for name, bag in served.items()]
        found = dict(zip(served, look_up_together(lookups), strict=True)) if served else {}
        return {
            name: _pool(bag, found[name], *given[name][1:]) if name in found else bag(*given[name])
            for name, bag in self.bags.items()
        }

    def prefetch(self, batch: Any) -> int:
        """Ask for the rows of a later batch; see `ParameterServerStrategy.prefetch`.

        Returns:
            How many parts of the batch have the features.
        """
        parts = list(_parts_with(self.bags.keys(), batch))
        for features in parts:
            for name, bag in self._served_bags().items():
                ids, *_ = _jagged(features[name], bag)
                bag.served_table().prefetch(ids)
        return len(parts)

    def _served_bags(self) -> dict[str, Any]:
        return {n: bag for n, bag in self.bags.items() if getattr(bag, "_table", None) is not None}


def _parts_with(names: Collection[str], batch: Any) -> Iterator[Any]:
    """Yield what has all these features: a batch, or parts of nested tuples, lists and dicts."""
    keys: set[Any] = set(batch.keys()) if hasattr(batch, "keys") else set()
    missing = [name for name in names if name not in keys]
    if not missing:
        yield batch
    elif len(missing) < len(names):
        raise ValueError(f"prefetch: the batch lacks the features {', '.join(missing)}")
    elif isinstance(batch, tuple | list | Mapping):
        for part in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _parts_with(names, part)


def _jagged(
    feature: Any, bag: nn.Module
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return ids, offsets and weights of a feature."""
    if isinstance(feature, torch.Tensor):
        return feature, None, None
    if isinstance(feature, tuple):
        ids, offsets, *weights = feature
        return ids, offsets, weights[0] if weights else None
    offsets = feature.offsets()  # torchrec's JaggedTensor: with the end of the last bag
    if not bag.include_last_offset:
        offsets = offsets[:-1]
    return feature.values(), offsets, feature.weights_or_none()


def table_embeddings(roots: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the embeddings that become tables: trainable ones that do not share their weight.

    Subclasses may use their weight in any way, so their weight stays a dense variable.
    """
    modules = list(modules_of(roots))
    users = Counter(id(own) for module in modules for own in module.parameters(recurse=False))
    found: list[nn.Module] = []
    for module in modules:
        if not isinstance(module, TableLayer):
            is_exact = type(module) in (*_SERVED, *_SERVED.values())
            if not is_exact or users[id(module.weight)] > 1:
                continue
            if module.max_norm is not None:
                raise ValueError(
                    f"{module} has max_norm, which changes rows in forward; only optimizers can "
                    "change rows on parameter servers"
                )
        if isinstance(module.weight, nn.Parameter) and module.weight.requires_grad:
            found.append(module)
    return found


def _padding(index: int | None, rows: int | None) -> int | None:
    """Normalize padding_idx as nn.Embedding does: negative values count from the end."""
    if index is None or rows is None:
        return index
    if not -rows <= index < rows:
        raise ValueError(f"padding_idx must be within {rows} embeddings, got {index}")
    return index % rows


def attach_table(module: nn.Module, table: ServedTable) -> None:
    """Make a module use a table's rows from now on, with sparse gradients."""
    module.__dict__.update(_table=table, sparse=True)
    module.weight.__dict__["table"] = table
    if module.__class__ in _SERVED:
        module.__class__ = _SERVED[module.__class__]
