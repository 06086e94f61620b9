"""Keras optimizers on replicas.

Gradients that backward did not reduce are reduced, one copy of the parameters is stepped once, and
states can be divided among replicas, as `training/sharded.py` divides those of torch's optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
import torch

from fastdist.collectives.communicator import Communicator
from fastdist.errors import CollectiveMismatchError, FastdistError, UnsupportedError
from fastdist.replicas.context import state
from fastdist.strategies.replicated import ReplicatedStrategy
from fastdist.training.modules import broadcast_state
from fastdist.training.sharded import TRIAL_STEPS, differ, with_owners

# Lists with an entry for each variable that every replica needs.
_WHOLE = ("_accumulated_gradients", "_model_variables_moving_average")


def share_steps(model: Any, strategy: ReplicatedStrategy) -> None:
    """Adapt the optimizers of a model: the one it was compiled with, and other attributes."""
    for value in list(vars(model).values()):
        if isinstance(value, keras.optimizers.Optimizer) and "apply" not in vars(value):
            value.apply = _SharedApply(value, strategy)


def gather_states(model: Any) -> None:
    """Complete the states of a model's sharded optimizers. Every replica must call."""
    for slots in _sharded(model):
        slots.gather()


def make_room(model: Any) -> None:
    """Make room for all states of a model's optimizers, which are about to be loaded."""
    for slots in _sharded(model):
        slots.release()


def _sharded(model: Any) -> list[ShardedSlots]:
    found = [vars(v).get("apply") for v in vars(model).values() if hasattr(v, "__dict__")]
    return [slots for each in found if isinstance(each, _SharedApply) for slots in each.sharded]


class _SharedApply:
    """The method `apply` of an optimizer, for all replicas together."""

    def __init__(self, optimizer: Any, strategy: ReplicatedStrategy) -> None:
        self.sharded: list[ShardedSlots] = []
        if strategy.options.shard_optimizer:
            inner = getattr(optimizer, "inner_optimizer", optimizer)  # of LossScaleOptimizer
            parts = getattr(inner, "_inner_optimizers", [inner])  # of MultiOptimizer
            self.sharded = [ShardedSlots(each, strategy._members.connect) for each in parts]
        self._apply = optimizer.apply
        self._optimizer = optimizer
        self._strategy = strategy
        self._is_central = False  # True once the optimizer's variables are in the one copy

    def __call__(self, grads: Any, trainable_variables: Any = None) -> None:
        context = state.replica
        if context is None or context.communicator is None:
            self._apply(grads, trainable_variables)
            return
        workers, optimizer, central = context.communicator, self._optimizer, self._strategy.central
        grads = list(grads)
        if trainable_variables is not None:
            _reduce_missing(grads, list(trainable_variables), context)
        self._strategy._members.note_step()
        if central is None:
            self._apply(grads, trainable_variables)
            return
        if not self._is_central:
            if not optimizer.built:
                optimizer.build(trainable_variables)
            central.take_parameters(workers, [v.value for v in _changed_by_steps(optimizer)])
            self._is_central = True
        central.step_once(workers, lambda: self._apply(grads, trainable_variables))


def _changed_by_steps(optimizer: Any) -> list[Any]:
    """Return the variables without learning rates, which callbacks set on each replica."""
    inner = getattr(optimizer, "inner_optimizer", None)
    rates = [getattr(each, "_learning_rate", None) for each in (optimizer, inner)]
    return [v for v in optimizer.variables if not any(v is rate for rate in rates)]


def _reduce_missing(grads: list[Any], variables: list[Any], context: Any) -> None:
    """Average gradients that did not come from `backward`, such as those of torch.autograd.grad.

    The gradients of backward are those of the global batch already, and stay in `.grad` until the
    next step. If they were removed before, averaging equal gradients changes nothing.
    """
    missing = [
        i
        for i, (grad, variable) in enumerate(zip(grads, variables, strict=True))
        if grad is not None and getattr(variable, "value", variable).grad is None
    ]
    if not missing:
        return
    share = context.relative_weight / context.num_replicas_in_sync
    parts = [grads[i] * share if share else torch.zeros_like(grads[i]) for i in missing]
    context.communicator.all_reduce(parts)
    for i, part in zip(missing, parts, strict=True):
        grads[i] = part


