"""What a server is to keep: dense variables and tables of rows, and how they are updated."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import fastdist._core as _core
from fastdist.ps.wire.protocol import MAX_META_BYTES

# Elements of a dense variable that share a scale.
_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class RuleSpec:
    """An update rule.

    Attributes:
        name: of a class of torch.optim: SGD, Adagrad, Adam, AdamW, RMSprop.
        options: its hyperparameters.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def make(self) -> _core.UpdateRule:
        """The compiled rule.

        Raises:
            ValueError: an unknown name or option, or a value out of range.
        """
        options = {k: tuple(v) if isinstance(v, list) else v for k, v in self.options.items()}
        return _core.UpdateRule(self.name, **options)

    @property
    def counts_steps(self) -> bool:
        """Whether what a push does depends on how many there were before."""
        return self.name in ("Adam", "AdamW") or bool(self.options.get("lr_decay"))


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A dense variable, or the part of one that a server keeps.

    Attributes:
        name: what it is found by.
        shape: of its value.
        rule: how gradients change it.
        storage: "float32" or "bfloat16".
        wire: how gradients and values travel: "float32", "bfloat16", "float16", or "int8" with a
            scale for every 1024 elements. Initial and assigned values are float32.
        refuse_nonfinite: a push with NaN or infinity is an error, and not only counted.
    """

    name: str
    shape: tuple[int, ...]
    rule: RuleSpec
    storage: str = "float32"
    wire: str = "float32"
    refuse_nonfinite: bool = False

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def make(self, initial: np.ndarray[Any, Any]) -> _core.DenseVariable:
        """The variable.

        Args:
            initial: float32, of `shape`.
        """
        self.wire_format()  # names that do not exist are refused here
        return _core.DenseVariable(initial, self.rule.make(), self.storage)

    def wire_format(self) -> _core.WireFormat | None:
        """What encodes gradients and values; None for float32."""
        return _wire_format(self.wire, _BLOCK)


@dataclass(frozen=True, slots=True)
class RowsSpec:
    """A table of rows.

    Attributes:
        name: what it is found by.
        dim: elements of a row.
        rule: how gradients change it.
        rows: ids are below this; None: any 64 bits, and rows come into being when they are pushed.
        initializer: ("constant", value, 0), ("uniform", low, high) or ("normal", mean, deviation).
        seed: of the initial values, which depend on it and the id alone.
        storage: "float32", "bfloat16" or "int8".
        max_rows: the rows touched the longest ago are dropped over this number.
        max_age: rows that so many pushes have not touched are dropped.
        wire: how gradients and values travel: "float32", "bfloat16", "float16", or "int8" with a
            scale for every row. Assigned values are float32.
        refuse_nonfinite: a push with NaN or infinity is an error, and not only counted.
    """

    name: str
    dim: int
    rule: RuleSpec
    rows: int | None = None
    initializer: tuple[str, float, float] = ("constant", 0.0, 0.0)
    seed: int = 0
    storage: str = "float32"
    max_rows: int | None = None
    max_age: int | None = None
    wire: str = "float32"
    refuse_nonfinite: bool = False

    def make(self) -> _core.RowTable:
        """The table, empty."""
        self.wire_format()  # names that do not exist are refused here
        return _core.RowTable(
            self.dim,
            self.rule.make(),
            rows=self.rows,
            initializer=self.initializer,
            seed=self.seed,
            storage=self.storage,
            max_rows=self.max_rows,
            max_age=self.max_age,
        )

    def wire_format(self) -> _core.WireFormat | None:
        """What encodes gradients and rows; None for float32."""
        return _wire_format(self.wire, self.dim)


Spec = DenseSpec | RowsSpec


def _wire_format(name: str, dim: int) -> _core.WireFormat | None:
    return None if name == "float32" else _core.WireFormat(name, dim)


def to_json(spec: Spec) -> bytes:
    """For a message.

    Raises:
        ValueError: a name or options beyond all measure.
    """
    data = json.dumps({type(spec).__name__: dataclasses.asdict(spec)}).encode()
    if len(data) > MAX_META_BYTES:
        raise ValueError(f"a spec of {len(data)} bytes, of which {MAX_META_BYTES} are allowed")
    return data


def from_json(data: bytes) -> Spec:
    """What `to_json` gave.

    Raises:
        ValueError: something else.
    """
    try:
        ((kind, fields),) = json.loads(data).items()
        rule = RuleSpec(**fields.pop("rule"))
        if kind == "DenseSpec":
            shape = tuple(int(length) for length in fields.pop("shape"))
            if min(shape, default=0) < 0:
                raise ValueError("negative lengths")
            return DenseSpec(shape=shape, rule=rule, **fields)
        if kind == "RowsSpec":
            name, low, high = fields.pop("initializer")
            return RowsSpec(rule=rule, initializer=(name, float(low), float(high)), **fields)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a spec of a variable or table: {error}") from None
    raise ValueError(f"not a spec of a variable or table: {kind!r}")
