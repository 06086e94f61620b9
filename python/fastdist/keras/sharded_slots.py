"""Divides the states of a Keras optimizer among replicas, as `training/sharded.py` does torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from fastdist.collectives.communicator import Communicator
from fastdist.errors import FastdistError
from fastdist.training.modules import broadcast_state
from fastdist.training.sharded import with_owners

# Lists with an entry per variable that every replica needs.
_KEPT = {
    "_accumulated_gradients",
    "_model_variables_moving_average",
    "_trainable_variables",
    "_variables",
}


class ShardedSlots:
    """Takes the place of the method by which an optimizer changes variables and their states.

    From the first step on, a replica has the states of the variables that it owns, and those of
    others are empty; `gather` completes them. Every replica must make this object.
    """

    def __init__(self, optimizer: Any, connect: Callable[[], Communicator | None]) -> None:
        self._optimizer = optimizer
        self._connect = connect
        self._plain = optimizer._backend_update_step
        self._workers: Communicator | None = None  # while the states are divided
        self._owners: dict[int, int] = {}  # by the id of a model's variable
        self._is_lost = False  # True from a loss of states until others are loaded
        optimizer._backend_update_step = self._step

    def _step(self, grads: Sequence[Any], variables: Sequence[Any], learning_rate: Any) -> None:
        workers = self._connect()
        if self._is_lost or self._workers not in (None, workers):
            raise FastdistError(
                f"the states of {type(self._optimizer).__name__}, which is sharded, were lost with "
                "replicas that had them: restore it on all replicas"
            )
        if workers is None:
            self._plain(grads, variables, learning_rate)
            return
        if self._workers is None:
            self._divide(workers)
        own = [i for i, v in enumerate(variables) if self._owners[id(v)] == workers.rank]
        if own:
            self._plain([grads[i] for i in own], [variables[i] for i in own], learning_rate)
        for owner in range(workers.world_size):
            changed = [v.value for v in variables if self._owners[id(v)] == owner]
            if changed:
                broadcast_state(workers, changed, owner)

    def _divide(self, workers: Communicator) -> None:
        variables = self._optimizer._trainable_variables
        values = [variable.value for variable in variables]
        owners = with_owners(self._optimizer, {}, values, workers.world_size)
        self._owners = {id(v): owners[value] for v, value in zip(variables, values, strict=True)}
        self._workers = workers
        for slot, owner in self._slots():
            if owner != workers.rank:
                slot.value.data = slot.value.new_empty(0)

    def _slots(self) -> list[tuple[Any, int]]:
        """Return the states that belong to one variable each, and the owners."""
        optimizer = self._optimizer
        variables = optimizer._trainable_variables
        return [
            (slot, self._owners[id(variable)])
            for name, slots in vars(optimizer).items()
            if name not in _KEPT and isinstance(slots, list) and len(slots) == len(variables)
            for slot, variable in zip(slots, variables, strict=True)
            if isinstance(slot, keras.Variable)
        ]

    def release(self) -> None:
        """Make room for the states of all variables, which are about to be loaded."""
        self._is_lost = False
        if self._workers is None:
            return
        for slot, owner in self._slots():
            if owner != self._workers.rank:
                slot.value.data = slot.value.new_zeros(slot.shape)
        self._workers = None

    def gather(self) -> None:
        """Complete the states of all variables. Every replica must call."""
        divided, workers = self._workers, self._connect()
        if divided is None:
            return
        slots = self._slots()
        self.release()
        if divided is not workers:  # it has lost replicas, or got more
            self._is_lost = True
            return
        for owner in range(workers.world_size):
            own = [slot.value for slot, its in slots if its == owner]
            if own:
                broadcast_state(workers, own, owner)
        # Such as a product over steps: replica 0 has made all steps, since it owns the largest.
        others = {id(slot) for slot, _ in slots}
        alike = [v.value for v in self._optimizer.variables if id(v) not in others]
        broadcast_state(workers, alike)


def shard_steps(optimizer: Any, connect: Callable[[], Communicator | None]) -> list[ShardedSlots]:
    """Divide the states of an optimizer, or of those inside it."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)  # of LossScaleOptimizer
    return [ShardedSlots(each, connect) for each in getattr(inner, "_inner_optimizers", [inner])]
