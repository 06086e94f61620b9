"""Keras optimizers whose steps parameter servers take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import torch

from fastdist.errors import UnsupportedError

# Options that servers do not have.
_REFUSED = (
    "amsgrad",
    "clipnorm",
    "clipvalue",
    "global_clipnorm",
    "gradient_accumulation_steps",
    "loss_scale_factor",
    "use_ema",
)
_KINDS = (
    keras.optimizers.AdamW,  # an Adam
    keras.optimizers.Adam,
    keras.optimizers.Adagrad,
    keras.optimizers.SGD,
)


def require_served(optimizer: Any) -> None:
    """Check that servers can apply an optimizer."""
    name = type(optimizer).__name__
    is_of_keras = type(optimizer).__module__.split(".")[0] == "keras"
    if not is_of_keras or not isinstance(optimizer, _KINDS):
        raise UnsupportedError(
            f"parameter servers cannot apply {name}; expected SGD, Adagrad, Adam or AdamW of "
            "keras.optimizers"
        )
    for option in _REFUSED:
        if getattr(optimizer, option, None):
            raise UnsupportedError(
                f"parameter servers cannot apply {name} with {option}="
                f"{getattr(optimizer, option)!r}; leave {option} out"
            )
    rate = optimizer._learning_rate
    if not isinstance(rate, keras.Variable):
        raise UnsupportedError(
            f"parameter servers cannot follow the {type(rate).__name__} of {name}: each step would "
            "need the number of steps that all workers have taken; give a number, and set "
            "it for each epoch with keras.callbacks.LearningRateScheduler"
        )
    has_momentum = isinstance(optimizer, keras.optimizers.SGD) and optimizer.momentum
    if optimizer.weight_decay and (has_momentum or isinstance(optimizer, keras.optimizers.Adagrad)):
        raise UnsupportedError(
            f"parameter servers cannot apply {name} with weight_decay="
            f"{optimizer.weight_decay!r}{' and momentum' if has_momentum else ''}, which Keras "
            "subtracts from the values themselves; expected SGD without momentum, Adam or AdamW"
        )


def served_optimizer(optimizer: Any, variables: Sequence[Any]) -> torch.optim.Optimizer:
    """Return torch's optimizer with the rule of one of Keras that `require_served` accepts."""
    lr, decay = float(optimizer.learning_rate), optimizer.weight_decay or 0.0
    decayed = [v.value for v in variables if optimizer._use_weight_decay(v)]
    others = [v.value for v in variables if not optimizer._use_weight_decay(v)]
    groups: list[dict[str, Any]] = [{"params": decayed, "weight_decay": decay}]
    if others:
        groups.append({"params": others, "weight_decay": 0.0})
    if isinstance(optimizer, keras.optimizers.SGD):
        is_nesterov = bool(optimizer.nesterov and optimizer.momentum)
        return torch.optim.SGD(groups, lr, momentum=optimizer.momentum, nesterov=is_nesterov)
    if isinstance(optimizer, keras.optimizers.Adagrad):
        # Keras adds epsilon inside the square root, so it belongs to the first sum.
        first = optimizer.initial_accumulator_value + optimizer.epsilon
        return torch.optim.Adagrad(groups, lr, initial_accumulator_value=first, eps=0.0)
    betas = optimizer.beta_1, optimizer.beta_2
    made = torch.optim.AdamW if decay else torch.optim.Adam
    adam = made(groups, lr, betas, optimizer.epsilon)
    adam.defaults["eps_hat"] = True  # of the servers' rule
    for group in adam.param_groups:
        group["eps_hat"] = True
    return adam


class ServedApply:
    """The method `apply` of a Keras optimizer on a worker: servers take the step of `served`."""

    def __init__(
        self, optimizer: Any, served: torch.optim.Optimizer, variables: Sequence[Any]
    ) -> None:
        self._optimizer = optimizer
        self._served = served
        self._variables = list(variables)

    def share_rate(self) -> None:
        """Give the next functions the chief's learning rate."""
        for group in self._served.param_groups:
            group["lr"] = float(self._optimizer.learning_rate)

    def __call__(self, grads: Any, trainable_variables: Any = None) -> None:
        """Send the gradients of variables, and make the servers take a step."""
        variables = self._variables if trainable_variables is None else list(trainable_variables)
        given = {id(v.value): g for v, g in zip(variables, grads, strict=True)}
        for variable in self._variables:
            gradient = given.pop(id(variable.value), None)
            if variable.value.grad is not gradient:
                variable.value.grad = gradient
        if given:
            raise UnsupportedError(
                f"{type(self._optimizer).__name__} was given {len(given)} variables that were no "
                "trainable variables of the model in its first fit"
            )
        self._served.step()
        self._optimizer.iterations.assign_add(1)
