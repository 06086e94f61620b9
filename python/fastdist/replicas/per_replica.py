"""Values that differ from replica to replica, alone or inside nested structures.

A structure is any nesting of tuples, named tuples, lists, dicts and dataclasses; everything else is
a leaf. `run` takes structures whose leaves are per-replica values apart, and joins what the
replicas return into such a structure again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


@dataclasses.dataclass(frozen=True, slots=True)
class PerReplica(Generic[T]):
    """One value for each replica of this process (tf.distribute.DistributedValues).

    Attributes:
        values: in the order of the replicas.
        examples: how many examples of the global batch each replica of the whole job has, in
            the order of their ids; None where the values are no part of a batch.
    """

    values: tuple[T, ...]
    examples: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        rows = "".join(f"\n  {i}: {value!r}" for i, value in enumerate(self.values))
        return f"PerReplica({rows})"


def map_structure(fn: Callable[..., R], structure: Any, *others: Any) -> Any:
    """Apply `fn` to the leaves of structures that are alike, and build the same structure.

    Raises:
        ValueError: the structures differ in kind, length or keys; the message names the place.
    """
    return _map(fn, "", structure, others) if others else _mapped(fn, structure)


def leaves(structure: Any) -> list[Any]:
    """The leaves, depth first; of dicts in the order of their keys' insertion."""
    found: list[Any] = []
    map_structure(found.append, structure)
    return found


def select(structure: Any, replica: int) -> Any:
    """What a structure holds for the local replica: per-replica values become its own."""

    def own(leaf: Any) -> Any:
        return leaf.values[replica] if type(leaf) is PerReplica else leaf

    return own(structure) if type(structure) is PerReplica else map_structure(own, structure)


def regroup(structures: Sequence[Any], examples: tuple[int, ...] | None = None) -> Any:
    """Join one structure per local replica into one structure of per-replica values.

    Raises:
        ValueError: the structures differ.
    """
    return map_structure(lambda *values: PerReplica(values, examples), *structures)


def local_results(value: Any) -> tuple[Any, ...]:
    """The values of this process's replicas: those of a per-replica value, else the value alone."""
    return value.values if type(value) is PerReplica else (value,)


def _mapped(fn: Callable[..., Any], structure: Any) -> Any:
    """`_map` of one structure, in every run: the usual kinds first."""
    kind = type(structure)
    if kind is tuple:
        return tuple([_mapped(fn, item) for item in structure])
    if kind is list:
        return [_mapped(fn, item) for item in structure]
    if kind is dict:
        return {key: _mapped(fn, item) for key, item in structure.items()}
    return fn(structure) if kind in _LEAVES else _map(fn, "", structure, ())


def _map(fn: Callable[..., Any], place: str, structure: Any, others: tuple[Any, ...]) -> Any:
    kind = type(structure)
    if isinstance(structure, (tuple, list)):
        _require_alike(place, structure, others, len)
        items = [
            _map(fn, f"{place}[{i}]", item, tuple(other[i] for other in others))
            for i, item in enumerate(structure)
        ]
        return kind(*items) if hasattr(structure, "_fields") else kind(items)
    if isinstance(structure, dict):
        _require_alike(place, structure, others, set)
        pairs = {
            key: _map(fn, f"{place}[{key!r}]", item, tuple(other[key] for other in others))
            for key, item in structure.items()
        }
        return pairs if kind is dict else _dict_like(structure, pairs)
    if dataclasses.is_dataclass(structure) and kind is not PerReplica:
        _require_alike(place, structure, others, lambda _: None)
        fields = [field.name for field in dataclasses.fields(structure) if field.init]
        return dataclasses.replace(
            structure,  # type: ignore[type-var]  # an instance: types are no leaves here
            **{
                name: _map(
                    fn,
                    f"{place}.{name}",
                    getattr(structure, name),
                    tuple(getattr(other, name) for other in others),
                )
                for name in fields
            },
        )
    return fn(structure, *others)


def _dict_like(model: dict[Any, Any], pairs: dict[Any, Any]) -> dict[Any, Any]:
    made = model.copy()  # keeps what subclasses carry besides: a default factory, say
    made.update(pairs)
    return made


def _require_alike(
    place: str, structure: Any, others: tuple[Any, ...], shape: Callable[[Any], Any]
) -> None:
    for other in others:
        if type(other) is not type(structure) or shape(other) != shape(structure):
            raise ValueError(
                f"replicas hold different structures at {place or 'the top'}: "
                f"{_describe(structure)} and {_describe(other)}"
            )


def _describe(structure: Any) -> str:
    kind = type(structure).__name__
    if isinstance(structure, dict):
        return f"{kind} with keys {sorted(map(str, structure))}"
    return f"{kind} of {len(structure)}" if isinstance(structure, (tuple, list)) else kind


_LEAVES = frozenset({PerReplica, int, float, bool, str, type(None)})
