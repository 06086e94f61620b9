"""Values that differ from replica to replica, alone or inside nested structures.

A structure is any nesting of tuples, named tuples, lists, dicts, dataclasses and classes that are
registered with `torch.utils._pytree`, such as transformers' ModelOutput; other objects are leaves,
and so is a PackedSequence, though it is a named tuple.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, NoReturn, TypeVar

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

T = TypeVar("T")
R = TypeVar("R")


class Origin(NamedTuple):
    """The origin of a batch; equal on all replicas that take their parts of one global batch.

    Attributes:
        epoch: the dataset's epoch; 0 if all epochs have one order.
        step: the batch's number in it.
        settings: names and values of the dataset's arguments, and the length of its source.
        code: a hash of the settings.
        data: a hash of some examples of the source; 0 if none was taken, -1 if none is certain.
    """

    epoch: int
    step: int
    settings: tuple[tuple[str, Any], ...]
    code: int
    data: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PerReplica(Generic[T]):
    """The value of each replica of this process (tf.distribute.DistributedValues).

    Batches of a distributed dataset contain `PerReplica` values, and `run` returns them if the job
    has several replicas. `strategy.reduce` combines the values of all replicas,
    `strategy.local_results` returns the values as a tuple, and `fastdist.map` computes with them.

    Attributes:
        values: one value per replica of this process; a process has one replica, except under
            TPUStrategy, which traces one program for all replicas.
        examples: number of examples of the global batch that each replica of the job has, in the
            order of replica ids; None if the values do not come from a batch.
        weights: what each replica of the job counts in a mean, from the `weight` of `run`; None:
            as much as its examples.
        origin: where a batch comes from; None if each worker reads its own data.

    Examples:
        >>> import fastdist as fd
        >>> strategy = fd.OneDeviceStrategy("cpu")
        >>> value = fd.PerReplica((3.0,))
        >>> strategy.local_results(value), strategy.reduce("sum", value)
        ((3.0,), tensor(3.))
    """

    values: tuple[T, ...]
    examples: tuple[int, ...] | None = None
    weights: tuple[float, ...] | None = None
    origin: Origin | None = None

    def __repr__(self) -> str:
        rows = "".join(f"\n  {i}: {value!r}" for i, value in enumerate(self.values))
        return f"PerReplica({rows})"

    if not TYPE_CHECKING:  # type checkers report these uses

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"PerReplica has no attribute {name!r}: {_HINT}", name=name, obj=self
            )

        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> NoReturn:
            name = getattr(func, "__name__", "a function of torch")
            raise TypeError(
                f"{name} got a PerReplica: it holds one value for each replica. Compute in "
                "run, where each replica gets its own: strategy.run(model, args=(batch,)). "
                f"Outside, {_HINT.partition('. ')[2]}"
            )

    def _refuse(self, *_: object, **_named: object) -> NoReturn:
        raise TypeError(f"a PerReplica cannot be used as a number or array: {_HINT}")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, VALUES):
            self._refuse()
        return self is other

    __hash__ = object.__hash__

    if not TYPE_CHECKING:
        __float__ = __int__ = __complex__ = __bool__ = __index__ = __array__ = _refuse
        __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refuse
        __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = _refuse
        __pow__ = __rpow__ = __matmul__ = __rmatmul__ = __neg__ = __abs__ = __round__ = _refuse
        __lt__ = __le__ = __gt__ = __ge__ = __len__ = __getitem__ = __iter__ = _refuse

    def __format__(self, spec: str) -> str:
        if spec:
            self._refuse()
        return repr(self)


_HINT = (
    "it holds one value for each replica. strategy.reduce('mean', value) combines the values of "
    "all replicas, strategy.local_results(value) returns the values of this process, and "
    "fastdist.map(fn, value) calls fn with each value"
)


def map(fn: Callable[..., Any], *values: Any) -> Any:
    """Call `fn` with each replica's own values, and return the results as `run` does.

    The results keep the examples of the batch that the values come from, so that
    `strategy.reduce("mean", ...)` weights replicas by examples.

    Args:
        fn: the function to call once per replica of this process.
        values: structures; `PerReplica` leaves become the replica's own value.

    Returns:
        The result of `fn`, with tensors and numbers as `PerReplica`.

    Raises:
        ValueError: the values come from batches that were divided differently among replicas.

    Examples:
        >>> import fastdist as fd
        >>> fd.map(lambda loss: loss / 2, fd.PerReplica((3.0,)))
        PerReplica(
          0: 1.5)
    """
    parts = [leaf for leaf in leaves(list(values)) if type(leaf) is PerReplica]
    known = {part.examples for part in parts if part.examples is not None}
    if len(known) > 1:
        raise ValueError(
            "fastdist.map: the values come from batches that were divided differently among "
            f"replicas: {sorted(known)} examples"
        )
    if not parts:
        return fn(*values)
    local = len(parts[0].values)
    results = [fn(*select(list(values), replica)) for replica in range(local)]
    weights = {part.weights for part in parts if part.weights is not None}
    if len(weights) > 1:
        raise ValueError(
            "fastdist.map: the values come from runs with different weights of replicas: "
            f"{sorted(weights)}"
        )
    return wrap(results, next(iter(known), None), next(iter(weights), None))


def wrap(
    results: Sequence[Any],
    examples: tuple[int, ...] | None = None,
    weights: tuple[float, ...] | None = None,
) -> Any:
    """Join the results of this process's replicas; tensors and numbers become `PerReplica`."""

    def join(*values: Any) -> Any:
        is_value = isinstance(values[0], VALUES)
        return PerReplica(values, examples, weights) if is_value else values[0]

    return map_structure(join, *results)


