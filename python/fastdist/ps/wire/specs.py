"""Specifications of dense variables and tables of rows, and of their update rules."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import fastdist._core as _core
from fastdist.processes.cgroups import usable_memory_bytes

# Elements of a dense variable that share a scale.
_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class RuleSpec:
    """An update rule.

    Attributes:
        name: a class of torch.optim: SGD, Adagrad, Adam, AdamW, RMSprop; or RowWiseAdagrad, for
            tables only.
        options: its hyperparameters.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def make(self) -> _core.UpdateRule:
        """Create the compiled rule; raise ValueError for what it does not accept."""
        options = {k: tuple(v) if isinstance(v, list) else v for k, v in self.options.items()}
        return _core.UpdateRule(self.name, **options)

    @property
    def counts_steps(self) -> bool:
        """True if the effect of a push depends on the number of pushes before it."""
        return self.name in ("Adam", "AdamW") or bool(self.options.get("lr_decay"))


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A dense variable, or a server's piece of one.

    Attributes:
        name: unique on a server.
        shape: its value's shape.
        rule: the rule that applies gradients.
        wire: encoding of gradients and values in messages: "float32", "bfloat16", "float16", or
            "int8" with a scale for every 1024 elements. Initial and assigned values are float32.
        refuse_nonfinite: reject pushes with NaN or infinity instead of only counting them.
    """

    name: str
    shape: tuple[int, ...]
    rule: RuleSpec
    wire: str = "float32"
    refuse_nonfinite: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def make(self, initial: np.ndarray[Any, Any]) -> _core.DenseVariable:
        """Create the variable; `initial` is float32, of `shape`."""
        self.wire_format()  # raises for an unknown name
        return _core.DenseVariable(initial, self.rule.make())

    def wire_format(self) -> _core.WireFormat | None:
        """Return the encoder of gradients and values; None for float32."""
        return None if self.wire == "float32" else _core.WireFormat(self.wire, _BLOCK)


@dataclass(frozen=True, slots=True)
class RowsSpec:
    """A table of rows.

    Attributes:
        name: unique on a server.
        dim: elements of a row.
        rule: the rule that applies gradients.
        rows: ids are below this number; None accepts any 64-bit id, and creates rows on their
            first push.
        initializer: ("constant", value, 0), ("uniform", low, high) or ("normal", mean, deviation).
        seed: initial values depend on the seed and the id alone.
        first_id: id of the first row, in a part of a larger table.
        storage: "float32", "bfloat16" or "int8".
        max_rows: the number of rows above which the least recently touched rows are dropped.
        max_age: rows that were not touched in this many pushes are dropped.
        wire: encoding of gradients and rows in messages: "float32", "bfloat16", "float16", or
            "int8" with a scale for every row. Assigned values are float32.
        refuse_nonfinite: reject pushes with NaN or infinity instead of only counting them.
    """

    name: str
    dim: int
    rule: RuleSpec
    rows: int | None = None
    initializer: tuple[str, float, float] = ("constant", 0.0, 0.0)
    seed: int = 0
    first_id: int = 0
    storage: str = "float32"
    max_rows: int | None = None
    max_age: int | None = None
    wire: str = "float32"
    refuse_nonfinite: bool = False

    def make(self) -> _core.RowTable:
        """Create the table, empty."""
        self.wire_format()  # raises for an unknown name
        return _core.RowTable(
            self.dim,
            self.rule.make(),
            rows=self.rows,
            memory_bytes=usable_memory_bytes(),
            initializer=self.initializer,
            seed=self.seed,
            first_id=self.first_id,
            storage=self.storage,
            max_rows=self.max_rows,
            max_age=self.max_age,
        )

    def wire_format(self) -> _core.WireFormat | None:
        """Return the encoder of gradients and rows; None for float32."""
        return None if self.wire == "float32" else _core.WireFormat(self.wire, self.dim)


Spec = DenseSpec | RowsSpec


def to_json(spec: Spec) -> bytes:
    """Return a spec as JSON, for a message."""
    return json.dumps({type(spec).__name__: dataclasses.asdict(spec)}).encode()


def from_json(data: bytes) -> Spec:
    """Parse the result of `to_json`; raise ValueError if it is anything else."""
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
