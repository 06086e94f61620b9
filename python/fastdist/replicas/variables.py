"""Variables: state of replicas, with rules that combine their writes and reads (tf.Variable)."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import nn

from fastdist.collectives.autograd import as_tensor
from fastdist.collectives.communicator import Communicator
from fastdist.replicas.context import ReplicaContext, state
from fastdist.replicas.cross_replica import reduce_values
from fastdist.replicas.per_replica import select

_ScatterOp = Literal["add", "sub", "mul", "div", "min", "max", "update"]


class VariableSynchronization(enum.Enum):
    """Time at which replicas' values of a variable are combined (tf.VariableSynchronization).

    Examples:
        >>> import fastdist as fd
        >>> on_read, add = fd.VariableSynchronization.ON_READ, fd.VariableAggregation.SUM
        >>> seen = fd.Variable(0, synchronization=on_read, aggregation=add)
    """

    AUTO = "auto"
    """Same as ON_WRITE."""
    ON_WRITE = "on_write"
    """A write in `run` is aggregated over replicas; all replicas hold the same value."""
    ON_READ = "on_read"
    """Each replica reads and writes its own value; a read outside `run` aggregates the values."""


class VariableAggregation(enum.Enum):
    """Operation that combines replicas' values of a variable (tf.VariableAggregation).

    Examples:
        >>> import fastdist as fd
        >>> best = fd.Variable(0.0, aggregation=fd.VariableAggregation.MEAN)
    """

    NONE = "none"
    """Values are not combined: each replica keeps the value that it wrote."""
    SUM = "sum"
    MEAN = "mean"
    ONLY_FIRST_REPLICA = "only_first_replica"


class Owner(Protocol):
    """The interface of a strategy that its variables use."""

    num_replicas_in_sync: int
    local_replica_ids: tuple[int, ...]

    def connect(self) -> Communicator | None:
        """Return the communicator of all processes, made again after a failure; None if alone.

        Every replica must call.
        """

    def values(self, variable: Variable) -> Sequence[torch.Tensor]:
        """Return the value of each local replica."""

    def refresh(self) -> None:
        """Bring changes made outside `run` to all replicas."""

    def write(self, variable: Variable, write: Callable[[int, Variable], None]) -> None:
        """Call `write(local, component)` for each local replica; the component is a variable."""


class Variable(nn.Module):
    """A tensor of state that is not trained: a counter, a moving average, a sum of losses.

    A variable made in a strategy's scope, alone or as part of a module, exists on every replica.
    In `run`, a write to a variable that is aggregated on write waits for all replicas; no other
    operation communicates. Outside `run`, all workers must write the same values. A variable that
    is aggregated on read must be read, or saved, by all workers together.

    Its key in a state_dict is "value", and holds the result of a read outside `run`. So it can be
    loaded under another strategy, or without a strategy. A copy or a pickle holds the first
    replica's value.

    Args:
        initial_value: a number, array or tensor; all workers start with the first worker's value.
        synchronization: the time at which the replicas' values are combined.
        aggregation: the operation that combines them.
        dtype: dtype of the tensor; None: the dtype of the initial value.

    Raises:
        ValueError: the aggregation is MEAN for integers, or SUM or MEAN for booleans.

    Examples:
        >>> import fastdist as fd
        >>> with fd.OneDeviceStrategy("cpu").scope():
        ...     seen = fd.Variable(0, aggregation=fd.VariableAggregation.SUM)
        >>> seen.assign_add(32)
        >>> seen.value
        tensor(32)
    """

    _value: torch.Tensor

    def __init__(
        self,
        initial_value: Any,
        *,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        value = torch.as_tensor(initial_value, dtype=dtype).detach().clone()
        self.synchronization = VariableSynchronization(synchronization)
        self.aggregation = VariableAggregation(aggregation)
        if value.dtype == torch.bool and self.aggregation in _ADDING:
            raise ValueError(f"a variable of bool cannot have the aggregation {self.aggregation}")
        is_exact = not (value.is_floating_point() or value.is_complex())
        if is_exact and self.aggregation is VariableAggregation.MEAN:
            raise ValueError(
                f"a variable of {value.dtype} cannot have the aggregation {self.aggregation}: MEAN "
                "is not defined for integers; pass dtype=torch.float32, or another aggregation"
            )
        self.register_buffer("_value", value)

    @property
    def component(self) -> torch.Tensor:
        """The tensor of one replica."""
        return self._value

    @property
    def is_local(self) -> bool:
        """True if replicas may hold different values."""
        by_replica = self.synchronization is VariableSynchronization.ON_READ
        return by_replica or self.aggregation is VariableAggregation.NONE

    @property
    def value(self) -> torch.Tensor:
        """This replica's tensor in `run`; outside `run`, the aggregated value.

        Raises:
            ValueError: outside `run`, if synchronization is ON_READ and aggregation is NONE.
        """
        owner = _owner_of(self)
        if owner is None or self.synchronization is not VariableSynchronization.ON_READ:
            return self._value
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                "a variable with synchronization ON_READ and aggregation NONE has no single value "
                "outside run; strategy.local_results(variable) returns the values of this process"
            )
        values, workers = owner.values(self), owner.connect()
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            first = values[0].clone()
            return first if workers is None else workers.broadcast(first)
        return reduce_values(workers, self.aggregation.value, values, None, None)

    def assign(self, value: Any) -> None:
        """Set the value; in `run`, to the aggregate of the values that the replicas pass."""
        self._write(value, None)

    def assign_add(self, delta: Any) -> None:
        """Add to the value, with the aggregation of `assign`."""
        self._write(delta, 1)

    def assign_sub(self, delta: Any) -> None:
        """Subtract from the value, with the aggregation of `assign`."""
        self._write(delta, -1)

    def scatter_add(self, indices: Any, updates: Any) -> None:
        """Add to some rows of the value; the same row may be given several times.

        In `run`, the aggregation decides which rows count: with SUM those of all replicas, with
        MEAN too, divided by the number of replicas, with ONLY_FIRST_REPLICA those of the first,
        with NONE each replica's own.

        Args:
            indices: integers, shape [n], of rows along axis 0; n may differ between replicas.
            updates: shape [n, *value.shape[1:]], or a shape that broadcasts to it.

        Raises:
            IndexError: there is no such row.
            TypeError: a dtype is wrong.
            ValueError: a shape is wrong, or synchronization is ON_READ.
        """
        self._scatter("add", indices, updates)

    def scatter_sub(self, indices: Any, updates: Any) -> None:
        """Subtract from some rows; see `scatter_add`."""
        self._scatter("sub", indices, updates)

    def scatter_mul(self, indices: Any, updates: Any) -> None:
        """Multiply some rows; see `scatter_add`. Not defined for MEAN in `run`."""
        self._scatter("mul", indices, updates)

    def scatter_div(self, indices: Any, updates: Any) -> None:
        """Divide some rows; see `scatter_add`. Not defined for MEAN in `run`."""
        self._scatter("div", indices, updates)

    def scatter_min(self, indices: Any, updates: Any) -> None:
        """Lower some rows to at most `updates`; see `scatter_add`. Not for MEAN in `run`."""
        self._scatter("min", indices, updates)

    def scatter_max(self, indices: Any, updates: Any) -> None:
        """Raise some rows to at least `updates`; see `scatter_add`. Not for MEAN in `run`."""
        self._scatter("max", indices, updates)

    def scatter_update(self, indices: Any, updates: Any) -> None:
        """Set some rows; see `scatter_add`. Of equal indices the last counts, in replica order.

        Not defined for MEAN in `run`.
        """
        self._scatter("update", indices, updates)

    def extra_repr(self) -> str:
        """Format this replica's value, and the settings."""
        return f"{self._value}, {self.synchronization}, {self.aggregation}"

    def _write(self, value: Any, sign: int | None) -> None:
        owner, context = _owner_of(self), state.replica
        if owner is not None:
            owner.refresh()
            ids, replicas = owner.local_replica_ids, owner.num_replicas_in_sync

            def put(local: int, component: Variable) -> None:
                own = self._given(select(value, local), sign)
                component._put(self._part(own, ids[local], replicas), sign)

            owner.write(self, put)
            return
        given = self._given(value, sign)
        if context is not None and self.synchronization is not VariableSynchronization.ON_READ:
            given = self._aggregated(given, context)
        self._put(given, sign)

    def _scatter(self, op: _ScatterOp, indices: Any, updates: Any) -> None:
        if self.synchronization is VariableSynchronization.ON_READ:
            raise ValueError(
                f"scatter_{op} needs a variable with synchronization ON_WRITE, got "
                f"{self.synchronization}"
            )
        is_complex = self._value.is_complex()
        is_exact = not (is_complex or self._value.is_floating_point())
        if (op == "div" and is_exact) or (op in ("min", "max") and is_complex):
            raise TypeError(f"scatter_{op} is not defined for a variable of {self._value.dtype}")
        owner, context = _owner_of(self), state.replica
        if owner is not None:
            owner.refresh()

            def put(local: int, component: Variable) -> None:
                given = select((indices, updates), local)
                _scatter_rows(component._value, op, *_to_rows(component._value, *given))

            owner.write(self, put)
            return
        rows, values = _to_rows(self._value, indices, updates)
        if context is not None and context.num_replicas_in_sync > 1:
            rows, values = self._aggregated_rows(op, rows, values, context)
        _scatter_rows(self._value, op, rows, values)

    def _aggregated_rows(
        self, op: _ScatterOp, rows: torch.Tensor, values: torch.Tensor, context: ReplicaContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self.aggregation is VariableAggregation.NONE:
            return rows, values
        if self.aggregation is VariableAggregation.MEAN:
            if op not in ("add", "sub"):
                raise ValueError(
                    f"scatter_{op} is not defined for the aggregation {self.aggregation}; use "
                    "SUM, ONLY_FIRST_REPLICA, scatter_add or scatter_sub"
                )
            values = values / context.num_replicas_in_sync
        everyone: tuple[torch.Tensor, torch.Tensor] = context.all_gather((rows, values))
        if self.aggregation is not VariableAggregation.ONLY_FIRST_REPLICA:
            return everyone
        first = int(context.all_gather(rows.new_tensor([len(rows)]))[0])
        return everyone[0][:first], everyone[1][:first]

    def _given(self, value: Any, sign: int | None) -> torch.Tensor:
        given = as_tensor(value.value if isinstance(value, Variable) else value).detach()
        if sign is not None and not torch.can_cast(given.dtype, self._value.dtype):
            raise TypeError(f"cannot add {given.dtype} to a variable of {self._value.dtype}")
        return given.to(self._value.dtype)

    def _put(self, value: torch.Tensor, sign: int | None) -> None:
        with torch.no_grad():
            if sign is None:
                self._value.copy_(value)
            else:
                self._value.add_(value.to(self._value.device), alpha=sign)

    def _aggregated(self, given: torch.Tensor, context: ReplicaContext) -> torch.Tensor:
        if context.num_replicas_in_sync == 1 or self.aggregation is VariableAggregation.NONE:
            return given
        own = given.to(self._value.device).broadcast_to(self._value.shape)
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            combined: torch.Tensor = context.all_gather(own[None])[0]
        else:
            combined = context.all_reduce(self.aggregation.value, own)
        return combined

    def _part(self, value: torch.Tensor, replica: int, replicas: int) -> torch.Tensor:
        """Return the part of `value` that one replica must hold so that the parts aggregate to it.

        Only ON_READ with SUM divides the value; integers are divided into whole parts.
        """
        is_summed = self.aggregation is VariableAggregation.SUM
        if not is_summed or self.synchronization is not VariableSynchronization.ON_READ:
            return value
        if self._value.is_floating_point() or self._value.is_complex():
            return value / replicas
        whole = value.div(replicas, rounding_mode="floor")
        return whole + (value - whole * replicas > replica)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the strategy: copies and pickles belong to no strategy."""
        return {k: v for k, v in self.__dict__.items() if k != _OWNER}

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        del keep_vars
        context = state.replica
        value = self.value
        if context is not None and self.synchronization is VariableSynchronization.ON_READ:
            value = self._aggregated(value, context)
        destination[prefix + "value"] = value.detach()

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + "value"
        if strict:
            unexpected_keys += [k for k in state_dict if k.startswith(prefix) and k != key]
        if key not in state_dict:
            missing_keys += [key] if strict else []
            return
        given = as_tensor(state_dict[key])
        if tuple(given.shape) != tuple(self._value.shape):
            error_msgs.append(
                f"size mismatch for {key}: {tuple(given.shape)} in the state_dict, "
                f"{tuple(self._value.shape)} here"
            )
            return
        context = state.replica
        if context is None:
            self.assign(given)
        else:
            replica, replicas = context.replica_id_in_sync_group, context.num_replicas_in_sync
            self._put(self._part(given, replica, replicas), None)


_ADDING = (VariableAggregation.SUM, VariableAggregation.MEAN)
_OWNER = "_fastdist_owner"


def own(roots: Sequence[nn.Module], owner: Owner) -> None:
    """Make variables belong to a strategy; their components then aggregate to their values."""
    for root in roots:
        for module in root.modules():
            if isinstance(module, Variable) and module.__dict__.get(_OWNER) is not owner:
                value = module._value.clone()
                module.__dict__[_OWNER] = owner
                module.assign(value)


def local_components(roots: Sequence[nn.Module]) -> set[int]:
    """Return the ids of tensors that may differ between replicas."""
    return {
        id(module.component)
        for root in roots
        for module in root.modules()
        if isinstance(module, Variable) and module.is_local
    }


def _owner_of(variable: Variable) -> Owner | None:
    """Return the strategy to read and write through; None to use this replica's tensor only."""
    return None if state.replica is not None else variable.__dict__.get(_OWNER)


def _to_rows(target: torch.Tensor, indices: Any, updates: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Check indices and updates of a tensor's rows (tf.IndexedSlices).

    Returns:
        indices, int64 [n], and updates, [n, *target.shape[1:]], of the target's dtype and device.
    """
    rows = as_tensor(indices).detach()
    values = as_tensor(updates).detach()
    if target.dim() == 0:
        raise ValueError("scatter: the variable is a scalar, which has no rows")
    if rows.dim() != 1:
        raise ValueError(f"scatter: indices must have shape [n], got {tuple(rows.shape)}")
    if rows.numel() == 0:
        rows = rows.long()  # an empty list has torch's default dtype
    if rows.dtype.is_floating_point or rows.dtype.is_complex or rows.dtype == torch.bool:
        raise TypeError(f"scatter: indices must be integers, got {rows.dtype}")
    if not torch.can_cast(values.dtype, target.dtype):
        raise TypeError(f"scatter: a variable of {target.dtype} cannot hold {values.dtype}")
    if target.device.type != "xla" and rows.numel():
        low, high = int(rows.min()), int(rows.max())
        if low < 0 or high >= len(target):
            raise IndexError(
                f"scatter: index {low if low < 0 else high} of a variable that has "
                f"{len(target)} rows"
            )
    shape = (len(rows), *target.shape[1:])
    try:
        values = values.to(target).broadcast_to(shape)
    except RuntimeError:
        raise ValueError(
            f"scatter: updates must have shape {shape}, got {tuple(values.shape)}"
        ) from None
    return rows.to(target.device, torch.int64), values


@torch.no_grad()
def _scatter_rows(
    target: torch.Tensor, op: _ScatterOp, rows: torch.Tensor, values: torch.Tensor
) -> None:
    """Change rows of a tensor in place; "update" takes the last of updates with equal indices."""
    if op in ("add", "sub"):
        target.index_add_(0, rows, values, alpha=1 if op == "add" else -1)
        return
    wide = rows.reshape(-1, *[1] * (target.dim() - 1)).expand_as(values)
    if op == "mul":
        target.scatter_reduce_(0, wide, values, "prod")
    elif op == "div":
        target.div_(torch.ones_like(target).scatter_reduce_(0, wide, values, "prod"))
    elif op in ("min", "max"):
        target.scatter_reduce_(0, wide, values, f"a{op}")
    else:
        numbers = torch.arange(1, len(rows) + 1, device=rows.device)
        last = rows.new_zeros(len(target)).scatter_reduce_(0, rows, numbers, "amax")
        given = torch.cat([target[:1], values])[last]  # row 0 stands for rows that stay
        stays = (last == 0).reshape(-1, *[1] * (target.dim() - 1))
        target.copy_(torch.where(stays, target, given))
