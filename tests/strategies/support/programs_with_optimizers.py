"""Programs for training that use gradients, optimizers and schedulers as existing programs do."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import fastdist as fd
import pytest
import torch
import torch.nn.functional as F
from fastdist import Strategy
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.utils.checkpoint import checkpoint
from training_programs import (
    Net,
    finish,
    made,
    program,
    simply_trained,
    step_program,
    steps,
    train,
    trained,
)


@step_program
def gradient_penalty(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    x.requires_grad_()
    out = model(x)
    (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (F.mse_loss(out, y) + grad.square().sum(1).mean()).backward()
    optimizer.step()


@step_program
def backward_twice(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """A graph kept, and a second loss on it; both are summed in `.grad`."""
    optimizer.zero_grad()
    out = model(x)
    F.mse_loss(out, y).backward(retain_graph=True)
    out.square().mean().backward()
    optimizer.step()


@program
def create_graph_in_backward(strategy: Strategy) -> list[torch.Tensor]:
    model, optimizer = made(strategy)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward(create_graph=True)
        for p in model.parameters():
            p.grad = p.grad.detach()
        optimizer.step()

    with warnings.catch_warnings():  # not in `step`: filters are all threads' own
        warnings.filterwarnings("ignore", "Using backward.. with create_graph", UserWarning)
        return trained(strategy, step, model)


@step_program
def grad_by_hand(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """torch.autograd.grad gives the replica's own; the context reduces it."""
    context = fd.get_replica_context()
    parameters = list(model.parameters())
    loss = F.mse_loss(model(x), y) if len(x) else 0 * model(x).sum()
    grads = torch.autograd.grad(loss, parameters)
    for p, grad in zip(parameters, grads, strict=True):
        p.grad = context.all_reduce("mean", grad * context.relative_weight)
    optimizer.step()


@program
def checkpointed_with_dropout(strategy: Strategy) -> list[torch.Tensor]:
    """Recomputed in backward with the same mask: else the gradient is that of another loss."""
    torch.manual_seed(1)
    with strategy.scope():
        model = nn.Sequential(nn.Linear(6, 300), nn.Dropout(0.5))
    for reentrant in (True, False):

        def step(x: torch.Tensor, reentrant: bool = reentrant) -> bool:
            model.zero_grad()
            torch.rand(3)
            with strategy.no_sync():
                x = x.requires_grad_()
                out = checkpoint(model, x, use_reentrant=reentrant)
                torch.rand(5)
                out.sum().backward()
            kept = (out != 0).float().sum(0) * 2
            return torch.equal(model[0].bias.grad, kept)

        rows = strategy.distribute_values_from_function(lambda context: torch.ones(4, 6))
        for _ in range(5):
            assert all(strategy.local_results(strategy.run(step, args=(rows,))))
    return finish(strategy, model)


@step_program
def checkpointed(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    hidden = checkpoint(model.first, x, use_reentrant=False)
    out = checkpoint(lambda h: model.second(torch.tanh(h)), hidden, use_reentrant=True)
    F.mse_loss(out, y).backward()
    optimizer.step()


@program
def autocast_and_scaler(strategy: Strategy) -> list[torch.Tensor]:
    torch.manual_seed(1)
    with strategy.scope():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    scales = []

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=False):
            loss = F.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    for scale in steps(strategy, step):
        scales.append(scale)
    assert scaler.get_scale() == 64.0
    return finish(strategy, model)


@program
def overflow_on_one_replica(strategy: Strategy) -> list[torch.Tensor]:
    """All skip the step that only one would."""
    torch.manual_seed(1)
    with strategy.scope():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        if fd.get_replica_context().replica_id_in_sync_group == 0:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    for scales in steps(strategy, step):
        assert len(set(strategy.local_results(scales))) == 1
    assert scaler.get_scale() == 1.0
    return finish(strategy, model)


@program
def bfloat16_autocast(strategy: Strategy) -> list[torch.Tensor]:
    model, optimizer = made(strategy)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(x)
            assert out.dtype == torch.bfloat16
        F.mse_loss(out.float(), y).backward()
        optimizer.step()

    for _ in steps(strategy, step):
        pass
    return [(p * 20).round() / 20 * 0 for p in finish(strategy, model)]


@program
def clipped_by_norm_and_value(strategy: Strategy) -> list[torch.Tensor]:
    model, optimizer = made(strategy)

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        optimizer.step()
        return float(norm)

    norms = [strategy.local_results(norm)[0] for norm in steps(strategy, step)]
    return [*finish(strategy, model), torch.tensor(norms)]


@program
def frozen_then_unfrozen(strategy: Strategy) -> list[torch.Tensor]:
    torch.manual_seed(1)
    with strategy.scope():
        model = Net()
        model.first.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    for _ in steps(strategy, functools.partial(train, model, optimizer)):
        model.first.requires_grad_(True)
    model.second.bias.requires_grad = False
    return simply_trained(strategy, model, optimizer)


@step_program
def frozen_and_unfrozen_inside_run(
    model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor
) -> None:
    for first in (True, False):
        optimizer.zero_grad()
        model.first.requires_grad_(first)
        model.second.requires_grad_(not first)
        F.mse_loss(model(x), y).backward()
        optimizer.step()
    model.requires_grad_(True)


@program
def lbfgs(strategy: Strategy) -> list[torch.Tensor]:
    model, optimizer = made(
        strategy,
        optimizer=functools.partial(
            torch.optim.LBFGS, lr=0.5, max_iter=4, line_search_fn="strong_wolfe"
        ),
    )

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        return float(optimizer.step(closure).detach())

    losses = [strategy.local_results(loss)[0] for loss in steps(strategy, step)]
    return [*finish(strategy, model), torch.tensor(losses)]