class ShardedSlots:
    """Takes the place of the method by which an optimizer changes variables and their states.

    From the first step on, a replica has the states of the variables that it owns, and those of
    others are empty. `gather` completes them, as saving does. Every replica must make this object.
    """

    def __init__(self, optimizer: Any, connect: Callable[[], Communicator | None]) -> None:
        _require_divisible(optimizer)
        self._optimizer = optimizer
        self._connect = connect
        self._plain = optimizer._backend_update_step
        self._place: tuple[int, int] | None = None  # replicas and rank, while states are divided
        self._owners: dict[int, int] = {}  # by the id of a model's variable
        self._owned: list[tuple[Any, int]] = []  # states of one variable each, with their owners
        self._shared: list[torch.Tensor] = []  # states of all variables, such as a product
        self._is_lost = False  # True from a loss of states until others are loaded
        save, load = optimizer.save_own_variables, optimizer.load_own_variables
        set_weights = optimizer.set_weights

        def save_whole(store: Any) -> None:
            self.gather()
            save(store)

        def load_whole(store: Any) -> None:
            if len(store.keys()) == len(optimizer.variables):  # else nothing is loaded
                self.release()
            load(store)

        def set_whole(weights: Any) -> None:
            self.release()
            set_weights(weights)

        optimizer._backend_update_step = self._step
        optimizer.save_own_variables = save_whole
        optimizer.load_own_variables = load_whole
        optimizer.set_weights = set_whole

    def _step(self, grads: Sequence[Any], variables: Sequence[Any], learning_rate: Any) -> None:
        workers = self._connect()
        if self._is_lost or self._place not in (None, _place_in(workers)):
            raise self._lost()
        if workers is None:
            self._plain(grads, variables, learning_rate)
            return
        if self._place is None:
            self._divide(workers)
        owners = [self._owners[id(variable)] for variable in variables]
        own = [i for i, owner in enumerate(owners) if owner == workers.rank]
        if own:
            self._plain([grads[i] for i in own], [variables[i] for i in own], learning_rate)
        for owner in sorted(set(owners)):
            pairs = zip(variables, owners, strict=True)
            broadcast_state(workers, [v.value for v, its in pairs if its == owner], owner)
        if self._shared and len(set(owners)) < workers.world_size:
            broadcast_state(workers, self._shared, owners[0])

    def _divide(self, workers: Communicator) -> None:
        variables = self._optimizer._trainable_variables
        values = [variable.value for variable in variables]
        owners = with_owners(self._optimizer, {}, values, workers.world_size)
        self._owners = {id(v): owners[value] for v, value in zip(variables, values, strict=True)}
        references, shared = _references(self._optimizer)
        self._owned = [(slot, self._owners[id(variable)]) for slot, variable in references]
        self._shared = [variable.value for variable in shared]
        self._place = _place_in(workers)
        for slot, owner in self._owned:
            if owner != workers.rank:
                slot.value.data = slot.value.new_empty(0)

    def release(self) -> None:
        """Make room for the states of all variables, which are about to be loaded."""
        self._is_lost = False
        if self._place is None:
            return
        for slot, owner in self._owned:
            if owner != self._place[1]:
                slot.value.data = slot.value.new_zeros(slot.shape)
        self._place = None

    def gather(self) -> None:
        """Complete the states of all variables. Every replica must call.

        Raises:
            FastdistError: replicas that had states are lost.
        """
        if self._is_lost:
            raise self._lost()
        if self._place is None:
            return
        workers = self._connect()
        try:
            is_whole = workers is not None and all(
                workers.all_gather_object(self._place == _place_in(workers))
            )
        except CollectiveMismatchError as error:
            raise CollectiveMismatchError(
                f"{type(self._optimizer).__name__} is sharded: every replica must save or load it. "
                f"{error}",
                error.ranks,
            ) from None
        self.release()
        if not is_whole:
            self._is_lost = True
            raise self._lost()
        assert workers is not None
        for owner in range(workers.world_size):
            broadcast_state(workers, [s.value for s, its in self._owned if its == owner], owner)

    def _lost(self) -> FastdistError:
        return FastdistError(
            f"the states of {type(self._optimizer).__name__}, which is sharded, were lost with "
            "replicas that had them: load it on all replicas"
        )