def map_structure(
    fn: Callable[..., R], structure: Any, *others: Any, is_leaf: Callable[..., bool] | None = None
) -> Any:
    """Apply `fn` to the corresponding leaves of equal structures, and build the same structure.

    `is_leaf` is a function of corresponding nodes: True if `fn` takes them as they are.
    """
    if others or is_leaf is not None:
        return _Mapping(fn, is_leaf).apply("", structure, others)
    return _mapped(fn, structure)


def leaves(structure: Any) -> list[Any]:
    """Return the leaves, depth first; the leaves of a dict in insertion order."""
    found: list[Any] = []
    map_structure(found.append, structure)
    return found


def shares(weights: tuple[float, ...] | None) -> list[float] | None:
    """Return each replica's share of a batch; None if all replicas have the same share."""
    if weights is None or weights.count(weights[0]) == len(weights):
        return None
    whole = sum(weights)
    return [weight / whole for weight in weights]


def select(structure: Any, replica: int = 0) -> Any:
    """Replace the per-replica values in a structure by the values of one local replica."""

    def own(leaf: Any) -> Any:
        return leaf.values[replica] if type(leaf) is PerReplica else leaf

    return own(structure) if type(structure) is PerReplica else map_structure(own, structure)


def _mapped(fn: Callable[..., Any], structure: Any) -> Any:
    """Map one structure; `run` needs this to be fast, so common types come first."""
    kind = type(structure)
    if kind is tuple:
        return tuple([_mapped(fn, item) for item in structure])
    if kind is list:
        return [_mapped(fn, item) for item in structure]
    if kind is dict:
        return {key: _mapped(fn, item) for key, item in structure.items()}
    return fn(structure) if kind in _LEAVES else _Mapping(fn).apply("", structure, ())


@dataclasses.dataclass(frozen=True, slots=True)
class _Mapping:
    """A function that is applied to the leaves of structures."""

    fn: Callable[..., Any]
    is_leaf: Callable[..., bool] | None = None

    def apply(self, place: str, structure: Any, others: tuple[Any, ...]) -> Any:
        kind = type(structure)
        if kind is PackedSequence or (
            self.is_leaf is not None and self.is_leaf(structure, *others)
        ):
            return self.fn(structure, *others)
        if kind in pytree.SUPPORTED_NODES and kind not in _BUILTIN:
            return self._apply_registered(place, structure, others)
        if isinstance(structure, (tuple, list)):
            _require_alike(place, structure, others, len)
            items = [
                self.apply(f"{place}[{i}]", item, tuple(other[i] for other in others))
                for i, item in enumerate(structure)
            ]
            return kind(*items) if hasattr(structure, "_fields") else kind(items)
        if isinstance(structure, dict):
            _require_alike(place, structure, others, set)
            pairs = {
                key: self.apply(f"{place}[{key!r}]", item, tuple(other[key] for other in others))
                for key, item in structure.items()
            }
            if kind is dict:
                return pairs
            made = structure.copy()  # keeps attributes of subclasses, such as a default factory
            made.update(pairs)
            return made
        if _is_instance(structure):
            _require_alike(place, structure, others, lambda _: None)
            fields = {
                name: self.apply(
                    f"{place}.{name}",
                    getattr(structure, name),
                    tuple(getattr(other, name) for other in others),
                )
                for name in (field.name for field in dataclasses.fields(structure) if field.init)
            }
            return dataclasses.replace(structure, **fields)
        for other in others:
            if isinstance(other, (tuple, list, dict)) or _is_instance(other):
                raise ValueError(_different(place, structure, other))
        return self.fn(structure, *others)

    def _apply_registered(self, place: str, structure: Any, others: tuple[Any, ...]) -> Any:
        """Apply to an object whose class is registered with torch's pytree."""
        node = pytree.SUPPORTED_NODES[type(structure)]
        children, context = node.flatten_fn(structure)
        flat = []
        for other in others:
            same = type(other) is type(structure)
            theirs, other_context = node.flatten_fn(other) if same else ([], None)
            if not same or other_context != context or len(theirs) != len(children):
                raise ValueError(_different(place, structure, other))
            flat.append(theirs)
        items = [
            self.apply(f"{place}[{i}]", item, tuple(theirs[i] for theirs in flat))
            for i, item in enumerate(children)
        ]
        return node.unflatten_fn(items, context)


def _is_instance(structure: Any) -> bool:
    """Return True for a dataclass's instance that is a structure."""
    return dataclasses.is_dataclass(structure) and not isinstance(structure, (type, PerReplica))


def _require_alike(
    place: str, structure: Any, others: tuple[Any, ...], shape: Callable[[Any], Any]
) -> None:
    for other in others:
        if type(other) is not type(structure) or shape(other) != shape(structure):
            raise ValueError(_different(place, structure, other))


def _different(place: str, structure: Any, other: Any) -> str:
    return (
        f"replicas hold different structures at {place or 'the top'}: "
        f"{_describe(structure)} and {_describe(other)}"
    )


def _describe(structure: Any) -> str:
    kind = type(structure).__name__
    if isinstance(structure, dict):
        return f"{kind} with keys {[str(key) for key in structure]}"
    return f"{kind} of {len(structure)}" if isinstance(structure, (tuple, list)) else kind


VALUES = (torch.Tensor, int, float, complex, np.ndarray, np.generic)
_LEAVES = frozenset({PerReplica, torch.Tensor, int, float, bool, str, type(None)})
_BUILTIN = frozenset({tuple, list, dict})
