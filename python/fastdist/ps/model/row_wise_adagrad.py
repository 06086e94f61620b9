"""Row-wise Adagrad: one accumulator for each row of an embedding table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastdist.ps.wire.specs import RuleSpec


class RowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad for embeddings, with one accumulator per row instead of one per element.

    A row's accumulator grows by the mean of the squared gradient over the row, and the row changes
    by -lr × gradient / (√accumulator + eps): EXACT_ROWWISE_ADAGRAD of FBGEMM, RowWiseAdagrad of
    TorchRec. Made in the scope of a `ParameterServerStrategy`, it is a rule of the servers; its
    state takes 4 bytes per row. In one process it steps as any optimizer, on sparse or dense
    gradients.

    Args:
        params: weights of embeddings, [rows, dim].
        lr: learning rate.
        lr_decay: step n uses lr / (1 + (n - 1) × lr_decay).
        weight_decay: the factor of the value that is added to the gradient.
        initial_accumulator_value: accumulator before the first step.
        eps: the number added to the root of the accumulator.
        maximize: go up the gradient.

    Raises:
        ValueError: a hyperparameter is out of range, or a parameter is not [rows, dim]. At the end
            of a scope: a parameter is not the weight of an embedding.

    Examples:
        >>> import fastdist as fd
        >>> import torch
        >>> table, out = fd.nn.Embedding(100, 8), torch.nn.Linear(8, 1)
        >>> optimizers = [
        ...     fd.ps.RowWiseAdagrad(table.parameters(), lr=0.05),
        ...     torch.optim.Adam(out.parameters()),
        ... ]
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "lr_decay": lr_decay,
            "weight_decay": weight_decay,
            "initial_accumulator_value": initial_accumulator_value,
            "eps": eps,
            "maximize": maximize,
        }
        RuleSpec("RowWiseAdagrad", defaults).make()  # raises for a value out of range
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with hyperparameters of their own."""
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.dim() != 2:
                raise ValueError(
                    "RowWiseAdagrad takes weights of embeddings, [rows, dim], got a parameter of "
                    f"shape {tuple(parameter.shape)}"
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step on all parameters with gradients; return what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            shape = (parameter.shape[0], 1)
            state["step"] = 0
            state["row_sum"] = parameter.new_full(shape, group["initial_accumulator_value"])
        state["step"] += 1
        assert parameter.grad is not None
        rows: Any = slice(None)
        gradient = parameter.grad
        if gradient.is_sparse:
            gradient = gradient.coalesce()
            rows, gradient = gradient.indices()[0], gradient.values()
        if group["maximize"]:
            gradient = -gradient
        if group["weight_decay"]:
            gradient = gradient + group["weight_decay"] * parameter[rows]
        sums = state["row_sum"]
        sums[rows] += gradient.square().mean(1, keepdim=True)
        rate = group["lr"] / (1 + (state["step"] - 1) * group["lr_decay"])
        parameter[rows] -= rate * gradient / (sums[rows].sqrt() + group["eps"])