@program
def groups_and_schedulers(strategy: Strategy) -> list[torch.Tensor]:
    torch.manual_seed(1)
    with strategy.scope():
        model = Net()
        extra = nn.Linear(2, 2)
        optimizer = torch.optim.AdamW(
            [
                {"params": model.first.parameters(), "lr": 1e-2},
                {"params": model.second.parameters(), "weight_decay": 0.1},
            ],
            lr=1e-1,
        )
        cosine = schedulers.CosineAnnealingLR(optimizer, 10)
        plateau = schedulers.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    rates = []

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.mse_loss(extra(model(x)), y)
        loss.backward()
        optimizer.step()
        cosine.step()
        return loss.detach()

    for i in range(2):
        for _ in steps(strategy, step):
            plateau.step(1.0)
            rates.append(optimizer.param_groups[0]["lr"])
        if i == 0:
            optimizer.add_param_group({"params": extra.parameters(), "lr": 1e-3})
            cosine = schedulers.StepLR(optimizer, 1)
    return [*finish(strategy, model, extra), torch.tensor(rates)]


def scheduled(strategy: Strategy, make: Any, read: Any) -> list[torch.Tensor]:
    """Step a scheduler in `run`; return what `read(group, scheduler)` does after each step too."""
    torch.manual_seed(1)
    with strategy.scope():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = make(optimizer)

    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[float, ...]:
        train(model, optimizer, x, y)
        scheduler.step()
        return read(optimizer.param_groups[0], scheduler)

    rates = [strategy.local_results(a) for one in steps(strategy, step) for a in one]
    assert all(len(set(rate)) == 1 for rate in rates)
    return [*finish(strategy, model), torch.tensor([rate[0] for rate in rates])]


@program
def one_cycle(strategy: Strategy) -> list[torch.Tensor]:
    return scheduled(
        strategy,
        lambda optimizer: schedulers.OneCycleLR(optimizer, 0.2, total_steps=10),
        lambda group, cycle: (group["lr"], group["momentum"], cycle.get_last_lr()[0]),
    )


@program
def sequential_schedulers(strategy: Strategy) -> list[torch.Tensor]:
    def make(optimizer: Any) -> Any:
        parts = [
            schedulers.LinearLR(optimizer, 0.5, total_iters=2),
            schedulers.ExponentialLR(optimizer, 0.9),
        ]
        return schedulers.SequentialLR(optimizer, parts, [2])

    return scheduled(strategy, make, lambda group, scheduler: (group["lr"],))


@program
def accumulated(strategy: Strategy) -> list[torch.Tensor]:
    """With no_sync inside the step, around runs, and without it."""
    model, optimizer = made(strategy)

    def add(x: torch.Tensor, y: torch.Tensor) -> None:
        F.mse_loss(model(x), y).backward()

    def apply() -> None:
        optimizer.step()
        optimizer.zero_grad()

    for _ in steps(strategy, add):
        pass
    strategy.run(apply)
    return finish(strategy, model)


@program
def optimizer_hooks(strategy: Strategy) -> list[torch.Tensor]:
    torch.manual_seed(1)
    with strategy.scope():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def halve(optimizer: Any, args: Any, kwargs: Any) -> None:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad.mul_(0.5)

        optimizer.register_step_pre_hook(halve)
    return simply_trained(strategy, model, optimizer)


@step_program
def optimizer_in_backward(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> None:
    """Gradients set to None, accumulated into, and detached, between steps."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    F.mse_loss(model(x), y).backward()
    optimizer.step()


@program
def cleared_and_clipped_outside_run(strategy: Strategy) -> list[torch.Tensor]:
    """Backward in one run, the step in another, and gradients changed between them."""
    model, optimizer = made(strategy)

    def backward(x: torch.Tensor, y: torch.Tensor) -> None:
        F.mse_loss(model(x), y).backward()

    optimizer.zero_grad()
    for _ in steps(strategy, backward):
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        model.first.bias.grad = torch.ones(8)
        strategy.run(lambda: optimizer.step())
        optimizer.zero_grad()
    return finish(strategy, model)


@program
def stepped_outside_run(strategy: Strategy) -> list[torch.Tensor]:
    """And inside again: momentum has followed."""
    model, optimizer = made(strategy, optimizer=functools.partial(torch.optim.AdamW, lr=0.01))

    def backward(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()

    for _ in range(2):
        for _ in steps(strategy, backward):
            optimizer.step()
        return simply_trained(strategy, model, optimizer)


@program
def plateau_inside_run(strategy: Strategy) -> list[torch.Tensor]:
    torch.manual_seed(1)
    with strategy.scope():
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.1))
        plateau = schedulers.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        train(model, optimizer, x, y)
        plateau.step(1.0)
        return float(optimizer.param_groups[0]["lr"])

    rates = [strategy.local_results(one) for one in steps(strategy, step)]
    for rate, wanted in zip(rates, (0.1, 0.1, 0.05), strict=True):
        assert rate == pytest.approx((wanted,) * len(rate))
    return finish(strategy, model)


@program
def adversarial(strategy: Strategy) -> list[torch.Tensor]:
    """Two models and two optimizers in turn, as a GAN's; one is frozen while the other trains."""
    torch.manual_seed(1)
    with strategy.scope():
        one, two = nn.Linear(6, 6), Net()
        first = torch.optim.Adam(one.parameters(), lr=0.01)
        second = torch.optim.RMSprop(two.parameters(), lr=0.01)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        second.zero_grad()
        F.mse_loss(two(one(x).detach()), y).backward()
        second.step()
        two.requires_grad_(False)
        first.zero_grad()
        (-F.mse_loss(two(one(x)), y)).backward()
        first.step()
        two.requires_grad_(True)

    return trained(strategy, step, one, two)