def _place_in(workers: Communicator | None) -> tuple[int, int] | None:
    return None if workers is None else (workers.world_size, workers.rank)


def _references(optimizer: Any) -> tuple[list[tuple[Any, Any]], list[Any]]:
    """Return the states of one variable each, with their variables, and those of all variables."""
    variables = optimizer._trainable_variables
    of: dict[int, Any] = {}
    known = {id(optimizer.iterations), id(optimizer._iterations), id(optimizer._learning_rate)}
    for name, listed in vars(optimizer).items():
        if name in _WHOLE:
            known |= set(map(id, listed))
        elif name != "_variables" and isinstance(listed, list) and len(listed) == len(variables):
            of |= {id(slot): v for slot, v in zip(listed, variables, strict=True)}
    # Keras names a state after its variable.
    named = {variable.path.replace("/", "_"): variable for variable in variables}
    references, shared = [], []
    for slot in optimizer.variables:
        if id(slot) in known:
            continue
        found = [name for name in named if slot.name.startswith(f"{name}_")]
        variable = of.get(id(slot), named[max(found, key=len)] if found else None)
        if variable is not None:
            references.append((slot, variable))
        elif len(slot.shape) == 0:
            shared.append(slot)
        else:
            raise UnsupportedError(
                f"{type(optimizer).__name__} cannot be divided among replicas: nothing tells of "
                f"which variable {slot.path} is a state; make it by add_variable_from_reference"
            )
    return references, shared


def _require_divisible(optimizer: Any) -> None:
    """Check that an optimizer steps each variable by itself."""
    own = [each for each in type(optimizer).__mro__ if not each.__module__.startswith("keras.")]
    name = type(optimizer).__name__
    whole = [m for m in ("apply", "_backend_apply_gradients") if any(m in vars(c) for c in own)]
    if whole:
        raise UnsupportedError(
            f"{name} cannot be divided among replicas: its own {whole[0]} may need all states; "
            "override update_step"
        )
    if own[:-1] and differ(optimizer, partial(_trial, optimizer)):
        raise UnsupportedError(
            f"{name} cannot be divided among replicas: its step of one variable depends on other "
            "variables' gradients, number or order, or draws random numbers"
        )


@torch.no_grad()
def _trial(optimizer: Any, scales: Sequence[float | None]) -> list[torch.Tensor]:
    """Return the variable without a scale, and states of all, after steps beside others."""
    torch.default_generator.manual_seed(0)
    twin = type(optimizer).from_config(optimizer.get_config())
    variables = [keras.Variable(torch.ones(4, 4), name=f"variable{i}") for i in range(2)]
    twin.build(variables)
    for turn in range(TRIAL_STEPS):
        gradient = torch.linspace(-1.0, 2.0, 16).roll(turn).view(4, 4)
        gradients = [(1.0 if scale is None else scale) * gradient for scale in scales]
        twin._backend_update_step(gradients, variables[: len(scales)], twin.learning_rate)
        twin._iterations.assign_add(1)
    shared = _references(twin)[1]
    return [
        variable.value.detach().clone() for variable in (variables[scales.index(None)], *shared)
    ]
